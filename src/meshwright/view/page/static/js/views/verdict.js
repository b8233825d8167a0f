// The verdict: fits or not, what bounds the step, targets, and what to change first.

import { format, h, panel, table } from "meshwright/draw.js";
import { about, changes } from "meshwright/views/overview.js";

export const view = {
  name: "verdict",
  title: "The verdict",
  short: "Verdict",
  workspace: "plan",
  sentence: "Whether the plan fits, what bounds it, which targets it misses, and what to change next.",
  needs: ["verdict", "advice"],
  optional: ["advice"],
  draw(element, { verdict, advice }, context) {
    element.append(h("div", { class: `notice ${verdict.fits ? "good" : "error"}` }, h("p", null, h("b", null, verdict.headline)), h("p", null, verdict.sentence)));
    const next = panel("What to change first", null);
    element.append(h("div", { class: "columns" },
      panel("Targets", "What a good plan reaches.", table([
        { title: "", key: "good", text: (good) => h("span", { class: good ? "tone-good" : "tone-warn" }, good ? "✓ met" : "✗ missed") },
        { title: "target", key: "name" },
        { title: "value", key: "share", text: (v) => format.percent(v), align: "right" },
        { title: "wanted", key: "target" },
      ], verdict.targets, { caption: "Targets" })), next));
    changes(next, verdict, advice, context);
    element.append(about(verdict));
  },
};
