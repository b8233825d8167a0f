// The pipeline timeline: one lane per rank, schedules under each other at one time scale.

import { button, contentWidth, format, h, legend, panel, stat, stats, table } from "meshwright/draw.js";
import { lanes } from "meshwright/lanes.js";

const COLOURS = { F: "forward", B: "backward", I: "input-gradient", W: "weight" };
const CLOSING = { dp: "dp", sums: "tp", optimizer: "optimizer", overhead: "host" }, CLOSING_NAMES = { dp: "reduce gradients", sums: "sum partial gradients" };
const ACTION_PX = 16; // width of an action below which only the beginning is shown at first
let time = format.seconds; // how times are written: seconds, or units of a schedule that belongs to no plan
let place = {}; // what is shown; kept while the same pipeline is drawn again

export const view = {
  title: "Pipeline timeline",
  sentence: "One lane per pipeline rank, time to the right. Gaps are the bubble. All schedules have the same time scale.",
  draw(element, data, context) {
    const first = data.panels[0];
    time = data.unit ? (value, digits) => `${format.number(value, digits)} ${data.unit}` : format.seconds;
    element.append(stats(
      stat("Step", time(first.step_time_s), { detail: `${first.schedule}, simulated`, formula: first.formulas.step_time_s }),
      stat("Bubble", format.percent(first.bubble_fraction), { detail: "idle share of the schedule", formula: first.formulas.bubble_fraction, tone: first.bubble_fraction > 0.2 ? "warn" : "" }),
      stat("In flight, most", format.number(Math.max(...first.in_flight)), { detail: "micro-batches on one rank" }),
      stat("Micro-batches", format.whole(first.microbatches), { detail: `on ${first.ranks} ${first.ranks === 1 ? "rank" : "ranks"}` })));
    const shown = data.panels, box = element.appendChild(panel("Schedules", data.note)), kinds = kindsOf(shown).map((k) => ({ label: `${k} ${data.kinds[k]}`, colour: COLOURS[k] }));
    if (data.choices.length && data.pipeline && context.live) box.append(choose(data, context));
    timelines(box, data, shown);
    box.append(legend([...kinds, ...closingOf(shown).map((part) => ({ label: nameOf(part), colour: CLOSING[part] })), { label: "bubble", colour: "grid" }]));
    if (shown.length > 1) box.append(comparison(shown));
    if (data.stages.length > 1) element.append(stages(data));
  },
};

const nameOf = (part) => CLOSING_NAMES[part] ?? part, titleOf = ({ schedule, virtual }) => `${schedule}${virtual > 1 ? ` × ${virtual}` : ""}`;
const kindsOf = (panels) => ["F", "B", "I", "W"].filter((k) => panels.some((p) => p.lanes.some((lane) => lane.kind.includes(k))));
const closingOf = (panels) => Object.keys(CLOSING).filter((part) => panels.some((p) => p.closing.some((c) => c.part === part)));

/** One toggle for every schedule; those that this plan cannot run are disabled with the reason. */
function choose(data, context) {
  const shown = new Set(data.panels.slice(1).map((p) => p.schedule));
  const turn = ({ name, legal, about, reason }) => button(name, () => {
    shown.delete(name) || shown.add(name);
    context.setOptions({ schedules: [...shown].slice(-3) });
  }, { class: "small", disabled: !legal, title: legal ? about : reason, "aria-pressed": String(shown.has(name)) });
  const others = data.choices.filter((c) => c.name !== data.panels[0].schedule);
  return h("div", { class: "controls", role: "group", "aria-label": "Schedules to compare" }, others.map(turn));
}

