// Step time against memory of many plans, and the Pareto front on which less memory costs the least time.

import { inSeconds, curves } from "meshwright/charts.js";
import { format, label, legend, panel, table } from "meshwright/draw.js";

const GIB = 2 ** 30, SHAPES = ["circle", "square", "triangle", "diamond"];

export const view = {
  title: "Time against memory",
  sentence: "Each mark is a plan. No plan lies below and to the left of the stepped line: it is the least time for a given amount of memory. Choose a mark to use its plan.",
  draw(element, data, context) {
    const box = element.appendChild(panel("Plans", data.note));
    const names = [...new Set(data.points.map((p) => p.strategy))], style = Object.fromEntries(names.map((n, i) => [n, { colour: `series-${(i % 8) + 1}`, shape: SHAPES[Math.floor(i / 8) % 4] }]));
    chart(box, data, context, style);
    box.append(legend([...names.map((n) => ({ label: n, ...style[n] })), { label: "this plan", colour: "focus", shape: "diamond" }]));
    const front = data.points.filter((p) => p.front).sort((a, b) => a.step_time_s - b.step_time_s);
    if (front.length) box.append(table([
      ["step", "step_time_s", "s"], ["memory", "memory_bytes", (v) => format.gib(v / GIB)],
      "strategy", ["plan", "title"],
    ], front, { caption: "The front, fastest first", onrow: context.live ? (p) => context.set("plan", p.plan) : null, rowLabel: (p) => `Use ${p.title}` }));
  },
};

function chart(element, data, context, style) {
  const { mine } = data, all = [...data.points, mine], limit = data.limit_bytes / GIB, gib = (p) => p.memory_bytes / GIB;
  const quick = Math.min(...all.map((p) => p.step_time_s)), slow = Math.min(Math.max(...all.map((p) => p.step_time_s)), Math.max(2.2 * quick, Math.min(4 * quick, mine.step_time_s * 1.05)));
  const shown = data.points.filter((p) => gib(p) < 1.4 * limit), above = shown.filter((p) => p.step_time_s > slow).length, front = [...data.front].sort((a, b) => gib(a) - gib(b));
  const most = Math.max(limit * 1.08, ...shown.map(gib), Math.min(gib(mine) * 1.03, 1.6 * limit)), top = slow * 1.03;
  const dot = (p, more) => ({ x: gib(p), y: p.step_time_s, formula: p.formula, ...more });
  const c = curves(element, { label: `${data.points.length} plans; ${data.note}`, height: 370, x: { from: 0, to: most, label: "memory of the fullest GPU, GiB" }, y: { from: quick * 0.94, to: top, ...inSeconds("step time", slow) },
    marks: [{ at: limit, words: `GPU memory ${format.gib(limit)}`, colour: "bad" }],
    series: [
      { points: [...front.map((p) => dot(p)), ...(front.length ? [{ x: limit, y: front.at(-1).step_time_s }] : [])], steps: true, colour: "quiet", dash: "3 3", width: 1.6, dots: false },
      { only: true, points: shown.map((p) => dot(p, { ...style[p.strategy], radius: p.best ? 8 : 5.5, label: "", formula: `${p.formula}${p.best ? "\nthe planner’s choice" : ""}`, onclick: context.live ? () => context.set("plan", p.plan) : null })) },
      { only: true, points: mine.step_time_s <= slow * 1.02 && gib(mine) <= most ? [dot(mine, { colour: "focus", shape: "diamond", radius: 7, label: "this plan" })] : [] },
    ] });
  if (above) label(c, `${above} slower ${above === 1 ? "plan" : "plans"} at the upper edge`, 4, -4, { size: 11, colour: "quiet" });
}
