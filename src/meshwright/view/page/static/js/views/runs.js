// Runs: the folders that `meshwright train` writes. A list beside curves that grow while a run trains, predicted against measured by part, a measured
// step above the simulated one, faults and checkpoints. Several runs are drawn in the same figures, each in its own colour.

import { button, choice, clear, controls, empty, format, h, keepFocus, panel, sentence, slider, stat, stats, table, terms } from "meshwright/draw.js";
import { check } from "meshwright/fields.js";
import { refusal } from "meshwright/notice.js";
import { AXES, column, curves, history, parts, steps } from "meshwright/run-charts.js";
import { known, release, subscribe, watch } from "meshwright/runs.js";
import * as save from "meshwright/save.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const MOST = 8, FILTER_FROM = 8; // runs that are drawn together; runs from which the list has a filter
const TONES = { running: "accent", done: "good", stopped: "warn", failed: "bad", unreadable: "bad" };
const SMOOTH = [0, 5, 10, 25, 50, 100];
const colours = new Map(); // of runs by name: a run keeps its colour
let filter = "", ended = null;

const options = () => state.get().page.options.runs ?? {};
const set = (changes) => state.set("page.options.runs", { ...options(), ...changes });
const names = () => known.list?.runs.map((r) => r.name) ?? [];
/** The names of the runs that are drawn; the first one is in the head. */
function shown() {
  const all = names(), wanted = [options().shown ?? []].flat().filter((name) => all.includes(name)).slice(0, MOST);
  return wanted.length ? wanted : all.slice(0, 1);
}

function colourOf(name) {
  if (!colours.has(name)) {
    const used = new Set(shown().map((other) => colours.get(other)));
    colours.set(name, [1, 2, 3, 4, 5, 6, 7, 8].find((k) => !used.has(k)) ?? 1);
  }
  return `series-${colours.get(name)}`;
}

/** A view of runs: the list, the head of the first chosen one, and what `draw(body, runs)` adds. */
function runsView(name, title, tab, draw) {
  return {
    name, title, tab, ownTitle: true, needs: [], liveOnly: !source.hasRuns, localOptions: true,
    draw(element) {
      const list = h("aside", { class: "runs-list", "aria-label": "Runs" }), body = h("div", { class: "runs-body" });
      element.append(h("div", { class: "runs" }, list, body));
      ended?.();
      ended = subscribe(() => {
        if (!body.isConnected) return;
        if (body.matches(":active")) return void setTimeout(paint, 300); // what is pressed stays until the click
        paint();
      });
      let first = "";
      function paint() {
        if (source.live && known.list) watch(shown());
        const listed = JSON.stringify([known.list, shown()]);
        if (listed !== first) keepFocus(list, () => fill(list));
        first = listed;
        keepFocus(body, () => content(body, draw));
        save.attach(body, name);
      }
      if (source.live) watch(known.list ? shown() : []);
      paint();
    },
    leave() {
      ended?.();
      release();
    },
  };
}

export const views = [
  runsView("runs", "Training runs", "Curves", (body, runs) => {
    const logs = check("Logarithmic loss and norm", "", (log) => set({ log }));
    logs.follow(options().log);
    body.append(controls(
      choice("Across", Object.entries(AXES), options().x ?? "step", (x) => set({ x })),
      logs.node,
      slider("Smoothing", { values: SMOOTH, value: options().smooth ?? 0, text: (n) => (n ? `${n} steps` : "none"), oninput: (smooth) => set({ smooth }) })));
    curves(body, runs, { across: options().x ?? "step", smooth: options().smooth ?? 0, logarithmic: options().log });
    if (runs.length > 1) body.append(comparison(runs));
  }),
  runsView("run-parts", "Predicted and measured", "Predicted and measured", (body, runs) => {
    const first = runs[0].run, { difference, proof } = first.parts;
    if (!runs[0].comparable) body.append(h("p", { class: "notice" }, `The prediction is for ${first.accelerator}, the run used CPU processes: times do not compare.`));
    if (proof) body.append(proved(proof));
    const measured = runs.filter(({ run }) => run.parts.communication?.exposed_s && run.parts.communication.predicted_exposed_s);
    if (measured.length) parts(body, measured, runs.length > 1);
    if (difference) body.append(panel(`Every quantity of ${first.name}`, "What both the prediction and the run have.", table([
      ["quantity", "what"], ...["predicted", "measured"].map((side) => [side, (row) => quantity(row[side], row.unit), "plain"]),
      ["error", (row) => (row.measured ? format.change(row.predicted / row.measured - 1) : "–"), "plain"],
    ], difference, { name: "Prediction and measurement" })));
    if (!measured.includes(runs[0]) && !difference) body.append(later(first, "The parts of a step are measured at the end of a run."));
  }),
  runsView("run-steps", "A measured step", "Timeline", (body, runs) => {
    const timed = runs.filter(({ run }) => run.parts.timeline?.measured?.length);
    if (!timed.includes(runs[0])) body.append(later(runs[0].run, "A step is traced at the end of a run."));
    for (const { run } of timed.slice(0, 2)) steps(body, run.parts.timeline, runs.length > 1 ? run.name : "");
  }),
  runsView("run-events", "Faults and checkpoints", "Faults and checkpoints", (body, runs) => {
    history(body, runs);
    for (const { run } of runs) events(body, run, runs.length > 1);
    circumstances(body, runs[0].run);
  }),
];

