// Predictions against published measurements, those of this model first, with the error of each source.

import { axis, band, figure, format, h, label, legend, log, panel, scatter, stat, svg, table } from "meshwright/draw.js";

export const view = {
  name: "published",
  title: "Predicted against published",
  tab: "Published runs",
  workspace: "plan",
  sentence: "Each mark is one published figure: left of the line we predict less than was measured, right of it more. The bar is the error band of the prediction.",
  draw(element, data) {
    element.append(runs(data));
    const box = panel(data.matches ? `Runs of ${data.model}, then others` : "Published training runs", data.note);
    element.append(box);
    const rows = data.rows.map((r, i) => ({ ...r, key: `${i}`, text: `${r.title} · ${r.unit}` })), small = box.clientWidth < 560;
    const c = figure(box, { height: 62 + 22 * rows.length, left: small ? 136 : 300, right: 46, bottom: 42, label: data.note });
    const x = log([0.5, 2], [0, c.width]), y = band(rows.map((r) => r.key), [0, c.height], { gap: 0.3 });
    axis(c, x, "bottom", { label: "predicted / published", ticks: small ? [0.5, 1, 2] : [0.5, 0.67, 0.8, 1, 1.25, 1.5, 2], format: (v) => `${v}×` });
    axis(c, y, "left", { format: (key) => { const t = rows[Number(key)].text; return small && t.length > 19 ? `${t.slice(0, 18)}…` : t.length > 50 ? `${t.slice(0, 49)}…` : t; } });
    c.plot.append(svg("line", { x1: x(1), x2: x(1), y1: 0, y2: c.height, stroke: "quiet", "stroke-width": 1.5 }));
    const clamp = (v) => Math.max(0.5, Math.min(2, v));
    for (const r of rows) {
      const at = y(r.key) + y.width / 2;
      c.plot.append(svg("line", { x1: x(clamp(r.low / r.published)), x2: x(clamp(r.high / r.published)), y1: at, y2: at, stroke: r.this_model ? "compute" : "hidden", "stroke-width": 4, "stroke-linecap": "round", opacity: 0.55 }));
      label(c, `${r.ratio.toFixed(2)}×`, c.width + 6, at, { middle: true, size: 10, colour: "quiet" });
    }
    scatter(c, rows.map((r) => ({ x: clamp(r.ratio), y: r.key, colour: r.this_model ? "compute" : r.within ? "optimizer" : "tp", shape: r.within ? "circle" : "diamond", formula: r.formula })), { x, y: (key) => y(key) + y.width / 2, radius: 4.5 });
    box.append(legend([...(data.matches ? [{ label: `runs of ${data.model}`, colour: "compute" }] : []), { label: "published figure inside the band", colour: "optimizer" }, { label: "outside (diamond)", colour: "tp" }]));
    element.append(panel("Error of each source", "", table([
      { title: "source", key: "source" }, { title: "figures", key: "figures", align: "right" },
      { title: "mean error", key: "error", text: (v) => format.percent(v, 0), align: "right" }, { title: "bias", key: "bias", text: (v) => format.change(v), align: "right" },
    ], data.sources, { caption: "Mean error of the figures of a source" })));
  },
};

/** Well-known runs, predicted and measured, with this plan's prediction in the same units. */
function runs(data) {
  const figures = (name, p) => stat(name, `${format.count(p.tokens_per_s_per_gpu)} ${p.unit}/s per GPU`, { detail: `predicted: step ${format.seconds(p.step_time_s)}, ${format.seconds(p.low_s)} to ${format.seconds(p.high_s)}`, formula: p.title });
  const near = data.runs.filter((r) => r.like);
  const words = near.length ? `${near.length} of them share the model or the GPU (${data.model}, ${data.accelerator}) and come first.` : `None of them is of ${data.model} or on ${data.accelerator}.`;
  return panel("Well-known runs and this plan", `Measured step times of published runs, and what we predict for them. ${words}`,
    h("div", { class: "stats" }, figures("This plan", data.plan)),
    table([
      { title: "run", key: "run", formula: (r) => r.plan }, { title: "shares", key: "like", text: (v) => v || "–" }, { title: "GPUs", key: "gpus", text: (v) => format.whole(v), align: "right" }, { title: "GPU", key: "accelerator" },
      { title: "measured", key: "measured_s", text: (v) => format.seconds(v), align: "right" }, { title: "predicted", key: "predicted_s", text: (v) => format.seconds(v), align: "right", formula: (r) => r.formula },
      { title: "band", value: (r) => `${format.seconds(r.low_s)} to ${format.seconds(r.high_s)}${r.within ? "" : " (missed)"}` }, { title: "error", value: (r) => format.change(r.ratio - 1), align: "right" },
      { title: "tokens/s per GPU", key: "tokens_per_s_per_gpu", text: (v) => format.count(v), align: "right" }, { title: "source", key: "source" },
    ], data.runs, { chosen: (r) => r.like !== "", caption: "Step time of well-known runs, measured and predicted" }));
}
