// Step time against memory of many plans, and the Pareto front on which less memory costs the least time.

import { curves } from "meshwright/charts.js";
import { format, panel, table } from "meshwright/draw.js";

const SHAPES = ["circle", "square", "triangle", "diamond"];

export const view = {
  title: "Time against memory",
  sentence: "Each mark is a plan. No plan lies below and to the left of the stepped line: it is the least time for a given amount of memory. " +
    "Choose a mark to use its plan.",
  draw(element, { points, front, mine, limit_gib: limit, note }, context) {
    const all = [...points, mine], quick = Math.min(...all.map((p) => p.step_time_s)), slowest = Math.max(...all.map((p) => p.step_time_s));
    const slow = Math.min(slowest, Math.max(2.2 * quick, Math.min(4 * quick, mine.step_time_s * 1.05)));
    const shown = points.filter((p) => p.gib < 1.4 * limit), above = shown.filter((p) => p.step_time_s > slow).length;
    const most = Math.max(limit * 1.08, ...shown.map((p) => p.gib), Math.min(mine.gib * 1.03, 1.6 * limit));
    const dot = (p, more) => ({ x: p.gib, y: p.step_time_s, formula: p.formula, ...more }), use = (p) => context.set("plan", p.plan);
    const mark = (p) => dot(p, { onclick: context.live ? () => use(p) : null, ...(p.best && { radius: 8, formula: `${p.formula}\nthe planner’s choice` }) });
    const strategies = [...new Set(shown.map((p) => p.strategy))].map((name, i) => ({ name, only: true, radius: 5.5, colour: `series-${(i % 8) + 1}`,
      shape: SHAPES[Math.floor(i / 8) % 4], points: shown.filter((p) => p.strategy === name).map(mark) }));
    const here = mine.step_time_s <= slow * 1.02 && mine.gib <= most ? [dot(mine, { label: "this plan" })] : [];
    const stairs = [...front.map((p) => dot(p)), ...front.slice(-1).map((p) => dot(p, { x: limit }))];
    const slower = above ? ` ${above} slower ${above === 1 ? "plan" : "plans"} at the upper edge.` : "", box = element.appendChild(panel("Plans", note + slower));
    curves(box, { label: `${points.length} plans; ${note}`, height: 370, marks: [{ at: limit, words: `GPU memory ${format.gib(limit)}`, colour: "bad" }],
      x: { from: 0, to: most, label: "memory of the fullest GPU, GiB" }, y: { from: quick * 0.94, to: slow * 1.03, label: "step time", unit: "s" },
      series: [{ points: stairs, steps: true, colour: "quiet", dash: "3 3", width: 1.6, dots: false }, ...strategies,
        { name: "this plan", only: true, points: here, colour: "focus", shape: "diamond", radius: 7 }] });
    const rows = points.filter((p) => p.front).sort((a, b) => a.step_time_s - b.step_time_s);
    if (rows.length) box.append(table([["step", "step_time_s", "s"], ["memory", "gib", "gib"], "strategy", ["plan", "title"]], rows,
      { caption: "The front, fastest first", onrow: context.live ? use : null, rowLabel: (p) => `Use ${p.title}` }));
  },
};
