// The overview: verdict, where the time goes, memory, and what to change first, together.

import { clear, format, h, panel, stat } from "meshwright/draw.js";
import { stages } from "meshwright/views/memory.js";
import { steps } from "meshwright/views/waterfall.js";

export const view = {
  name: "overview",
  title: "Overview",
  workspace: "plan",
  sentence: "The most important views of this plan together. Each heading leads to its view.",
  needs: ["verdict", "memory", "waterfall", "advice"],
  optional: ["advice"],
  draw(element, data, context) {
    const { verdict, memory, waterfall, advice } = data, compare = context.compare;
    const link = (name, title) => h("button", { type: "button", class: "link", onclick: () => context.go(name) }, title);
    const time = panel(null, null, h("h3", null, link("waterfall", "Where the step’s time goes")));
    const room = panel(null, null, h("h3", null, link("memory", "Memory per GPU")));
    const next = panel("What to change first", null);
    element.append(h("div", { class: "columns wide" }, time, h("div", null, room, next)), targets(verdict), about(verdict));
    steps(time, waterfall, compare?.waterfall);
    stages(room, memory, compare?.memory, { most: 8 });
    changes(next, verdict, advice, context);
  },
};

/** The targets as small numbers, green where they are met. */
function targets(verdict) {
  return h("div", { class: "stats" }, verdict.targets.map((t) => stat(t.name, format.percent(t.share), { detail: `${t.good ? "✓" : "✗"} ${t.target}`, tone: t.good ? "good" : "warn" })));
}

/** The changes that save most, then advice for the pipeline and the findings of lint, each with a button that applies it. Shared with the verdict view. */
export function changes(element, verdict, advice, context) {
  const list = h("ul", { class: "advice" });
  const apply = (words, set) => (context.live && Object.keys(set).length ? h("button", { type: "button", class: "small", onclick: () => context.update(set) }, words) : null);
  const share = (seconds) => `${format.seconds(Math.abs(seconds))} (${format.percent(Math.abs(seconds) / advice.step_time_s)})`;
  for (const c of advice?.first ?? []) {
    const effect = c.saves_s >= 0 ? `saves ${share(c.saves_s)}` : `takes ${share(c.saves_s)} longer, and fits`;
    list.append(h("li", { title: c.fix }, h("b", null, c.title), `: ${effect}, ${format.gib(c.memory_gib)} `, apply("Apply", c.set)));
  }
  const p = verdict.pipeline;
  if (p?.advice) list.append(h("li", null, h("b", null, "Low pipeline efficiency. "), `${p.advice[0].toUpperCase()}${p.advice.slice(1)}. `, p.raise_to ? apply(`Raise to ${p.raise_to.microbatches} micro-batches`, { "workload.batch": p.raise_to.batch }) : null, " ", p.cut_to && p.cut_to.set ? apply(`Cut to ${p.cut_to.stages} stages`, p.cut_to.set) : null));
  for (const f of advice?.findings ?? []) {
    const saves = f.saves_s > 0 ? ` Saves ${share(f.saves_s)}.` : f.cost_s ? ` Costs ${share(f.cost_s)}.` : "";
    list.append(h("li", { title: f.fix || null }, h("b", null, `${f.name[0].toUpperCase()}${f.name.slice(1)}. `), `${f.what}.${saves} `, f.saves_s > 0 ? apply("Apply", f.set) : null));
  }
  clear(element).append(h("h3", null, "What to change first"), list.children.length ? list : h("p", null, advice ? `No change of one field is known to help${context.live ? ": “Find the best” searches all plans" : ""}.` : "The live page computes them: meshwright web."));
}

/** What the numbers are of. Shared with the verdict view. */
export function about(verdict) {
  const t = verdict.training;
  return panel("What this is", null,
    h("dl", { class: "reasons" },
      h("dt", null, "model"), h("dd", null, `${verdict.subject.model}, ${format.count(verdict.subject.parameters)} parameters`),
      h("dt", null, "cluster"), h("dd", null, `${format.whole(verdict.subject.gpus)} × ${verdict.subject.accelerator}, ${verdict.subject.cluster}; stack ${verdict.subject.stack}`),
      h("dt", null, "plan"), h("dd", null, `${verdict.subject.plan}; ${format.whole(verdict.subject.microbatches)} micro-batches per step`),
      h("dt", null, "step time"), h("dd", null, `${format.seconds(verdict.step_time_s)}, likely ${format.seconds(verdict.step_time_low_s)} to ${format.seconds(verdict.step_time_high_s)}${verdict.own_trainer ? `; ${verdict.own_trainer}` : ""}`),
      t ? [h("dt", null, "training"), h("dd", null, `${format.count(t.tokens)} tokens in ${format.seconds(t.total_s)}, ${format.whole(t.gpu_hours)} GPU-hours${t.price_usd ? `, $${format.whole(t.price_usd)}` : ""}`)] : null,
      h("dt", null, "constants"), h("dd", null, verdict.calibrated),
      verdict.assumed.length ? [h("dt", null, "assumed"), h("dd", null, verdict.assumed.join("; "))] : null));
}
