// Runs: the folders that `meshwright train` writes, on the live page and in the file of `meshwright report`. Curves grow while a run trains; at
// its end there are predicted against measured by part, and a measured step above the simulated one.

import { choice, clear, format, h, panel, stat, table } from "meshwright/draw.js";
import { refusal } from "meshwright/notice.js";
import { column, curves, parts, steps } from "meshwright/run-charts.js";
import * as source from "meshwright/source.js";

const POLL_MS = 1500, MOST_COMPARED = 3;
let known = { list: null, runs: new Map() }, timer = 0, asked = null;

export const view = {
  name: "runs",
  title: "Training runs",
  short: "Runs",
  workspace: "runs",
  sentence: source.live ? "Runs of `meshwright train --out DIR` below the folder given by `meshwright web --runs DIR`: measured against predicted." : "Runs of `meshwright train`: each was predicted before it ran.",
  needs: [],
  liveOnly: !source.hasRuns,
  localOptions: true,
  draw(element, data, context) {
    const body = h("div", null);
    element.append(body);
    if (known.list && known.runs.has(chosen(context))) paint(body, context);
    clearTimeout(timer);
    follow(body, context);
  },
  leave() {
    clearTimeout(timer);
    asked?.abort();
  },
};

const chosen = (context) => (known.list.runs.some((r) => r.name === context.options.run) ? context.options.run : known.list.runs[0]?.name);
const compared = (context) => (context.options.compare ?? []).filter((name) => name !== chosen(context) && known.list.runs.some((r) => r.name === name)).slice(0, MOST_COMPARED);

