// What Python describes as parts (view/page/sheet.py), drawn one below the other: most views of plans, and the files of commands.

import * as charts from "meshwright/charts.js";
import { choice, contentWidth, controls, empty, format, h, panel, sentence, stat, stats, table, terms } from "meshwright/draw.js";
import * as looks from "meshwright/parts.js";

export const view = {
  title: "Measurements",
  ownTitle: true,
  draw(element, { title, parts: all }) {
    element.append(h("h2", null, title));
    parts(element, all);
  },
};

/** Draw parts. What follows a panel is inside it; panels `beside` each other share a row; texts outside of panels share one. */
export function parts(element, all, context = {}) {
  let box = element, row = null, wasLine = false;
  const later = []; // what is in panels: those of a row must all be there before a width is known
  for (const part of all) {
    const isLine = part.kind === "text" && !PLAIN[part.tone], isPanel = part.kind === "panel", draw = KINDS[part.kind];
    if (isPanel) row = part.beside ? row ?? element.appendChild(h("div", { class: "columns" })) : null;
    if (isPanel || (isLine && !wasLine)) box = (row ?? element).appendChild(panel(part.title, part.note));
    if (box === element) draw(box, part, context);
    else if (!isPanel) later.push([draw, box, part]);
    wasLine = isLine;
  }
  for (const [draw, into, part] of later) draw(into, part, context);
}

const PLAIN = { sentence, empty };
const shown = (value, unit) => (typeof value === "string" ? value : (format.by[unit] ?? format.number)(value));
const pair = (cell) => (Array.isArray(cell) ? cell : [cell]);

const KINDS = {
  text: (box, { words, tone }) => box.append(PLAIN[tone]?.(words) ?? h("p", { class: `line tone-${tone}` }, words)),
  stats: (box, part) => box.append(stats(...part.stats.map(({ name, value, unit, ...more }) => stat(name, shown(value, unit), more)))),
  terms: (box, { pairs }) => box.append(terms(pairs)),
  choices: (box, part, { live, setOptions }) => live && box.append(controls(
    part.choices.map(({ name, label, values, value }) => choice(label, values, value, (v) => setOptions({ [name]: v }))))),
  table(box, { caption, name = caption, columns, rows }, { live, update }) {
    const shownAs = ([title, unit], i) => [title, ({ cells }) => pair(cells[i])[0], unit, ({ cells }) => pair(cells[i])[1]];
    box.append(table(columns.map(shownAs), rows, { caption, name, chosen: (row) => row.chosen, rowLabel: (row) => `Use ${row.name ?? row.cells[0]}`,
      onrow: live && rows.some((row) => row.use) ? (row) => update(row.use) : null }));
  },
  curves,
  bars,
};

/** Curves and points [x, y, formula, more], where `more` has what is special of a point: low, high, shape. */
function curves(box, { series, ...more }) {
  const point = (base) => ([x, y, formula, own]) => ({ x, y, base, formula, ...own });
  charts.curves(box, { ...more, series: series.map((one) => ({ ...one, points: one.points.map(point(one.base)) })) });
}

/** Bars with room for their labels and texts; the look of a piece is a part of the step or a colour. */
function bars(box, { rows: given, ...more }) {
  const small = contentWidth(box) < 480, short = (text) => (small && text.length > 20 ? `${text.slice(0, 19)}…` : text);
  const piece = ({ look, pattern, ...one }) => ({ ...one, ...(looks.STEP[look] ?? { colour: look }), ...(pattern && { pattern }) });
  const rows = given.map((row) => ({ ...row, label: short(row.label), parts: row.parts.map(piece) }));
  const longest = (key) => Math.max(0, ...rows.map((row) => (row[key] ?? "").split(small ? " · " : "\n")[0].length));
  charts.bars(box, rows, { left: 16 + 6.6 * longest("label"), right: 12 + 6.4 * longest("text"), ...more });
}
