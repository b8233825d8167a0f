// Step time against memory of many plans, and the Pareto front on which less memory costs the least time.

import { inSeconds } from "meshwright/bars.js";
import { axis, figure, format, label, legend, line, linear, panel, scatter, table, threshold } from "meshwright/draw.js";

const GIB = 2 ** 30, SHAPES = ["circle", "square", "triangle", "diamond"];

export const view = {
  name: "pareto",
  title: "Time against memory",
  tab: "Best plans",
  workspace: "plan",
  sentence: "Each mark is a plan. No plan lies below and to the left of the stepped line: it is the least time for a given amount of memory. Choose a mark to use its plan.",
  draw(element, data, context) {
    const box = panel("Plans", data.note);
    element.append(box);
    const names = [...new Set(data.points.map((p) => p.strategy))], style = Object.fromEntries(names.map((n, i) => [n, { colour: `series-${(i % 8) + 1}`, shape: SHAPES[Math.floor(i / 8) % 4] }]));
    chart(box, data, context, style);
    box.append(legend([...names.map((n) => ({ label: n, ...style[n] })), { label: "this plan", colour: "focus" }]));
    const front = data.points.filter((p) => p.front).sort((a, b) => a.step_time_s - b.step_time_s);
    if (front.length) box.append(table([
      { title: "step", key: "step_time_s", text: (v) => format.seconds(v), align: "right" },
      { title: "memory", key: "memory_bytes", text: (v) => format.gib(v / GIB), align: "right" },
      { title: "strategy", key: "strategy" }, { title: "plan", key: "title" },
    ], front, { caption: "The front, fastest first", onrow: context.live ? (p) => context.set("plan", p.plan) : null, rowLabel: (p) => `Use ${p.title}` }));
  },
};

function chart(element, data, context, style) {
  const all = [...data.points, data.mine];
  const quick = Math.min(...all.map((p) => p.step_time_s)), slow = Math.min(Math.max(...all.map((p) => p.step_time_s)), Math.max(2.2 * quick, Math.min(4 * quick, data.mine.step_time_s * 1.05)));
  const shown = data.points.filter((p) => p.memory_bytes < 1.4 * data.limit_bytes), above = shown.filter((p) => p.step_time_s > slow).length;
  const c = figure(element, { height: 370, left: 62, right: 20, top: 22, bottom: 42, label: `${data.points.length} plans; ${data.note}` });
  c.root.setAttribute("role", "group"); // its points are buttons
  const x = linear([0, Math.max(data.limit_bytes * 1.08, ...shown.map((p) => p.memory_bytes), Math.min(data.mine.memory_bytes * 1.03, 1.6 * data.limit_bytes)) / GIB], [0, c.width]);
  const y = linear([quick * 0.94, slow * 1.03], [c.height, 0]);
  axis(c, x, "bottom", { label: "memory of the fullest GPU, GiB" });
  axis(c, y, "left", inSeconds("step time", slow));
  threshold(c, x(data.limit_bytes / GIB), `GPU memory ${format.gib(data.limit_bytes / GIB)}`);
  if (above) label(c, `${above} slower ${above === 1 ? "plan" : "plans"} at the upper edge`, 4, -4, { size: 11, colour: "quiet" });
  const front = [...data.front].sort((a, b) => a.memory_bytes - b.memory_bytes);
  if (front.length) line(c, [...front.map((p) => ({ x: p.memory_bytes / GIB, y: p.step_time_s })), { x: data.limit_bytes / GIB, y: front[front.length - 1].step_time_s }], { x, y, steps: true, colour: "quiet", dash: "3 3", width: 1.6 });
  scatter(c, shown.map((p) => ({ x: p.memory_bytes / GIB, y: Math.min(p.step_time_s, y.domain[1]), ...style[p.strategy], radius: p.best ? 8 : 5.5, formula: `${p.formula}${p.best ? "\nthe planner’s choice" : ""}`, onclick: context.live ? () => context.set("plan", p.plan) : null })), { x, y }).forEach((node, i) => node.setAttribute("aria-label", `Use ${shown[i].title}`));
  const { mine } = data;
  if (mine.step_time_s <= slow * 1.02 && mine.memory_bytes / GIB <= x.domain[1]) scatter(c, [{ x: mine.memory_bytes / GIB, y: mine.step_time_s, colour: "focus", shape: "diamond", radius: 7, formula: mine.formula, label: "this plan" }], { x, y });
}
