// The strategies' table: what each form of parallelism splits and sends, and when to use it.

import { h, panel, table, terms } from "meshwright/draw.js";

export const view = {
  title: "Strategies side by side",
  sentence: "What each form of parallelism splits, what it sends and when, and when to use it. Coloured rows are the strategies that the plan combines.",
  draw(element, { letters, rows, rules, title }) {
    const chosen = (row) => row.used, name = ["strategy", (r) => (r.used ? h("b", null, `${r.name} ✓`) : r.name)];
    element.append(
      panel("What is split, and what is sent", letters, table([name, ["what is split", "splits"], "collective", "when", ["elements sent by one GPU per step", "volume"]],
        rows, { chosen, caption: "Traffic of each strategy" })),
      panel("When to use it", `This plan: ${title}. State in bytes on one GPU: bf16, Adam, fp32 master weights.`, table(
        [name, ["overlaps", "overlap"], "state", ["when to use", "use"]], rows, { chosen, caption: "Use of each strategy" })),
      panel("Rules of thumb", "", terms(rules.map((r) => [r.name, r.text]))));
  },
};
