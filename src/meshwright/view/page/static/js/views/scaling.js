// Scaling over GPU counts: throughput and efficiency, and where transfers between nodes take longer than compute.

import { curves } from "meshwright/charts.js";
import { empty, format, h, panel, table } from "meshwright/draw.js";

const SECONDS = [["compute_s", "compute", { colour: "compute" }], ["inside_s", "transfers inside nodes", { colour: "pp", dash: "6 4" }],
  ["between_s", "transfers between nodes", { colour: "tp" }]];

export const view = {
  title: "Scaling over GPUs",
  sentence: "More data-parallel replicas of this plan. Strong scaling keeps the batch, weak scaling lets it grow with the GPUs; " +
    "100% means that every GPU trains as many samples as on the fewest.",
  draw(element, { strong, weak, best, unit, note, takes_over: over }) {
    const all = [...strong, ...weak], [first] = all;
    if (!first) return element.append(empty(note));
    const same = "Seconds per step of one GPU with the same batch: compute shrinks with more GPUs, gradient traffic does not.";
    const box = panel("Throughput", note), efficiency = panel("Efficiency", "Throughput per GPU, relative to the fewest GPUs.");
    const crossing = panel("What takes the time", over?.formula ?? same), marks = over ? [{ at: over.gpus, words: "inter-node bandwidth takes over", colour: "bad" }] : [];
    element.append(box, h("div", { class: "columns" }, efficiency, crossing));
    const sizes = [...new Set(all.map((r) => r.gpus))].sort((a, b) => a - b), x = { log: 2, label: "GPUs", ticks: sizes, unit: "whole" };
    const points = (rows, key) => rows.map((r) => ({ x: r.gpus, y: r[key], formula: r.formula, shape: r.fits === false ? "cross" : undefined }));
    const of = (key) => [{ name: "same batch (strong)", points: points(strong, key), colour: "compute" },
      { name: "batch grows (weak)", points: points(weak, key), colour: "optimizer", dash: "6 4" }];
    const proportional = sizes.map((gpus) => ({ x: gpus, y: (first.tokens_per_s * gpus) / first.gpus })), only = { only: true };
    curves(box, { label: note, height: 300, left: 66, x, y: { log: 10, label: `${unit} per second`, unit: "count" }, marks, series: [
      ...of("tokens_per_s"), { name: "in proportion", points: proportional, colour: "quiet", dash: "2 4", width: 1.3, dots: false },
      best.length && { name: "best plan of the size", points: points(best, "tokens_per_s"), colour: "ep", shape: "diamond", radius: 6, ...only },
      all.some((r) => r.fits === false) && { name: "does not fit", shape: "cross", colour: "quiet", points: [], ...only }].filter(Boolean) });
    const shares = strong.map((r) => `${r.gpus} GPUs ${format.percent(r.efficiency, 0)}`).join(", ");
    curves(efficiency, { label: `Efficiency: ${shares}`, height: 260, x, y: { from: 0, unit: "percent" }, series: of("efficiency") });
    const values = strong.flatMap((r) => SECONDS.map(([key]) => r[key])).filter((v) => v > 0), least = Math.max(Math.min(...values), Math.max(...values) / 1e4) * 0.7;
    const line = ([key, name, look]) => ({ name, ...look, radius: 3.5, focus: false, points: strong.map((r) => ({
      x: r.gpus, y: r[key] > least ? r[key] : null, formula: `${r.gpus} GPUs: ${format.seconds(r[key])} of ${name}` })) });
    if (strong.length < 2 || !values.length) crossing.append(empty("One size only."));
    else curves(crossing, { label: "Seconds per step of compute and of transfers inside and between nodes by number of GPUs", height: 260, x,
      y: { log: 10, from: least, unit: "s", ticks: 5 }, marks, series: SECONDS.map(line) });
    if (best.length) element.append(panel("The best plan of each size", "", table([
      ["GPUs", "gpus", "whole"], ["step", "step_time_s", "s"], [`${unit}/s`, "tokens_per_s", "count", (r) => r.formula], ["best common plan", "title"],
    ], best, { caption: "The best common plan with the same batch" })));
  },
};
