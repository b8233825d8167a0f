// The tp × pp heat map: the fastest plan of every pair of degrees; pairs without a plan are labelled with the reason.

import { axis, band, figure, format, h, label, panel, rect } from "meshwright/draw.js";

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
  const rate = (value) => `${format.count(value)} ${data.unit}/s`;
  element.append(h("p", { class: "ramp" }, h("span", null, rate(low)), h("i", { "aria-hidden": "true" }), h("span", null, `${rate(high)}, the fastest`)));
  for (const cell of data.cells) {
    const left = x(String(cell.tp)), top = y(String(cell.pp)), share = high > low ? (cell.tokens_per_s - low) / (high - low) : 1;
    const node = rect(c, left, top, x.width, y.width, { fill: cell.fits ? `color-mix(in oklab, var(--heat-high) ${Math.round(100 * share)}%, var(--heat-low))` : "grid", formula: cell.formula || cell.reason, round: 3, onclick: cell.fits && context.live ? () => context.set("plan", cell.plan) : null });
    if (cell.tp === data.mine.tp && cell.pp === data.mine.pp) node.classList.add("chosen");
    const words = cell.fits ? (side > 36 ? format.count(cell.tokens_per_s, side > 46 ? 3 : 2) : "") : side > 34 ? cell.label : "";
    if (words) label(c, words, left + x.width / 2, top + y.width / 2, { anchor: "middle", middle: true, size: cell.fits ? 11 : 9.5, colour: !cell.fits ? "quiet" : share > 0.55 ? "heat-ink-high" : "heat-ink-low" }).style.pointerEvents = "none";
  }
  element.append(h("p", { class: "sentence" }, `Numbers: tokens per second, ${format.count(low)} to ${format.count(high)}. Outlined: this plan, tp ${data.mine.tp} × pp ${data.mine.pp}.`));
}
