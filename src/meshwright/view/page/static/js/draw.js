// The drawing module: elements, scales, axes, marks, tables, controls. A view builds its figure from these.
//
//   const chart = figure(element, { height: 220, left: 60, label: "Memory: 61.5 of 79 GiB" });
//   const x = linear([0, 79], [0, chart.width]);
//   axis(chart, x, "bottom", { label: "GiB per GPU" });
//   rect(chart, 0, 20, x(61.5), 30, { fill: "compute", formula: "61.5 GiB" });
//
// Text enters only through text nodes. Colours are names of CSS variables ("compute" → var(--compute)) or any CSS colour.

import { formula, hide, show } from "meshwright/tip.js";
import * as format from "meshwright/format.js";

export { formula, format, hide, show };

const SVG = "http://www.w3.org/2000/svg";
const PAINT = new Set(["fill", "stroke", "opacity"]);
const LONG_TEXT = 24; // characters: a cell with more is kept wide on a phone, where the table scrolls

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "value" && "value" in element) element.value = value;
    else if (PAINT.has(name) && element.namespaceURI === SVG) element.style.setProperty(name, name === "opacity" ? value : paint(value));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

/** An HTML element: h("p", { class: "note", onclick: f, style: { width: "4px" } }, "text", child, [children]). */
export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children.flat(Infinity).flatMap(coded));
/** A text in which `backticks` mark code, in pieces. */
const coded = (child) => (typeof child === "string" && /`[^`]+`/.test(child) ? child.split("`").map((part, i) => (i % 2 ? h("code", null, part) : part)) : [child]);
/** An SVG element: svg("rect", { x: 0, fill: "compute" }). */
export const svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);
/** Remove all children; returns the element. */
export const clear = (element) => (element.replaceChildren(), element);
/** A colour by the name of its CSS variable; other CSS colours pass. */
export const paint = (colour) => (/^[a-z][a-z0-9-]*$/.test(colour) && !CSS_WORDS.has(colour) ? `var(--${colour})` : colour);
const CSS_WORDS = new Set(["none", "currentcolor", "transparent", "white", "black", "inherit"]);
/** The present value of a CSS variable, for canvas: colourOf("compute") → "#0072B2". */
export const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || name;

// Scales: functions from a value to a position, with `domain`, `range` and `ticks(n)`; a linear one has `invert(position)`.

/** Linear scale. `linear([0, max], [0, width])`; `nice` extends the domain to a round tick. */
export function linear(domain, range, { nice = false, count = 5 } = {}) {
  let [a, b] = domain;
  if (a === b) b = a + 1;
  const step = niceStep((b - a) / count);
  if (nice) [a, b] = [Math.floor(a / step + 1e-9) * step, Math.ceil(b / step - 1e-9) * step];
  const scale = (value) => range[0] + ((value - a) / (b - a)) * (range[1] - range[0]);
  scale.invert = (position) => a + ((position - range[0]) / (range[1] - range[0])) * (b - a);
  scale.ticks = (n = count) => {
    const s = niceStep((b - a) / n), out = [];
    for (let v = Math.ceil(a / s - 1e-9) * s; v <= b + s * 1e-9; v += s) out.push(Math.abs(v) < s * 1e-9 ? 0 : Number(v.toPrecision(12)));
    return out;
  };
  return Object.assign(scale, { domain: [a, b], range, kind: "linear" });
}

const niceStep = (rough) => {
  const power = 10 ** Math.floor(Math.log10(Math.abs(rough) || 1));
  return power * ([1, 2, 2.5, 5, 10].find((m) => m * power >= Math.abs(rough) * 0.999) ?? 10);
};

/** Logarithmic scale of a positive domain; ticks at powers of `base` (2 or 10), thinned to about `n`. */
export function log(domain, range, { base = 10 } = {}) {
  const [a, b] = domain.map((v) => Math.log(Math.max(v, Number.MIN_VALUE)));
  const width = b - a || 1;
  const scale = (value) => range[0] + ((Math.log(Math.max(value, Number.MIN_VALUE)) - a) / width) * (range[1] - range[0]);
  scale.ticks = (n = 6) => {
    const unit = Math.log(base), first = Math.ceil(a / unit - 1e-9), last = Math.floor(b / unit + 1e-9);
    const step = Math.max(1, Math.ceil((last - first + 1) / n)), out = [];
    for (let k = first; k <= last; k += step) out.push(base ** k);
    if (out.length < 3 && base === 10) for (let k = first - 1; k <= last; k++) for (const m of [2, 5]) out.push(m * 10 ** k);
    return out.filter((v) => Math.log(v) >= a - 1e-9 && Math.log(v) <= b + 1e-9).sort((p, q) => p - q);
  };
  return Object.assign(scale, { domain, range, kind: "log" });
}

