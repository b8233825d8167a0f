// The communication roofline: what a device sends through each level of links against its ceiling; and the roofline of the whole step.

import { bars, curves } from "meshwright/charts.js";
import { empty, format, label, legend, panel, rule, sentence, svg, table } from "meshwright/draw.js";

const LEVELS = ["compute", "tp", "optimizer", "ep", "cp"], DASHES = [null, null, "7 5", "2 4", "9 3 2 3"], SHAPES = { tp: "square", cp: "triangle", ep: "diamond", pp: "cross", dp: "circle" };

export const view = {
  title: "Communication roofline",
  sentence: "Each line is one level of links: flat at its bandwidth, falling where latency dominates. Each mark is a collective of this plan, in the colour of the level that it really crosses.",
  draw(element, data) {
    const box = element.appendChild(panel("Collectives against the level that they cross", data.note));
    chart(box, data);
    const axes = [...new Set(data.points.map((p) => p.axis))].map((axis) => ({ label: axis, colour: "quiet", shape: SHAPES[axis] }));
    if (axes.length) box.append(legend([...axes, ...(data.measured.length ? [{ label: "measured", colour: "surface", shape: "circle" }] : [])]));
    if (axes.length && !data.measured.length) box.append(sentence(`No bench points: the links are those of the catalog (${data.calibrated || "uncalibrated"}).`));
    if (data.points.length) box.append(list(data));
    const step = element.appendChild(panel("The whole step", `${data.step.regime}: ${data.step.level} links allow the least. Advice: ${data.step.advice.join("; ") || "none"}.`));
    ceilings(step, data.step.ceilings);
  },
};

function chart(element, { levels, points: all, measured }) {
  const points = all.filter((p) => p.sent_bytes > 0), sizes = [...points, ...measured].map((p) => p.sent_bytes), most = Math.max(...levels.map((l) => l.bandwidth));
  const low = Math.max(1e6, Math.min(...[...points, ...measured].map((p) => p.rate), ...levels.map((l) => l.bandwidth / 300)) / 2);
  const from = Math.min(1e3, ...sizes.filter((s) => s > 100)), to = Math.max(1e9, ...sizes) * 1.6, dot = (p, more) => ({ x: p.sent_bytes, y: p.rate, formula: p.formula, ...more });
  const c = curves(element, {
    label: `Roofline: ${levels.map((l) => `${l.name} ${format.rate(l.bandwidth)}`).join(", ")}; ${points.length} collectives`, height: 380, left: 74, right: 18, top: 18, inset: 0, least: 1,
    x: { log: 10, from, to, label: "bytes that one device sends through the level in one call", format: (v) => format.bytes(v), ticks: element.clientWidth < 512 ? 3 : 7 },
    y: { log: 10, from: low, to: most * 1.5, label: "bytes per second of one device", format: (v) => format.rate(v), ticks: 6 },
    series: [
      ...levels.map((l, k) => ({ name: `${l.name}: ${format.rate(l.bandwidth)}`, colour: LEVELS[k % 5], dash: DASHES[k % 5], width: 2.4 - 0.3 * k, formula: l.formula, dots: false, points: l.curve.filter(([n, rate]) => n >= from && n <= to && rate >= low).map(([x, y]) => ({ x, y })) })),
      { only: true, focus: false, points: measured.map((p) => dot(p, { colour: "surface", stroke: LEVELS[p.level % 5] })) },
      { only: true, radius: 5.5, points: points.map((p) => dot(p, { colour: LEVELS[p.level % 5], shape: SHAPES[p.axis] })) },
    ],
  });
  levels.forEach(({ bandwidth, crossover_bytes: bytes }, k) => { // below its s*, latency takes longer than the transfer
    const colour = LEVELS[k % 5], star = Math.max(0, Math.min(c.width, c.x(bytes))), middle = c.y(bandwidth / 2);
    c.plot.prepend(svg("rect", { x: 0, y: c.y(bandwidth), width: star, height: c.height - c.y(bandwidth), fill: colour, opacity: 0.05 }));
    rule(c, star, middle - 7, star, middle + 7, { stroke: colour });
    label(c, `s* ${format.bytes(bytes)}`, star + 5, middle + 12, { size: 10, colour, halo: true });
  });
  label(c, "latency-bound", 8, c.height - 8, { size: 11, colour: "quiet" });
  label(c, "bandwidth-bound", c.width - 8, 2, { anchor: "end", size: 11, colour: "quiet" });
}

function list(data) {
  const rows = data.points.slice(0, 12);
  return table([
    ["collective", (p) => `${p.name} (${p.axis})`], ["operation", (p) => `${p.operation}, ${p.algorithm}`],
    ["ranks", "ranks", "plain"], ["buffer", "buffer_bytes", "bytes"],
    ["level", (p) => data.levels[p.level].name],
    ["of ceiling", "share", (v) => format.percent(v, 0), (p) => p.formula], ["bound by", "bound"],
    ["per step", "step_seconds", "s", (p) => p.formula],
  ], rows, { caption: data.points.length > rows.length ? `The ${rows.length} collectives that take longest, of ${data.points.length}` : "All collectives of the step" });
}

function ceilings(element, rows) {
  const used = rows.filter((c) => c.bytes > 0);
  if (!used.length) return element.append(empty("Nothing is sent."));
  const shown = used.map((r) => ({ label: r.level, text: `${format.percent(r.efficiency, 0)} · ${format.seconds(r.seconds)}`, parts: [{ value: r.efficiency, colour: LEVELS[rows.indexOf(r) % 5], formula: r.formula }] }));
  bars(element, shown, { left: 74, right: 120, tall: 34, x: { most: 1, label: "share of the peak FLOP/s that the bandwidth of the level allows", format: (v) => format.percent(v, 0) } });
}
