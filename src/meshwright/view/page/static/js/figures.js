// The figures of the course: controls above, the numbers, and a drawing that follows them. The drawings are those of the views.

import { curves } from "meshwright/curves.js";
import { axis, band, choice, clear, figure, format, h, label, legend, linear, log, slider, stacked, stat, threshold } from "meshwright/draw.js";
import { refusal } from "meshwright/notice.js";
import { ways } from "meshwright/views/overlap.js";
import { family, player, sizes } from "meshwright/views/collectives.js";

const AS = { ...format.by, whole: format.whole, text: String, number: (v) => format.number(v) };
const chosen = new Map(); // values of controls by figure, kept while the page is open
const WAIT_MS = 60; // a slider that moves asks once

/** A figure of the course by its name, with words below it. `ask(options, signal)` gets its data. */
export function embedded(name, words, ask) {
  const controls = h("div", { class: "controls" }), stats = h("div", { class: "stats" }), drawing = h("div", { class: "drawing" }), note = h("p", { class: "sentence" });
  const node = h("figure", { class: "panel embedded", dataset: { figure: name }, "aria-busy": "true" }, controls, stats, drawing, note, h("figcaption", null, words));
  let shown = "", timer = 0, request = null;
  const values = () => chosen.get(name) ?? {};
  const set = (key, value) => {
    chosen.set(name, { ...values(), [key]: value });
    clearTimeout(timer);
    timer = setTimeout(load, WAIT_MS);
  };
  async function load() {
    request?.abort();
    request = new AbortController();
    const { signal } = request;
    node.setAttribute("aria-busy", "true");
    try {
      const { figure: data } = await ask({ figure: name, values: values() }, signal);
      if (signal.aborted) return;
      const now = JSON.stringify(data.controls.map(({ value, ...rest }) => rest));
      if (now !== shown) clear(controls).append(...data.controls.map((one) => control(one, (value) => set(one.name, value))));
      shown = now;
      clear(stats).append(...data.stats.map((one) => stat(one.name, one.value, { detail: one.detail })));
      note.textContent = data.note;
      drawing.style.minHeight = `${drawing.offsetHeight}px`; // the text below does not jump
      DRAWINGS[data.draw](clear(drawing), data.data);
      drawing.style.minHeight = "";
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      const { fix = "", ...problem } = error.error ?? { what: String(error), fix: "reload the page" };
      clear(drawing).append(refusal({ ...problem, fix: fix.includes("--") ? "" : fix })); // options of a command are no help here
      clear(stats);
    }
    node.setAttribute("aria-busy", "false");
  }
  queueMicrotask(load); // when it is on the page and has a width
  return node;
}

function control({ kind, label: name, value, values, unit }, set) {
  const words = AS[unit] ?? AS.number;
  if (kind === "choice") return choice(name, values, value, set);
  if (kind === "text") return h("label", { class: "control" }, h("span", null, name), h("input", { type: "text", value, placeholder: unit, spellcheck: "false", onchange: (event) => set(event.target.value) }));
  return slider(name, { values, value, text: words, oninput: set });
}

const scale = ({ unit, log: base, ...rest }) => ({ ...rest, log: base, format: AS[unit] ?? AS.number });

/** Curves on shared axes; points are [x, y, words]. */
function lines(element, d) {
  const series = d.series.map((s) => ({ dots: false, ...s, ...(s.only ? { dots: true, radius: 6 } : {}), points: s.points.map(([x, y, formula]) => ({ x, y, formula })) }));
  curves(element, { label: d.label || d.series.map((s) => s.name).filter(Boolean).join(", "), height: element.clientWidth < 480 ? 250 : 310, left: 84, x: { ticks: element.clientWidth < 480 ? 3 : 6, ...scale(d.x) }, y: scale(d.y), series, marks: d.marks });
}

/** Horizontal bars of stacked parts; `limit` is a dashed line. */
function bars(element, d) {
  const rows = d.rows, small = element.clientWidth < 480, left = Math.min(small ? 120 : 200, 16 + 6.6 * Math.max(...rows.map((r) => r.label.length)));
  const ends = rows.map((r) => (r.start ?? 0) + r.parts.reduce((sum, p) => sum + p.value, 0)), words = AS[d.x.unit] ?? AS.number;
  const c = figure(element, { height: (d.limit ? 66 : 50) + 30 * rows.length, top: d.limit ? 20 : 8, left, right: 12 + 6.4 * Math.max(0, ...rows.map((r) => (r.text ?? "").length)), bottom: 40, label: d.label || rows.map((r) => `${r.label}: ${r.text ?? ""}`).join("; ") });
  const most = Math.max(d.x.to ?? 0, ...ends, d.limit?.at ?? 0), x = d.x.log ? log([d.x.from, most], [0, c.width]) : linear([0, most], [0, c.width]), y = band(rows.map((r) => r.label), [0, c.height], { gap: 0.28 });
  axis(c, x, "bottom", { label: d.x.label, format: words, ticks: small ? 3 : 5 });
  axis(c, y, "left");
  stacked(c, rows, { x, y });
  rows.forEach((r, i) => r.text && label(c, r.text, x(ends[i]) + 6, y(r.label) + y.width / 2, { middle: true, size: 11, halo: true }));
  if (d.limit) threshold(c, x(d.limit.at), d.limit.words);
  const parts = new Map(rows.flatMap((r) => r.parts.map((p) => [p.name, p])));
  if (parts.size > 1) element.append(legend([...parts.values()].map((p) => ({ label: p.name, colour: p.colour, pattern: p.pattern }))));
}

/** Compute above, messages below, for each way. */
function spans(element, d) {
  ways(element, d, Math.max(...d.ways.map((w) => w.end_s)), d.compute, d.communication);
  element.append(legend([{ label: d.names[0], colour: d.compute }, { label: d.names[1], colour: d.communication, pattern: "hatch" }, { label: "end", colour: "bad", shape: "line" }]));
}

const DRAWINGS = { spans, lines, bars, sizes, player: (element, d) => player(element, d.program, d.inputs), family: (element, d) => family(element, d, { live: false }) };
