// The load of experts: how many tokens each gets, and what a more or less even load changes.

import { curves } from "meshwright/charts.js";
import { empty, format, h, panel, table } from "meshwright/draw.js";

export const view = {
  title: "Load of experts",
  sentence: "All ranks wait for the one whose experts get most tokens. A capacity limits its load and drops what is above.",
  draw(element, { loads, capacity, measured, top_k: chosen, ep, rows }, context) {
    if (!loads.length) return element.append(empty("No tokens choose experts in this model: there is no load to balance."));
    const assumed = measured ? "As measured." : "Assumed: the load falls as a power of an expert’s place, and the first experts share a rank.";
    const load = panel("Tokens of each expert over the mean", `${loads.length} experts of which a token chooses ${chosen}; ${ep} expert-parallel ranks. ${assumed}`);
    const use = (r) => context.update({ "workload.imbalance": r.imbalance, "workload.loads": null });
    element.append(h("div", { class: "columns" }, load, panel("What the load changes", "Imbalance is the load of the busiest rank over the mean.", table(
      [["imbalance", "imbalance", "number"], ["step", "step_time_s", "s"], ["memory", "memory_gib", "gib"], ["dropped copies", "dropped_share", "share"]],
      rows, { name: "Step, memory and dropped copies by imbalance", chosen: (r) => r.now, onrow: context.live ? use : null, rowLabel: (r) => `Use imbalance ${format.number(r.imbalance)}` }))));
    const limit = capacity ? [{ at: capacity, words: `capacity ${format.number(capacity)}`, flat: true }] : [];
    curves(load, {
      label: `Load of experts over the mean, from ${format.number(loads[0])} to ${format.number(loads.at(-1))}`, height: 240, left: 48, right: 18, bottom: 36, inset: 0,
      x: { from: 0, to: loads.length, label: "experts, the most loaded first" }, y: { from: 0, to: 1.1 * Math.max(loads[0], capacity), label: "load over the mean" },
      series: [{ colour: "ep", area: 0.75, steps: true, only: true, dots: false, points: [...loads, loads.at(-1)].map((y, x) => ({ x, y })) }],
      marks: [{ at: 1, words: "mean", colour: "quiet", flat: true }, ...limit],
    });
  },
};
