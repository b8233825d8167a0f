// One chart of points and curves on shared axes, with vertical marks: scaling, batch, goodput, plans by time and memory, measurements of links.

import { axis, figure, label as write, legend, line, linear, log, scatter, svg } from "meshwright/draw.js";

/** Draw a chart. `x` and `y`: { log: base or 0, from, to, label, format, ticks }; without `from` and `to` they span the series.
 *  series: [{ name, points: [{ x, y, formula, shape, low, high, onclick }], colour, dash, width, steps, formula, shape, radius, dots, focus, only }], of which
 *  `only` has no line and `dots: false` no points; marks: [{ at, words, colour, low }]. Returns the chart with its scales. */
export function curves(element, { label, height = 280, left = 62, x: across, y: up, series, marks = [] }) {
  const c = figure(element, { height, left, right: 20, bottom: 42, label }), points = series.flatMap((s) => s.points).filter((p) => Number.isFinite(p.y));
  const ends = (side, key, slack) => {
    const values = [...points.map((p) => p[key]), ...(key === "x" ? marks.map((m) => m.at) : [])], low = Math.min(...values), high = Math.max(...values);
    return [side.from ?? low / (side.log ? slack : 1), side.to ?? Math.max(high * slack, side.log ? low * 2 : high)];
  };
  const scale = (side, key, slack, range) => (side.log ? log(ends(side, key, slack), range, { base: side.log }) : linear(ends(side, key, slack), range));
  const x = scale(across, "x", 1, [8, c.width - 8]), y = scale(up, "y", up.log ? 1.25 : 1.05, [c.height, 0]);
  const thin = (ticks) => (Array.isArray(ticks) ? ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(2, Math.floor(c.width / 64))) === 0) : ticks);
  axis(c, x, "bottom", { label: across.label, format: across.format, ticks: thin(across.ticks) });
  axis(c, y, "left", { label: up.label, format: up.format, ticks: up.ticks });
  for (const s of series) {
    if (!s.only) line(c, s.points, { x, y, colour: s.colour, dash: s.dash, width: s.width ?? 2, steps: s.steps, formula: s.formula });
    for (const p of s.points) if (p.low) c.plot.append(svg("line", { x1: x(p.x), x2: x(p.x), y1: y(p.low), y2: y(p.high), stroke: s.colour, "stroke-width": 1.4 }));
    if (s.dots !== false) scatter(c, s.points.filter((p) => Number.isFinite(p.y)), { x, y, colour: s.colour, shape: s.shape, radius: s.radius ?? 4, focus: s.focus !== false });
  }
  marks.forEach(({ at, words, colour, low }, row) => {
    const px = x(at), right = px > c.width * 0.6;
    c.plot.append(svg("line", { x1: px, x2: px, y1: 0, y2: c.height, stroke: colour, "stroke-width": 1.6, "stroke-dasharray": "5 4" }));
    write(c, words, right ? px - 5 : px + 5, low ? c.height - 8 : 10 + 15 * row, { anchor: right ? "end" : "start", size: 11, colour, halo: true });
  });
  const named = series.filter((s) => s.name);
  if (named.length > 1) element.append(legend(named.map((s) => ({ label: s.name, colour: s.colour, shape: s.only ? s.shape ?? "box" : "line", dash: s.dash }))));
  return { ...c, x, y };
}
