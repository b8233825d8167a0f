// The tp × pp heat map: the fastest plan of every pair of degrees; pairs without a plan are labelled with the reason.

import { axis, band, figure, format, h, heatmap, panel, ramp } from "meshwright/draw.js";

export const view = {
  title: "Tensor × pipeline parallelism",
  sentence: "Throughput of the fastest plan with these degrees; all other fields are searched. Grey pairs have no plan, for the reason in the cell. Choose a cell to use its plan.",
  draw(element, data, context) {
    const box = element.appendChild(panel("Fastest plan of each pair", context.refreshing ? `${data.note} First plans; the search goes on.` : data.note));
    chart(box, data, context);
    if (data.reasons.length) box.append(h("p", { class: "sentence" }, `No plan: ${data.reasons.map((r) => ({ memory: "memory – the leanest plan needs more than a GPU has", GPUs: "GPUs – tp × pp does not divide the GPUs", heads: "heads – tp does not divide the attention heads", layers: "layers – more stages than layers", batch: "batch – the batch cannot be divided" }[r] ?? r)).join("; ")}.`));
  },
};

function chart(element, data, context) {
  const side = Math.min(58, Math.max(30, Math.floor((Math.min(element.clientWidth, 760) - 60) / data.tp.length)));
  const c = figure(element, { width: 70 + side * data.tp.length, height: 56 + Math.min(side, 40) * data.pp.length, left: 54, right: 8, top: 8, bottom: 44, label: data.note });
  c.root.setAttribute("role", "group"); // its cells are buttons
  const x = band(data.tp.map(String), [0, c.width], { gap: 0.07 }), y = band([...data.pp].reverse().map(String), [0, c.height], { gap: 0.09 });
  axis(c, x, "bottom", { label: "tensor-parallel degree (tp)" });
  axis(c, y, "left", { label: "pipeline stages (pp)" });
  const rates = data.cells.filter((cell) => cell.fits).map((cell) => cell.tokens_per_s), low = Math.min(...rates), high = Math.max(...rates);
  element.append(ramp(`${format.count(low)} ${data.unit}/s`, `${format.count(high)} ${data.unit}/s, the fastest`));
  heatmap(c, data.cells.map((cell) => ({
    x: String(cell.tp), y: String(cell.pp), share: cell.fits ? (high > low ? (cell.tokens_per_s - low) / (high - low) : 1) : null,
    text: side > 36 ? format.count(cell.tokens_per_s, side > 46 ? 3 : 2) : "", reason: side > 34 ? cell.label : "", formula: cell.formula || cell.reason,
    chosen: cell.tp === data.mine.tp && cell.pp === data.mine.pp,
    onclick: cell.fits && context.live ? () => context.set("plan", cell.plan) : null,
  })), { x, y });
  element.append(h("p", { class: "sentence" }, `Numbers: tokens per second, ${format.count(low)} to ${format.count(high)}. Outlined: this plan, tp ${data.mine.tp} × pp ${data.mine.pp}.`));
}
