// The figures of the course: controls above, the numbers, and a drawing that follows them. The drawings are those of the views.

import { bars as drawBars, inSeconds, curves } from "meshwright/charts.js";
import { axis, band, choice, clear, figure, format, h, keepFocus, label, labelled, legend, linear, rect, slider, stat, svg } from "meshwright/draw.js";
import { refusal } from "meshwright/notice.js";
import { playback } from "meshwright/playback.js";
import { schedule } from "meshwright/views/modeler.js";
import { view as ranks } from "meshwright/views/ranks.js";
import { family, player, sizes } from "meshwright/views/collectives.js";

const AS = { ...format.by, text: String, power: (v) => (v === 1 ? "1" : `10${[...String(Math.round(Math.log10(v)))].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("")}`) };
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
  if (kind === "text") return labelled(name, h("input", { type: "text", value, placeholder: unit, spellcheck: "false", onchange: (event) => set(event.target.value) }));
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
  const small = element.clientWidth < 480, rows = d.rows.map((r) => (small && r.text ? { ...r, text: r.text.split(/ on | · /)[0] } : r)), longest = (key) => Math.max(0, ...rows.map((r) => (r[key] ?? "").length));
  drawBars(element, rows, { left: Math.min(small ? 146 : 200, 16 + 6.6 * longest("label")), right: 12 + 6.4 * longest("text"), tall: 30, top: d.limit ? 20 : 8, x: { ...scale(d.x), ticks: d.x.ticks ?? (small ? 3 : 5) }, limit: d.limit, label: d.label || undefined });
}

/** Compute and messages of several ways under each other. */
function ways(element, d, top, compute, comm) {
  const rows = d.ways.flatMap((w) => [`${w.name}:title`, `${w.name}:compute`, `${w.name}:communication`]);
  const c = figure(element, { height: 250, left: 12, right: 12, top: 4, bottom: 42, label: d.formula });
  const x = linear([0, top * 1.03], [0, c.width]), y = band(rows, [0, c.height], { gap: 0.12 });
  axis(c, x, "bottom", inSeconds("time", top));
  d.ways.forEach((way, k) => {
    const first = y(`${way.name}:compute`);
    label(c, `${way.name}: ${format.seconds(way.end_s)}${k ? `, ${format.percent(d.saved, 0)} less` : ""}`, 0, first - 6, { size: 11, weight: 600, halo: true });
    let busy = -1;
    for (const span of way.spans) {
      const width = x(span.seconds) - x(0), at = y(`${way.name}:${span.stream}`);
      if (width < 0.4 && x(span.start) < busy + 0.4) continue;
      busy = x(span.start) + width;
      rect(c, x(span.start), at, Math.max(0.5, width - 0.8), y.width, { fill: span.stream === "compute" ? compute : comm, pattern: span.stream === "compute" ? null : "hatch", focus: false, formula: `${span.name}: ${format.seconds(span.start)} to ${format.seconds(span.start + span.seconds)}\n${d.formula}` });
      if (width > 46) label(c, span.name, x(span.start) + width / 2, at + y.width / 2, { anchor: "middle", middle: true, size: 10, colour: span.stream === "compute" ? "surface" : "ink" }).style.pointerEvents = "none";
    }
    const end = x(way.end_s);
    c.plot.append(svg("line", { x1: end, x2: end, y1: first, y2: first + 2 * y.step - 4, stroke: "bad", "stroke-width": 1.6 }));
  });
}

/** Compute above, messages below, for each way. */
function spans(element, d) {
  ways(element, d, Math.max(...d.ways.map((w) => w.end_s)), d.compute, d.communication);
  element.append(legend([{ label: d.names[0], colour: d.compute }, { label: d.names[1], colour: d.communication, pattern: "hatch" }, { label: "end", colour: "bad", shape: "line" }]));
}

const STEPS_PER_S = 3; // units of the schedule in a second

