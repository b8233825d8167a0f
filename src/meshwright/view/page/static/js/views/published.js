// Predictions against published measurements, those of this model and GPU first.

import { format, panel, stat, stats, table } from "meshwright/draw.js";

export const view = {
  title: "Predicted against published",
  draw(element, data) {
    const p = data.plan;
    const near = data.runs.filter((r) => r.like);
    const words = near.length ? `${near.length} of them share the model or the GPU (${data.model}, ${data.accelerator}) and come first.` : `None of them is of ${data.model} or on ${data.accelerator}.`;
    element.append(panel("Well-known runs and this plan", `Measured step times of published runs, and what we predict for them. ${data.note} ${words}`,
      stats(stat("This plan", `${format.count(p.tokens_per_s_per_gpu)} ${p.unit}/s per GPU`, { detail: `predicted: step ${format.seconds(p.step_time_s)}, ${format.seconds(p.low_s)} to ${format.seconds(p.high_s)}`, formula: p.title })),
      table([
        ["run", "run", null, (r) => r.plan], ["shares", (r) => r.like || "–"], ["GPUs", "gpus", "whole"], ["GPU", "accelerator"],
        ["measured", "measured_s", "s"], ["predicted", "predicted_s", "s", (r) => r.formula],
        ["band", (r) => `${format.seconds(r.low_s)} to ${format.seconds(r.high_s)}${r.within ? "" : " (missed)"}`], ["error", (r) => format.change(r.ratio - 1), "plain"],
        ["tokens/s per GPU", "tokens_per_s_per_gpu", "count"], "source",
      ], data.runs, { chosen: (r) => r.like !== "", caption: "Step time of well-known runs, measured and predicted" })));
  },
};
