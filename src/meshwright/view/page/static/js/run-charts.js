// The figures of one training run: curves by step, predicted against measured by part, and a measured step above the simulated one.

import { area, axis, band, bars, canvas, colourOf, figure, format, h, hide, legend, linear, line, panel, scatter, show, svg, table } from "meshwright/draw.js";

/** The values of a run by step: [{ x: step, y }], without steps that lack it. */
export const column = (run, name) => {
  const at = run.columns.indexOf(name), step = run.columns.indexOf("step");
  return at < 0 ? [] : run.rows.map((row) => ({ x: row[step], y: row[at] })).filter((p) => Number.isFinite(p.y));
};

/** Seconds blocked in communication by step, summed over parts. */
const exposed = (run) => {
  const at = run.columns.indexOf("exposed_s"), step = run.columns.indexOf("step");
  return run.rows.filter((row) => row[at] && typeof row[at] === "object").map((row) => ({ x: row[step], y: Object.values(row[at]).reduce((a, b) => a + b, 0) }));
};

const MARKS = { restart: ["warn", "restart"], fault: ["bad", "fault"], spike: ["warn", "loss spike"], skipped: ["bubble", "skipped update"], "checkpoint-failed": ["bad", "checkpoint failed"] };

/** All curves of a run. `others`: further runs whose curves are drawn in the same figures. */
export function curves(element, run, comparable, others = []) {
  const { prediction } = run.parts, scaled = (points, factor) => points.map((p) => ({ x: p.x, y: p.y * factor }));
  const series = (name) => [column(run, name), ...others.map((other) => column(other, name))];
  const expected = (value, low, high) => (comparable && Number.isFinite(value) ? { value, low, high } : null);
  const predictedExposed = prediction?.exposed_s && ["tp", "cp", "ep", "pp", "dp", "bubble"].reduce((sum, part) => sum + (prediction.exposed_s[part] ?? 0), 0);
  const all = [
    { title: "Loss", lines: series("loss"), colour: "compute", points: column(run, "validation_loss"), marks: marks(run), fromZero: false },
    { title: "Step time", lines: series("seconds"), colour: "tp", unit: "s", expected: expected(prediction?.step_time_s, prediction?.step_time_low_s, prediction?.step_time_high_s), clip: true },
    { title: "Throughput", lines: series("tokens_per_s"), colour: "optimizer", unit: "per second", expected: expected(prediction?.tokens_per_s) },
    { title: "MFU", lines: series("mfu").map((points) => scaled(points, 100)), colour: "ep", unit: "%", expected: expected(prediction?.mfu && 100 * prediction.mfu), sentence: prediction?.mfu_denominator && comparable ? `Of ${prediction.mfu_denominator}.` : "" },
    { title: "Exposed communication", lines: [exposed(run), ...others.map(exposed)], colour: "dp", unit: "s", expected: expected(predictedExposed || null), sentence: "Seconds that rank 0 was blocked, waits for other ranks included.", clip: true },
    { title: "Gradient norm", lines: series("grad_norm"), colour: "cp", clip: true },
    { title: "Learning rate", lines: series("learning_rate"), colour: "recompute" },
    { title: "Memory", lines: series("memory_gib"), colour: "gathered", unit: "GiB", sentence: run.about?.device === "cpu" ? "Resident memory of the process of rank 0, peak until then." : "Memory that rank 0 reserved, peak until then." },
  ].filter(({ lines }) => lines[0].length > 1);
  const boxes = all.map(({ title, sentence }) => panel(title, sentence || null)), grid = h("div", { class: "columns" }, boxes);
  element.append(grid); // all panels first: their number decides their width
  all.forEach((one, i) => curve(boxes[i], one, [run.name, ...others.map((other) => other.name)]));
}

const marks = (run) => (run.events ?? []).filter((event) => MARKS[event.kind]).map((event) => ({ x: event.step, kind: event.kind, text: event.text }));
const DASHES = [null, "6 3", "2 3", "8 3 2 3"];

