// One chart of points, curves and areas on shared axes, with marks: scaling, memory over time, rooflines, runs, plans by time and memory.

import { area, axis, figure, label as write, legend, line, linear, log, rule, scatter, svg, threshold } from "meshwright/draw.js";

/** Draw a chart. `x` and `y`: { log: base or 0, nice, from, to, label, format, ticks }; without `from` and `to` they span the series, and what is
 *  beyond them is drawn at the edge. series: [{ name, points: [{ x, y, base, formula, shape, low, high, onclick }], colour, dash, width, steps,
 *  formula, shape, radius, dots, focus, only, area }], of which `only` has no line, `dots: false` no points, and `area` is the opacity of what is
 *  below; marks: [{ at, words or title, colour, dash, low, flat }], of which `flat` ones are at a value of y. Named series have a legend from
 *  `least` of them. Returns the chart with its scales. */
export function curves(element, { label, height = 280, left = 62, right = 20, top = 12, bottom = 42, inset = 8, least = 2, x: across, y: up, series, marks = [] }) {
  const c = figure(element, { height, left, right, top, bottom, label }), points = series.flatMap((s) => s.points).filter((p) => Number.isFinite(p.y));
  function scale(side, key, slack, range) {
    const values = [...points.map((p) => p[key]), ...(key === "x" ? marks.map((m) => m.at) : [])], least = Math.min(...values), most = Math.max(...values);
    const ends = [side.from ?? least / (side.log ? slack : 1), side.to ?? Math.max(most * slack, side.log ? least * 2 : most)];
    const free = side.log ? log(ends, range, { base: side.log }) : linear(ends, range, { nice: Boolean(side.nice), count: side.nice }), [low, high] = free.domain;
    return Object.assign((value) => free(Math.max(low, Math.min(value, high))), free);
  }
  const x = scale(across, "x", 1, [inset, c.width - inset]), y = scale(up, "y", up.log ? 1.25 : 1.05, [c.height, 0]);
  const thin = (ticks) => (Array.isArray(ticks) ? ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(2, Math.floor(c.width / 64))) === 0) : ticks);
  axis(c, x, "bottom", { ...across, ticks: thin(across.ticks) });
  axis(c, y, "left", up);
  for (const s of series) {
    if (s.area) area(c, s.points, { x, y, colour: s.colour, opacity: s.area, steps: s.steps });
    if (!s.only) line(c, s.points, { x, y, colour: s.colour, dash: s.dash, width: s.width ?? 2, steps: s.steps, formula: s.formula });
    for (const p of s.points) if (p.low) rule(c, x(p.x), y(p.low), x(p.x), y(p.high), { stroke: s.colour, width: 1.4 });
    const shown = s.dots === false ? [] : s.points.filter((p) => Number.isFinite(p.y));
    scatter(c, shown, { x, y, colour: s.colour, shape: s.shape, radius: s.radius ?? 4, focus: s.focus !== false });
  }
  marks.forEach(({ at, words = "", title = "", colour = "quiet", dash = "5 4", low, flat }, row) => {
    if (flat) return threshold(c, y(at), words, { flat, colour });
    const px = x(at), isRight = px > c.width * 0.6;
    rule(c, px, 0, px, c.height, { stroke: colour, width: 1.6, dash }, title && svg("title", null, title));
    if (words) write(c, words, isRight ? px - 5 : px + 5, low ? c.height - 8 : 10 + 15 * row, { anchor: isRight ? "end" : "start", size: 11, colour, halo: true });
  });
  const named = series.filter((s) => s.name);
  const shapeOf = (s) => (s.area ? "box" : s.only ? s.shape ?? "box" : "line");
  if (named.length >= least) element.append(legend(named.map((s) => ({ label: s.name, colour: s.colour, shape: shapeOf(s), dash: s.dash }))));
  return { ...c, x, y };
}
