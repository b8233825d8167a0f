// Where the step goes: a waterfall of compute, exposed communication, bubble and optimizer, and what overlap hides.

import { axis, band, bars, figure, format, h, label, legend, linear, panel, rect, stacked, stat } from "meshwright/draw.js";

export const view = {
  name: "waterfall",
  title: "Where the step’s time goes",
  short: "Step time",
  group: "this plan",
  sentence: "Each bar starts where the one above ends; together they are the step of the busiest rank. Orange and pink bars are communication that no compute hides.",
  draw(element, data, context) {
    element.append(h("div", { class: "stats" }, ...data.stats.map((s) => stat(s.name, format.by[s.unit](s.value), { detail: s.detail, formula: s.formula, tone: s.tone }))));
    const parts = panel("The step, part by part", data.sentence);
    element.append(parts);
    steps(parts, data, context.compare);
    const overlap = panel("What overlap hides", data.overlap.sentence);
    element.append(overlap);
    buffering(overlap, data.overlap);
  },
};

/** The waterfall. Shared with the overview. */
export function steps(element, data, compare) {
  const top = Math.max(data.step_time_s, compare?.step_time_s ?? 0);
  let sum = 0;
  const rows = data.parts.map((p) => {
    const row = { label: p.name, value: p.s, start: sum, colour: p.colour, pattern: p.pattern, formula: `${p.name}: ${format.seconds(p.s)} (${format.percent(p.s / data.step_time_s)} of the step)\n${p.formula}`, text: `${format.seconds(p.s)} · ${format.percent(p.s / data.step_time_s)}` };
    sum += p.s;
    return row;
  });
  rows.push({ label: "step", value: data.step_time_s, colour: "quiet", text: format.seconds(data.step_time_s), formula: data.formulas.step });
  if (compare) rows.push({ label: "step, plan 2", value: compare.step_time_s, colour: "second", text: format.seconds(compare.step_time_s), formula: compare.formulas.step });
  const small = element.clientWidth < 480, unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const chart = figure(element, { height: 50 + 25 * rows.length, left: small ? 96 : 168, right: small ? 60 : 100, bottom: 40, label: `Step of ${format.seconds(data.step_time_s)}: ${data.parts.map((p) => `${p.name} ${format.seconds(p.s)}`).join(", ")}` });
  const x = linear([0, top], [0, chart.width]), y = band(rows.map((r) => r.label), [0, chart.height], { gap: 0.3 });
  axis(chart, x, "bottom", { label: `time within the step, ${unit[0]}`, format: (v) => format.number(v * unit[1]), ticks: small ? 3 : 6 });
  axis(chart, y, "left", { format: (name) => (small && name.length > 15 ? `${name.slice(0, 14)}…` : name) });
  bars(chart, rows.map((r) => ({ ...r, text: null })), { x, y });
  for (const r of rows) {
    const end = x((r.start ?? 0) + r.value), inside = end > chart.width - (small ? 20 : 40) && x(r.start ?? 0) > 90;
    label(chart, small ? r.text.split(" · ")[0] : r.text, inside ? x(r.start ?? 0) - 6 : end + 6, y(r.label) + y.width / 2, { anchor: inside ? "end" : "start", middle: true, size: 11, halo: true });
  }
  return chart;
}

function buffering(element, overlap) {
  const top = Math.max(...overlap.rows.map((r) => r.step_time_s)), unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const chart = figure(element, { height: 46 + 34 * overlap.rows.length, left: 128, right: 66, bottom: 40, label: overlap.rows.map((r) => `${r.name}: ${format.seconds(r.step_time_s)}`).join(", ") });
  const x = linear([0, top], [0, chart.width]), y = band(overlap.rows.map((r) => r.name), [0, chart.height], { gap: 0.3 });
  axis(chart, x, "bottom", { label: `step time, ${unit[0]}`, format: (v) => format.number(v * unit[1]) });
  axis(chart, y, "left");
  stacked(chart, overlap.rows.map((r) => ({ label: r.name, parts: r.parts.map((p) => ({ ...p, value: p.s, formula: `${r.name}, ${p.name}: ${format.seconds(p.s)}` })) })), { x, y });
  for (const r of overlap.rows) label(chart, format.seconds(r.step_time_s), x(r.step_time_s) + 6, y(r.name) + y.width / 2, { middle: true, size: 11, weight: 600, halo: true });
  element.append(legend(overlap.parts.map((p) => ({ label: p.name, colour: p.colour, pattern: p.pattern }))));
  if (overlap.axes.length) element.append(axes(overlap));
}

/** For each axis: communication in total, hidden behind compute, exposed. */
function axes(overlap) {
  const box = h("div", null);
  const top = Math.max(...overlap.axes.map((a) => a.total_s));
  const chart = figure(box, { width: overlap.width, height: 50 + 26 * overlap.axes.length, left: 128, right: 66, bottom: 40, label: overlap.axes.map((a) => `${a.name}: ${format.seconds(a.hidden_s)} hidden, ${format.seconds(a.exposed_s)} exposed`).join("; ") });
  const unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const x = linear([0, top], [0, chart.width]), y = band(overlap.axes.map((a) => a.name), [0, chart.height], { gap: 0.3 });
  axis(chart, x, "bottom", { label: `communication, ${unit[0]}`, format: (v) => format.number(v * unit[1]) });
  axis(chart, y, "left");
  for (const a of overlap.axes) {
    rect(chart, 0, y(a.name), x(a.exposed_s), y.width, { fill: a.colour, formula: `${a.name}, exposed: ${format.seconds(a.exposed_s)}\n${a.formula}` });
    rect(chart, x(a.exposed_s), y(a.name), x(a.total_s) - x(a.exposed_s), y.width, { fill: a.colour, pattern: "hatch", formula: `${a.name}, hidden behind compute: ${format.seconds(a.hidden_s)}\n${a.formula}` });
    label(chart, format.percent(a.total_s ? a.hidden_s / a.total_s : 0, 0) + " hidden", x(a.total_s) + 6, y(a.name) + y.width / 2, { middle: true, size: 11, halo: true });
  }
  return box;
}