function curve(box, { title, lines, colour, unit = "", expected = null, points = [], marks: marked = [], fromZero = true, clip = false }, names) {
  const ys = lines.flat().map((p) => p.y), sorted = [...ys].sort((a, b) => a - b);
  // The first steps take long and have large gradients: they may leave the figure.
  const top = clip ? Math.max(sorted[Math.floor(0.98 * (sorted.length - 1))] * 1.25, expected?.value ?? 0) : Math.max(...ys, ...points.map((p) => p.y), expected?.value ?? -Infinity);
  const most = clip ? Math.min(top, Math.max(sorted.at(-1), expected?.value ?? 0)) : top;
  const least = fromZero ? Math.min(0, sorted[0]) : Math.min(sorted[0], ...points.map((p) => p.y));
  const scale = unit === "s" && most < 1 ? 1e3 : 1, shown = unit === "s" && scale === 1e3 ? "ms" : unit;
  const first = lines[0], last = first.at(-1);
  const chart = figure(box, { height: 180, left: 52, bottom: 34, label: `${title} over ${first.length} steps: from ${format.number(first[0].y)} to ${format.number(last.y)} ${unit}` });
  const begin = Math.min(...lines.filter((l) => l.length).map((l) => l[0].x)), end = Math.max(...lines.filter((l) => l.length).map((l) => l.at(-1).x), begin + 1);
  const x = linear([begin, end], [0, chart.width]), y = linear([least, most || 1], [chart.height, 0], { nice: true });
  axis(chart, y, "left", { label: shown, format: (v) => (unit === "per second" ? format.count(v * scale) : format.number(v * scale)), ticks: 4 });
  axis(chart, x, "bottom", { label: "step", format: format.whole, ticks: Math.max(2, Math.floor(chart.width / 70)) });
  if (expected) {
    const inside = (v) => Math.max(y.domain[0], Math.min(v, y.domain[1]));
    if (Number.isFinite(expected.low) && Number.isFinite(expected.high)) area(chart, x.domain.map((at) => ({ x: at, y: inside(expected.high), base: inside(expected.low) })), { x, y, colour: "bubble", opacity: 0.25 });
    if (expected.value <= y.domain[1]) line(chart, x.domain.map((at) => ({ x: at, y: expected.value })), { x, y, colour: "quiet", dash: "5 4", width: 1.5 });
  }
  lines.forEach((one, i) => line(chart, clip ? one.map((p) => ({ x: p.x, y: Math.min(p.y, y.domain[1]) })) : one, { x, y, colour, dash: DASHES[i % DASHES.length], width: i ? 1.3 : 1.7 }));
  if (points.length) scatter(chart, points.map((p) => ({ ...p, formula: `Validation loss ${format.number(p.y, 5)} after step ${format.whole(p.x)}` })), { x, y, colour: "tp", radius: 3.5 });
  for (const mark of marked.filter((m) => m.x >= begin && m.x <= end)) {
    chart.plot.append(svg("line", { x1: x(mark.x), x2: x(mark.x), y1: 0, y2: chart.height, stroke: MARKS[mark.kind][0], "stroke-width": 1.5, "stroke-dasharray": "3 2" }, svg("title", null, `Step ${format.whole(mark.x)}: ${mark.text}`)));
  }
  const items = names.length > 1 ? names.map((label, i) => ({ label, colour, shape: "line", dash: DASHES[i % DASHES.length] })) : [];
  if (expected) items.push({ label: expected.low !== undefined ? "predicted, with its band" : "predicted", colour: "quiet", shape: "line", dash: "5 4" });
  if (points.length) items.push({ label: "validation", colour: "tp" });
  for (const kind of new Set(marked.map((m) => m.kind))) items.push({ label: MARKS[kind][1], colour: MARKS[kind][0], shape: "line", dash: "3 2" });
  if (items.length) box.append(legend(items));
}

/** Exposed seconds of the busiest rank by part, measured and predicted. */
export function parts(element, communication) {
  const names = [...new Set([...Object.keys(communication.exposed_s), ...Object.keys(communication.predicted_exposed_s)])].filter((n) => communication.exposed_s[n] || communication.predicted_exposed_s[n]);
  const box = panel("By part of the step", `Exposed seconds of the busiest rank (rank ${communication.busiest_rank}), mean of ${communication.steps} steps.`);
  element.append(box);
  const rows = names.flatMap((name) => [{ label: `${name}, measured`, value: communication.exposed_s[name] ?? 0, colour: "tp" }, { label: `${name}, predicted`, value: communication.predicted_exposed_s[name] ?? 0, colour: "compute", pattern: "hatch" }]);
  const chart = figure(box, { height: 46 + 19 * rows.length, left: 150, right: 70, bottom: 38, label: rows.map((r) => `${r.label} ${format.seconds(r.value)}`).join(", ") });
  const most = Math.max(...rows.map((r) => r.value)), scale = most < 1 ? 1e3 : 1;
  const x = linear([0, most], [0, chart.width]), y = band(rows.map((r) => r.label), [0, chart.height], { gap: 0.2 });
  axis(chart, x, "bottom", { label: scale === 1 ? "s" : "ms", format: (v) => format.number(v * scale) });
  axis(chart, y, "left");
  bars(chart, rows.map((r) => ({ ...r, formula: `${r.label}: ${format.seconds(r.value)}`, text: format.seconds(r.value) })), { x, y });
}

