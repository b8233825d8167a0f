// Scaling over GPU counts: throughput and efficiency, and where transfers between nodes take longer than compute.

import { curves } from "meshwright/charts.js";
import { empty, format, h, panel, table } from "meshwright/draw.js";

export const view = {
  title: "Scaling over GPUs",
  sentence: "More data-parallel replicas of this plan. Strong scaling keeps the batch, weak scaling lets it grow with the GPUs; 100% means that every GPU trains as many samples as on the fewest.",
  draw(element, data) {
    if (!data.strong.length && !data.weak.length) return element.append(empty(data.note));
    const box = panel("Throughput", data.note), efficiency = panel("Efficiency", "Throughput per GPU, relative to the fewest GPUs.");
    const crossing = panel("What takes the time", data.takes_over ? data.takes_over.formula : "Seconds per step of one GPU with the same batch: compute shrinks with more GPUs, gradient traffic does not.");
    element.append(box, h("div", { class: "columns" }, efficiency, crossing));
    const sizes = [...new Set([...data.strong, ...data.weak].map((r) => r.gpus))].sort((a, b) => a - b), x = { log: 2, label: "GPUs", ticks: sizes, format: format.whole };
    const points = (rows, key) => rows.map((r) => ({ x: r.gpus, y: r[key], formula: r.formula, shape: r.fits === false ? "cross" : "circle" }));
    const marks = data.takes_over ? [{ at: data.takes_over.gpus, words: "inter-node bandwidth takes over", colour: "bad" }] : [];
    const of = (key) => [{ name: "same batch (strong)", points: points(data.strong, key), colour: "compute" }, { name: "batch grows (weak)", points: points(data.weak, key), colour: "optimizer", dash: "6 4" }];
    const first = data.strong[0] ?? data.weak[0], proportional = sizes.map((gpus) => ({ x: gpus, y: (first.tokens_per_s * gpus) / first.gpus }));
    const tooLarge = [...data.strong, ...data.weak].some((r) => r.fits === false) ? [{ name: "does not fit", shape: "cross", colour: "quiet", only: true, points: [] }] : [];
    const best = { name: "best plan of the size", points: data.best.map((r) => ({ x: r.gpus, y: r.tokens_per_s, formula: r.formula })), colour: "ep", shape: "diamond", radius: 6, only: true };
    curves(box, { label: data.note, height: 300, left: 66, x, y: { log: 10, label: `${data.unit} per second`, format: format.count }, marks, series: [...of("tokens_per_s"), { name: "in proportion", points: proportional, colour: "quiet", dash: "2 4", width: 1.3, dots: false }, ...(data.best.length ? [best] : []), ...tooLarge] });
    curves(efficiency, { label: `Efficiency: ${data.strong.map((r) => `${r.gpus} GPUs ${format.percent(r.efficiency, 0)}`).join(", ")}`, height: 260, x, y: { from: 0, format: (v) => format.percent(v, 0) }, series: of("efficiency") });
    const parts = [["compute_s", "compute", "compute", null], ["inside_s", "transfers inside nodes", "pp", "6 4"], ["between_s", "transfers between nodes", "tp", null]], values = data.strong.flatMap((r) => parts.map(([key]) => r[key])).filter((v) => v > 0);
    if (data.strong.length < 2 || !values.length) crossing.append(empty("One size only."));
    else {
      const least = Math.max(Math.min(...values), Math.max(...values) / 1e4) * 0.7;
      curves(crossing, { label: "Seconds per step of compute and of transfers inside and between nodes by number of GPUs", height: 260, x, y: { log: 10, from: least, format: (v) => format.seconds(v), ticks: 5 }, marks,
        series: parts.map(([key, name, colour, dash]) => ({ name, colour, dash, radius: 3.5, focus: false, points: data.strong.map((r) => ({ x: r.gpus, y: r[key] > least ? r[key] : null, formula: `${r.gpus} GPUs: ${format.seconds(r[key])} of ${name}` })) })) });
    }
    if (data.best.length) element.append(panel("The best plan of each size", "", table([
      ["GPUs", "gpus", "whole"], ["step", "step_time_s", "s"],
      [`${data.unit}/s`, "tokens_per_s", "count", (r) => r.formula], ["best common plan", "title"],
    ], data.best, { caption: "The best common plan with the same batch" })));
  },
};
