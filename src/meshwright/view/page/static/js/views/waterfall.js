// Where the step goes: a waterfall of compute, exposed communication, bubble and optimizer, and what overlap hides.

import { axis, band, bars, figure, format, h, label, legend, linear, panel, rect, stacked, stat } from "meshwright/draw.js";
import * as part from "meshwright/parts.js";

export const view = {
  name: "waterfall",
  title: "What overlap hides",
  tab: "Time",
  workspace: "plan",
  sentence: "Communication that no compute hides makes the step longer. What is hidden is free until compute becomes faster.",
  draw(element, data) {
    element.append(h("div", { class: "stats" }, ...stats(data)));
    const overlap = panel("The step with other overlap", `This plan overlaps ${data.overlap.overlaps.join(", ") || "nothing"} with compute. Double buffering transfers the next piece while the present one is computed: “no overlap” is the step without it, “double buffering” with it on every axis.`);
    element.append(overlap);
    buffering(overlap, data.overlap);
  },
};

function stats(data) {
  const share = (s) => format.percent(s / data.step_time_s);
  return [
    stat("Step", format.seconds(data.step_time_s), { formula: data.formulas.step }),
    stat("Compute", format.seconds(data.compute_s), { detail: share(data.compute_s) }),
    stat("Exposed communication", format.seconds(data.exposed_s), { detail: share(data.exposed_s), tone: data.exposed_s > 0.2 * data.step_time_s ? "warn" : "" }),
    stat("Hidden communication", format.seconds(data.hidden_s), { detail: data.communication_s ? `${format.percent(data.hidden_s / data.communication_s, 0)} of all` : "none" }),
    stat("Bubble", format.seconds(data.bubble_s), { detail: share(data.bubble_s) }),
  ];
}

/** The waterfall. Shared with the overview. */
export function steps(element, data) {
  const small = element.clientWidth < 480;
  let sum = 0;
  const rows = data.parts.map((p) => {
    const row = { label: small ? part.NAMES[p.part] ?? p.name : p.name, value: p.s, start: sum, ...part.step(p.part), formula: `${p.name}: ${format.seconds(p.s)} (${format.percent(p.s / data.step_time_s)} of the step)\n${p.formula}`, text: `${format.seconds(p.s)} · ${format.percent(p.s / data.step_time_s)}` };
    sum += p.s;
    return row;
  });
  rows.push({ label: "step", start: 0, value: data.step_time_s, colour: "quiet", text: format.seconds(data.step_time_s), formula: data.formulas.step });
  falling(element, rows, { left: small ? 104 : 196, label: `Step of ${format.seconds(data.step_time_s)}: ${data.parts.map((p) => `${p.name} ${format.seconds(p.s)}`).join(", ")}` });
}

/** Bars of a step of which each begins where another ends: rows [{ label, start, value, colour, text, formula }]. */
export function falling(element, rows, { left, label: name }) {
  const top = Math.max(...rows.map((r) => r.start + r.value)), small = element.clientWidth < 480, unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const chart = figure(element, { height: 50 + 25 * rows.length, left, right: small ? 60 : 100, bottom: 40, label: name });
  const x = linear([0, top], [0, chart.width]), y = band(rows.map((r) => r.label), [0, chart.height], { gap: 0.3 });
  axis(chart, x, "bottom", { label: `time within the step, ${unit[0]}`, format: (v) => format.number(v * unit[1]), ticks: small ? 3 : 6 });
  axis(chart, y, "left");
  bars(chart, rows.map((r) => ({ ...r, text: null })), { x, y });
  for (const r of rows) {
    const end = x(r.start + r.value), inside = end > chart.width - (small ? 20 : 40) && x(r.start) > 90;
    label(chart, small ? r.text.split(" · ")[0] : r.text, inside ? x(r.start) - 6 : end + 6, y(r.label) + y.width / 2, { anchor: inside ? "end" : "start", middle: true, size: 11, halo: true });
  }
}

function buffering(element, overlap) {
  const top = Math.max(...overlap.rows.map((r) => r.step_time_s)), unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const chart = figure(element, { height: 46 + 34 * overlap.rows.length, left: 112, right: 66, bottom: 40, label: overlap.rows.map((r) => `${r.name}: ${format.seconds(r.step_time_s)}`).join(", ") });
  const x = linear([0, top], [0, chart.width]), y = band(overlap.rows.map((r) => r.name), [0, chart.height], { gap: 0.3 });
  axis(chart, x, "bottom", { label: `step time, ${unit[0]}`, format: (v) => format.number(v * unit[1]) });
  axis(chart, y, "left");
  stacked(chart, overlap.rows.map((r) => ({ label: r.name, parts: r.parts.map((p) => ({ value: p.s, ...part.step(p.part), formula: `${r.name}: ${part.NAMES[p.part]} ${format.seconds(p.s)}` })) })), { x, y });
  for (const r of overlap.rows) label(chart, format.seconds(r.step_time_s), x(r.step_time_s) + 6, y(r.name) + y.width / 2, { middle: true, size: 11, weight: 600, halo: true });
  element.append(legend([...new Set(overlap.rows.flatMap((r) => r.parts.map((p) => p.part)))].map((name) => ({ label: part.NAMES[name], ...part.step(name) }))));
  if (overlap.axes.length) axes(element, overlap);
}

/** For each axis: communication in total, hidden behind compute, exposed. */
function axes(element, overlap) {
  const small = element.clientWidth < 480, name = (a) => (small ? part.NAMES[a.axis] : a.name);
  const top = Math.max(...overlap.axes.map((a) => a.total_s));
  const chart = figure(element, { height: 50 + 26 * overlap.axes.length, left: small ? 112 : 190, right: 84, bottom: 40, label: overlap.axes.map((a) => `${a.name}: ${format.seconds(a.hidden_s)} hidden, ${format.seconds(a.exposed_s)} exposed`).join("; ") });
  const unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const x = linear([0, top], [0, chart.width]), y = band(overlap.axes.map((a) => name(a)), [0, chart.height], { gap: 0.3 });
  axis(chart, x, "bottom", { label: `communication, ${unit[0]}`, format: (v) => format.number(v * unit[1]) });
  axis(chart, y, "left");
  for (const a of overlap.axes) {
    rect(chart, 0, y(name(a)), x(a.exposed_s), y.width, { fill: part.step(a.axis).colour, formula: `${a.name}, exposed: ${format.seconds(a.exposed_s)}\n${a.formula}` });
    rect(chart, x(a.exposed_s), y(name(a)), x(a.total_s) - x(a.exposed_s), y.width, { fill: part.step(a.axis).colour, pattern: "hatch", formula: `${a.name}, hidden behind compute: ${format.seconds(a.hidden_s)}\n${a.formula}` });
    label(chart, format.percent(a.total_s ? a.hidden_s / a.total_s : 0, 0) + " hidden", x(a.total_s) + 6, y(name(a)) + y.width / 2, { middle: true, size: 11, halo: true });
  }
}