/** Bands of equal width for names: band(names, [0, height])(name) is the start, `.width` the thickness. */
export function band(names, range, { gap = 0.25, most = Infinity } = {}) {
  const step = Math.min((range[1] - range[0]) / Math.max(1, names.length), most), width = step * (1 - gap);
  const at = new Map(names.map((name, i) => [name, range[0] + i * step + (step - width) / 2]));
  return Object.assign((name) => at.get(name), { width, step, domain: names, range, kind: "band" });
}

// Figures.

/** The width of an element without its padding. */
export function contentWidth(element) {
  const style = getComputedStyle(element);
  return element.clientWidth - (parseFloat(style.paddingLeft) || 0) - (parseFloat(style.paddingRight) || 0);
}

/** An SVG figure as wide as `element` (at least 260 px): { root, plot, width, height, element } with margins around `plot`.
 *  `label` is its accessible name and should have the main numbers. Draw again on resize: the page calls `draw` then. */
export function figure(element, { height = 240, top = 12, right = 16, bottom = 36, left = 56, label = "", width = 0 } = {}) {
  const outer = Math.max(260, Math.floor(width || contentWidth(element) || 640));
  const plot = svg("g", { transform: `translate(${left},${top})` });
  const root = svg("svg", { class: "figure", viewBox: `0 0 ${outer} ${height}`, width: outer, height, role: label ? "img" : "presentation", "aria-label": label || null }, plot);
  element.append(root);
  return { root, plot, element, width: outer - left - right, height: height - top - bottom, margin: { top, right, bottom, left } };
}

/** Append `text` to `parent` (a chart or SVG group). Options: anchor start|middle|end, size, colour, weight, rotate. */
export function label(parent, text, x, y, { anchor = "start", colour = "ink", size = 12, weight = null, rotate = 0, middle = false, halo = false } = {}) {
  const node = svg("text", { x, y, "text-anchor": anchor, "font-size": size, "font-weight": weight, fill: colour, class: halo ? "halo" : null, dy: middle ? "0.35em" : null, transform: rotate ? `rotate(${rotate} ${x} ${y})` : null }, String(text));
  (parent.plot ?? parent).append(node);
  return node;
}

/** A label in the middle of a mark, which it leaves to the pointer. */
export function centred(parent, text, x, y, options) {
  const node = label(parent, text, x, y, { anchor: "middle", middle: true, ...options });
  node.style.pointerEvents = "none";
  return node;
}
/** A straight line across a chart. */
export const rule = (chart, x1, y1, x2, y2, { stroke = "quiet", width = 2, dash = null, opacity = null } = {}, ...children) => chart.plot.appendChild(
  svg("line", { x1, x2, y1, y2, stroke, "stroke-width": width, "stroke-dasharray": dash, opacity }, ...children));

