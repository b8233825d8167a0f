// The figures of training runs: curves with a linked pointer, predicted against measured by part, a measured step above the simulated one, and what
// happened when. A run has one colour in all of them.

import { bars, curves as draw } from "meshwright/charts.js";
import { contentWidth, empty, format, formula, h, hide, label as write, legend, panel, rule, scatter, show, svg, table } from "meshwright/draw.js";
import { firstAfter, laneOf, lanes } from "meshwright/lanes.js";
import * as part from "meshwright/parts.js";

/** What the curves can be drawn across. */
export const AXES = { step: "steps", time: "time", tokens: "tokens" };
const ACROSS = { step: { label: "step", text: format.whole }, time: { label: "time since the first step", text: (v) => format.seconds(v, 2) }, tokens: { label: "tokens or samples", text: (v) => format.count(v, 2) } };
const BLOCKED = ["tp", "cp", "ep", "pp", "dp", "bubble"]; // parts of a prediction that a rank measures as time blocked
const MARKS = { restart: ["warn", "restart"], fault: ["bad", "fault"], spike: ["warn", "loss spike"], rollback: ["warn", "rollback"], skipped: ["bubble", "skipped update"], "checkpoint-failed": ["bad", "checkpoint failed"] };
let pointed = null; // where the pointer is on the common axis; kept while the curves grow

/** The values of a run: [{ x, y, step }], without steps that lack them. */
export function column(run, name, across = "step") {
  const at = run.columns.indexOf(name), [step, time, tokens] = ["step", "time", "tokens"].map((key) => run.columns.indexOf(key)), begun = run.rows.find((row) => row[time])?.[time];
  const x = { step: (row) => row[step], time: (row) => row[time] - begun, tokens: (row) => (row[step] + 1) * row[tokens] }[across];
  const value = name === "exposed_s" ? (row) => (row[at] && typeof row[at] === "object" ? Object.values(row[at]).reduce((a, b) => a + b, 0) : null) : (row) => row[at];
  return at < 0 ? [] : run.rows.map((row) => ({ x: x(row), y: value(row), step: row[step] })).filter((p) => Number.isFinite(p.y) && Number.isFinite(p.x));
}

/** The mean of the values around each point, of `count` in all. */
function smoothed(points, count) {
  if (!count || points.length < 3) return points;
  const sums = [0];
  for (const p of points) sums.push(sums.at(-1) + p.y);
  return points.map((p, i) => {
    const half = Math.min(Math.floor(count / 2), i, points.length - 1 - i);
    return { ...p, y: (sums[i + half + 1] - sums[i - half]) / (2 * half + 1) };
  });
}

/** Two points for each of `pixels` parts, the lowest and the highest: the drawn line is the same. */
function thinned(points, pixels) {
  if (points.length <= 4 * pixels) return points;
  const out = [], size = points.length / pixels;
  for (let k = 0; k < pixels; k++) {
    const some = points.slice(Math.floor(k * size), Math.floor((k + 1) * size));
    const low = some.reduce((a, b) => (b.y < a.y ? b : a)), high = some.reduce((a, b) => (b.y > a.y ? b : a));
    out.push(...(low.x < high.x ? [low, high] : [high, low]));
  }
  return [...out, points.at(-1)];
}

