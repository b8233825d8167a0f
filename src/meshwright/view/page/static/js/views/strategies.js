// The strategies' table: what each form of parallelism splits and sends, and when to use it.

import { h, panel, table } from "meshwright/draw.js";

export const view = {
  title: "Strategies side by side",
  sentence: "What each form of parallelism splits, what it sends and when, and when to use it. Coloured rows are the strategies that the plan combines.",
  draw(element, data) {
    const chosen = (row) => row.used, name = { title: "strategy", value: (r) => r.name, text: (v, r) => (r.used ? h("b", null, `${v} ✓`) : v) };
    element.append(
      panel("What is split, and what is sent", data.letters, table([name, { title: "what is split", key: "splits" }, { title: "collective", key: "collective" }, { title: "when", key: "when" }, { title: "elements sent by one GPU per step", key: "volume" }], data.rows, { chosen, caption: "Traffic of each strategy" })),
      panel("When to use it", `This plan: ${data.title}. State in bytes on one GPU: bf16, Adam, fp32 master weights.`, table([name, { title: "overlaps", key: "overlap" }, { title: "state", key: "state" }, { title: "when to use", key: "use" }], data.rows, { chosen, caption: "Use of each strategy" })),
      panel("Rules of thumb", "", h("dl", null, data.rules.map((r) => [h("dt", null, h("b", null, r.name)), h("dd", { class: "sentence", style: { "margin-bottom": ".4rem" } }, r.text)]))),
    );
  },
};