/** An axis of the chart. side: bottom|left|right|top. Options: label (with unit), format, ticks (count or values), grid. */
export function axis(chart, scale, side, { label: title = "", format: text = scale.kind === "band" ? String : (v) => format.number(v), ticks = 5, grid = true, line = true } = {}) {
  const group = svg("g", { class: "axis", "aria-hidden": "true" });
  const flat = side === "bottom" || side === "top";
  const across = flat ? chart.height : chart.width;
  const start = side === "bottom" ? chart.height : side === "right" ? chart.width : 0;
  const values = scale.kind === "band" ? scale.domain : Array.isArray(ticks) ? ticks : scale.ticks(ticks);
  for (const value of values) {
    const p = scale(value) + (scale.kind === "band" ? scale.width / 2 : 0);
    if (grid && scale.kind !== "band") group.append(svg("line", flat ? { x1: p, x2: p, y1: 0, y2: across } : { x1: 0, x2: across, y1: p, y2: p }));
    if (flat) label(group, text(value), p, start + (side === "bottom" ? 16 : -6), { anchor: "middle", colour: "quiet", size: 11 });
    else label(group, text(value), side === "left" ? -8 : start + 8, p, { anchor: side === "left" ? "end" : "start", colour: "quiet", size: 11, middle: true });
  }
  if (line && scale.kind !== "band") group.append(svg("line", { class: "base", ...(flat ? { x1: 0, x2: chart.width, y1: start, y2: start } : { x1: start, x2: start, y1: 0, y2: chart.height }) }));
  if (title && flat) label(group, title, chart.width / 2, start + (side === "bottom" ? 31 : -20), { anchor: "middle", colour: "quiet", size: 11 });
  if (title && !flat) {
    const x = side === "left" ? -chart.margin.left + 12 : chart.width + chart.margin.right - 4;
    label(group, title, x, chart.height / 2, { anchor: "middle", colour: "quiet", size: 11, rotate: -90 });
  }
  chart.plot.append(group);
  return group;
}

