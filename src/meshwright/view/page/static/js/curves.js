// One chart of points, curves and areas on shared axes, with marks: scaling, memory over time, rooflines, runs, plans by time and memory.

import { area, axis, figure, label as write, legend, line, linear, log, scatter, svg, threshold } from "meshwright/draw.js";

/** Draw a chart. `x` and `y`: { log: base or 0, nice, from, to, label, format, ticks }; without `from` and `to` they span the series.
 *  series: [{ name, points: [{ x, y, base, formula, shape, low, high, onclick }], colour, dash, width, steps, formula, shape, radius, dots, focus, only, area }], of
 *  which `only` has no line, `dots: false` no points, and `area` is the opacity of what is below; marks: [{ at, words, colour, low, flat }], of which `flat` ones are
 *  at a value of y. Named series have a legend from `least` of them. Returns the chart with its scales. */
export function curves(element, { label, height = 280, left = 62, right = 20, top = 12, bottom = 42, inset = 8, least = 2, x: across, y: up, series, marks = [] }) {
  const c = figure(element, { height, left, right, top, bottom, label }), points = series.flatMap((s) => s.points).filter((p) => Number.isFinite(p.y));
  const ends = (side, key, slack) => {
    const values = [...points.map((p) => p[key]), ...(key === "x" ? marks.map((m) => m.at) : [])], low = Math.min(...values), high = Math.max(...values);
    return [side.from ?? low / (side.log ? slack : 1), side.to ?? Math.max(high * slack, side.log ? low * 2 : high)];
  };
  const scale = (side, key, slack, range) => (side.log ? log(ends(side, key, slack), range, { base: side.log }) : linear(ends(side, key, slack), range, { nice: Boolean(side.nice), count: side.nice }));
  const x = scale(across, "x", 1, [inset, c.width - inset]), y = scale(up, "y", up.log ? 1.25 : 1.05, [c.height, 0]);
  const thin = (ticks) => (Array.isArray(ticks) ? ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(2, Math.floor(c.width / 64))) === 0) : ticks);
  axis(c, x, "bottom", { label: across.label, format: across.format, ticks: thin(across.ticks) });
  axis(c, y, "left", { label: up.label, format: up.format, ticks: up.ticks });
  for (const s of series) {
    if (s.area) area(c, s.points, { x, y, colour: s.colour, opacity: s.area, steps: s.steps });
    if (!s.only) line(c, s.points, { x, y, colour: s.colour, dash: s.dash, width: s.width ?? 2, steps: s.steps, formula: s.formula });
    for (const p of s.points) if (p.low) c.plot.append(svg("line", { x1: x(p.x), x2: x(p.x), y1: y(p.low), y2: y(p.high), stroke: s.colour, "stroke-width": 1.4 }));
    if (s.dots !== false) scatter(c, s.points.filter((p) => Number.isFinite(p.y)), { x, y, colour: s.colour, shape: s.shape, radius: s.radius ?? 4, focus: s.focus !== false });
  }
  marks.forEach(({ at, words, colour, low, flat }, row) => {
    if (flat) return threshold(c, y(at), words, { flat, colour });
    const px = x(at), isRight = px > c.width * 0.6;
    c.plot.append(svg("line", { x1: px, x2: px, y1: 0, y2: c.height, stroke: colour, "stroke-width": 1.6, "stroke-dasharray": "5 4" }));
    write(c, words, isRight ? px - 5 : px + 5, low ? c.height - 8 : 10 + 15 * row, { anchor: isRight ? "end" : "start", size: 11, colour, halo: true });
  });
  const named = series.filter((s) => s.name);
  if (named.length >= least) element.append(legend(named.map((s) => ({ label: s.name, colour: s.colour, shape: s.area ? "box" : s.only ? s.shape ?? "box" : "line", dash: s.dash }))));
  return { ...c, x, y };
}
