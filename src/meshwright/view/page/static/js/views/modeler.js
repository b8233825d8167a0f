// The published bandwidth and efficiency modeler with its own numbers and the corrected ones side by side.

import { axis, band, button, centred, choice, empty, figure, format, h, labelled, linear, panel, rect, slider, table } from "meshwright/draw.js";

const KINDS = { F: ["forward", "forward"], B: ["backward", "backward"], I: ["backward", "backward of inputs"], W: ["weight", "backward of weights"] };
const TEXT = {
  share: (v) => format.percent(v), s: (v) => format.seconds(v, 4), "bit/s": (v) => `${(v / 1e9).toFixed(2)} Gb/s`,
  MiB: (v) => `${format.number(v / 2 ** 20, 4)} MiB`, GiB: (v) => `${format.number(v / 2 ** 30, 4)} GiB`,
};
const upTo = (most) => Array.from({ length: most }, (_, k) => k + 1), powers = (from, to) => upTo(to - from + 1).map((k) => 2 ** (k + from - 1));
const STEPS = { stages: upTo(64), microbatches: [...powers(0, 9), 6, 12, 24, 48, 96], layers: upTo(100), tokens: powers(8, 17), tp: powers(0, 6) };

export const view = {
  title: "Bandwidth and efficiency modeler",
  sentence: "A pipeline by its few numbers. A published tool shows the same inputs; its values stand next to the corrected ones.",
  draw(element, { inputs: i, rate, ...data }, context) {
    const set = (key) => (value) => context.setOptions({ [key]: value });
    const steps = (name, key) => slider(name, { values: [...new Set([...STEPS[key], i[key]])].sort((a, b) => a - b), value: i[key], text: format.whole, oninput: set(key) });
    const typed = (name, key, most = 1e6) => number(name, i[key], key === "hidden" ? 1 : 0.001, most, key === "hidden", set(key));
    if (context.live) element.append(h("div", { class: "controls grid" },
      steps("Stages", "stages"), steps("Micro-batches", "microbatches"), steps("Layers per stage", "layers"), steps("Tokens per micro-batch", "tokens"),
      typed("Hidden size", "hidden", 65536), steps("Tensor-parallel ranks", "tp"), typed("Compute: ms per layer and micro-batch", "layer_ms", 1e4),
      typed("Link between stages, Gb/s", "link_gbps"), choice("Precision", data.precisions, i.precision, set("precision")),
      choice("Schedule", data.schedules, i.schedule, set("schedule")), typed("Bytes reduced in chunks, MB", "chunk_mb"),
      typed("Rate of that reduction, Gb/s", "chunk_gbps"), typed("Cost of one more chunk, µs", "overhead_us")));
    if (data.advice.low) element.append(warning(data.advice, i, context));
    const line = panel("The schedule, walked", `${i.stages} stages × ${i.microbatches} micro-batches = ${i.stages * i.microbatches} forwards and as many backwards. Gaps are the bubble.`);
    element.append(panel("As published, and corrected", "Where the two differ, the last column says why.", table([
      ["", "name"], ["published tool", (row) => (row.tool === null ? "not shown" : TEXT[row.unit](row.tool)), "plain"],
      ["here", (row) => h("b", { class: row.same ? "" : "tone-warn" }, TEXT[row.unit](row.ours)), "plain", (row) => `${row.name}\n${row.formula}`],
      "formula", ["difference", (row) => row.why || "none"]], data.rows, { caption: "Numbers of the pipeline" })),
    panel("Chunks behind backward", "More chunks overlap more and cost more.", h("p", null, data.chunks.formula, ".")), line);
    if (data.timeline) schedule(line, data.timeline);
    else line.append(empty("Too many actions to draw here: the timeline view has them all."));
    const sent = TEXT.MiB(data.message_bytes), about = (held) => [`${i.layers} layers`, `${sent} per micro-batch`, `holds ${held} micro-batches`];
    const card = (held, k) => h("li", null, h("b", null, `Stage ${k + 1}`), about(held).map((words) => h("span", null, words)));
    element.append(panel("Stages", "Activations flow forward, gradients backward.", h("ol", { class: "cards" }, data.held.map(card))));
    const ranks = i.tp > 1 ? ` on one of ${format.whole(i.tp)} tensor-parallel ranks,` : "", far = rate.flops_per_s > 2.5e15;
    element.append(panel("What this compute rate means", null, h("p", null, `A transformer layer of width ${format.whole(i.hidden)} takes ${format.flops(rate.flops)} for forward and backward${ranks} of `,
      `${format.whole(i.tokens)} tokens; in ${format.number(i.layer_ms)} ms that is ${format.flops(rate.flops_per_s)}/s. `,
      far ? "No single GPU does this: the stated rate stands for a group of them, or for much thinner layers." : "A fast GPU, or a few of them, can do this.")));
  },
};