/** The fill of a mark: a colour, or with `pattern` a hatch of it ("hatch", "dots", "cross"), so that colour is not the only sign. */
function fillOf(chart, colour, pattern) {
  if (!pattern) return colour;
  const id = `${pattern}-${colour.replace(/[^a-z0-9]/gi, "")}-${chart.root.dataset.id ?? (chart.root.dataset.id = String(serial++))}`;
  if (!chart.root.querySelector(`#${id}`)) {
    const marks = { hatch: [["path", { d: "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", stroke: colour, "stroke-width": 1.4 }]], dots: [["circle", { cx: 3, cy: 3, r: 1.2, fill: colour }]], cross: [["path", { d: "M0,0 l6,6 M6,0 l-6,6", stroke: colour, "stroke-width": 1 }]] }[pattern];
    chart.root.prepend(svg("defs", null, svg("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, svg("rect", { width: 6, height: 6, fill: colour, opacity: 0.22 }), marks.map(([tag, a]) => svg(tag, a)))));
  }
  return `url(#${id})`;
}
let serial = 0;

/** One rectangle with an optional tooltip; negative sizes become zero. Options: fill, pattern, formula, focus, round, stroke, opacity, onclick, and its accessible `name`. */
export function rect(chart, x, y, width, height, { fill = "compute", pattern = null, formula: text = "", focus = true, round = 1, stroke = null, onclick = null, opacity = null, name = text } = {}) {
  const node = svg("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), rx: round, fill: fillOf(chart, fill, pattern), stroke, opacity });
  if (onclick) activate(chart, node, onclick, name);
  chart.plot.append(formula(node, text, { focus }));
  return node;
}

/** Make a mark react to click, Enter and Space like a button. Its figure becomes a group: the content of an image is hidden from assistive technology. */
function activate(chart, node, action, name) {
  chart.root.setAttribute("role", "group");
  for (const [key, value] of Object.entries({ tabindex: "0", role: "button", "aria-label": name.replace(/\n/g, "; ") })) node.setAttribute(key, value);
  node.classList.add("active");
  node.addEventListener("click", action);
  node.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), action(event)));
}

/** A dashed line across a chart at a position of one of its scales, such as a limit, with words at its end. `flat`: at a position of y. */
export function threshold(chart, at, words, { flat = false, colour = "bad" } = {}) {
  rule(chart, ...(flat ? [0, at, chart.width, at] : [at, -4, at, chart.height]), { stroke: colour, dash: "5 4" });
  label(chart, words, flat ? chart.width : Math.max(at, 110) - 4, flat ? at - 5 : -2, { anchor: "end", size: 11, colour, halo: true });
}

/** A line through points [{ x, y }] (null y: a gap). Options: x, y scales, colour, dash, width, steps (staircase). */
export function line(chart, points, { x, y, colour = "compute", dash = null, width = 2, steps = false, formula: text = null } = {}) {
  let path = "", pen = false;
  for (const p of points) {
    if (p.y === null || p.y === undefined || !Number.isFinite(p.y)) { pen = false; continue; }
    const [px, py] = [x(p.x), y(p.y)].map((v) => Number(v.toFixed(2)));
    path += pen ? (steps ? `H${px}V${py}` : `L${px},${py}`) : `M${px},${py}`;
    pen = true;
  }
  const node = svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": width, "stroke-dasharray": dash, "stroke-linejoin": "round", "stroke-linecap": "round" });
  chart.plot.append(formula(node, text, { focus: false }));
}

/** The area between points [{ x, y, base = 0 }] and their base. Options: x, y, colour, opacity, steps. */
export function area(chart, points, { x, y, colour = "compute", opacity = 0.2, steps = false } = {}) {
  const up = [], down = [];
  points.forEach((p, i) => {
    if (steps && i) up.push([x(p.x), y(points[i - 1].y)]), down.push([x(p.x), y(points[i - 1].base ?? 0)]);
    up.push([x(p.x), y(p.y)]);
    down.push([x(p.x), y(p.base ?? 0)]);
  });
  const path = [...up, ...down.reverse()].map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(2)},${b.toFixed(2)}`).join("");
  const node = svg("path", { d: `${path}Z`, fill: colour, opacity });
  chart.plot.append(node);
  return node;
}

const SHAPES = { circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`, square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}Z`, diamond: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`, triangle: (r) => `M0,${-1.2 * r}L${1.1 * r},${0.8 * r}H${-1.1 * r}Z`, cross: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}` };

/** Points [{ x, y, colour, shape, formula, label, onclick }]. shape: circle|square|diamond|triangle|cross. */
export function scatter(chart, points, { x, y, colour = "compute", radius = 5, shape = "circle", focus = true } = {}) {
  return points.map((p) => {
    const kind = p.shape ?? shape, node = svg("path", { d: SHAPES[kind](p.radius ?? radius), transform: `translate(${x(p.x).toFixed(2)},${y(p.y).toFixed(2)})`, fill: kind === "cross" ? "none" : p.colour ?? colour, stroke: p.stroke ?? (kind === "cross" ? p.colour ?? colour : "surface"), "stroke-width": kind === "cross" ? 2 : 1, class: "point" });
    if (p.onclick) activate(chart, node, p.onclick, p.formula ?? p.label);
    chart.plot.append(formula(node, p.formula, { focus }));
    const isRight = x(p.x) > 0.85 * chart.width;
    if (p.label) label(chart, p.label, x(p.x) + (isRight ? -1 : 1) * (radius + 4), y(p.y) + (p.down ?? 0), { anchor: isRight ? "end" : "start", middle: true, size: 11, halo: true });
    return node;
  });
}

/** A legend: items [{ label, colour, pattern, shape: "line" or that of a point, dash, value }]. Returns the list element. */
export function legend(items) {
  return h("ul", { class: "legend" }, items.map((item) => {
    const root = svg("svg", { width: 16, height: 12, "aria-hidden": "true" });
    const mark = item.shape === "line" ? svg("line", { x1: 0, x2: 16, y1: 6, y2: 6, stroke: item.colour, "stroke-width": 2.5, "stroke-dasharray": item.dash ?? null }) : SHAPES[item.shape] ? svg("path", { d: SHAPES[item.shape](5), transform: "translate(8,6)", fill: item.shape === "cross" ? "none" : item.colour, stroke: item.colour }) : svg("rect", { width: 14, height: 12, rx: 2, fill: fillOf({ root }, item.colour, item.pattern) });
    root.append(mark);
    return h("li", null, root, h("span", null, item.label), item.value !== undefined ? h("b", null, item.value) : null);
  }));
}

/** A table. Columns: [title, key or value(row), kind, about(row)], or only a key that is also the title; `kind` is a unit of `format.by` or a function
 *  of the value, and says that this is a number. Options: caption (or only a name for assistive technology), onrow(row), chosen(row). */
export function table(given, rows, { caption = "", name = caption, onrow = null, chosen = null, rowLabel = null } = {}) {
  const columns = given.map((one) => (typeof one === "string" ? [one, one] : one));
  const cell = ([, value, kind, about], row, first) => {
    const found = typeof value === "function" ? value(row) : row[value], words = (kind && typeof found !== "string" ? (format.by[kind] ?? kind)(found) : found) ?? "–";
    const long = String(words.textContent ?? words).length > LONG_TEXT ? "text" : null;
    const node = h(first ? "th" : "td", { class: kind ? "number" : long, scope: first ? "row" : null }, words instanceof Node ? words : String(words));
    return about ? formula(node, about(row), { focus: false }) : node;
  };
  const use = (row) => h("td", null, button("Use", () => onrow(row), { class: "small", "aria-label": rowLabel?.(row) ?? null }));
  const body = rows.map((row) => h("tr", { class: chosen?.(row) ? "chosen" : null }, columns.map((column, i) => cell(column, row, !i)), onrow && use(row)));
  const head = columns.map(([title, , kind]) => h("th", { scope: "col", class: kind ? "number" : null }, title));
  return framed(name || "Table", h("table", null, caption ? h("caption", null, caption) : null,
    h("thead", null, h("tr", null, head, onrow && h("th", { scope: "col" }, h("span", { class: "hidden" }, "Use")))), h("tbody", null, body)));
}

/** A frame in which something wide scrolls. */
export const framed = (name, ...children) => h("div", { class: "table", tabindex: "0", role: "region", "aria-label": name }, ...children);

// Parts of a view.

/** Draw the content of an element anew; the control in the same place gets the focus back. */
export function keepFocus(element, drawn) {
  const reachable = () => [...element.querySelectorAll("button, select, input, a, summary, [tabindex]")], at = reachable().indexOf(document.activeElement);
  drawn();
  if (at >= 0) reachable()[at]?.focus({ preventScroll: true });
}

/** The frame of one figure: a heading, one sentence that says what to see, then children. Returns the section; append figures to it. */
export function panel(title, words, ...children) {
  return h("section", { class: "panel" }, title ? h("h3", null, title) : null, words ? sentence(words) : null, ...children);
}

/** A button that is no link and sends no form. */
export const button = (words, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, words);
/** Names and what is said of them: [[name, words], …]; what has no words is left out. */
export const terms = (pairs) => h("dl", { class: "reasons" }, pairs.filter(([, words]) => words || words === 0).map(([name, words]) => [h("dt", null, name), h("dd", null, words)]));
/** What stands where there is nothing to show. */
export const empty = (words) => h("p", { class: "empty" }, words);
/** A quiet sentence below a figure. */
export const sentence = (words) => h("p", { class: "sentence" }, words);
/** A row of controls of a view. */
export const controls = (...children) => h("div", { class: "controls" }, ...children);
/** The main numbers of a view, each a `stat`; what is null or false is left out. */
export const stats = (...all) => h("div", { class: "stats" }, ...all);

/** One number with its name: stat("Step time", "70.9 s", { detail: "57 to 103 s", formula, tone: "good"|"bad"|"warn" }). */
export const stat = (name, value, { detail = "", formula: text = "", tone = "" } = {}) => formula(
  h("div", { class: `stat ${tone}` }, h("span", { class: "name" }, name), h("b", null, value), detail ? h("span", { class: "detail" }, detail) : null), text);

/** A control with its name above it. */
export const labelled = (name, control, ...more) => h("label", { class: "control" }, h("span", null, name, ...more), control);

/** A labelled select: choice("Order by", [["time", "step time"], …] or ["a", "b"], value, onchange(value)). */
export function choice(name, values, value, onchange) {
  const pairs = values.map((v) => (Array.isArray(v) ? v : [v, String(v)]));
  const select = h("select", { onchange: () => onchange(pairs[select.selectedIndex][0]) }, pairs.map(([v, words]) => h("option", { selected: v === value }, words)));
  return labelled(name, select);
}

/** A labelled slider over the stops `values`, with its value as text: slider("GPUs", { values, value, text(v), oninput(v) }). */
export function slider(name, { values, value, text = (v) => format.number(v), oninput }) {
  const output = h("output", null, text(value));
  const input = h("input", { type: "range", "aria-label": name, min: 0, max: values.length - 1, step: 1, value: Math.max(0, values.findIndex((v) => v >= value)), "aria-valuetext": text(value), oninput: () => {
    const chosen = values[Number(input.value)];
    output.textContent = text(chosen);
    input.setAttribute("aria-valuetext", text(chosen));
    oninput(chosen);
  } });
  return labelled(name, input, " ", output);
}
