// The two charts of the page. Bars from left to right: where a step goes, memory of stages, shares of a peak, scenarios side by side. Points, curves and
// areas on shared axes, with marks: scaling, memory over time, rooflines, runs, plans by time and memory.

import { area, axis, band, contentWidth, figure, format, label, legend, line, linear, log, rect, rule, scatter, svg, threshold } from "meshwright/draw.js";

/** What `axis` needs to show seconds up to `most`: the unit in the words, and numbers in it. */
export function inSeconds(words, most) {
  const [unit, factor] = most >= 1 ? ["s", 1] : most >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return { label: words ? `${words}, ${unit}` : unit, format: (v) => format.number(v * factor) };
}

/** The label of an axis, and its numbers in their unit or by a formatter; seconds up to `most` on a linear axis share one unit. */
const worded = ({ label, unit = "number", format: own, log }, most) => (unit === "s" && !log ? inSeconds(label, most) : { label, format: own ?? format.by[unit] });

/** Where the text of a bar begins: behind its end, or behind a limit line that would cross the text. */
const behind = (end, text, line) => 6 + (line > end && line < end + 12 + 6.4 * text.length ? line : end);

/** Draw rows [{ label, start = 0, parts: [{ value, colour, pattern, formula, name }], text, tone, limit, key }]: parts follow each other, `text` stands
 *  at their end, names in a legend.
 *  `x`: { label, unit or format, ticks, log: base, from, to (at least), most (exactly) }; `limit`: { at, words } is a dashed line; a row's own
 *  limit a short one. `key` groups what belongs to a row. */
export function bars(element, rows, { label: name, left = 112, right = 70, tall = 26, x: across = {}, limit = null, top = 12, weight = null, focus = true }) {
  const ends = rows.map((r) => (r.start ?? 0) + r.parts.reduce((sum, p) => sum + p.value, 0)), small = contentWidth(element) < 480;
  const most = across.most ?? Math.max(across.to ?? 0, ...ends, limit?.at ?? 0, ...rows.map((r) => r.limit ?? 0));
  const chart = figure(element, { height: 38 + top + tall * rows.length, left, right, top, bottom: 38, label: name ?? rows.map((r) => `${r.label} ${r.text ?? ""}`).join(", ") });
  const x = across.log ? log([across.from, most], [0, chart.width], { base: across.log }) : linear([across.from ?? 0, most], [0, chart.width]), y = band(rows.map((_, i) => i), [0, chart.height], { gap: 0.28 });
  axis(chart, x, "bottom", { ticks: across.ticks ?? (small ? 3 : 6), ...worded(across, most) });
  axis(chart, y, "left", { format: (i) => rows[i].label });
  rows.forEach((row, i) => {
    const plot = row.key === undefined ? chart.plot : svg("g", { dataset: row.key }), one = { ...chart, plot }, end = x(ends[i]), middle = y(i) + y.width / 2;
    if (plot !== chart.plot) chart.plot.append(plot);
    let sum = row.start ?? 0;
    for (const { value, colour: fill, pattern, formula } of row.parts) {
      if (value > 0) rect(one, x(sum), y(i), x(sum + value) - x(sum), y.width, { fill, pattern, formula, focus, round: 0 });
      sum += Math.max(0, value);
    }
    const inside = row.start < 0 || (end > chart.width - (small ? 20 : 40) && x(row.start ?? 0) > 90); // no room behind the bar
    const text = small ? row.text?.split(" · ")[0] : row.text, line = row.limit ?? (limit && Math.min(limit.at, most));
    if (text) label(one, text, inside ? x(row.start) - 6 : behind(end, text, line && x(line)), middle, { anchor: inside ? "end" : "start", middle: true, size: 11, weight, colour: row.tone || "ink", halo: true });
    if (row.limit) rule(one, x(row.limit), y(i) - 2, x(row.limit), y(i) + y.width + 2, { stroke: "bad" });
  });
  if (limit) threshold(chart, x(Math.min(limit.at, most)), limit.words);
  const named = new Map(rows.flatMap((row) => row.parts.filter((p) => p.name && p.value > 0).map((p) => [p.name, p])));
  const items = [...named.values()].map(({ name: words, colour, pattern }) => ({ label: words, colour, pattern }));
  if (rows.some((row) => row.limit)) items.push({ label: "limit of the GPU", colour: "bad", shape: "line" });
  if (items.length > 1) element.append(legend(items));
  return { ...chart, x, y };
}

/** Draw a chart. `x` and `y`: { log: base or 0, nice, from, to, label, unit or format, ticks }; without `from` and `to` they span the series, and what is
 *  beyond them is drawn at the edge. series: [{ name, points: [{ x, y, base, formula, shape, low, high, onclick }], colour, dash, width, steps,
 *  formula, shape, radius, dots, focus, only, area }], of which `only` has no line, `dots: false` no points, and `area` is the opacity of what is
 *  below; marks: [{ at, words or title, colour, dash, low, flat }], of which `flat` ones are at a value of y. Named series have a legend from
 *  `least` of them. Returns the chart with its scales. */
export function curves(element, { label: name, height = 280, left = 62, right = 20, top = 12, bottom = 42, inset = 8, least = 2, x: across, y: up, series, marks = [] }) {
  const c = figure(element, { height, left, right, top, bottom, label: name }), points = series.flatMap((s) => s.points).filter((p) => Number.isFinite(p.y));
  function scale(side, key, slack, range) {
    const values = [...points.map((p) => p[key]), ...(key === "x" ? marks.map((m) => m.at) : [])], least = Math.min(...values), most = Math.max(...values);
    const ends = [side.from ?? least / (side.log ? slack : 1), side.to ?? Math.max(most * slack, side.log ? least * 2 : most)];
    const free = side.log ? log(ends, range, { base: side.log }) : linear(ends, range, { nice: Boolean(side.nice), count: side.nice }), [low, high] = free.domain;
    return Object.assign((value) => free(Math.max(low, Math.min(value, high))), free);
  }
  const x = scale(across, "x", 1, [inset, c.width - inset]), y = scale(up, "y", up.log ? 1.25 : 1.05, [c.height, 0]);
  const thin = (ticks) => (Array.isArray(ticks) ? ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(2, Math.floor(c.width / 64))) === 0) : ticks);
  axis(c, x, "bottom", { ticks: thin(across.ticks ?? (c.width < 420 ? 3 : 7)), ...worded(across, x.domain[1]) });
  axis(c, y, "left", { ticks: up.ticks, ...worded(up, y.domain[1]) });
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
    if (words) label(c, words, isRight ? px - 5 : px + 5, low ? c.height - 8 : 10 + 15 * row, { anchor: isRight ? "end" : "start", size: 11, colour, halo: true });
  });
  const named = series.filter((s) => s.name);
  const shapeOf = (s) => (s.area ? "box" : s.only ? s.shape ?? "box" : "line");
  if (named.length >= least) element.append(legend(named.map((s) => ({ label: s.name, colour: s.colour, shape: shapeOf(s), dash: s.dash }))));
  return { ...c, x, y };
}
