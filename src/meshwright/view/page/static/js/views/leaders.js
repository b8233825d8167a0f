// The best plans of the search, why the winner leads, and the present plan compared with it.

import { format, h, panel, stat, stats, table, terms } from "meshwright/draw.js";

export const view = {
  title: "The best plans",
  sentence: "The fastest plans that fit, found by the same search as the command plan. “Use” puts a plan into the knobs.",
  draw(element, data, context) {
    const [best] = data.leaders, { mine, reasons, strategies } = data, onrow = context.live ? (row) => context.update({ plan: row.plan }) : null;
    const costed = `${format.whole(data.costed)} costed in ${format.seconds(data.seconds)}`, columns = h("div", { class: "columns" });
    element.append(stats(
      stat("Step of the best plan", format.seconds(best.step_time_s), { detail: `simulated; MFU ${format.percent(best.mfu)}`, tone: "good" }),
      stat("Legal plans", format.whole(data.searched), { detail: data.provisional ? "common plans first; the complete search runs" : costed }),
      stat("Present plan", ...present(mine))));
    element.append(panel("Leaders", `Chosen: ${data.chosen_from}.${data.choice ? ` ${data.choice}` : ""}`, table([
      ["plan", "title"], ["step", "step_time_s", "s"], ["against best", "slower", (s) => (Math.abs(s) < 5e-4 ? "best" : format.change(s, 1))],
      ["MFU", "mfu", "share"], ["memory", "memory_gib", "gib"], ["bound by", "bound_by"],
    ], data.leaders, { caption: "The winner and the fastest plans of other shapes", onrow, chosen: (row) => row.present, rowLabel: (row) => `Use ${row.title}` })), columns);
    if (reasons.length) columns.append(panel("Why the winner leads", "Each choice against the plan without it.", terms(reasons.map((r) => [r.field, r.why]))));
    if (mine.legal && mine.fields.length) columns.append(panel("The present plan against the winner", `${format.seconds(mine.step_time_s)} per step, ${format.change(mine.slower, 1)}.`,
      table(["field", ["present", "mine"], ["winner", "best"]], mine.fields, { caption: "Fields that differ" }),
      table([["part of the step", "name"], ["difference", "s", (s) => `${s > 0 ? "+" : ""}${format.seconds(s)}`]], mine.difference, { caption: "Seconds that the present plan adds" })));
    if (strategies.length) element.append(panel("Why not another strategy", "The best plan of each strategy, and what makes it slower.", table(
      ["strategy", ["best plan of it", "title"], ["slower by", "slower", (s) => (s === null ? "does not fit" : format.percent(s))], "why"],
      strategies, { caption: "Other strategies", onrow, rowLabel: (row) => `Use the best plan of ${row.strategy}` })));
  },
};

/** How the present plan compares: the value and the details of its number. */
function present(mine) {
  if (!mine.legal) return ["not legal", { detail: mine.refused, tone: "bad" }];
  if (mine.slower < 5e-4) return ["is the best", { detail: format.seconds(mine.step_time_s), tone: "good" }];
  return [format.change(mine.slower, 1), { detail: `${format.seconds(mine.step_time_s)}, simulated`, tone: mine.slower > 0.1 ? "warn" : "" }];
}