const later = (run, words) => empty(`${words} ${run.name} ${run.state === "running" ? "still trains" : "has none"}.`);

function content(body, draw) {
  clear(body);
  if (known.lost) body.append(h("p", { class: "notice", role: "status" }, known.list ? "The server does not answer. What is below is from before; the page goes on as soon as the server is back." : "The server does not answer yet."));
  if (!known.list) return void (known.lost || body.append(empty("Reading …")));
  if (known.list.error) return void body.append(refusal(known.list.error));
  if (!known.list.runs.length) return void body.append(none());
  const all = shown().map((name) => known.runs.get(name)).filter(Boolean);
  for (const run of all.filter((run) => run.error)) body.append(refusal(run.error));
  const runs = all.filter((run) => !run.error).map((run) => ({ run, colour: colourOf(run.name), comparable: run.about?.device !== "cpu" || !run.accelerator || run.accelerator === "cpu" }));
  if (!runs.length) return void (all.length || body.append(empty("Reading …")));
  head(body, runs[0]);
  draw(body, runs);
}

const none = () => panel("No run yet", "Train one in a terminal; it appears here with its first step.",
  command(`meshwright train examples/demo-dp2-tp2.toml --out ${known.list.folder || "runs"}/demo`), known.list.folder ? null
    : [h("p", null, "This server was started without a folder of runs. Start it with one:"), command("meshwright web --runs runs")]);
const command = (words) => h("pre", { class: "command" }, words);

