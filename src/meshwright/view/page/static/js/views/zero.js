// ZeRO stages and the memory wall: state on one GPU by stage, the largest model that fits, and this plan with each stage.

import { axis, band, bars, choice, figure, format, h, label, legend, line, linear, log, panel, stacked, svg, table, threshold } from "meshwright/draw.js";

const COLOURS = { parameters: "parameters", gradients: "gradients", optimizer: "states" }, LINES = [["tp", null], ["cp", "7 4"], ["ep", "3 3"], ["compute", null]];

export const view = {
  name: "zero",
  title: "ZeRO and the memory wall",
  short: "ZeRO",
  workspace: "learn",
  sentence: "Adam in mixed precision keeps 16 bytes per parameter. ZeRO shards the optimizer’s 12 (stage 1), the gradients’ 2 (stage 2) and the weights’ 2 (stage 3) over the data-parallel GPUs.",
  draw(element, data, context) {
    if (context.live) element.append(h("div", { class: "controls" }, choice("Data-parallel GPUs (P)", data.rank_choices.map((n) => [n, String(n)]), data.ranks, (ranks) => context.setOptions({ ranks }))));
    const columns = h("div", { class: "columns" });
    const bars_ = panel(`State of ${format.count(data.parameters)} parameters on one of ${data.ranks} GPUs`, data.note), wall_ = panel("The memory wall", "State on one GPU by model size. Where a line crosses the GPU’s memory, the state alone no longer fits.");
    columns.append(bars_, wall_);
    element.append(columns);
    stages(bars_, data);
    wall(wall_, data);
    if (data.plan.length > 1) {
      const box = panel("This plan with each stage", "All memory of the fullest GPU, as estimated: activations, buffers and the allocator’s slack included.");
      element.append(box);
      whole(box, data);
    }
    element.append(panel("A printed figure, corrected", "An often copied figure of a 7B model on 8 GPUs does not add up; the formula gives:", table([
      { title: "stage", key: "name" }, { title: "printed", key: "printed_gb", text: (v) => `${format.number(v)} GB`, align: "right" }, { title: "right", key: "right_gb", text: (v) => `${format.number(v, 4)} GB`, align: "right" },
    ], data.seed, { caption: "State on one of 8 GPUs, 7B parameters" })));
  },
};

function stages(element, data) {
  const list = data.stages.map((s) => ({ ...s, label: s.name }));
  const c = figure(element, { height: 250, left: 66, right: 64, bottom: 42, label: list.map((s) => s.formula).join("; ") });
  const x = linear([0, Math.max(...list.map((s) => s.bytes), data.limit_bytes)], [0, c.width]), y = band(list.map((s) => s.label), [0, c.height], { gap: 0.3 });
  axis(c, x, "bottom", { label: "bytes of state on one GPU", format: (v) => format.bytes(v), ticks: 3 });
  axis(c, y, "left");
  stacked(c, list.map((s) => ({ label: s.label, parts: s.parts.map((p) => ({ name: p.name, value: p.bytes, colour: COLOURS[p.name], formula: s.formula })) })), { x, y });
  for (const s of list) label(c, format.bytes(s.bytes), x(s.bytes) + 5, y(s.label) + y.width / 2, { middle: true, size: 11, weight: 600, colour: s.bytes > data.limit_bytes ? "bad" : "ink", halo: true });
  threshold(c, x(data.limit_bytes), `${data.accelerator} ${format.bytes(data.limit_bytes)}`);
  element.append(legend([{ label: "weights 2N", colour: "parameters" }, { label: "gradients 2N", colour: "gradients" }, { label: "masters and moments 12N", colour: "states" }]), h("p", { class: "sentence" }, `Sent per step and GPU: ${data.stages.map((s) => `${s.name} ${s.sent}`).join(", ")} elements.`));
}

function wall(element, data) {
  const c = figure(element, { height: 290, left: 62, right: 18, bottom: 42, label: data.wall.map((w) => `${w.name}: up to ${format.count(w.largest)} parameters`).join(", ") });
  const x = log([1e8, 1e13], [0, c.width]), y = log([1e9, 1e13], [c.height, 0]);
  axis(c, x, "bottom", { label: "parameters", format: (v) => format.count(v), ticks: 6 });
  axis(c, y, "left", { format: (v) => format.bytes(v), ticks: 5 });
  data.wall.forEach((w, k) => {
    line(c, w.curve.filter(([, b]) => b >= 1e9 && b <= 1e13).map(([n, b]) => ({ x: n, y: b })), { x, y, colour: LINES[k][0], dash: LINES[k][1], formula: w.formula });
    if (w.largest <= 1e13 && w.largest >= 1e8) {
      c.plot.append(svg("circle", { cx: x(w.largest), cy: y(data.limit_bytes), r: 4.5, fill: LINES[k][0], stroke: "surface" }));
    }
  });
  threshold(c, y(data.limit_bytes), `${data.accelerator} ${format.bytes(data.limit_bytes)}`, { flat: true });
  const mine = x(data.parameters);
  c.plot.append(svg("line", { x1: mine, x2: mine, y1: 0, y2: c.height, stroke: "quiet", "stroke-width": 1.3, "stroke-dasharray": "2 3" }));
  label(c, "this model", mine > c.width - 70 ? mine - 4 : mine + 4, c.height - 6, { anchor: mine > c.width - 70 ? "end" : "start", size: 10.5, colour: "quiet", halo: true });
  element.append(legend(data.wall.map((w, k) => ({ label: `${w.name} up to`, value: format.count(w.largest), colour: LINES[k][0], shape: "line", dash: LINES[k][1] }))));
}

function whole(element, data) {
  const list = data.plan.map((p) => ({ ...p, label: p.name }));
  const c = figure(element, { height: 54 + 34 * list.length, left: 66, right: 150, bottom: 42, label: list.map((p) => `${p.label}: ${format.gib(p.bytes / 2 ** 30)}`).join(", ") });
  const gib = (b) => b / 2 ** 30, x = linear([0, Math.max(...list.map((p) => gib(p.bytes)), gib(data.limit_bytes))], [0, c.width]), y = band(list.map((p) => p.label), [0, c.height], { gap: 0.3 });
  axis(c, x, "bottom", { label: "GiB on the fullest GPU", ticks: 4 });
  axis(c, y, "left");
  bars(c, list.map((p) => ({ label: p.label, value: gib(p.bytes), colour: p.fits ? "compute" : "bad", pattern: p.now ? null : "hatch", formula: `${p.label}: ${format.gib(gib(p.bytes))}, step ${format.seconds(p.step_time_s)}`, text: `${format.gib(gib(p.bytes))} · ${format.seconds(p.step_time_s)}${p.now ? " · this plan" : ""}` })), { x, y });
  threshold(c, x(gib(data.limit_bytes)), `${data.accelerator} ${format.gib(gib(data.limit_bytes))}`);
}