/** A schedule that plays: actions appear as time passes, and bars beside the lanes show the micro-batches in flight. */
function pipeline(element, d) {
  const units = (v) => format.number(v, 4), wide = element.clientWidth > 640;
  const box = h("div", { style: { display: "grid", "grid-template-columns": wide ? "minmax(0, 1fr) 17rem" : "minmax(0, 1fr)", gap: ".4rem 1rem" } }), left = h("div"), right = h("div");
  const go = playback(element, { end: d.makespan_s, stops: [...new Set(d.actions.map((a) => a[3]))].sort((a, b) => a - b), rate: STEPS_PER_S, step: 0.25, name: "Time in the schedule", words: (t) => `${units(t)} of ${units(d.makespan_s)} units`, show });
  element.append(box);
  box.append(left, right);
  const { chart, x, y, marks } = schedule(left, d, { label: "time, in units of one forward", unit: 1, time: units, lane: (r) => `rank ${r}` });
  const cursor = chart.plot.appendChild(svg("line", { y1: -4, y2: chart.height, stroke: "bad", "stroke-width": 1.6 }));
  const peak = Math.max(...d.peak), memory = figure(right, { height: 44 + chart.height - 12 + 6, left: wide ? 6 : 62, right: 26, bottom: 38, label: `Most in flight: ${d.peak.map((n, r) => `rank ${r} ${format.number(n)}`).join(", ")}` });
  const across = linear([0, peak], [0, memory.width]), lane = memory.height / d.ranks;
  axis(memory, across, "bottom", { label: "micro-batches in flight", ticks: 4 });
  const held = d.peak.map((most, r) => {
    const at = r * lane + lane * 0.06, tall = lane * 0.88, bar = rect(memory, 0, at, 0, tall, { fill: "activations" });
    memory.plot.append(svg("line", { x1: across(most), x2: across(most), y1: at, y2: at + tall, stroke: "bad", "stroke-width": 2 }));
    if (!wide) label(memory, `rank ${r}`, -8, at + tall / 2, { anchor: "end", middle: true, size: 11, colour: "quiet" });
    return { bar, words: label(memory, "", 0, at + tall / 2, { middle: true, size: 11, halo: true }) };
  });
  element.append(legend([...new Set(d.actions.map((a) => a[1]))].map((kind) => ({ F: { label: "forward", colour: "forward" }, B: { label: "backward", colour: "backward" }, I: { label: "backward of inputs", colour: "input-gradient" }, W: { label: "backward of weights", colour: "weight" } })[kind]).concat({ label: "in flight now", colour: "activations" }, { label: "most in flight", colour: "bad", shape: "line" })));
  function show(t) {
    d.actions.forEach((a, i) => marks[i].forEach((node) => node && (node.style.visibility = a[3] < t - 1e-9 ? "" : "hidden")));
    cursor.setAttribute("x1", x(t));
    cursor.setAttribute("x2", x(t));
    held.forEach(({ bar, words }, r) => {
      const n = d.held[r].findLast(([at]) => at < t + 1e-9)?.[1] ?? 0;
      bar.setAttribute("width", across(n));
      words.textContent = format.number(n);
      words.setAttribute("x", across(n) + 4);
    });
  }
  go(d.makespan_s);
}

/** Matrices with their numbers: a card for each GPU, and the result. */
function matrices(element, d) {
  const cards = element.appendChild(h("div", { class: "columns" }));
  for (const { title, matrices: all } of d.cards) {
    const most = Math.max(...all.map((m) => m.rows[0].length)), wide = Math.min(38, (Math.min(element.clientWidth, 520) - 24) / most), high = 22, card = h("div");
    cards.append(card);
    const c = figure(card, { left: 2, right: 2, top: 4, bottom: 4, width: wide * most + 8, height: 30 + all.reduce((sum, m) => sum + 30 + high * m.rows.length, 0), label: `${title}: ${all.map((m) => `${m.name} ${m.rows.map((row) => row.join(" ")).join("; ")}`).join(", ")}` });
    label(c, title, 0, 14, { size: 13.5, weight: 600 });
    let y = 24;
    for (const m of all) {
      label(c, m.name, 0, y + 14, { size: 11, colour: "quiet" });
      m.rows.forEach((row, i) => row.forEach((v, j) => {
        rect(c, j * wide, y + 20 + i * high, wide - 2, high - 2, { fill: "grid", focus: false });
        label(c, format.number(v), (j + 0.5) * wide, y + 20 + (i + 0.5) * high - 1, { anchor: "middle", middle: true, size: 12 });
      }));
      y += 30 + high * m.rows.length;
    }
  }
}

/** The grid of ranks; the chosen rank is kept by the drawing. */
function grid(element, d, rank = 0) {
  const again = (chosen) => keepFocus(element, () => grid(clear(element), d, chosen));
  ranks.draw(element, d, { options: { rank }, setOptions: (options) => again(options.rank) });
}

const DRAWINGS = { ranks: grid, spans, pipeline, matrices, lines, bars, sizes, player: (element, d) => player(element, d.program, d.inputs), family: (element, d) => family(element, d, { live: false }) };
