// Runs: the folders that `meshwright train` writes. Curves grow while a run trains; at its end, predicted against measured by part, and a
// measured step above the simulated one.

import { area, axis, band, bars, canvas, choice, clear, colourOf, figure, format, h, hide, legend, linear, line, panel, show, stat, table } from "meshwright/draw.js";
import { refusal } from "meshwright/notice.js";
import * as source from "meshwright/source.js";

const POLL_MS = 1500;
let known = { list: null, run: null }, timer = 0, asked = null;

export const view = {
  name: "runs",
  title: "Training runs",
  short: "Runs",
  group: "runs",
  sentence: "Runs of `meshwright train --out DIR` below the folder given by `meshwright web --runs DIR`: measured against predicted.",
  needs: [],
  liveOnly: true,
  localOptions: true,
  draw(element, data, context) {
    const body = h("div", null);
    element.append(body);
    if (known.run && known.run.name === (context.options.run ?? known.run.name)) paint(body, context);
    clearTimeout(timer);
    follow(body, context);
  },
  leave() {
    clearTimeout(timer);
    asked?.abort();
  },
};

/** Ask for the list and for what is new in the chosen run; go on while it trains. */
async function follow(body, context) {
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  try {
    known.list = await source.runs(signal);
    const name = known.list.runs.some((r) => r.name === context.options.run) ? context.options.run : known.list.runs[0]?.name;
    if (name === undefined) clear(body).append(h("p", { class: "empty" }, "There is no run yet. Train one with "), h("code", null, `meshwright train examples/demo-dp2-tp2.toml --out ${known.list.folder || "runs"}/demo`));
    else {
      const before = known.run?.name === name ? known.run : null, found = await source.run(name, before?.seen ?? "", signal);
      if (signal.aborted) return;
      const fresh = !before || found.rows.length > 0 || Object.keys(found.parts).length > 0 || found.state !== before.state;
      const kept = before && !found.fresh ? before : { rows: [], events: [], parts: {} };
      known.run = { ...found, rows: [...kept.rows, ...found.rows], events: [...kept.events, ...found.events], parts: { ...kept.parts, ...found.parts } };
      if (fresh || !body.firstChild) paint(body, context);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    clear(body).append(refusal(error.error ?? { code: "", what: String(error), why: "", valid: [], fix: "" }));
  }
  if (!signal.aborted && known.run?.state !== "done") timer = setTimeout(() => body.isConnected && follow(body, context), POLL_MS);
}

const column = (run, name) => {
  const at = run.columns.indexOf(name), step = run.columns.indexOf("step");
  return at < 0 ? [] : run.rows.map((row) => ({ x: row[step], y: row[at] })).filter((p) => p.y !== null && p.y !== undefined);
};

function paint(body, context) {
  const run = known.run, { prediction, measurement, difference, communication, timeline } = run.parts;
  clear(body).append(h("div", { class: "controls" }, choice("Run", known.list.runs.map((r) => [r.name, `${r.name} (${r.state})`]), run.name, (name) => context.setOptions({ run: name }))), h("p", { class: "sentence" }, run.title));
  const seconds = column(run, "seconds"), loss = column(run, "loss");
  body.append(h("div", { class: "stats" },
    stat("State", run.state, { detail: `${format.whole(run.steps)} steps`, tone: run.state === "done" ? "good" : run.state === "stopped" ? "warn" : "" }),
    stat("Loss", loss.length ? format.number(loss.at(-1).y, 4) : "–", { detail: loss.length ? `from ${format.number(loss[0].y, 4)}` : "" }),
    measurement ? stat("Measured step", format.seconds(measurement.step_time_s), { detail: `${format.seconds(measurement.step_time_low_s)} to ${format.seconds(measurement.step_time_high_s)}` }) : stat("Last step", seconds.length ? format.seconds(seconds.at(-1).y) : "–"),
    prediction ? stat("Predicted step", format.seconds(prediction.step_time_s), { detail: measurement ? `${format.change(prediction.step_time_s / measurement.step_time_s - 1)} against the run` : `${format.seconds(prediction.step_time_low_s)} to ${format.seconds(prediction.step_time_high_s)}` }) : null));
  const curves = h("div", { class: "columns three" });
  body.append(curves);
  const shown = [["Loss", loss, { colour: "compute", unit: "loss" }], ["Step time", seconds, { colour: "tp", unit: "s", prediction }], ["Gradient norm", column(run, "grad_norm"), { colour: "optimizer", unit: "norm" }]].filter(([, points]) => points.length);
  const boxes = shown.map(([title]) => panel(title, null));
  curves.append(...boxes); // all panels first: their number decides their width
  shown.forEach(([title, points, options], i) => curve(boxes[i], title, points, options));
  if (communication) parts(body, communication);
  if (difference) body.append(panel("Predicted against measured", "Each quantity that both the prediction and the run have.", table([
    { title: "quantity", key: "what" },
    { title: "predicted", key: "predicted", text: (v, row) => quantity(v, row.unit), align: "right" },
    { title: "measured", key: "measured", text: (v, row) => quantity(v, row.unit), align: "right" },
    { title: "error", key: "error", text: (v, row) => (row.measured ? format.change(row.predicted / row.measured - 1) : "–"), align: "right" },
  ], difference, { caption: "Prediction and measurement" })));
  if (timeline?.measured?.length) steps(body, timeline);
  else if (run.state !== "done") body.append(h("p", { class: "empty" }, "Parts and timelines appear when the run ends."));
}

const quantity = (value, unit) => ({ s: () => format.seconds(value), bytes: () => format.bytes(value), GiB: () => format.gib(value), "%": () => `${format.number(value)}%` })[unit]?.() ?? `${format.count(value)} ${unit}`;

function curve(box, title, points, { colour, unit, prediction: given = null }) {
  // A file that was written by hand, or only in part, may lack the band.
  const prediction = given && [given.step_time_low_s, given.step_time_s, given.step_time_high_s].every(Number.isFinite) ? given : null;
  const ys = points.map((p) => p.y);
  const scale = unit === "s" && Math.max(...ys) < 1 ? 1e3 : 1, name = unit === "s" ? (scale === 1 ? "s" : "ms") : unit;
  const most = Math.max(...ys, prediction?.step_time_s ?? 0), least = unit === "loss" ? Math.min(...ys) : 0;
  const chart = figure(box, { height: 190, left: 54, label: `${title} over ${points.length} steps: from ${format.number(ys[0])} to ${format.number(ys.at(-1))} ${unit}` });
  const x = linear([points[0].x, Math.max(points.at(-1).x, points[0].x + 1)], [0, chart.width]), y = linear([least, most * 1.02], [chart.height, 0], { nice: true });
  axis(chart, y, "left", { label: name, format: (v) => format.number(v * scale) });
  axis(chart, x, "bottom", { label: "step" });
  if (prediction) {
    const [low, high] = [prediction.step_time_low_s, Math.min(prediction.step_time_high_s, y.domain[1])];
    area(chart, [{ x: x.domain[0], y: high, base: low }, { x: x.domain[1], y: high, base: low }], { x, y, colour: "bubble", opacity: 0.25 });
    line(chart, [{ x: x.domain[0], y: prediction.step_time_s }, { x: x.domain[1], y: prediction.step_time_s }], { x, y, colour: "quiet", dash: "5 4", width: 1.5 });
  }
  line(chart, points, { x, y, colour, width: 1.6 });
  if (prediction) box.append(legend([{ label: "measured", colour, shape: "line" }, { label: "predicted, with its band", colour: "quiet", shape: "line", dash: "5 4" }]));
}

/** Exposed seconds of the busiest rank by part, measured and predicted. */
function parts(element, communication) {
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
function steps(element, timeline) {
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