/** The list: a click shows one run, a checkbox draws another in the same figures. */
function fill(list) {
  clear(list);
  const all = known.list?.runs ?? [], drawn = shown(), rows = h("ul");
  const show = () => clear(rows).append(...all.filter((row) => `${row.name} ${row.model} ${row.title} ${row.state}`.toLowerCase().includes(filter.toLowerCase())).map((row) => item(row, drawn)));
  list.append(h("details", { open: !matchMedia("(max-width: 900px)").matches }, h("summary", null, h("b", null, `${format.whole(all.length)} ${all.length === 1 ? "run" : "runs"}`), known.list?.folder ? ` in ${known.list.folder}` : ""),
    all.length >= FILTER_FROM ? h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs", value: filter, oninput: (event) => { filter = event.target.value; show(); } }) : null, rows));
  show();
}

const swatch = (colour) => h("span", { class: "swatch", style: { background: `var(--${colour})` } });
const stateOf = ({ state }) => h("span", { class: `state tone-${TONES[state] ?? "ink"}` }, state);
const planOf = ({ model, title }) => [model, title].filter(Boolean).join(" · ");

function item(row, drawn) {
  const on = drawn.includes(row.name), others = drawn.filter((name) => name !== row.name), expected = row.predicted_step_time_s && row.step_time_s && row.comparable ? ` · predicted ${format.change(row.predicted_step_time_s / row.step_time_s - 1)}` : "";
  return h("li", { class: on ? "chosen" : null },
    h("input", { type: "checkbox", checked: on, disabled: (on && drawn.length === 1) || (!on && drawn.length >= MOST), style: { "accent-color": on ? `var(--${colourOf(row.name)})` : "var(--quiet)" }, "aria-label": `Draw ${row.name}`, onchange: () => set({ shown: on ? others : [...drawn, row.name] }) }),
    button(row.name, () => set({ shown: [row.name, ...(on ? others : [])] }), { class: "link", "aria-current": drawn[0] === row.name ? "true" : null }),
    stateOf(row),
    h("small", null, [row.loss === null || row.loss === undefined ? "" : `loss ${format.number(row.loss, 4)}`, row.step_time_s ? `${format.seconds(row.step_time_s)} a step${expected}` : ""].filter(Boolean).join(" · ")),
    h("small", null, planOf(row)));
}

const entryOf = (run) => known.list.runs.find((r) => r.name === run.name) ?? {};

/** Name, progress and the main numbers of one run. */
function head(body, { run, colour, comparable }) {
  const { prediction, measurement } = run.parts, entry = entryOf(run), planned = run.about?.steps;
  const loss = column(run, "loss"), seconds = column(run, "seconds"), last = seconds.at(-1), memory = column(run, "memory_gib").at(-1);
  const error = prediction && entry.step_time_s && comparable ? `${format.change(prediction.step_time_s / entry.step_time_s - 1)} against the run` : "";
  body.append(h("header", { class: "run-head" },
    h("h2", null, swatch(colour), run.name, " ", stateOf(run)),
    sentence(planOf(run)),
    planned ? h("p", { class: "progress" }, h("progress", { max: planned, value: Math.min(run.steps, planned), "aria-label": "Steps" }), ` step ${format.whole(run.steps)} of ${format.whole(planned)}${left(run)}`) : null));
  body.append(stats(
    stat("Loss", loss.length ? format.number(loss.at(-1).y, 4) : "–", { detail: loss.length ? `from ${format.number(loss[0].y, 4)}` : "" }),
    measurement ? stat("Measured step", format.seconds(measurement.step_time_s), { detail: `${format.seconds(measurement.step_time_low_s)} to ${format.seconds(measurement.step_time_high_s)}` }) : stat("Last step", last ? format.seconds(last.y) : "–", { detail: entry.step_time_s ? `median ${format.seconds(entry.step_time_s)}` : "" }),
    prediction ? stat("Predicted step", format.seconds(prediction.step_time_s), { detail: error || (Number.isFinite(prediction.step_time_low_s) ? `${format.seconds(prediction.step_time_low_s)} to ${format.seconds(prediction.step_time_high_s)}` : "") }) : null,
    entry.tokens_per_s ? stat("Throughput", `${format.count(entry.tokens_per_s)} ${entry.unit}/s`, { detail: entry.mfu && comparable ? `MFU ${format.percent(entry.mfu)}` : "" }) : null,
    memory ? stat("Memory", format.gib(memory.y), { detail: "peak of rank 0" }) : null,
    checkpoint(run)));
}

/** Time left at the rate of the last steps. */
function left(run) {
  if (run.state !== "running" || !run.about?.steps) return "";
  const at = run.columns.indexOf("time"), step = run.columns.indexOf("step"), rows = run.rows.filter((row) => row[at]).slice(-200);
  if (rows.length < 2 || rows.at(-1)[step] <= rows[0][step]) return "";
  const rate = (rows.at(-1)[at] - rows[0][at]) / (rows.at(-1)[step] - rows[0][step]);
  return `, about ${format.seconds(Math.max(0, rate * (run.about.steps - run.steps)), 2)} left`;
}

function checkpoint(run) {
  const written = run.events.filter((event) => event.kind?.startsWith("checkpoint")), finished = written.filter((event) => event.kind === "checkpoint-finished").at(-1);
  if (!written.length) return null;
  const writing = run.state === "running" && written.at(-1).kind === "checkpoint-begun";
  return stat("Checkpoint", writing ? `writing step ${format.whole(written.at(-1).step)}` : finished ? `step ${format.whole(finished.step)}` : "none", { detail: finished ? `${writing ? `last: step ${format.whole(finished.step)}, ` : ""}${finished.seconds ? `took ${format.seconds(finished.seconds)}` : ""}` : "" });
}

/** The chosen runs side by side. */
function comparison(runs) {
  const rows = runs.map(({ run, colour }) => ({ ...entryOf(run), colour })), loss = (v) => format.number(v, 4);
  return panel("", "", table([
    ["run", (row) => h("span", { class: "nowrap" }, swatch(row.colour), row.name)], "state", ["steps", "steps", "whole"], ["loss", "loss", loss],
    ["validation", "validation_loss", loss], ["step", "step_time_s", "s"], ["predicted", "predicted_step_time_s", "s"],
    ["per second", (row) => (row.tokens_per_s ? `${format.count(row.tokens_per_s)} ${row.unit}` : "–"), "plain"],
    ["MFU", "mfu", "share"], ["memory", "memory_gib", (v) => (v ? format.gib(v) : "–")], ["model and plan", planOf],
  ], rows, { caption: "Runs side by side" }));
}

/** The verdict of `verify --out` in the same folder. */
function proved(proof) {
  const copies = (proof.copies ?? [proof]).map((copy) => copy.plan).filter(Boolean), bounds = Object.entries(proof.errors ?? {}).map(([dtype, e]) => `${dtype} gradients within ${e.gradient?.toExponential(1)}`);
  const first = proof.first_break, why = first ? `${first.what} ${first.name} of step ${first.step} on rank ${first.rank} differs; axis ${first.axis}` : "the collectives it issues differ from the step program";
  const words = proof.passed ? `Proved to train the same model as one device, over ${proof.steps} steps on ${proof.ranks} ranks: ${bounds.join(", ")}.` : `Not proved: ${why}.`;
  return h("p", { class: proof.passed ? "notice good" : "notice error" }, words, copies.length ? ` Trained to prove it: ${copies.join("; ")}.` : "");
}

const clock = (seconds) => new Date(1e3 * seconds).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });

