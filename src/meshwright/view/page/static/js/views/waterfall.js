// Where the step goes: a waterfall of compute, exposed communication, bubble and optimizer, and what overlap hides.

import { bars } from "meshwright/charts.js";
import { format, legend, panel, stat, stats } from "meshwright/draw.js";
import * as part from "meshwright/parts.js";

export const views = [
  {
    name: "waterfall",
    title: "What overlap hides",
    sentence: "Communication that no compute hides makes the step longer. What is hidden is free until compute becomes faster.",
    draw: (element, { exposed_s: exposed, hidden_s: hidden, communication_s: all, step_time_s: step }) => element.append(stats(
      stat("Exposed communication", format.seconds(exposed), { detail: format.percent(exposed / step), tone: exposed > 0.2 * step ? "warn" : "" }),
      stat("Hidden communication", format.seconds(hidden), { detail: all ? `${format.percent(hidden / all, 0)} of all` : "none" }))),
  },
  { name: "overlap", title: "The step with other overlap", ownTitle: true, draw: buffering },
];

/** The waterfall: each bar begins where the one above it ends. Shared with the overview. */
export function steps(element, data) {
  const small = element.clientWidth < 480, share = (s) => `${format.seconds(s)} · ${format.percent(s / data.step_time_s)}`;
  let sum = 0;
  const rows = data.parts.map((p) => {
    sum += p.s;
    return { label: small ? part.NAMES[p.part] ?? p.name : p.name, start: sum - p.s, text: share(p.s), parts: [{ value: p.s, ...part.step(p.part), formula: `${p.name}: ${share(p.s)} of the step\n${p.formula}` }] };
  });
  rows.push({ label: "step", text: format.seconds(data.step_time_s), parts: [{ value: data.step_time_s, colour: "quiet", formula: data.formulas.step }] });
  bars(element, rows, { left: small ? 104 : 196, right: small ? 60 : 100, x: { seconds: "time within the step" } });
}

function buffering(view, overlap) {
  const element = view.appendChild(panel("The step with other overlap", `This plan overlaps ${overlap.overlaps.join(", ") || "nothing"} with compute. Double buffering transfers the next piece while the present one is computed: “no overlap” is the step without it, “double buffering” with it on every axis.`));
  const rows = overlap.rows.map((r) => ({ label: r.name, text: format.seconds(r.step_time_s), parts: r.parts.map((p) => ({ value: p.s, ...part.step(p.part), formula: `${r.name}: ${part.NAMES[p.part]} ${format.seconds(p.s)}` })) }));
  bars(element, rows, { tall: 34, weight: 600, x: { seconds: "step time" } });
  element.append(legend([...new Set(overlap.rows.flatMap((r) => r.parts.map((p) => p.part)))].map((name) => ({ label: part.NAMES[name], ...part.step(name) }))));
  if (!overlap.axes.length) return;
  // For each axis: communication exposed, and hidden behind compute.
  const small = element.clientWidth < 480, shares = (a) => [["exposed", a.exposed_s, null], ["hidden behind compute", a.hidden_s, "hatch"]];
  const axes = overlap.axes.map((a) => ({ label: small ? part.NAMES[a.axis] : a.name, text: `${format.percent(a.total_s ? a.hidden_s / a.total_s : 0, 0)} hidden`, parts: shares(a).map(([words, value, pattern]) => ({ value, pattern, colour: part.step(a.axis).colour, formula: `${a.name}, ${words}: ${format.seconds(value)}\n${a.formula}` })) }));
  bars(element, axes, { left: small ? 112 : 190, right: 84, x: { seconds: "communication" } });
}
