// What the page says of a plan: the verdict above the views; errors in the one shape of Meshwright; short messages.

import { clear, format, formula, h } from "meshwright/draw.js";

/** A box with what is wrong, why, the valid values and the fix. */
export function refusal(error) {
  const valid = (error.valid ?? []).slice(0, 24).map(String).join(", ");
  return h("div", { class: "notice error", role: "alert" },
    h("p", null, h("b", null, error.code ? `${error.code}: ` : ""), plain(error.what)),
    error.why ? h("p", null, `${plain(error.why)}.`.replace(/\.\.$/, ".")) : null,
    valid ? h("p", null, "Valid: ", valid) : null,
    error.fix ? h("p", null, `Fix: ${plain(error.fix)}`) : null);
}

/** Words of an error without the options of a command: "--set plan.tp=8" → "plan.tp = 8". */
const plain = (text) => text.replace(/--set (\S+?)=(\S+)/g, "$1 = $2").replaceAll("`", "");

let timer = 0;
/** A message at the corner of the page for three seconds. */
export function toast(text) {
  document.getElementById("toast")?.remove();
  document.body.append(h("div", { id: "toast", role: "status" }, text));
  clearTimeout(timer);
  timer = setTimeout(() => document.getElementById("toast")?.remove(), 3000);
}

/** Fill the bar of the verdict: the numbers and one sentence, or the error that stops the plan. */
export function verdict(element, { data, error }) {
  clear(element).className = error ? "bad" : data.tone;
  if (error) {
    const kind = /^MW-(?!WEB)/.test(error.code) ? "Not a legal plan. " : "No answer. ";
    return element.append(h("div", { class: "error" }, h("p", null, h("b", null, kind), error.code ? `${error.code}: ` : "", error.what, error.why ? `. ${error.why}` : "")));
  }
  const { formulas: f, pipeline } = data, number = (name, value, words, tone = "") => formula(h("div", { class: tone }, h("span", null, name), h("b", null, value)), words);
  element.append(h("p", null, h("b", null, `${data.headline} `), data.sentence), h("div", { class: "numbers" },
    number("step", format.seconds(data.step_time_s), f.step),
    number("MFU", format.percent(data.mfu), f.mfu, data.mfu_tone),
    number("memory", `${format.gib(data.memory_gib)} of ${format.gib(data.memory_limit_gib)}`, f.memory, data.fits ? "" : "bad"),
    number(`${data.unit}/s`, format.count(data.tokens_per_s), f.throughput),
    pipeline && number("pipeline efficiency", format.percent(pipeline.efficiency_share), f.pipeline, pipeline.efficiency_share < pipeline.target_share ? "warn" : "good")));
}
