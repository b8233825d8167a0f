// The published bandwidth and efficiency modeler with its own numbers and the corrected ones side by side.

import { axis, band, choice, figure, format, h, label, linear, panel, rect, slider, table } from "meshwright/draw.js";

const KINDS = { F: ["forward", "forward"], B: ["backward", "backward"], I: ["backward", "backward of inputs"], W: ["weight", "backward of weights"] };
const TEXT = { share: (v) => format.percent(v), s: (v) => format.seconds(v, 4), "bit/s": (v) => `${(v / 1e9).toFixed(2)} Gb/s`, MiB: (v) => `${format.number(v / 2 ** 20, 4)} MiB`, GiB: (v) => `${format.number(v / 2 ** 30, 4)} GiB` };

export const view = {
  title: "Bandwidth and efficiency modeler",
  sentence: "A pipeline by its few numbers. A published tool shows the same inputs; its values stand next to the corrected ones.",
  draw(element, data, context) {
    const i = data.inputs, set = (key) => (value) => context.setOptions({ [key]: value });
    const upTo = (most) => Array.from({ length: most }, (_, k) => k + 1), powers = (from, to) => upTo(to - from + 1).map((k) => 2 ** (k + from - 1));
    const inputs = h("div", { class: "controls grid" },
      slider("Stages", { values: upTo(64), value: i.stages, text: format.whole, oninput: set("stages") }),
      slider("Micro-batches", { values: [...new Set([...powers(0, 9), 6, 12, 24, 48, 96, i.microbatches])].sort((a, b) => a - b), value: i.microbatches, text: format.whole, oninput: set("microbatches") }),
      slider("Layers per stage", { values: upTo(100), value: i.layers, text: format.whole, oninput: set("layers") }),
      slider("Tokens per micro-batch", { values: powers(8, 17), value: i.tokens, text: format.whole, oninput: set("tokens") }),
      number("Hidden size", i.hidden, 1, 65536, true, set("hidden")),
      slider("Tensor-parallel ranks", { values: powers(0, 6), value: i.tp, text: format.whole, oninput: set("tp") }),
      number("Compute: ms per layer and micro-batch", i.layer_ms, 0.001, 1e4, false, set("layer_ms")),
      number("Link between stages, Gb/s", i.link_gbps, 0.001, 1e6, false, set("link_gbps")),
      choice("Precision", data.precisions, i.precision, set("precision")),
      choice("Schedule", data.schedules, i.schedule, set("schedule")),
      number("Bytes reduced in chunks, MB", i.chunk_mb, 0.001, 1e6, false, set("chunk_mb")),
      number("Rate of that reduction, Gb/s", i.chunk_gbps, 0.001, 1e6, false, set("chunk_gbps")),
      number("Cost of one more chunk, µs", i.overhead_us, 0.001, 1e6, false, set("overhead_us")));
    element.append(context.live ? inputs : "");
    if (data.advice.low) element.append(warning(data, context));
    element.append(panel("As published, and corrected", "Where the two differ, the last column says why.", table([
      { title: "", key: "name" },
      { title: "published tool", key: "tool", text: (v, row) => (v === null ? "not shown" : TEXT[row.unit](v)), align: "right" },
      { title: "here", key: "ours", text: (v, row) => h("b", { class: row.same ? "" : "tone-warn" }, TEXT[row.unit](v)), align: "right", formula: (row) => `${row.name}\n${row.formula}` },
      { title: "formula", key: "formula" },
      { title: "difference", key: "why", text: (v) => v || "none" },
    ], data.rows, { caption: "Numbers of the pipeline" })));
    element.append(panel("Chunks behind backward", "More chunks overlap more and cost more.", h("p", null, data.chunks.formula, ".")));
    const line = element.appendChild(panel("The schedule, walked", `${i.stages} stages × ${i.microbatches} micro-batches = ${i.stages * i.microbatches} forwards and as many backwards. White is the bubble.`));
    if (data.timeline) schedule(line, data.timeline);
    else line.append(h("p", { class: "empty" }, "Too many actions to draw here: the timeline view has them all."));
    element.append(panel("Stages", "Activations flow forward, gradients backward.", h("ol", { class: "cards" }, data.cards.map((c) => h("li", null, h("b", null, `Stage ${c.stage}`), h("span", null, `${c.layers} layers`), h("span", null, `${format.number(c.message_bytes / 2 ** 20, 4)} MiB per micro-batch`), h("span", null, `holds ${c.held} micro-batches`))))));
    element.append(panel("What this compute rate means", null, h("p", null, `A transformer layer of width ${format.whole(i.hidden)} takes ${format.flops(data.rate.flops)} for forward and backward${i.tp > 1 ? ` on one of ${format.whole(i.tp)} tensor-parallel ranks,` : ""} of ${format.whole(i.tokens)} tokens; in ${format.number(i.layer_ms)} ms that is ${format.flops(data.rate.flops_per_s)}/s. ${data.rate.flops_per_s > 2.5e15 ? "No single GPU does this: the stated rate stands for a group of them, or for much thinner layers." : "A fast GPU, or a few of them, can do this."}`)));
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
  return h("label", { class: "control" }, h("span", null, name), input);
}

function warning(data, context) {
  const { tool, ours } = data.advice, use = (words, options) => (context.live ? h("button", { type: "button", class: "small", onclick: () => context.setOptions(options) }, words) : words);
  return h("div", { class: "notice" }, h("p", null, h("b", null, "Low efficiency. "), `Pipeline efficiency is ${format.percent(data.advice.efficiency_share)}, below 80%. Raise micro-batches from ${data.inputs.microbatches} to ${ours.microbatches}, or cut stages from ${data.inputs.stages} to ${ours.stages}.`),
    h("p", null, ours.microbatches ? use(`${ours.microbatches} micro-batches`, { microbatches: ours.microbatches }) : "", " ", use(`${ours.stages} stages`, { stages: ours.stages }), ` The published tool says ${tool.microbatches} micro-batches or ${tool.stages} stages: it doubles, or removes one.`));
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
    const words = width > 16 && y.width > 11 ? label(chart, microbatch + 1, x(start) + width / 2, at + y.width / 2, { anchor: "middle", middle: true, size: 10, colour: "on-fill" }) : null;
    if (words) words.style.pointerEvents = "none";
    return [node, words];
  });
  return { chart, x, y, marks };
}
