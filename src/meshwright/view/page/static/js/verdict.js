// The verdict above every view: the four numbers and one sentence, or the error that stops the plan.

import { h, clear, format, formula } from "meshwright/draw.js";

const number = (name, value, { tone = "", text = "" } = {}) => {
  const node = h("div", { class: tone }, h("span", null, name), h("b", null, value));
  return text ? formula(node, text) : node;
};

/** Fill the bar. `update` applies the changes of an advice; null in a written file. */
export function bar(element, { data, compare, error }, update) {
  clear(element);
  if (error) {
    element.className = "bad";
    element.append(h("div", { class: "error" }, h("p", null, h("b", null, "Not a legal plan. "), `${error.code}: ${error.what}`, error.why ? `. ${error.why}` : "")), error.fix ? h("p", null, "Fix: ", h("code", null, error.fix)) : "");
    return;
  }
  element.className = data.tone;
  const f = data.formulas, versus = (mine, other, text) => (other === undefined || other === null ? mine : `${mine} · ${text(other)}`);
  element.append(h("div", { class: "numbers" },
    number("step", versus(format.seconds(data.step_time_s), compare?.step_time_s, format.seconds), { text: f.step }),
    number("MFU", versus(format.percent(data.mfu), compare?.mfu, format.percent), { tone: data.mfu_tone, text: f.mfu }),
    number("memory", `${versus(format.gib(data.memory_gib), compare?.memory_gib, format.gib)} of ${format.gib(data.memory_limit_gib)}`, { tone: data.fits ? "" : "bad", text: f.memory }),
    number(`${data.unit}/s`, versus(format.count(data.tokens_per_s), compare?.tokens_per_s, format.count), { text: f.throughput }),
    data.pipeline ? number("pipeline efficiency", format.percent(data.pipeline.efficiency_share), { tone: data.pipeline.efficiency_share < data.pipeline.target_share ? "warn" : "good", text: f.pipeline }) : null));
  element.append(h("p", null, h("b", null, `${data.headline} `), data.sentence, compare ? " The second number is the compared plan’s." : ""));
}
