// Scaling over GPU counts: throughput and efficiency, and where transfers between nodes take longer than compute.

import { axis, figure, format, h, label, legend, line, linear, log, panel, scatter, svg, table } from "meshwright/draw.js";

export const view = {
  name: "scaling",
  title: "Scaling over GPUs",
  tab: "Scaling",
  workspace: "plan",
  sentence: "More data-parallel replicas of this plan. Strong scaling keeps the batch, weak scaling lets it grow with the GPUs; 100% means that every GPU trains as many samples as on the fewest.",
  draw(element, data) {
    if (!data.strong.length && !data.weak.length) return element.append(h("p", { class: "empty" }, data.note));
    const box = panel("Throughput", data.note), columns = h("div", { class: "columns" });
    element.append(box, columns);
    throughput(box, data);
    const efficiency = panel("Efficiency", "Throughput per GPU, relative to the fewest GPUs."), crossing = panel("What takes the time", data.takes_over ? data.takes_over.formula : "Seconds per step of one GPU with the same batch: compute shrinks with more GPUs, gradient traffic does not.");
    columns.append(efficiency, crossing);
    shares(efficiency, data);
    seconds(crossing, data);
    if (data.best.length) element.append(panel("The best plan of each size", "", table([
      { title: "GPUs", key: "gpus", text: (v) => format.whole(v), align: "right" }, { title: "step", key: "step_time_s", text: (v) => format.seconds(v), align: "right" },
      { title: `${data.unit}/s`, key: "tokens_per_s", text: (v) => format.count(v), align: "right", formula: (r) => r.formula }, { title: "best common plan", key: "title" },
    ], data.best, { caption: "The best common plan with the same batch" })));
  },
};

const gpus = (data) => [...new Set([...data.strong, ...data.weak, ...data.best].map((r) => r.gpus))].sort((a, b) => a - b);
const xOf = (c, data) => { const all = gpus(data); return log([all[0], Math.max(all[all.length - 1], all[0] * 2)], [8, c.width - 8], { base: 2 }); };
const ticksOf = (c, data) => { const all = [...new Set([...data.strong, ...data.weak].map((r) => r.gpus))].sort((a, b) => a - b), every = Math.ceil(all.length / Math.max(2, Math.floor(c.width / 64))); return all.filter((_, i) => i % every === 0); };

function throughput(element, data) {
  const c = figure(element, { height: 300, left: 66, right: 20, bottom: 42, label: data.note });
  const rows = [...data.strong, ...data.weak, ...data.best], x = xOf(c, data), y = log([Math.min(...rows.map((r) => r.tokens_per_s)) * 0.8, Math.max(...rows.map((r) => r.tokens_per_s)) * 1.25], [c.height, 0]);
  axis(c, x, "bottom", { label: "GPUs", ticks: ticksOf(c, data), format: (v) => format.whole(v) });
  axis(c, y, "left", { label: `${data.unit} per second`, format: (v) => format.count(v) });
  const series = (list, colour, dash) => (line(c, list.map((r) => ({ x: r.gpus, y: r.tokens_per_s })), { x, y, colour, dash }), scatter(c, list.map((r) => ({ x: r.gpus, y: r.tokens_per_s, formula: r.formula, shape: r.fits === false ? "cross" : "circle" })), { x, y, colour, radius: 4.5 }));
  const first = data.strong[0] ?? data.weak[0], last = gpus(data).at(-1);
  line(c, [{ x: first.gpus, y: first.tokens_per_s }, { x: last, y: (first.tokens_per_s * last) / first.gpus }], { x, y, colour: "quiet", dash: "2 4", width: 1.3 });
  series(data.weak, "optimizer", "6 4");
  series(data.strong, "compute", null);
  scatter(c, data.best.map((r) => ({ x: r.gpus, y: r.tokens_per_s, formula: r.formula })), { x, y, colour: "ep", shape: "diamond", radius: 6 });
  marker(c, x, data);
  element.append(legend([{ label: "same batch (strong)", colour: "compute", shape: "line" }, { label: "batch grows (weak)", colour: "optimizer", shape: "line", dash: "6 4" }, { label: "in proportion", colour: "quiet", shape: "line", dash: "2 4" }, ...(data.best.length ? [{ label: "best plan of the size", colour: "ep" }] : [])]));
}

function marker(c, x, data) {
  if (!data.takes_over) return;
  const at = x(data.takes_over.gpus);
  c.plot.append(svg("line", { x1: at, x2: at, y1: 0, y2: c.height, stroke: "bad", "stroke-width": 1.6, "stroke-dasharray": "5 4" }));
  label(c, "inter-node bandwidth takes over", at > c.width / 2 ? at - 5 : at + 5, 10, { anchor: at > c.width / 2 ? "end" : "start", size: 11, colour: "bad", halo: true });
}

function shares(element, data) {
  const c = figure(element, { height: 260, left: 52, right: 14, bottom: 42, label: `Efficiency: ${data.strong.map((r) => `${r.gpus} GPUs ${format.percent(r.efficiency, 0)}`).join(", ")}` });
  const x = xOf(c, data), y = linear([0, Math.max(1.05, ...data.strong.map((r) => r.efficiency), ...data.weak.map((r) => r.efficiency))], [c.height, 0]);
  axis(c, x, "bottom", { label: "GPUs", ticks: ticksOf(c, data), format: (v) => format.whole(v) });
  axis(c, y, "left", { format: (v) => format.percent(v, 0) });
  for (const [rows, colour, dash] of [[data.weak, "optimizer", "6 4"], [data.strong, "compute", null]]) {
    line(c, rows.map((r) => ({ x: r.gpus, y: r.efficiency })), { x, y, colour, dash });
    scatter(c, rows.map((r) => ({ x: r.gpus, y: r.efficiency, formula: r.formula })), { x, y, colour, radius: 4 });
  }
}

function seconds(element, data) {
  const rows = data.strong, values = rows.flatMap((r) => [r.compute_s, r.inside_s, r.between_s]).filter((v) => v > 0);
  if (rows.length < 2 || !values.length) return element.append(h("p", { class: "empty" }, "One size only."));
  const c = figure(element, { height: 260, left: 62, right: 14, bottom: 42, label: "Seconds per step of compute and of transfers inside and between nodes by number of GPUs" });
  const x = xOf(c, data), y = log([Math.max(Math.min(...values), Math.max(...values) / 1e4) * 0.7, Math.max(...values) * 1.4], [c.height, 0]);
  axis(c, x, "bottom", { label: "GPUs", ticks: ticksOf(c, data), format: (v) => format.whole(v) });
  axis(c, y, "left", { format: (v) => format.seconds(v), ticks: 5 });
  for (const [key, colour, dash] of [["compute_s", "compute", null], ["inside_s", "pp", "6 4"], ["between_s", "tp", null]]) {
    const points = rows.map((r) => ({ x: r.gpus, y: r[key] > y.domain[0] ? r[key] : null, formula: `${r.gpus} GPUs: ${format.seconds(r[key])} of ${{ compute_s: "compute", inside_s: "transfers inside nodes", between_s: "transfers between nodes" }[key]}` }));
    line(c, points, { x, y, colour, dash });
    scatter(c, points.filter((p) => p.y !== null), { x, y, colour, radius: 3.5, focus: false });
  }
  marker(c, x, data);
  element.append(legend([{ label: "compute", colour: "compute", shape: "line" }, { label: "transfers inside nodes", colour: "pp", shape: "line", dash: "6 4" }, { label: "transfers between nodes", colour: "tp", shape: "line" }]));
}
