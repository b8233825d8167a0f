// The best plans of the search, why the winner leads, and the present plan compared with it.

import { format, h, panel, stat, table } from "meshwright/draw.js";

export const view = {
  title: "The best plans",
  sentence: "The fastest plans that fit, found by the same search as the command plan. “Use” puts a plan into the knobs.",
  draw(element, data, context) {
    const best = data.leaders[0], use = (row) => context.update({ plan: row.plan });
    element.append(h("div", { class: "stats" },
      stat("Step of the best plan", format.seconds(best.step_time_s), { detail: `MFU ${format.percent(best.mfu)}`, tone: "good" }),
      stat("Legal plans", format.whole(data.searched), { detail: data.provisional ? "common plans first; the complete search runs" : `${format.whole(data.costed)} costed in ${format.seconds(data.seconds)}` }),
      mine(data)));
    element.append(panel("Leaders", `Chosen: ${data.chosen_from}.${data.choice ? ` ${data.choice}` : ""}`, table([
      { title: "plan", key: "title" }, { title: "step", key: "step_time_s", unit: "s" },
      { title: "against best", key: "slower", text: (s) => (Math.abs(s) < 5e-4 ? "best" : format.change(s, 1)), align: "right" },
      { title: "MFU", key: "mfu", unit: "share" }, { title: "memory", key: "memory_gib", unit: "gib" }, { title: "bound by", key: "bound_by" },
    ], data.leaders, { caption: "The winner and the fastest plans of other shapes", onrow: context.live ? use : null, chosen: (row) => row.present, rowLabel: (row) => `Use ${row.title}` })));
    const columns = element.appendChild(h("div", { class: "columns" }));
    if (data.reasons.length) columns.append(panel("Why the winner leads", "Each choice against the plan without it.", h("dl", { class: "reasons" }, data.reasons.map((r) => [h("dt", null, r.field), h("dd", null, r.why)]))));
    if (data.mine.legal && data.mine.fields.length) columns.append(panel("The present plan against the winner", `${format.seconds(data.mine.step_time_s)} per step, ${format.change(data.mine.slower, 1)}.`,
      table([{ title: "field", key: "field" }, { title: "present", key: "mine" }, { title: "winner", key: "best" }], data.mine.fields, { caption: "Fields that differ" }),
      table([{ title: "part of the step", key: "name" }, { title: "difference", key: "s", text: (s) => `${s > 0 ? "+" : ""}${format.seconds(s)}`, align: "right" }], data.mine.difference, { caption: "Seconds that the present plan adds" })));
    if (data.strategies.length) element.append(panel("Why not another strategy", "The best plan of each strategy, and what makes it slower.", table([
      { title: "strategy", key: "strategy" }, { title: "best plan of it", key: "title" },
      { title: "slower by", key: "slower", text: (s) => (s === null ? "does not fit" : format.percent(s)), align: "right" }, { title: "why", key: "why" },
    ], data.strategies, { caption: "Other strategies", onrow: context.live ? use : null, rowLabel: (row) => `Use the best plan of ${row.strategy}` })));
  },
};

function mine(data) {
  if (!data.mine.legal) return stat("Present plan", "not legal", { detail: data.mine.refused, tone: "bad" });
  if (data.mine.slower < 5e-4) return stat("Present plan", "is the best", { detail: format.seconds(data.mine.step_time_s), tone: "good" });
  return stat("Present plan", format.change(data.mine.slower, 1), { detail: `${format.seconds(data.mine.step_time_s)} per step`, tone: data.mine.slower > 0.1 ? "warn" : "" });
}
