// Efficiency against the batch: MFU and what is lost, with the critical batch.

import { curves } from "meshwright/charts.js";
import { format, panel, stat, stats } from "meshwright/draw.js";

export const view = {
  title: "Efficiency against the batch",
  sentence: "A larger batch gives more compute behind which gradients are reduced, and more micro-batches to fill the pipeline. Above the critical batch, more of it buys little.",
  draw(element, { rows, batch, seq, critical, critical_reason: reason, note }) {
    const now = rows.find((r) => r.batch === batch), box = panel("MFU by batch", note);
    element.append(stats(
      stat("This batch", format.whole(batch), { detail: seq === null ? "samples" : `sequences of ${format.whole(seq)} tokens` }),
      now && stat("MFU", format.percent(now.mfu), { formula: now.formula, detail: `${format.percent(now.lost_share)} bubble and gradients` }),
      critical === null ? stat("Critical batch", "none", { formula: reason })
        : stat("Critical batch", format.whole(critical), { detail: "samples", formula: reason, tone: batch < critical ? "warn" : "" })), box);
    const points = (key) => rows.map((r) => ({ x: r.batch, y: r[key], formula: r.formula }));
    const marks = [critical && { at: critical, words: `critical batch ${format.whole(critical)}`, colour: "bad" }, { at: batch, words: `this batch ${format.whole(batch)}` }];
    curves(box, { label: note, height: 320, x: { log: 2, label: "batch, samples", format: format.whole },
      y: { from: 0, label: "MFU and share of the step", format: (v) => format.percent(v, 0) }, marks: marks.filter(Boolean), series: [
        { name: "MFU", points: points("mfu"), colour: "compute" },
        { name: "share lost to bubble and exposed gradients", points: points("lost_share"), colour: "tp", dash: "5 4", focus: false }] });
  },
};
