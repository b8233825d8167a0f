// Efficiency against the batch: MFU and what is lost, with the critical batch.

import { axis, figure, format, h, label, legend, line, linear, log, panel, scatter, stat, svg } from "meshwright/draw.js";

export const view = {
  name: "batch",
  title: "Efficiency against the batch",
  tab: "Scaling",
  workspace: "plan",
  sentence: "A larger batch gives more compute behind which gradients are reduced, and more micro-batches to fill the pipeline. Above the critical batch, more of it buys little.",
  draw(element, data) {
    const now = data.rows.find((r) => r.batch === data.batch);
    element.append(h("div", { class: "stats" },
      stat("This batch", format.whole(data.batch), { detail: data.seq === null ? "samples" : `sequences of ${format.whole(data.seq)} tokens` }),
      ...(now ? [stat("MFU", format.percent(now.mfu), { formula: now.formula, detail: `${format.percent(now.lost_share)} bubble and gradients` })] : []),
      stat("Critical batch", data.critical === null ? "none" : format.whole(data.critical), { detail: data.critical === null ? "" : "samples", formula: data.critical_reason, tone: data.critical !== null && data.batch < data.critical ? "warn" : "" })));
    const box = panel("MFU by batch", data.note);
    element.append(box);
    const c = figure(box, { height: 320, left: 56, right: 20, bottom: 42, label: data.note });
    const sizes = data.rows.map((r) => r.batch), all = [...sizes, ...(data.critical ? [data.critical] : [])];
    const x = log([Math.min(...all), Math.max(...all, Math.min(...all) * 2)], [8, c.width - 8], { base: 2 }), y = linear([0, Math.max(...data.rows.map((r) => Math.max(r.mfu, r.lost_share))) * 1.08], [c.height, 0]);
    axis(c, x, "bottom", { label: "batch, samples", format: (v) => format.count(v) });
    axis(c, y, "left", { label: "MFU and share of the step", format: (v) => format.percent(v, 0) });
    const series = (rows, colour, key, dash, focus) => {
      const points = rows.map((r) => ({ x: r.batch, y: r[key], formula: r.formula }));
      line(c, points, { x, y, colour, dash });
      scatter(c, points, { x, y, colour, radius: 4, focus });
    };
    series(data.rows, "tp", "lost_share", "5 4", false);
    series(data.rows, "compute", "mfu", null, true);
    const mark = (batch, text, colour, row) => {
      c.plot.append(svg("line", { x1: x(batch), x2: x(batch), y1: 0, y2: c.height, stroke: colour, "stroke-width": 1.6, "stroke-dasharray": "5 4" }));
      label(c, text, x(batch) > c.width * 0.6 ? x(batch) - 5 : x(batch) + 5, 10 + 15 * row, { anchor: x(batch) > c.width * 0.6 ? "end" : "start", size: 11, colour, halo: true });
    };
    if (data.critical) mark(data.critical, `critical batch ${format.whole(data.critical)}`, "bad", 0);
    mark(data.batch, `this batch ${format.whole(data.batch)}`, "quiet", 1);
    box.append(legend([{ label: "MFU", colour: "compute", shape: "line" }, { label: "share lost to bubble and exposed gradients", colour: "tp", shape: "line", dash: "5 4" }]));
  },
};
