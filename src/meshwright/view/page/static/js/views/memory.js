// Memory: stacked by part with the capacity line, per pipeline stage, and over time within the step.

import { bars, inSeconds, curves } from "meshwright/charts.js";
import { choice, controls, format, label, legend, panel, sentence, stat, stats } from "meshwright/draw.js";
import * as part from "meshwright/parts.js";

export const view = {
  title: "Memory per GPU",
  sentence: "The peak of the fullest stage, and how activations come and go within a step. Early stages hold those of more micro-batches.",
  draw(element, data, context) {
    const { formulas, timeline, checkpoint: save, limit_gib: limit } = data, host = format.gib(save.save_host);
    const held = `${format.number(timeline.in_flight)} micro-batches`, tooLarge = save.save_device > limit || save.save_host > save.host_limit;
    const time = panel("Over time within the step", `Stage ${timeline.stage} keeps up to ${held} between their forward and their backward.`);
    const choose = (stage) => context.setOptions({ stage }), stages = data.stages.map(({ stage }) => [stage, `stage ${stage}`]);
    element.append(stats(
      stat("Peak, fullest stage", format.gib(data.peak_gib), { detail: `of ${format.gib(limit)} usable`, tone: data.peak_gib > limit ? "bad" : "good", formula: formulas.peak }),
      stat("Model states", format.gib(data.states_gib), { detail: "parameters, gradients, optimizer", formula: formulas.states }),
      stat("Activations", format.gib(data.activations_gib), { detail: `${format.number(data.in_flight)} micro-batches in flight`, formula: formulas.activations }),
      stat("At a save", format.gib(save.save_device), { tone: tooLarge ? "bad" : "", formula: save.text,
        detail: save.save_host ? `and ${host} of ${format.gib(save.host_limit)} of a host` : "on a device; shards are written one tensor at a time" })), time);
    if (stages.length > 1) time.append(controls(choice("Stage", stages, timeline.stage, choose)));
    overTime(time, data);
  },
};

/** The stacked bars of the stages. Shared with the overview. */
export function stages(element, data, { most = 16 } = {}) {
  const shown = data.stages.length > most ? [...data.stages.slice(0, most / 2), ...data.stages.slice(-most / 2)] : data.stages;
  const gib = format.gib, rows = shown.map((stage) => ({ label: `stage ${stage.stage}`, text: gib(stage.total_gib), tone: stage.total_gib > data.limit_gib && "bad", parts: stage.parts.map((p) => ({ value: p.gib, ...part.memory(p.name), formula: `${p.name}: ${gib(p.gib)}\n${p.formula}` })) }));
  const peak = Math.max(...shown.map((stage) => stage.total_gib)), far = data.limit_gib > 4 * peak; // a small model: the limit would hide its bars
  bars(element, rows, { left: 62, right: 64, top: 18, tall: Math.min(26, 220 / Math.sqrt(rows.length)), weight: 600, x: { label: "GiB per GPU", most: far ? peak * 1.25 : Math.max(data.limit_gib, peak) * 1.02 }, limit: { at: data.limit_gib, words: `limit ${gib(data.limit_gib)}${far ? " →" : ""}` },
    label: `Memory per GPU by stage: ${rows.map((r) => `${r.label} ${r.text}`).join(", ")}; the limit is ${gib(data.limit_gib)}` });
  if (shown.length < data.stages.length) element.append(sentence(`The first and last ${most / 2} of ${data.stages.length} stages.`));
  element.append(legend(data.parts.map((name) => ({ label: name, ...part.memory(name) }))));
}

function overTime(element, data) {
  const { points, total_s: total, constant_gib: constant, peak_gib: peak } = data.timeline, limit = format.gib(data.limit_gib), far = data.limit_gib > 4 * peak;
  const chart = curves(element, {
    label: `Memory of stage ${data.timeline.stage} over one step: ${format.gib(constant)} constant, peak ${format.gib(peak)}`, height: 230, left: 56, right: 16, bottom: 36, inset: 0,
    x: { from: 0, to: total, ...inSeconds("time within the step", total) }, y: { from: 0, to: (far ? peak * 1.2 : Math.max(peak, data.limit_gib)) * 1.05, label: "GiB" },
    series: [
      { name: "states, working memory, context: constant", colour: "parameters", area: 0.45, only: true, dots: false, points: [0, total].map((x) => ({ x, y: constant })) },
      { name: "activations in flight", colour: "activations", area: 0.75, width: 1.2, steps: true, dots: false, points: points.map(([x, gib]) => ({ x, y: constant + gib, base: constant })) },
    ],
    marks: far ? [] : [{ at: data.limit_gib, words: `limit ${limit}`, colour: "bad", flat: true }],
  });
  if (far) label(chart, `limit ${limit} ↑`, chart.width, 6, { anchor: "end", size: 11, colour: "bad" });
}