/** Attempts, checkpoints and other events of a run, the newest first. */
function events(body, run, several) {
  const of = several ? ` of ${run.name}` : "", attempts = run.about?.attempts ?? [], isCheckpoint = (event) => event.kind?.startsWith("checkpoint");
  const saves = run.events.filter((event) => isCheckpoint(event) && event.kind !== "checkpoint-begun").slice(-50).reverse(), others = run.events.filter((event) => !isCheckpoint(event) && event.kind !== "evaluation").slice(-50).reverse();
  if (attempts.length > 1 || attempts[0]?.cause) body.append(panel(`Attempts${of}`, "A run that lost a rank begins again at its last good checkpoint.", table([
    ["attempt", (row) => attempts.indexOf(row) + 1], ["began", (row) => clock(row.start)], ["ranks", "world", "plain"], "plan",
    ["first step", "resumed_from", (v) => format.whole(v ?? 0)], ["ended", (row) => (row.ended ? clock(row.ended) : "–")], ["cause", (row) => row.cause ?? ""],
  ], attempts, { name: `Attempts${of}` })));
  const time = ["time", (row) => clock(row.time)], step = ["step", "step", "whole"], event = ["event", "text"], took = ["took", "seconds", (v) => (v ? format.seconds(v) : "–")];
  if (others.length) body.append(panel(`Events${of}`, "The newest first.", table([time, step, event], others, { name: `Events${of}` })));
  if (saves.length) body.append(panel(`Checkpoints${of}`, "The newest first. Time from the beginning of a save to its end; training goes on meanwhile.", table([time, step, took, event], saves, { name: `Checkpoints${of}` })));
  if (!others.length && !saves.length) body.append(empty(`Nothing happened${several ? ` in ${run.name}` : ""} beside training: no fault, no checkpoint.`));
}

/** What a run depends on besides its run file. */
function circumstances(body, run) {
  const about = run.about ?? {}, git = about.git, versions = Object.entries(about.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  const commit = git ? `${git.commit.slice(0, 12)} on ${git.branch}${git.changed ? `, ${git.changed} changed files` : ""}` : "";
  const facts = { command: about.command && h("code", null, about.command.join(" ")), hosts: (about.hosts ?? []).join(", "), versions, git: commit, seed: about.seed, platform: about.platform };
  const list = terms(Object.entries(facts));
  if (list.children.length) body.append(panel(`How ${run.name} was run`, null, list));
}

const quantity = (value, unit) => ({ s: () => format.seconds(value), bytes: () => format.bytes(value), GiB: () => format.gib(value), "%": () => `${format.number(value)}%` })[unit]?.() ?? `${format.count(value)} ${unit}`;
