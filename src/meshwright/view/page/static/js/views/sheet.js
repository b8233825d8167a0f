// Charts and tables that belong to no plan: the files of `bench --html` and `validate --html`. Python says which; see view/page/sheet.py.

import { curves } from "meshwright/charts.js";
import { axis, band, figure, format, h, log, panel, rule, scatter, sentence, table } from "meshwright/draw.js";

const COLOURS = ["compute", "tp", "optimizer", "ep", "cp", "pp", "dp", "second"], SHAPES = ["circle", "square", "triangle", "diamond", "cross"];
const style = (k) => ({ colour: COLOURS[k % 8], shape: SHAPES[Math.floor(k / 8) % 5] });

export const view = {
  title: "Measurements",
  ownTitle: true,
  draw(element, data) {
    element.append(h("h2", null, data.title));
    for (const note of data.notes) element.append(sentence(note));
    parts(element, data.parts);
  },
};

/** Charts, tables and lines, one below the other; lines that follow each other share a panel. */
export function parts(element, all) {
  let lines = null;
  for (const part of all) {
    if (part.line === undefined) (part.series ? chart : part.ratios ? ratios : grid)(element, part);
    else {
      if (!lines || element.lastChild !== lines) element.append((lines = panel("", "")));
      lines.append(h("p", { class: `line tone-${part.tone || "ink"}` }, part.line));
    }
  }
}

/** Series of points [x, y, low, high, words] on logarithmic axes, each with an optional line [[x, y], …]. */
function chart(element, { title, note, x, y, series }) {
  const box = element.appendChild(panel(title, note)), points = series.flatMap((s) => s.points), values = points.map((p) => p[1]), [least, most] = [Math.min(...values), Math.max(...values)];
  const dots = (s, k) => ({ name: s.name, ...style(k), only: true, radius: 4, focus: false, points: s.points.map(([at, value, low, high, formula]) => ({ x: at, y: value, low, high, formula })) });
  const fitted = (s, k) => ({ name: s.points.length ? "" : s.name, colour: s.points.length ? style(k).colour : "quiet", dash: "5 4", width: 1.6, dots: false, points: (s.line ?? []).filter((p) => p[1] >= least && p[1] <= most).map(([at, value]) => ({ x: at, y: value })) });
  curves(box, { label: `${title}: ${points.length} points`, height: 330, left: 74, x: { log: x.unit === "bytes" ? 2 : 10, label: x.label, format: format.by[x.unit], ticks: 6 }, y: { log: 10, label: y.label, format: format.by[y.unit], ticks: 6 },
    series: series.flatMap((s, k) => [...(s.points.length ? [dots(s, k)] : []), ...(s.line ? [fitted(s, k)] : [])]) });
}

/** Quantiles (10, 25, 50, 75, 90%) of predicted / measured by group, around the line of a perfect prediction. */
function ratios(element, { title, note, ratios: rows }) {
  const box = element.appendChild(panel(title, note));
  const c = figure(box, { height: 62 + 22 * rows.length, left: 250, right: 20, bottom: 42, label: title });
  const x = log([0.4, 2], [0, c.width]), y = band(rows.map((r) => r.name), [0, c.height], { gap: 0.3 }), clamp = (v) => x(Math.max(0.4, Math.min(2, v)));
  axis(c, x, "bottom", { label: "predicted / measured", ticks: [0.5, 0.67, 0.8, 1, 1.25, 1.5, 2], format: (v) => `${v}×` });
  axis(c, y, "left");
  rule(c, x(1), 0, x(1), c.height, { width: 1.5 });
  for (const { name, quantiles: [low, first, middle, third, high] } of rows) {
    const at = y(name) + y.width / 2;
    for (const [a, b, width] of [[low, high, 3], [first, third, 9]]) rule(c, clamp(a), at, clamp(b), at, { stroke: "compute", width, opacity: 0.5 });
    scatter(c, [{ x: Math.max(0.4, Math.min(2, middle)), y: name, shape: "diamond", formula: `${name}: median ${middle.toFixed(2)}×` }], { x, y: (key) => y(key) + y.width / 2, radius: 4 });
  }
}

function grid(element, { title, columns, rows }) {
  element.append(panel(title, "", table(columns.map(({ name, right }, i) => [name, (row) => row[i], right && "plain"]), rows, { name: title })));
}