/** All curves of runs [{ run, colour, comparable }]. The prediction, the marks and the sentences are those of the first. */
export function curves(element, runs, { across = "step", smooth = 0, logarithmic = false } = {}) {
  const { run, comparable } = runs[0], { prediction } = run.parts;
  const expected = (value, low, high, factor = 1) => (comparable && Number.isFinite(value) ? { value: value * factor, low: low * factor, high: high * factor } : null);
  const small = runs.every(({ run }) => column(run, "memory_gib").every((p) => p.y < 1));
  const blocked = prediction?.exposed_s && BLOCKED.reduce((sum, name) => sum + (prediction.exposed_s[name] ?? 0), 0);
  const charts = [
    { title: "Loss", key: "loss", evaluated: "validation_loss", fromZero: false, text: (v) => format.number(v, 4), marked: true, isLog: logarithmic },
    { title: "Step time", key: "seconds", text: format.seconds, expected: expected(prediction?.step_time_s, prediction?.step_time_low_s, prediction?.step_time_high_s), clip: true },
    { title: "Throughput", key: "tokens_per_s", text: (v) => `${format.count(v)}/s`, expected: expected(prediction?.tokens_per_s) },
    { title: "MFU", key: "mfu", text: format.percent, expected: expected(prediction?.mfu), sentence: prediction?.mfu_denominator && comparable ? `Of ${prediction.mfu_denominator}.` : "" },
    { title: "Exposed communication", key: "exposed_s", text: format.seconds, expected: expected(blocked || null), sentence: "Time that rank 0 was blocked, waits for other ranks included.", clip: true },
    { title: "Gradient norm", key: "grad_norm", text: format.number, clip: !logarithmic, isLog: logarithmic },
    { title: "Learning rate", key: "learning_rate", text: format.number },
    { title: "Memory", key: "memory_gib", text: small ? (v) => `${format.number(v)} MiB` : format.gib, factor: small ? 1024 : 1, sentence: run.about?.device === "cpu" ? "Resident memory of the process of rank 0, peak until then." : "Memory that rank 0 reserved, peak until then." },
  ].map((one) => ({ ...one, lines: runs.map((r) => ({ ...r, points: smoothed(column(r.run, one.key, across).map((p) => ({ ...p, y: p.y * (one.factor ?? 1) })), smooth) })).filter(({ points }) => points.length > 1) })).filter(({ lines }) => lines.length);
  if (!charts.length) return void element.append(empty(run.state === "running" ? "The first steps are computed; the curves appear with the second one." : "This run has fewer than two steps."));
  const boxes = charts.map(({ title }) => panel(title, null)), linked = [];
  charts.forEach(({ sentence }, i) => sentence && formula(boxes[i].querySelector("h3"), sentence));
  element.append(h("div", { class: "columns charts" }, boxes)); // all panels first: their number decides their width
  charts.forEach((one, i) => linked.push(curve(boxes[i], one, runs, across, linked)));
  const items = runs.length > 1 ? runs.map(({ run: { name }, colour }) => ({ label: name, colour, shape: "line" })) : [];
  if (charts.some((one) => one.expected)) items.push({ label: `predicted${runs.length > 1 ? ` for ${run.name}` : ""}, with its band`, colour: "quiet", shape: "line", dash: "5 4" });
  if (charts[0].marked) for (const kind of new Set((run.events ?? []).map((event) => event.kind).filter((kind) => MARKS[kind]))) items.push({ label: MARKS[kind][1], colour: MARKS[kind][0], shape: "line", dash: "3 2" });
  if (items.length) element.append(legend(items));
  if (pointed !== null) linked.forEach((chart) => chart.point(pointed));
}