const FILL = { F: "forward", B: "backward", I: "backward", W: "weight", optimizer: "optimizer", overhead: "host" };
const fill = (span) => (span.stream.startsWith("comm:") ? span.stream.slice(5) : FILL[span.category] ?? (span.stream === "host" ? "host" : "recompute"));

/** The measured step above the simulated one on one time axis; rows are rank and stream. */
export function steps(element, timeline) {
  const box = panel("A measured step above the simulated one", `Step ${timeline.step}. Ranks of the simulated step are pipeline stages. Point at a span for its name.`);
  element.append(box);
  const sides = ["measured", "simulated"].map((side) => [side, timeline[side]]);
  const end = Math.max(...sides.flatMap(([, spans]) => spans.map((s) => s.start_s + s.duration_s)));
  const rows = sides.flatMap(([side, spans]) => [{ title: side }, ...[...new Set(spans.map((s) => `${s.rank} ${s.stream}`))].sort(order).map((key) => ({ key, side, spans: spans.filter((s) => `${s.rank} ${s.stream}` === key) }))]);
  const height = 17, left = 112, at = rows.map((_, i) => i * height + 4), hits = [];
  const drawn = canvas(box, (pen, width) => {
    const x = linear([0, end], [left, width - 8]), ink = colourOf("ink"), quiet = colourOf("quiet");
    hits.length = 0;
    rows.forEach((row, i) => {
      pen.fillStyle = row.title ? ink : quiet;
      pen.font = `${row.title ? "600 12px" : "11px"} system-ui, sans-serif`;
      pen.fillText(row.title ? `${row.title[0].toUpperCase()}${row.title.slice(1)}` : `rank ${row.key}`, 0, at[i] + 11);
      for (const span of row.spans ?? []) {
        const [a, b] = [x(span.start_s), Math.max(x(span.start_s + span.duration_s), x(span.start_s) + 0.6)];
        pen.fillStyle = colourOf(fill(span));
        pen.fillRect(a, at[i], b - a, height - 4);
        hits.push([a, b, at[i], at[i] + height - 4, span]);
      }
    });
    pen.fillStyle = quiet;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const tick of linear([0, end], [0, 1]).ticks(6)) pen.fillText(`${format.number(tick * 1e3)} ms`, Math.min(x(tick), width - 22), rows.length * height + 18);
    pen.textAlign = "start";
  }, { height: rows.length * height + 28, label: `Timeline: measured ${format.seconds(length(timeline.measured))}, simulated ${format.seconds(length(timeline.simulated))}` });
  drawn.node.addEventListener("pointermove", (event) => {
    const hit = hits.find(([a, b, c, d]) => event.offsetX >= a && event.offsetX <= b && event.offsetY >= c && event.offsetY <= d);
    if (hit) show(drawn.node, `${hit[4].name}\n${hit[4].stream}, rank ${hit[4].rank}: ${format.seconds(hit[4].start_s)} + ${format.seconds(hit[4].duration_s)}`, event);
    else hide();
  });
  drawn.node.addEventListener("pointerleave", hide);
  const axes = [...new Set(sides.flatMap(([, spans]) => spans.filter((s) => s.stream.startsWith("comm:")).map((s) => s.stream.slice(5))))];
  box.append(legend([{ label: "forward", colour: "forward" }, { label: "backward", colour: "backward" }, { label: "block of the model", colour: "recompute" }, ...axes.map((a) => ({ label: `${a} communication`, colour: a })), { label: "optimizer", colour: "optimizer" }, { label: "host", colour: "host" }]));
  box.append(table([{ title: "stream", key: "stream" }, { title: "measured", key: "measured", text: (v) => format.seconds(v), align: "right" }, { title: "simulated", key: "simulated", text: (v) => format.seconds(v), align: "right" }], totals(timeline), { caption: "Busy seconds of rank 0 by stream" }));
}

const STREAMS = ["schedule", "compute", "comm:tp", "comm:cp", "comm:ep", "comm:pp", "comm:dp", "host"];
const order = (a, b) => Number(a.split(" ")[0]) - Number(b.split(" ")[0]) || STREAMS.indexOf(a.split(" ")[1]) - STREAMS.indexOf(b.split(" ")[1]);
const length = (spans) => Math.max(0, ...spans.map((s) => s.start_s + s.duration_s));
const totals = (timeline) => STREAMS.map((stream) => ({ stream, ...Object.fromEntries(["measured", "simulated"].map((side) => [side, timeline[side].filter((s) => s.rank === 0 && s.stream === stream).reduce((sum, s) => sum + s.duration_s, 0)])) })).filter((row) => row.measured || row.simulated);
