// The verdict above the views: the numbers and one sentence, or the error that stops the plan.

import { h, clear, format, formula } from "meshwright/draw.js";

const number = (name, value, { tone = "", text = "" } = {}) => {
  const node = h("div", { class: tone }, h("span", null, name), h("b", null, value));
  return text ? formula(node, text) : node;
};

/** Fill the bar. */
export function bar(element, { data, error }) {
  clear(element);
  element.className = error ? "bad" : data.tone;
  if (error) return element.append(h("div", { class: "error" }, h("p", null, h("b", null, /^MW-(?!WEB)/.test(error.code) ? "Not a legal plan. " : "No answer. "), error.code ? `${error.code}: ` : "", error.what, error.why ? `. ${error.why}` : "")));
  const f = data.formulas;
  element.append(h("p", null, h("b", null, `${data.headline} `), data.sentence), h("div", { class: "numbers" },
    number("step", format.seconds(data.step_time_s), { text: f.step }),
    number("MFU", format.percent(data.mfu), { tone: data.mfu_tone, text: f.mfu }),
    number("memory", `${format.gib(data.memory_gib)} of ${format.gib(data.memory_limit_gib)}`, { tone: data.fits ? "" : "bad", text: f.memory }),
    number(`${data.unit}/s`, format.count(data.tokens_per_s), { text: f.throughput }),
    data.pipeline ? number("pipeline efficiency", format.percent(data.pipeline.efficiency_share), { tone: data.pipeline.efficiency_share < data.pipeline.target_share ? "warn" : "good", text: f.pipeline }) : null));
}
