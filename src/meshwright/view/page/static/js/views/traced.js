// Traced steps beside the prediction: a strip per rank between what Python says of them.

import { format, legend, panel } from "meshwright/draw.js";
import { zone } from "meshwright/files.js";
import { laneOf, lanes } from "meshwright/lanes.js";
import * as source from "meshwright/source.js";
import { parts } from "meshwright/views/sheet.js";

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

function steps(element, data) {
  parts(element, data.parts);
  const strip = element.appendChild(panel(`One step of each rank (step ${data.step})`, data.note));
  strips(strip, data, data.predicted);
  parts(element, data.after);
}

/** A lane per rank on one time axis, and the prediction as the last lane. */
function strips(element, data, predicted) {
  const all = [...data.ranks.map((r) => ({ name: `rank ${r.rank}`, pieces: r.pieces, names: data.names })), ...(predicted ? [{ name: "predicted", ...predicted }] : [])];
  const drawn = all.map(({ name, pieces, names }) => laneOf(name, pieces.map(([start, length, index]) => ({ start, end: start + length, part: names[index] })), (s) => ({ colour: look(s.part), text: s.part.split(": ").at(-1), about: `${s.part}\n${name}: ${format.seconds(s.end - s.start)} from ${format.seconds(s.start)}` })));
  const long = (some) => Math.max(0, ...some.map((lane) => lane.reach.at(-1) ?? 0)); // of this step: the mean of all is above
  lanes(element, [{ title: `Step ${data.step}`, note: format.seconds(long(drawn.slice(0, data.ranks.length))), lanes: drawn }], { total: long(drawn), lane: 26, label: all.map(({ name, pieces }) => `${name}: ${pieces.length} pieces`).join(", ") });
  const seen = new Map(all.flatMap(({ pieces, names }) => pieces.map(([, , index]) => [look(names[index]), names[index]])));
  element.append(legend([...seen].map(([colour, part]) => ({ label: part.startsWith("waiting") ? "waiting for another rank" : part, colour }))));
}
