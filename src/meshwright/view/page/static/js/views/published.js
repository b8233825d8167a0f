// Predictions against published measurements, those of this model and GPU first.

import { format, h, panel, stat, table } from "meshwright/draw.js";

export const view = {
  title: "Predicted against published",
  draw(element, data) {
    const p = data.plan;
    const near = data.runs.filter((r) => r.like);
    const words = near.length ? `${near.length} of them share the model or the GPU (${data.model}, ${data.accelerator}) and come first.` : `None of them is of ${data.model} or on ${data.accelerator}.`;
    element.append(panel("Well-known runs and this plan", `Measured step times of published runs, and what we predict for them. ${data.note} ${words}`,
      h("div", { class: "stats" }, stat("This plan", `${format.count(p.tokens_per_s_per_gpu)} ${p.unit}/s per GPU`, { detail: `predicted: step ${format.seconds(p.step_time_s)}, ${format.seconds(p.low_s)} to ${format.seconds(p.high_s)}`, formula: p.title })),
      table([
        { title: "run", key: "run", formula: (r) => r.plan }, { title: "shares", key: "like", text: (v) => v || "–" }, { title: "GPUs", key: "gpus", unit: "whole" }, { title: "GPU", key: "accelerator" },
        { title: "measured", key: "measured_s", unit: "s" }, { title: "predicted", key: "predicted_s", unit: "s", formula: (r) => r.formula },
        { title: "band", value: (r) => `${format.seconds(r.low_s)} to ${format.seconds(r.high_s)}${r.within ? "" : " (missed)"}` }, { title: "error", value: (r) => format.change(r.ratio - 1), align: "right" },
        { title: "tokens/s per GPU", key: "tokens_per_s_per_gpu", unit: "count" }, { title: "source", key: "source" },
      ], data.runs, { chosen: (r) => r.like !== "", caption: "Step time of well-known runs, measured and predicted" })));
  },
};
