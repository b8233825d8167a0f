// One chart of bars from left to right: where a step goes, memory of stages, shares of a peak, scenarios side by side.

import { axis, band, contentWidth, figure, format, label, linear, log, rect, rule, svg, threshold } from "meshwright/draw.js";

/** What `axis` needs to show seconds up to `most`: the unit in the words, and numbers in it. */
export function inSeconds(words, most) {
  const [unit, factor] = most >= 1 ? ["s", 1] : most >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return { label: words ? `${words}, ${unit}` : unit, format: (v) => format.number(v * factor) };
}

/** Where the text of a bar begins: behind its end, or behind a limit line that would cross the text. */
const behind = (end, text, line) => 6 + (line > end && line < end + 12 + 6.4 * text.length ? line : end);

/** Draw rows [{ label, start = 0, parts: [{ value, colour, pattern, formula }], text, tone, limit, key }]: parts follow each other, `text` stands at their end.
 *  `x`: { label, format, seconds, ticks, log: base, from, to (at least), most (exactly) }; `limit`: { at, words } is a dashed line; a row's own limit a short one. `key` groups what belongs to a row. */
export function bars(element, rows, { label: name, left = 112, right = 70, tall = 26, x: across = {}, limit = null, top = 12, weight = null, focus = true }) {
  const ends = rows.map((r) => (r.start ?? 0) + r.parts.reduce((sum, p) => sum + p.value, 0)), small = contentWidth(element) < 480;
  const most = across.most ?? Math.max(across.to ?? 0, ...ends, limit?.at ?? 0, ...rows.map((r) => r.limit ?? 0));
  const chart = figure(element, { height: 38 + top + tall * rows.length, left, right, top, bottom: 38, label: name ?? rows.map((r) => `${r.label} ${r.text ?? ""}`).join(", ") });
  const x = across.log ? log([across.from, most], [0, chart.width], { base: across.log }) : linear([0, most], [0, chart.width]), y = band(rows.map((_, i) => i), [0, chart.height], { gap: 0.28 });
  axis(chart, x, "bottom", { ticks: across.ticks ?? (small ? 3 : 6), ...(across.seconds === undefined ? { label: across.label, format: across.format ?? ((v) => format.number(v)) } : inSeconds(across.seconds, most)) });
  axis(chart, y, "left", { format: (i) => rows[i].label });
  rows.forEach((row, i) => {
    const plot = row.key === undefined ? chart.plot : svg("g", { dataset: row.key }), one = { ...chart, plot }, end = x(ends[i]), middle = y(i) + y.width / 2;
    if (plot !== chart.plot) chart.plot.append(plot);
    let sum = row.start ?? 0;
    for (const { value, colour: fill, pattern, formula } of row.parts) {
      if (value > 0) rect(one, x(sum), y(i), x(sum + value) - x(sum), y.width, { fill, pattern, formula, focus, round: 0 });
      sum += Math.max(0, value);
    }
    const inside = end > chart.width - (small ? 20 : 40) && x(row.start ?? 0) > 90; // no room behind the bar
    const text = small ? row.text?.split(" · ")[0] : row.text, line = row.limit ?? (limit && Math.min(limit.at, most));
    if (text) label(one, text, inside ? x(row.start) - 6 : behind(end, text, line && x(line)), middle, { anchor: inside ? "end" : "start", middle: true, size: 11, weight, colour: row.tone || "ink", halo: true });
    if (row.limit) rule(one, x(row.limit), y(i) - 2, x(row.limit), y(i) + y.width + 2, { stroke: "bad" });
  });
  if (limit) threshold(chart, x(Math.min(limit.at, most)), limit.words);
  return { ...chart, x, y };
}
