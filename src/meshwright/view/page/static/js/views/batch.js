// Efficiency against the batch: MFU and what is lost, with the critical batch.

import { curves } from "meshwright/curves.js";
import { format, h, panel, stat } from "meshwright/draw.js";

export const view = {
  title: "Efficiency against the batch",
  sentence: "A larger batch gives more compute behind which gradients are reduced, and more micro-batches to fill the pipeline. Above the critical batch, more of it buys little.",
  draw(element, data) {
    const now = data.rows.find((r) => r.batch === data.batch);
    element.append(h("div", { class: "stats" },
      stat("This batch", format.whole(data.batch), { detail: data.seq === null ? "samples" : `sequences of ${format.whole(data.seq)} tokens` }),
      ...(now ? [stat("MFU", format.percent(now.mfu), { formula: now.formula, detail: `${format.percent(now.lost_share)} bubble and gradients` })] : []),
      stat("Critical batch", data.critical === null ? "none" : format.whole(data.critical), { detail: data.critical === null ? "" : "samples", formula: data.critical_reason, tone: data.critical !== null && data.batch < data.critical ? "warn" : "" })));
    const box = element.appendChild(panel("MFU by batch", data.note));
    const points = (key) => data.rows.map((r) => ({ x: r.batch, y: r[key], formula: r.formula }));
    const marks = [...(data.critical ? [{ at: data.critical, words: `critical batch ${format.whole(data.critical)}`, colour: "bad" }] : []), { at: data.batch, words: `this batch ${format.whole(data.batch)}`, colour: "quiet" }];
    curves(box, { label: data.note, height: 320, x: { log: 2, label: "batch, samples", format: format.count }, y: { from: 0, label: "MFU and share of the step", format: (v) => format.percent(v, 0) }, marks,
      series: [{ name: "MFU", points: points("mfu"), colour: "compute" }, { name: "share lost to bubble and exposed gradients", points: points("lost_share"), colour: "tp", dash: "5 4", focus: false }] });
  },
};
