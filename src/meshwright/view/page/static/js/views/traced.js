// Traced steps beside the prediction: a strip per rank, what to change first, and the waterfall from the predicted to the measured step.

import { bars } from "meshwright/charts.js";
import { format, legend, panel, sentence, stat, stats, table } from "meshwright/draw.js";
import { zone } from "meshwright/files.js";
import { laneOf, lanes } from "meshwright/lanes.js";
import * as source from "meshwright/source.js";

const COLOURS = {
  "compute: products": "compute", "compute: attention": "weight", "compute: loss": "backward", "compute: optimizer": "optimizer", "compute: other": "recompute",
  "compute: copies": "context", waiting: "bad", bubble: "hidden", communication: "dp", "communication: tp": "tp", "communication: cp": "cp", "communication: ep": "ep",
  "communication: pp": "pp", data: "series-5", host: "host", "host: synchronising calls": "series-7", other: "slack",
};
const look = (part) => COLOURS[part] ?? COLOURS[part.split(":")[0]] ?? COLOURS.other;

export const view = {
  title: "Traced steps",
  needs: source.live ? [] : ["traced"],
  sentence: "Where a step of each traced rank went, beside the prediction of its plan. Each moment belongs to one part, so the parts of a strip sum to its step.",
  draw(element, data) {
    zone(element, "traced", "Drop the profiler traces of any training program here, one file for each rank, or a folder with them (.json or .json.gz).", data.traced, steps);
  },
};

function steps(element, { predicted: p, causes, notes, memory, ...data }) {
  const seconds = format.seconds, held = data.memory_gib === null ? "not in the trace" : format.gib(data.memory_gib);
  const strip = panel(`One step of each rank (step ${data.step})`,
    p ? "The prediction is below, its parts one after the other. Where many short pieces meet, the longest is drawn." : data.no_prediction);
  element.append(stats(
    stat("Measured step", seconds(data.step_time_s), { detail: "mean, slowest rank" }),
    p && stat("Predicted step", seconds(p.step_time_s), { detail: `${seconds(p.low_s)} to ${seconds(p.high_s)}`, tone: data.step_time_s > p.high_s ? "warn" : "" }),
    stat("Attributed", format.percent(data.attributed), { detail: "of the traced time" }),
    (p || data.memory_gib !== null) && stat("Memory at the peak", held, { detail: p ? `${format.gib(p.memory_gib)} predicted` : "" })));
  element.append(panel("What to change first", causes.length ? "Causes of lost time, with the seconds of a step that each costs." : "No cause of lost time above 1% of the step: compute fills it.",
    notes.length ? sentence(notes.join(". ")) : null, causes.length ? table(["cause", ["per step", "seconds", "s"], "evidence", ["change", "fix"]], causes) : null));
  const columns = ["category", ["held", "gib", "gib"], ...(p ? [["predicted", "predicted_gib", (g) => (g ? format.gib(g) : "")]] : [])];
  if (memory.length) element.append(panel("Memory at the peak", data.memory_note, table(columns, memory)));
  element.append(strip);
  strips(strip, data, p);
  if (!p) return;
  waterfall(element.appendChild(panel("From the predicted to the measured step", `Rank ${p.rank}: red bars are slower than predicted, green ones faster.`)), p);
  element.append(panel("The largest differences", p.plan, table([["part", "name"], ["predicted", "predicted_s", "s"], ["measured", "measured_s", "s"], "reason"], p.largest)));
}

/** A lane per rank on one time axis, and the prediction as the last lane. */
function strips(element, data, predicted) {
  const all = [...data.ranks.map((r) => ({ name: `rank ${r.rank}`, pieces: r.pieces, parts: data.parts })), ...(predicted ? [{ name: "predicted", ...predicted }] : [])];
  const drawn = all.map(({ name, pieces, parts }) => laneOf(name, pieces.map(([start, length, index]) => ({ start, end: start + length, part: parts[index] })), (s) => ({ colour: look(s.part), text: s.part.split(": ").at(-1), about: `${s.part}\n${name}: ${format.seconds(s.end - s.start)} from ${format.seconds(s.start)}` })));
  const long = (some) => Math.max(0, ...some.map((lane) => lane.reach.at(-1) ?? 0)); // of this step: the mean of all is above
  lanes(element, [{ title: `Step ${data.step}`, note: format.seconds(long(drawn.slice(0, data.ranks.length))), lanes: drawn }], { total: long(drawn), lane: 26, label: all.map(({ name, pieces }) => `${name}: ${pieces.length} pieces`).join(", ") });
  const seen = new Map(all.flatMap(({ pieces, parts }) => pieces.map(([, , index]) => [look(parts[index]), parts[index]])));
  element.append(legend([...seen].map(([colour, part]) => ({ label: part.startsWith("waiting") ? "waiting for another rank" : part, colour }))));
}

function waterfall(element, predicted) {
  let sum = predicted.step_time_s;
  const whole = (label, colour) => ({ label, text: format.seconds(sum), parts: [{ value: sum, colour }] }), rows = [whole("predicted", "quiet")];
  for (const part of predicted.rows) {
    const change = part.measured_s - part.predicted_s;
    rows.push({ label: part.name, start: Math.min(sum, sum + change), text: `${change > 0 ? "+" : "−"}${format.seconds(Math.abs(change))}`, parts: [{ value: Math.abs(change), colour: change > 0 ? "bad" : "good", formula: `${part.name}: ${format.seconds(part.predicted_s)} predicted, ${format.seconds(part.measured_s)} measured\n${part.reason}` }] });
    sum += change;
  }
  bars(element, [...rows, whole("measured", "compute")], { left: 190, right: 100, x: { seconds: "time within the step" } });
}