function curve(box, { title, key, lines, text, evaluated = "", expected = null, marked = false, fromZero = true, clip = false, isLog = false }, runs, across, linked) {
  const sorted = lines.flatMap(({ points }) => points.map((p) => p.y)).sort((a, b) => a - b), [first] = lines, { label, text: at } = ACROSS[across];
  const extra = runs.flatMap(({ run, colour }) => column(run, evaluated, across).map((p) => ({
    ...p, colour, formula: `${run.name}: validation loss ${format.number(p.y, 5)}\nafter step ${format.whole(p.step)}` })));
  // The first steps take long and have large gradients: they may leave the figure.
  const all = Math.max(sorted.at(-1), ...extra.map((p) => p.y)), usual = sorted[Math.floor(0.98 * (sorted.length - 1))] * 1.25;
  const far = expected ? [Math.min(expected.high || expected.value, 3 * all), expected.value < 3 * all ? expected.value : -Infinity] : [];
  const most = Math.max(clip ? Math.min(all, usual) : all, ...far), lowest = Math.min(sorted[0], ...extra.map((p) => p.y));
  const least = fromZero ? Math.min(0, sorted[0]) : lowest, logs = isLog && sorted[0] > 0;
  const readout = h("p", { class: "readout", "aria-hidden": "true" }), width = contentWidth(box);
  box.querySelector("h3").after(readout);
  const begin = Math.min(...lines.map(({ points }) => points[0].x)), end = Math.max(...lines.map(({ points }) => points.at(-1).x)), ends = [begin, end > begin ? end : begin + 1];
  const level = (key, base) => ends.map((x) => ({ x, y: expected[key], base: expected[base] })), predicted = [];
  if (Number.isFinite(expected?.low) && Number.isFinite(expected.high)) predicted.push({ points: level("high", "low"), colour: "bubble", area: 0.22, only: true, dots: false });
  if (expected?.value <= most) predicted.push({ points: level("value"), colour: "quiet", dash: "5 4", width: 1.5, dots: false });
  const events = marked && across === "step" ? (first.run.events ?? []).filter((e) => MARKS[e.kind] && e.step >= begin && e.step <= end) : [];
  const chart = draw(box, {
    label: `${title} of ${lines.map(({ run, points }) => `${run.name}: from ${text(points[0].y)} to ${text(points.at(-1).y)} over ${points.length} steps`).join("; ")}`,
    height: 170, left: 58, right: 10, bottom: 34, inset: 0, x: { from: ends[0], to: ends[1], label, format: at, ticks: Math.max(2, Math.floor((width - 68) / 80)) },
    y: { log: logs ? 10 : 0, nice: 4, from: logs ? lowest : least, to: logs || most > least ? most : least + 1, format: text, ticks: 4 },
    series: [...predicted, ...lines.map(({ run, colour, points }) => ({ points: thinned(points, width), colour, width: run === runs[0].run ? 1.9 : 1.4, dots: false })),
      { points: extra, only: true, shape: "diamond", radius: 3.5, focus: false }],
    marks: events.map((e) => ({ at: e.step, colour: MARKS[e.kind][0], dash: "3 2", title: `Step ${format.whole(e.step)}: ${e.text}` })),
  }), { x, y, root } = chart;
  if (all > y.domain[1]) write(chart, `up to ${text(all)}`, chart.width, -2, { anchor: "end", size: 11, colour: "quiet" });

  const pointer = svg("g", { "pointer-events": "none" });
  chart.plot.append(pointer);
  const nearest = (points, at) => points[Math.max(0, Math.min(points.length - 1, firstAfter(points.map((p) => p.x), at)))];
  const values = (at) => lines.map((one) => ({ ...one, p: nearest(one.points, at) }));
  /** Mark one place of the common axis, with the value of each run; null: none. */
  function point(at) {
    pointer.replaceChildren();
    readout.replaceChildren();
    const found = at === null ? lines.map((one) => ({ ...one, p: one.points.at(-1) })) : values(at);
    readout.append(...found.map(({ colour, p }) => h("b", { style: { color: `var(--${colour})` } }, text(p.y))));
    if (at === null) return;
    rule({ plot: pointer }, x(at), 0, x(at), chart.height, { width: 1 });
    pointer.append(...found.map(({ colour, p }) => svg("circle", { cx: x(p.x), cy: y(p.y), r: 3.5, fill: colour, stroke: "surface" })));
  }
  const together = (at) => {
    pointed = at;
    linked.forEach((one) => one.point(at));
  };
  const words = (place) => `${label} ${at(place)}\n${values(place).map(({ run, p }) => `${run.name}: ${text(p.y)}${across === "step" ? "" : ` at step ${format.whole(p.step)}`}`).join("\n")}`;
  root.setAttribute("tabindex", "0");
  root.addEventListener("pointermove", (event) => {
    const px = event.clientX - root.getBoundingClientRect().left - chart.margin.left, at = nearest(first.points, x.invert(Math.max(0, Math.min(chart.width, px)))).x;
    together(at);
    show(root, () => words(at), event);
  });
  root.addEventListener("pointerleave", () => { together(null); hide(); });
  root.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const now = (pointed === null ? first.points.length - 1 : firstAfter(first.points.map((p) => p.x), pointed)) + by * Math.max(1, Math.round(first.points.length / 60));
    together(first.points[Math.max(0, Math.min(first.points.length - 1, now))].x);
    show(root, () => words(pointed), { type: "focus" });
    event.preventDefault();
  });
  root.addEventListener("blur", () => { if (pointed !== null) together(null); hide(); });
  point(null);
  return { point, key };
}

