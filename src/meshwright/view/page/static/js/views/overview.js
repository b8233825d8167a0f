// The workspace Plan: where the step's time goes, memory by stage and what to change first. Details open below it.

import { bars } from "meshwright/charts.js";
import { button, format, h, panel, sentence, terms } from "meshwright/draw.js";
import * as part from "meshwright/parts.js";
import { parts } from "meshwright/views/sheet.js";

const MOST_STAGES = 6; // of which bars are drawn

export const views = [
  {
    name: "overview",
    title: "Plan",
    needs: ["verdict", "memory", "waterfall"],
    draw(element, { verdict, memory, waterfall }, context) {
      const time = panel("Where the step’s time goes", null), room = panel("Memory per GPU, by stage", null);
      const about = h("details", { class: "about" }, h("summary", null, "What the numbers are of"), terms(verdict.about));
      element.append(h("div", { class: "overview" }, time, room, context.section("advice")), about);
      parts(time, [waterfall.bars]);
      stages(room, memory);
    },
  },
  { name: "advice", title: "What to change first", within: "overview", draw: changes },
];

/** The changes that save most, then the findings of lint, each with a button that applies it. */
function changes(element, { items }, context) {
  const item = ({ head, words, set }) => h("li", null, h("span", null, h("b", null, head), words),
    context.live && Object.keys(set).length > 0 && button("Apply", () => context.update(set), { class: "small" }));
  element.append(items.length ? h("ul", { class: "advice" }, items.map(item)) : h("p", null, "No change of one or two fields saves more than 0.1% of the step."));
}

/** The stacked bars of the stages, the first and the last ones of many. */
function stages(element, { stages: all, limit_gib: limit }) {
  const { gib } = format, many = all.length > MOST_STAGES;
  const rows = all.map(({ total_gib: total, parts: own }, k) => ({ label: `stage ${k}`, text: gib(total), total, tone: total > limit && "bad",
    parts: own.map((p) => ({ value: p.gib, name: p.name, ...part.memory(p.name), formula: `${p.name}: ${gib(p.gib)}\n${p.formula}` })) }));
  const shown = many ? [...rows.slice(0, MOST_STAGES / 2), ...rows.slice(-MOST_STAGES / 2)] : rows;
  const peak = Math.max(...shown.map((row) => row.total)), far = limit > 4 * peak; // a small model: the limit would hide its bars
  bars(element, shown, {
    left: 62, right: 64, top: 18, tall: Math.min(26, 220 / Math.sqrt(shown.length)), weight: 600,
    x: { label: "GiB per GPU", most: far ? peak * 1.25 : Math.max(limit, peak) * 1.02 }, limit: { at: limit, words: `limit ${gib(limit)}${far ? " →" : ""}` },
    label: `Memory per GPU by stage: ${shown.map((r) => `${r.label} ${r.text}`).join(", ")}; the limit is ${gib(limit)}`,
  });
  if (many) element.append(sentence(`The first and last ${MOST_STAGES / 2} of ${all.length} stages.`));
}