/** Ask for the list and for what is new in the chosen runs; go on while one of them trains. */
async function follow(body, context) {
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  try {
    const before = JSON.stringify(known.list);
    known.list = await source.runs(signal);
    const name = chosen(context);
    if (name === undefined) clear(body).append(h("p", { class: "empty" }, "There is no run yet. Train one with "), h("code", null, `meshwright train examples/demo-dp2-tp2.toml --out ${known.list.folder || "runs"}/demo`));
    else {
      let fresh = before !== JSON.stringify(known.list);
      for (const each of [name, ...compared(context)]) fresh = (await ask(each, signal)) || fresh;
      if (signal.aborted) return;
      if (fresh || !body.firstChild) paint(body, context);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    clear(body).append(refusal(error.error ?? { code: "", what: String(error), why: "", valid: [], fix: "" }));
  }
  if (!signal.aborted && source.live) timer = setTimeout(() => body.isConnected && follow(body, context), POLL_MS);
}

/** Read on in one run; whether anything is new. */
async function ask(name, signal) {
  const before = known.runs.get(name), found = await source.run(name, before?.seen ?? "", signal);
  if (signal.aborted) return false;
  const kept = before && !found.fresh ? before : { rows: [], events: [], parts: {} };
  known.runs.set(name, { ...found, rows: [...kept.rows, ...found.rows], events: [...kept.events, ...found.events], parts: { ...kept.parts, ...found.parts } });
  return !before || found.rows.length + found.events.length + Object.keys(found.parts).length > 0 || found.state !== before.state;
}

const TONES = { done: "good", stopped: "warn", failed: "bad", unreadable: "bad" };

function paint(body, context) {
  const name = chosen(context), run = known.runs.get(name), others = compared(context).map((other) => known.runs.get(other)).filter(Boolean);
  const { prediction, measurement, difference, communication, timeline, proof } = run.parts;
  const comparable = run.about?.device !== "cpu" || !run.accelerator || run.accelerator === "cpu";
  clear(body).append(h("div", { class: "controls" }, choice("Run", known.list.runs.map((r) => [r.name, `${r.name} (${r.state})`]), name, (next) => context.setOptions({ run: next, compare: [] }))), h("p", { class: "sentence" }, [run.model, run.title].filter(Boolean).join(" · ")));
  if (known.list.runs.length > 1) overview(body, context, name);
  stats(body, run, comparable);
  if (!comparable) body.append(h("p", { class: "notice" }, `The prediction is for ${run.accelerator}, the run used CPU processes: times do not compare.`));
  if (proof) body.append(proved(proof));
  curves(body, run, comparable, others);
  if (communication?.exposed_s && communication.predicted_exposed_s) parts(body, communication);
  if (difference) body.append(panel("Predicted against measured", "Each quantity that both the prediction and the run have.", table([
    { title: "quantity", key: "what" },
    { title: "predicted", key: "predicted", text: (v, row) => quantity(v, row.unit), align: "right" },
    { title: "measured", key: "measured", text: (v, row) => quantity(v, row.unit), align: "right" },
    { title: "error", key: "error", text: (v, row) => (row.measured ? format.change(row.predicted / row.measured - 1) : "–"), align: "right" },
  ], difference, { caption: "Prediction and measurement" })));
  if (timeline?.measured?.length) steps(body, timeline);
  else if (run.state === "running") body.append(h("p", { class: "empty" }, "Parts and timelines appear when the run ends."));
  history(body, run);
  circumstances(body, run, measurement ?? prediction);
}

function stats(body, run, comparable) {
  const { prediction, measurement } = run.parts, entry = known.list.runs.find((r) => r.name === run.name) ?? {};
  const loss = column(run, "loss"), seconds = column(run, "seconds"), last = seconds.at(-1);
  const error = prediction && entry.step_time_s && comparable ? `${format.change(prediction.step_time_s / entry.step_time_s - 1)} against the run` : "";
  body.append(h("div", { class: "stats" },
    stat("State", run.state, { detail: `${format.whole(run.steps)}${run.about?.steps ? ` of ${format.whole(run.about.steps)}` : ""} steps${left(run)}`, tone: TONES[run.state] ?? "" }),
    stat("Loss", loss.length ? format.number(loss.at(-1).y, 4) : "–", { detail: loss.length ? `from ${format.number(loss[0].y, 4)}` : "" }),
    measurement ? stat("Measured step", format.seconds(measurement.step_time_s), { detail: `${format.seconds(measurement.step_time_low_s)} to ${format.seconds(measurement.step_time_high_s)}` }) : stat("Last step", last ? format.seconds(last.y) : "–", { detail: entry.step_time_s ? `median ${format.seconds(entry.step_time_s)}` : "" }),
    prediction ? stat("Predicted step", format.seconds(prediction.step_time_s), { detail: error || (Number.isFinite(prediction.step_time_low_s) ? `${format.seconds(prediction.step_time_low_s)} to ${format.seconds(prediction.step_time_high_s)}` : "") }) : null,
    entry.tokens_per_s ? stat("Throughput", `${format.count(entry.tokens_per_s)} ${entry.unit}/s`, { detail: entry.mfu && comparable ? `MFU ${format.percent(entry.mfu)}` : "" }) : null,
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
  const events = run.events.filter((event) => event.kind?.startsWith("checkpoint")), finished = events.filter((event) => event.kind === "checkpoint-finished").at(-1);
  if (!events.length) return null;
  const writing = events.at(-1).kind === "checkpoint-begun";
  return stat("Checkpoint", writing ? `writing step ${format.whole(events.at(-1).step)}` : `step ${format.whole(finished.step)}`, { detail: finished ? `${writing ? `last: step ${format.whole(finished.step)}, ` : ""}${finished.seconds ? `took ${format.seconds(finished.seconds)}` : ""}` : "" });
}

/** All runs as a table; a run is shown, or its curves are drawn in the same figures. */
function overview(body, context, name) {
  const shown = new Set(compared(context));
  const compare = (row) => h("input", { type: "checkbox", checked: shown.has(row.name), disabled: row.name === name || (!shown.has(row.name) && shown.size >= MOST_COMPARED), "aria-label": `Compare with ${row.name}`, onchange: (event) => {
    const next = new Set(shown);
    if (event.target.checked) next.add(row.name);
    else next.delete(row.name);
    context.setOptions({ run: name, compare: [...next] });
  } });
  body.append(panel("Runs", `The curves of up to ${MOST_COMPARED} other runs can be drawn in the same figures.`, table([
    { title: "run", key: "name", text: (v) => h("button", { type: "button", class: "link", onclick: () => context.setOptions({ run: v, compare: [] }) }, v) },
    { title: "compare", value: (row) => row, text: (row) => compare(row) },
    { title: "state", key: "state" },
    { title: "steps", key: "steps", text: format.whole, align: "right" },
    { title: "loss", key: "loss", text: (v) => format.number(v, 4), align: "right" },
    { title: "step", key: "step_time_s", text: (v) => format.seconds(v), align: "right" },
    { title: "predicted", key: "predicted_step_time_s", text: (v) => format.seconds(v), align: "right" },
    { title: "per second", value: (row) => row, text: (row) => (row.tokens_per_s ? `${format.count(row.tokens_per_s)} ${row.unit}` : "–"), align: "right" },
    { title: "plan", value: (row) => [row.model, row.title].filter(Boolean).join(" · ") },
  ], known.list.runs, { caption: "Training runs", chosen: (row) => row.name === name })));
}

/** The verdict of `verify --out` in the same folder. */
function proved(proof) {
  const copies = (proof.copies ?? [proof]).map((copy) => copy.plan).filter(Boolean), bounds = Object.entries(proof.errors ?? {}).map(([dtype, e]) => `${dtype} gradients within ${e.gradient?.toExponential(1)}`);
  const first = proof.first_break, why = first ? `${first.what} ${first.name} of step ${first.step} on rank ${first.rank} differs; axis ${first.axis}` : "the collectives it issues differ from the step program";
  const words = proof.passed ? `Proved to train the same model as one device, over ${proof.steps} steps on ${proof.ranks} ranks: ${bounds.join(", ")}.` : `Not proved: ${why}.`;
  return h("p", { class: proof.passed ? "notice good" : "notice bad" }, words, copies.length ? ` Trained to prove it: ${copies.join("; ")}.` : "");
}

/** Attempts and events, if there was more than one uneventful attempt. */
function history(body, run) {
  const clock = (seconds) => new Date(1e3 * seconds).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
  const attempts = run.about?.attempts ?? [], events = run.events.filter((event) => !["checkpoint-begun", "evaluation"].includes(event.kind)).slice(-50).reverse();
  if (attempts.length > 1 || attempts[0]?.cause) body.append(panel("Attempts", "A run that lost a rank begins again at its last good checkpoint.", table([
    { title: "attempt", value: (row) => attempts.indexOf(row) + 1 },
    { title: "began", key: "start", text: clock },
    { title: "ranks", key: "world", align: "right" },
    { title: "plan", key: "plan" },
    { title: "first step", key: "resumed_from", text: (v) => format.whole(v ?? 0), align: "right" },
    { title: "ended", key: "ended", text: (v) => (v ? clock(v) : "–") },
    { title: "cause", key: "cause", text: (v) => v ?? "" },
  ], attempts, { caption: "Attempts" })));
  if (events.length) body.append(panel("Events", "The newest first.", table([{ title: "time", key: "time", text: clock }, { title: "step", key: "step", text: format.whole, align: "right" }, { title: "event", key: "text" }], events, { caption: "Events" })));
}

/** What a run depends on besides its run file. */
function circumstances(body, run) {
  const about = run.about ?? {}, git = about.git, versions = Object.entries(about.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  const rows = [["command", (about.command ?? []).join(" ")], ["hosts", (about.hosts ?? []).join(", ")], ["versions", versions], ["git", git ? `${git.commit.slice(0, 12)} on ${git.branch}${git.changed ? `, ${git.changed} changed files` : ""}` : ""], ["seed", about.seed], ["platform", about.platform]].filter(([, value]) => value !== undefined && value !== "");
  if (rows.length) body.append(panel("How it was run", null, h("dl", { class: "reasons" }, rows.flatMap(([name, value]) => [h("dt", null, name), h("dd", null, String(value))]))));
}

const quantity = (value, unit) => ({ s: () => format.seconds(value), bytes: () => format.bytes(value), GiB: () => format.gib(value), "%": () => `${format.number(value)}%` })[unit]?.() ?? `${format.count(value)} ${unit}`;