/** Exposed seconds of the busiest rank by part, measured (in the colour of the run) and predicted (hatched). */
export function parts(element, runs, named) {
  const box = element.appendChild(panel("By part of the step", runs.map(({ run }) => `${named ? `${run.name}: ` : ""}rank ${run.parts.communication.busiest_rank}, the busiest, mean of ${run.parts.communication.steps} steps`).join("; ") + ". Hatched: predicted."));
  const of = (c, name) => [c.exposed_s[name] ?? 0, c.predicted_exposed_s[name] ?? 0], all = runs.map(({ run }) => run.parts.communication), sides = ["measured", "predicted"];
  const names = [...new Set(all.flatMap((c) => [...Object.keys(c.exposed_s), ...Object.keys(c.predicted_exposed_s)]))].filter((name) => all.some((c) => of(c, name).some(Boolean)));
  const rows = names.flatMap((name) => runs.flatMap(({ run, colour }, k) => of(run.parts.communication, name).map((value, predicted) => ({ label: k || predicted ? "" : part.NAMES[name] ?? name, text: value ? format.seconds(value) : "",
    parts: [{ value, colour, pattern: predicted ? "hatch" : null, name: `${named ? `${run.name}, ` : ""}${sides[predicted]}`, formula: `${part.NAMES[name] ?? name}, ${sides[predicted]}${runs.length > 1 ? ` in ${run.name}` : ""}: ${format.seconds(value)}` }] }))));
  bars(box, rows, { left: element.clientWidth < 480 ? 96 : 130, tall: 18, focus: false, x: { label: "", unit: "s" }, label: rows.map((r) => r.parts[0].formula).join("; ") });
}

const FILL = { F: "forward", B: "backward", I: "input-gradient", W: "weight", optimizer: "optimizer", overhead: "host" };
const colourOf = (span) => (span.stream.startsWith("comm:") ? span.stream.slice(5) : FILL[span.category] ?? (span.stream === "host" ? "host" : "recompute"));
const STREAMS = ["schedule", "compute", "comm:tp", "comm:cp", "comm:ep", "comm:pp", "comm:dp", "host"];
const order = (a, b) => Number(a.split(" ")[0]) - Number(b.split(" ")[0]) || STREAMS.indexOf(a.split(" ")[1]) - STREAMS.indexOf(b.split(" ")[1]);
const SIDES = ["measured", "simulated"];

