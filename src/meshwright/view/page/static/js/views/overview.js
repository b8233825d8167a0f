// The workspace Plan: where the step's time goes, memory by stage and what to change first. Details open below it.

import { button, format, h, panel, terms } from "meshwright/draw.js";
import { stages } from "meshwright/views/memory.js";
import { steps } from "meshwright/views/waterfall.js";

export const views = [
  {
    name: "overview",
    title: "Plan",
    needs: ["verdict", "memory", "waterfall"],
    draw(element, { verdict, memory, waterfall }, context) {
      const time = panel("Where the step’s time goes", null), room = panel("Memory per GPU, by stage", null);
      element.append(h("div", { class: "overview" }, time, room, context.section("advice")), about(verdict));
      steps(time, waterfall);
      stages(room, memory, { most: 6 });
    },
  },
  { name: "advice", title: "What to change first", within: "overview", draw: changes },
];

/** The changes that save most, then the findings of lint, each with a button that applies it. */
function changes(element, advice, context) {
  const list = h("ul", { class: "advice" });
  const apply = (set) => (context.live && Object.keys(set).length ? button("Apply", () => context.update(set), { class: "small" }) : null);
  const share = (seconds) => `${format.seconds(Math.abs(seconds))} (${format.percent(Math.abs(seconds) / advice.step_time_s)})`;
  const item = (head, words, button) => list.append(h("li", null, h("span", null, h("b", null, head), words), button));
  for (const c of advice.first) {
    const effect = c.saves_s >= 0 ? `saves ${share(c.saves_s)}` : `takes ${share(c.saves_s)} longer, and fits`;
    item(c.title, `${c.follows ? `, with ${c.follows}` : ""}: ${effect}; ${format.gib(c.memory_gib)}`, apply(c.set));
  }
  for (const f of advice.findings) item(`${f.name[0].toUpperCase()}${f.name.slice(1)}. `, `${f.what}.${f.cost_s ? ` Costs ${share(f.cost_s)}.` : ""}`, f.saves_s > 0 && apply(f.set));
  element.append(list.children.length ? list : h("p", null, "No change of one or two fields saves more than 0.1% of the step."));
}

/** What the numbers are of, and the targets. */
function about({ subject, targets, training: t, ...verdict }) {
  const rows = {
    model: `${subject.model}, ${format.count(subject.parameters)} parameters`,
    cluster: `${format.whole(subject.gpus)} × ${subject.accelerator}, ${subject.cluster}; stack ${subject.stack}`,
    plan: `${subject.plan}; ${format.whole(subject.microbatches)} micro-batches per step`,
    "step time": `${format.seconds(verdict.step_time_s)}, likely ${format.seconds(verdict.step_time_low_s)} to ${format.seconds(verdict.step_time_high_s)}${verdict.own_trainer ? `; ${verdict.own_trainer}` : ""}`,
    targets: targets.map((target) => `${target.good ? "✓" : "✗"} ${target.name} ${format.percent(target.share)} (${target.target})`).join("; "),
    training: t && `${format.count(t.tokens)} tokens in ${format.seconds(t.total_s)}, ${format.whole(t.gpu_hours)} GPU-hours${t.price_usd ? `, $${format.whole(t.price_usd)}` : ""}`,
    constants: verdict.calibrated,
    assumed: verdict.assumed.join("; "),
  };
  return h("details", { class: "about" }, h("summary", null, "What the numbers are of"), terms(Object.entries(rows)));
}