/** The lanes of a panel: the actions of every rank, then what follows the schedule. */
function group(one, ticks, kinds) {
  const second = one.makespan_s / ticks;
  const ranks = one.lanes.map((lane, rank) => {
    const n = lane.start.length, start = new Float64Array(n + one.closing.length), end = new Float64Array(n + one.closing.length);
    const stage = (i) => (lane.stage.length ? lane.stage[i] : rank), late = one.virtual > 1 ? 0.4 / (one.virtual - 1) : 0;
    for (let i = 0; i < n; i++) {
      start[i] = lane.start[i] * second;
      end[i] = start[i] + one.durations[lane.kind[i]][stage(i)] * second;
    }
    let t = one.makespan_s;
    one.closing.forEach((part, k) => { start[n + k] = t; end[n + k] = t += part.seconds; });
    const action = (f, closing) => (i) => (i < n ? f(i) : closing(one.closing[i - n]));
    return {
      name: `rank ${rank}`, start, end,
      colour: action((i) => COLOURS[lane.kind[i]], (part) => CLOSING[part.part]),
      text: action((i) => String(lane.microbatch[i]), ({ part }) => nameOf(part)),
      key: action((i) => lane.microbatch[i], () => null),
      alpha: late ? action((i) => 1 - late * one.chunk_of[lane.stage[i]], () => 1) : null, // later stages of a rank are lighter
      about: action((i) => `${lane.kind[i]} (${kinds[lane.kind[i]]}) of micro-batch ${lane.microbatch[i]}, stage ${stage(i)}\nrank ${rank}: ${time(start[i], 4)} to ${time(end[i], 4)}, ${time(end[i] - start[i])}`,
        ({ part, seconds }) => `${nameOf(part)}\nall ranks: ${time(seconds)}`),
    };
  });
  return { title: titleOf(one), note: `${time(one.step_time_s)} · bubble ${format.percent(one.bubble_fraction)}`, lanes: ranks };
}

/** All schedules at one time scale. A schedule of many micro-batches begins with its warm-up, where an action can be told from the next. */
function timelines(element, data, shown) {
  const ranks = Math.max(...shown.map((p) => p.ranks)), total = Math.max(...shown.map((p) => p.step_time_s)), actions = Math.max(...shown[0].lanes.map((lane) => lane.start.length));
  const key = `${shown[0].ranks}/${shown[0].microbatches}/${total.toPrecision(3)}`;
  if (place.key !== key) place = { key };
  const pixels = (contentWidth(element) - 84) / Math.max(1, actions);
  lanes(element, shown.map((one) => group(one, data.ticks, data.kinds)), { total, place, time, begin: pixels < ACTION_PX ? (total * pixels) / ACTION_PX : total, lane: Math.max(6, Math.min(22, Math.floor(420 / (ranks * Math.min(2, shown.length))))), label: `Timelines of ${shown.map((p) => `${p.schedule}: ${time(p.step_time_s)}, bubble ${format.percent(p.bubble_fraction)}`).join("; ")}` });
}

function comparison(panels) {
  return table([
    ["schedule", titleOf], ["step", "step_time_s", (v) => time(v), (p) => p.formulas.step_time_s],
    ["bubble", "bubble_fraction", "share", (p) => p.formulas.bubble_fraction], ["in flight", (p) => Math.max(...p.in_flight), "number"],
    ...(panels.every((p) => p.memory_bytes === null) ? [] : [["memory", (p) => `${format.gib(p.memory_bytes / 2 ** 30)}${p.fits ? "" : ", too much"}`, "plain"]]),
  ], panels, { caption: "The same stages with each schedule" });
}

const stages = (data) => panel("Stages", `Activations flow forward, gradients backward: ${format.bytes(data.stages[0].message_bytes)} per micro-batch and direction at every boundary.`, table([
  ["stage", "stage", null, (s) => s.formula], ["rank", "rank", "plain"], ["layers", (s) => [s.layers, ...s.ends].join(" + "), "plain"],
  ["parameters", "parameters", "count"], ["forward", "forward_s", (v) => time(v)], ["backward", "backward_s", (v) => time(v)],
  ["memory", "memory_gib", "gib"], ["in flight", "in_flight", "number"],
], data.stages, { name: "Stages of the pipeline" }));