/** The measured step above the simulated one on one time axis; lanes are ranks and streams. */
export function steps(element, timeline, name) {
  const box = element.appendChild(panel(`A measured step above the simulated one${name ? `: ${name}` : ""}`, `Step ${timeline.step}. Ranks of the simulated step are pipeline stages.`)), total = Math.max(...SIDES.flatMap((side) => timeline[side].map((s) => s.start_s + s.duration_s)));
  const groups = SIDES.map((side) => {
    const spans = timeline[side], keys = [...new Set(spans.map((s) => `${s.rank} ${s.stream}`))].sort(order);
    return { title: side === "measured" ? "Measured" : "Simulated", note: format.seconds(Math.max(0, ...spans.map((s) => s.start_s + s.duration_s))), lanes: keys.map((key) => laneOf(`${key.replace("comm:", "")}`, spans.filter((s) => `${s.rank} ${s.stream}` === key).map((s) => ({ ...s, start: s.start_s, end: s.start_s + s.duration_s })), (s) => ({ colour: colourOf(s), text: s.name, about: `${s.name}\n${s.stream}, rank ${s.rank}: ${format.seconds(s.duration_s)} from ${format.seconds(s.start_s)}` }))) };
  }).filter((group) => group.lanes.length);
  lanes(box, groups, { total, label: groups.map((group) => `${group.title}: ${group.note}`).join(", "), lane: 16 });
  const used = new Set(SIDES.flatMap((side) => timeline[side].map(colourOf)));
  box.append(legend(Object.entries({ forward: "forward", backward: "backward", "input-gradient": "input gradient", weight: "weight gradient", recompute: "block of the model", tp: "tp communication", cp: "cp communication", ep: "ep communication", pp: "pp communication", dp: "dp communication", optimizer: "optimizer", host: "host" }).filter(([colour]) => used.has(colour)).map(([colour, words]) => ({ label: words, colour }))));
  const totals = STREAMS.map((stream) => ({ stream, ...Object.fromEntries(SIDES.map((side) => [side, timeline[side].filter((s) => s.rank === 0 && s.stream === stream).reduce((sum, s) => sum + s.duration_s, 0)])) })).filter((row) => row.measured || row.simulated);
  box.append(table(["stream", ["measured", "measured", "s"], ["simulated", "simulated", "s"]], totals, { caption: `Busy seconds of rank 0 by stream${name ? `: ${name}` : ""}` }));
}

const SHAPES = { good: "circle", accent: "square", bad: "cross" };
const HAPPENED = { ...MARKS, "checkpoint-finished": ["good", "checkpoint"], evaluation: ["accent", "evaluation"] };

/** When the attempts of each run trained, and what happened meanwhile. */
export function history(element, runs) {
  const all = runs.filter(({ run }) => run.about?.attempts?.some((a) => a.start));
  if (!all.length) return;
  const box = element.appendChild(panel("When it trained", "A bar is an attempt; between two of them the run was restarted. Marks are faults, restarts, checkpoints and evaluations.")), begun = ({ run }) => run.about.attempts[0].start;
  const end = ({ run }, attempt) => attempt.ended ?? run.rows.at(-1)?.[run.columns.indexOf("time")] ?? attempt.start;
  const most = Math.max(1, ...all.flatMap((one) => [...one.run.about.attempts.map((a) => end(one, a)), ...one.run.events.map((e) => e.time)].map((at) => at - begun(one))));
  const small = element.clientWidth < 480, short = (name) => (small && name.length > 8 ? `${name.slice(0, 7)}…` : name);
  const attempts = (one) => one.run.about.attempts.flatMap((attempt, i, list) => [ // a gap, then the attempt
    { value: attempt.start - (i ? end(one, list[i - 1]) : begun(one)), colour: "none" },
    { value: end(one, attempt) - attempt.start, colour: one.colour, formula: `Attempt ${i + 1}: ${attempt.world ?? "?"} ranks, from step ${format.whole(attempt.resumed_from ?? 0)}\n${attempt.cause || "no fault"}` },
  ]);
  const { x, y, ...chart } = bars(box, all.map((one) => ({ label: short(one.run.name), parts: attempts(one) })), { left: small ? 60 : 130, right: 14, tall: 30, top: 6,
    x: { label: "time since the start of the run", format: (v) => format.seconds(v, 2), to: most }, label: all.map(({ run }) => `${run.name}: ${run.about.attempts.length} attempts`).join(", ") });
  all.forEach((one, i) => scatter(chart, one.run.events.filter((e) => HAPPENED[e.kind]).map((e) => ({
    x: e.time - begun(one), y: i, colour: HAPPENED[e.kind][0], shape: SHAPES[HAPPENED[e.kind][0]], formula: `${e.text}\nstep ${format.whole(e.step)}` })),
  { x, y: () => y(i) + y.width / 2, shape: "triangle", focus: false }));
  const kinds = [...new Set(all.flatMap(({ run }) => run.events.map((e) => e.kind).filter((kind) => HAPPENED[kind])))];
  if (kinds.length) box.append(legend(kinds.map((kind) => ({ label: HAPPENED[kind][1], colour: HAPPENED[kind][0] }))));
}
