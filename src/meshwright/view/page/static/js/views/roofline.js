// The communication roofline: what a device sends through each level of links against its ceiling; and the roofline of the whole step.

import { bars } from "meshwright/bars.js";
import { axis, figure, format, h, label, legend, line, log, panel, scatter, svg, table } from "meshwright/draw.js";

const LEVELS = ["compute", "tp", "optimizer", "ep", "cp"], DASHES = [null, null, "7 5", "2 4", "9 3 2 3"], SHAPES = { tp: "square", cp: "triangle", ep: "diamond", pp: "cross", dp: "circle" };

export const view = {
  title: "Communication roofline",
  sentence: "Each line is one level of links: flat at its bandwidth, falling where latency dominates. Each mark is a collective of this plan, in the colour of the level that it really crosses.",
  draw(element, data) {
    const box = element.appendChild(panel("Collectives against the level that they cross", data.note));
    chart(box, data);
    const used = [...new Set(data.points.map((p) => p.axis))];
    box.append(legend(data.levels.map((l, k) => ({ label: `${l.name}: ${format.rate(l.bandwidth)}`, colour: LEVELS[k % 5], shape: "line", dash: DASHES[k % 5] }))));
    if (used.length) box.append(h("p", { class: "sentence" }, `Shapes: ${used.map((a) => `${a} ${{ square: "■", triangle: "▲", diamond: "◆", cross: "✕", circle: "●" }[SHAPES[a]]}`).join(", ")}${data.measured.length ? "; hollow: measured" : ""}. ${data.measured.length ? "" : `No bench points: the links are those of the catalog (${data.calibrated || "uncalibrated"}).`}`));
    if (data.points.length) box.append(list(data));
    const step = element.appendChild(panel("The whole step", `${data.step.regime}: ${data.step.level} links allow the least. Advice: ${data.step.advice.join("; ") || "none"}.`));
    ceilings(step, data.step.ceilings);
  },
};

function chart(element, data) {
  const points = data.points.filter((p) => p.sent_bytes > 0);
  const sizes = [...points, ...data.measured].map((p) => p.sent_bytes), rates = [...points, ...data.measured].map((p) => p.rate);
  const low = Math.max(1e6, Math.min(...rates, ...data.levels.map((l) => l.bandwidth / 300)) / 2);
  const c = figure(element, { height: 380, left: 74, right: 18, bottom: 42, top: 18, label: `Roofline: ${data.levels.map((l) => `${l.name} ${format.rate(l.bandwidth)}`).join(", ")}; ${points.length} collectives` });
  const x = log([Math.min(1e3, ...sizes.filter((s) => s > 100)), Math.max(1e9, ...sizes) * 1.6], [0, c.width]), y = log([low, Math.max(...data.levels.map((l) => l.bandwidth)) * 1.5], [c.height, 0]);
  axis(c, x, "bottom", { label: "bytes that one device sends through the level in one call", format: (v) => format.bytes(v), ticks: c.width < 420 ? 3 : 7 });
  axis(c, y, "left", { label: "bytes per second of one device", format: (v) => format.rate(v), ticks: 6 });
  const inside = (px) => Math.max(0, Math.min(c.width, px));
  data.levels.forEach((level, k) => {
    const colour = LEVELS[k % 5], star = inside(x(level.crossover_bytes));
    c.plot.append(svg("rect", { x: 0, y: y(level.bandwidth), width: star, height: c.height - y(level.bandwidth), fill: colour, opacity: 0.05 }));
    line(c, level.curve.filter(([n, rate]) => x(n) >= 0 && x(n) <= c.width && y(rate) <= c.height).map(([n, rate]) => ({ x: n, y: rate })), { x, y, colour, dash: DASHES[k % 5], width: 2.4 - 0.3 * k, formula: level.formula });
    c.plot.append(svg("line", { x1: star, x2: star, y1: y(level.bandwidth / 2) - 7, y2: y(level.bandwidth / 2) + 7, stroke: colour, "stroke-width": 2 }));
    label(c, `s* ${format.bytes(level.crossover_bytes)}`, star + 5, y(level.bandwidth / 2) + 12, { size: 10, colour, halo: true });
  });
  label(c, "latency-bound", 8, c.height - 8, { size: 11, colour: "quiet" });
  label(c, "bandwidth-bound", c.width - 8, 2, { anchor: "end", size: 11, colour: "quiet" });
  const clamp = (p) => ({ ...p, x: Math.max(p.sent_bytes, x.domain[0]), y: Math.max(p.rate, low) });
  scatter(c, data.measured.map((p) => ({ ...clamp(p), colour: "surface", formula: p.formula })), { x, y, radius: 4, focus: false }).forEach((node, i) => node.style.setProperty("stroke", `var(--${LEVELS[data.measured[i].level % 5]})`));
  scatter(c, points.map((p) => ({ ...clamp(p), colour: LEVELS[p.level % 5], shape: SHAPES[p.axis], formula: p.formula })), { x, y, radius: 5.5 });
}

function list(data) {
  const rows = data.points.slice(0, 12);
  return table([
    { title: "collective", value: (p) => `${p.name} (${p.axis})` }, { title: "operation", value: (p) => `${p.operation}, ${p.algorithm}` },
    { title: "ranks", key: "ranks", align: "right" }, { title: "buffer", key: "buffer_bytes", unit: "bytes" },
    { title: "level", value: (p) => data.levels[p.level].name },
    { title: "of ceiling", key: "share", text: (v) => format.percent(v, 0), align: "right", formula: (p) => p.formula }, { title: "bound by", key: "bound" },
    { title: "per step", key: "step_seconds", unit: "s", formula: (p) => p.formula },
  ], rows, { caption: data.points.length > rows.length ? `The ${rows.length} collectives that take longest, of ${data.points.length}` : "All collectives of the step" });
}

function ceilings(element, rows) {
  const used = rows.filter((c) => c.bytes > 0);
  if (!used.length) return element.append(h("p", { class: "empty" }, "Nothing is sent."));
  const shown = used.map((r) => ({ label: r.level, text: `${format.percent(r.efficiency, 0)} · ${format.seconds(r.seconds)}`, parts: [{ value: r.efficiency, colour: LEVELS[rows.indexOf(r) % 5], formula: r.formula }] }));
  bars(element, shown, { left: 74, right: 120, tall: 34, x: { most: 1, label: "share of the peak FLOP/s that the bandwidth of the level allows", format: (v) => format.percent(v, 0) } });
}
