// Charts and tables that belong to no plan: the files of `bench --html` and `validate --html`. Python says which; see view/page/sheet.py.

import { axis, band, figure, format, h, legend, line, log, panel, scatter, svg, table } from "meshwright/draw.js";

const COLOURS = ["compute", "tp", "optimizer", "ep", "cp", "pp", "dp", "second"], SHAPES = ["circle", "square", "triangle", "diamond", "cross"];
const style = (k) => ({ colour: COLOURS[k % 8], shape: SHAPES[Math.floor(k / 8) % 5] });

export const view = {
  name: "sheet",
  title: "Measurements",
  workspace: "plan",
  ownTitle: true,
  draw(element, data) {
    element.append(h("h2", null, data.title));
    for (const note of data.notes) element.append(h("p", { class: "sentence" }, note));
    parts(element, data.parts);
  },
};

/** Charts, tables and lines, one below the other; lines that follow each other share a panel. */
export function parts(element, all) {
  let lines = null;
  for (const part of all) {
    if (part.line === undefined) element.append(part.series ? chart(part) : part.ratios ? ratios(part) : grid(part));
    else {
      if (!lines || element.lastChild !== lines) element.append((lines = panel("", "")));
      lines.append(h("p", { class: `line tone-${part.tone || "ink"}` }, part.line));
    }
  }
}

/** Series of points [x, y, low, high, words] on logarithmic axes, each with an optional line [[x, y], …]. */
function chart({ title, note, x: across, y: up, series }) {
  const box = panel(title, note);
  const points = series.flatMap((s) => s.points), lines = series.flatMap((s) => s.line ?? []);
  queueMicrotask(() => {
    const c = figure(box, { height: 330, left: 74, right: 18, bottom: 42, label: `${title}: ${points.length} points` });
    const ends = (values) => [Math.min(...values), Math.max(...values)];
    const x = log(ends([...points, ...lines].map((p) => p[0])), [8, c.width - 8], { base: across.unit === "bytes" ? 2 : 10 }), y = log(ends(points.map((p) => p[1])), [c.height - 6, 6]);
    axis(c, x, "bottom", { label: across.label, format: format.by[across.unit], ticks: 6 });
    axis(c, y, "left", { label: up.label, format: format.by[up.unit], ticks: 6 });
    series.forEach((s, k) => {
      const { colour, shape } = style(k);
      if (s.line) line(c, s.line.filter((p) => p[1] >= y.domain[0] && p[1] <= y.domain[1]).map((p) => ({ x: p[0], y: p[1] })), { x, y, colour: s.points.length ? colour : "quiet", dash: "5 4", width: 1.6 });
      for (const [at, , low, high] of s.points) if (low) c.plot.append(svg("line", { x1: x(at), x2: x(at), y1: y(low), y2: y(high), stroke: colour, "stroke-width": 1.4 }));
      scatter(c, s.points.map(([px, py, , , formula]) => ({ x: px, y: py, formula })), { x, y, colour, shape, radius: 4, focus: false });
    });
    box.append(legend(series.map((s, k) => ({ label: s.name, ...(s.points.length ? { colour: style(k).colour } : { colour: "quiet", shape: "line", dash: "5 4" }) }))));
  });
  return box;
}

/** Quantiles (10, 25, 50, 75, 90%) of predicted / measured by group, around the line of a perfect prediction. */
function ratios({ title, note, ratios: rows }) {
  const box = panel(title, note);
  queueMicrotask(() => {
    const c = figure(box, { height: 62 + 22 * rows.length, left: 250, right: 20, bottom: 42, label: title });
    const x = log([0.4, 2], [0, c.width]), y = band(rows.map((r) => r.name), [0, c.height], { gap: 0.3 }), clamp = (v) => x(Math.max(0.4, Math.min(2, v)));
    axis(c, x, "bottom", { label: "predicted / measured", ticks: [0.5, 0.67, 0.8, 1, 1.25, 1.5, 2], format: (v) => `${v}×` });
    axis(c, y, "left");
    c.plot.append(svg("line", { x1: x(1), x2: x(1), y1: 0, y2: c.height, stroke: "quiet", "stroke-width": 1.5 }));
    for (const { name, quantiles: [low, first, middle, third, high] } of rows) {
      const at = y(name) + y.width / 2;
      for (const [a, b, width] of [[low, high, 3], [first, third, 9]]) c.plot.append(svg("line", { x1: clamp(a), x2: clamp(b), y1: at, y2: at, stroke: "compute", "stroke-width": width, opacity: 0.5 }));
      scatter(c, [{ x: Math.max(0.4, Math.min(2, middle)), y: name, shape: "diamond", formula: `${name}: median ${middle.toFixed(2)}×` }], { x, y: (key) => y(key) + y.width / 2, radius: 4 });
    }
  });
  return box;
}

function grid({ title, columns, rows }) {
  return panel(title, "", table(columns.map((column, i) => ({ title: column.name, align: column.right ? "right" : null, value: (row) => row[i] })), rows, { name: title }));
}