/** A labelled number within limits; a value outside says so at the field and changes nothing. */
function number(name, value, min, max, whole, onchange) {
  const input = h("input", { type: "number", value, min, max, step: whole ? 1 : "any", onchange: () => {
    const typed = Number(input.value), legal = input.value !== "" && typed >= min && typed <= max && (!whole || Number.isInteger(typed));
    input.setCustomValidity(legal ? "" : `${whole ? "A whole number" : "A number"} from ${format.number(min)} to ${format.number(max)}`);
    input.reportValidity();
    if (legal) onchange(typed);
  } });
  return labelled(name, input);
}

function warning({ tool, ours, efficiency_share: share }, inputs, context) {
  const use = (words, options) => (context.live ? button(words, () => context.setOptions(options), { class: "small" }) : words);
  return h("div", { class: "notice" }, h("p", null, h("b", null, "Low efficiency. "), `Pipeline efficiency is ${format.percent(share)}, below 80%. `,
    `Raise micro-batches from ${inputs.microbatches} to ${ours.microbatches}, or cut stages from ${inputs.stages} to ${ours.stages}.`),
  h("p", null, ours.microbatches ? use(`${ours.microbatches} micro-batches`, { microbatches: ours.microbatches }) : "", " ", use(`${ours.stages} stages`, { stages: ours.stages }),
    ` The published tool says ${tool.microbatches} micro-batches or ${tool.stages} stages: it doubles, or removes one.`));
}

/** A walked schedule: actions [rank, kind, micro-batch, start, end, depth of the stage]. Returns the chart, its scales and the marks of the actions. */
export function schedule(element, timeline, { label: title = "time within the step, ms", unit = 1e3, time = format.seconds, lane = (r) => `stage ${r + 1}` } = {}) {
  const height = Math.max(10, Math.min(26, 300 / timeline.ranks));
  const chart = figure(element, { height: 44 + height * timeline.ranks, left: 62, right: 12, bottom: 38, label: `Timeline of ${timeline.ranks} ranks over ${time(timeline.makespan_s)}` });
  const x = linear([0, timeline.makespan_s], [0, chart.width]), y = band(Array.from({ length: timeline.ranks }, (_, r) => lane(r)), [0, chart.height], { gap: 0.12 });
  axis(chart, x, "bottom", { label: title, format: (v) => format.number(v * unit), grid: false });
  axis(chart, y, "left");
  const marks = timeline.actions.map(([rank, kind, microbatch, start, end, depth]) => {
    const [colour, name] = KINDS[kind], width = x(end) - x(start), at = y(lane(rank));
    const node = rect(chart, x(start) + 0.5, at, width - 1, y.width, { fill: colour, focus: false, round: 1, opacity: depth ? 1 - 0.45 * depth : null, formula: `${name} of micro-batch ${microbatch + 1}, ${lane(rank)}\n${time(start)} to ${time(end)}` });
    const hasRoom = width > 16 && y.width > 11;
    return [node, hasRoom && centred(chart, microbatch + 1, x(start) + width / 2, at + y.width / 2, { size: 10, colour: "on-fill" })];
  });
  return { chart, x, y, marks };
}
