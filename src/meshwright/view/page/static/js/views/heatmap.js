// The tp × pp heat map: the fastest plan of every pair of degrees; pairs without a plan are labelled with the reason.

import { axis, band, centred, figure, format, h, panel, rect, sentence } from "meshwright/draw.js";

const REASONS = {
  memory: "memory – the leanest plan needs more than a GPU has", GPUs: "GPUs – tp × pp does not divide the GPUs", heads: "heads – tp does not divide the attention heads",
  layers: "layers – more stages than layers", batch: "batch – the batch cannot be divided",
};

export const view = {
  title: "Tensor × pipeline parallelism",
  sentence: "Throughput of the fastest plan with these degrees; all other fields are searched. Grey pairs have no plan, for the reason in the cell. Choose a cell to use its plan.",
  draw(element, data, context) {
    const box = element.appendChild(panel("Fastest plan of each pair", data.note));
    chart(box, data, context);
    if (data.reasons.length) box.append(sentence(`No plan: ${data.reasons.map((r) => REASONS[r] ?? r).join("; ")}.`));
  },
};

function chart(element, { tp, pp, cells, mine, unit, note }, context) {
  const side = Math.min(58, Math.max(30, Math.floor((Math.min(element.clientWidth, 760) - 60) / tp.length)));
  const c = figure(element, { width: 70 + side * tp.length, height: 56 + Math.min(side, 40) * pp.length, left: 54, right: 8, top: 8, bottom: 44, label: note });
  const x = band(tp.map(String), [0, c.width], { gap: 0.07 }), y = band([...pp].reverse().map(String), [0, c.height], { gap: 0.09 });
  axis(c, x, "bottom", { label: "tensor-parallel degree (tp)" });
  axis(c, y, "left", { label: "pipeline stages (pp)" });
  const rates = cells.filter((cell) => cell.fits).map((cell) => cell.tokens_per_s), low = Math.min(...rates), high = Math.max(...rates);
  const rate = (value) => `${format.count(value)} ${unit}/s`;
  element.append(h("p", { class: "ramp" }, h("span", null, rate(low)), h("i", { "aria-hidden": "true" }), h("span", null, `${rate(high)}, the fastest`)));
  for (const cell of cells) {
    const { fits, tokens_per_s: speed } = cell, left = x(String(cell.tp)), top = y(String(cell.pp)), share = high > low ? (speed - low) / (high - low) : 1;
    const fill = fits ? `color-mix(in oklab, var(--heat-high) ${Math.round(100 * share)}%, var(--heat-low))` : "grid";
    const use = fits && context.live ? () => context.set("plan", cell.plan) : null;
    const node = rect(c, left, top, x.width, y.width, { fill, formula: cell.formula || cell.reason, round: 3, onclick: use });
    if (cell.tp === mine.tp && cell.pp === mine.pp) node.classList.add("chosen");
    const words = fits ? (side > 36 ? format.count(speed, side > 46 ? 3 : 2) : "") : side > 34 ? cell.label : "";
    if (words) centred(c, words, left + x.width / 2, top + y.width / 2, { size: fits ? 11 : 9.5, colour: !fits ? "quiet" : share > 0.55 ? "heat-ink-high" : "heat-ink-low" });
  }
  element.append(sentence(`Outlined: this plan, tp ${mine.tp} × pp ${mine.pp}.`));
}
