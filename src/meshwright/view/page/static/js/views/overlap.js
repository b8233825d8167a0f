// Bucket and prefetch timelines: DDP reduces gradients behind backward, FSDP gathers the next layer's weights behind compute.

import { axis, band, choice, figure, format, h, label, legend, linear, panel, rect, svg } from "meshwright/draw.js";

export const view = {
  name: "overlap",
  title: "Buckets and prefetching",
  short: "Overlap",
  workspace: "learn",
  sentence: "The same layers without and with overlap. Above: compute; below: messages on the network. What ends after the last compute is exposed.",
  draw(element, data, context) {
    element.append(h("p", { class: data.ddp || data.fsdp ? "sentence" : "notice" }, data.note));
    if (data.ddp) {
      const box = panel("DDP: gradient buckets behind backward", "");
      if (context.live) box.append(h("div", { class: "controls" }, choice("Bucket", data.bucket_choices.map((b) => [b.bytes, b.text]), data.bucket_bytes, (bucket) => context.setOptions({ bucket }))));
      element.append(box);
      plan(box, data.ddp, "backward", "dp", "bucket all-reduce");
    }
    if (data.fsdp) {
      const box = panel("FSDP: the next layer’s weights are fetched early", "");
      element.append(box);
      plan(box, data.fsdp, "forward", "gathered", "all-gather of weights");
    }
  },
};

function plan(element, d, compute, comm, name) {
  element.append(h("p", { class: "sentence" }, d.formula.split("\n")[0]));
  ways(element, d, Math.max(...d.ways.map((w) => w.end_s)), compute, comm);
  element.append(legend([{ label: compute, colour: compute }, { label: name, colour: comm, pattern: "hatch" }, { label: "end", colour: "bad", shape: "line" }]));
}

/** Compute and messages of several ways under each other. */
export function ways(element, d, top, compute, comm) {
  const unit = top >= 1 ? ["s", 1] : top >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  const rows = d.ways.flatMap((w) => [`${w.name}:title`, `${w.name}:compute`, `${w.name}:communication`]);
  const c = figure(element, { height: 250, left: 12, right: 12, top: 4, bottom: 42, label: d.formula });
  const x = linear([0, top * 1.03], [0, c.width]), y = band(rows, [0, c.height], { gap: 0.12 });
  axis(c, x, "bottom", { label: `time, ${unit[0]}`, format: (v) => format.number(v * unit[1]) });
  d.ways.forEach((way, k) => {
    const first = y(`${way.name}:compute`);
    label(c, `${way.name}: ${format.seconds(way.end_s)}${k ? `, ${format.percent(d.saved, 0)} less` : ""}`, 0, first - 6, { size: 11, weight: 600, halo: true });
    let busy = -1;
    for (const span of way.spans) {
      const width = x(span.seconds) - x(0), at = y(`${way.name}:${span.stream}`);
      if (width < 0.4 && x(span.start) < busy + 0.4) continue;
      busy = x(span.start) + width;
      rect(c, x(span.start), at, Math.max(0.5, width - 0.8), y.width, { fill: span.stream === "compute" ? compute : comm, pattern: span.stream === "compute" ? null : "hatch", focus: false, formula: `${span.name}: ${format.seconds(span.start)} to ${format.seconds(span.start + span.seconds)}\n${d.formula}` });
      if (width > 46) label(c, span.name, x(span.start) + width / 2, at + y.width / 2, { anchor: "middle", middle: true, size: 10, colour: span.stream === "compute" ? "surface" : "ink" }).style.pointerEvents = "none";
    }
    const end = x(way.end_s);
    c.plot.append(svg("line", { x1: end, x2: end, y1: first, y2: first + 2 * y.step - 4, stroke: "bad", "stroke-width": 1.6 }));
  });
}
