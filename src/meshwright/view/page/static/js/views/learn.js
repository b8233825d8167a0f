// Twelve lessons through the views, with questions that check themselves. Answers come from Python, where our functions compute them.

import { clear, format, h, panel } from "meshwright/draw.js";

const given = new Map(); // answers of this visit, by "lesson.question"

export const view = {
  name: "learn",
  title: "Learn parallelism in twelve lessons",
  short: "Lessons",
  workspace: "learn",
  sentence: "Each lesson has a few sentences, a view to try them in, and questions that check themselves.",
  localOptions: true,
  draw(element, data, context) {
    const at = Math.min(Math.max(0, Number(context.options.lesson ?? 1) - 1), data.lessons.length - 1), lesson = data.lessons[at];
    const go = (n) => context.setOptions({ lesson: n + 1 });
    const path = h("ol", { class: "path" }, data.lessons.map((l, i) => h("li", null, h("button", { type: "button", "aria-current": i === at ? "step" : null, onclick: () => go(i) }, `${i + 1}. ${l.title}`, done(l, i) ? h("span", { class: "tone-good" }, " ✓") : ""))));
    const text = panel(`Lesson ${at + 1}: ${lesson.title}`, null, ...lesson.text.map((t) => h("p", null, t)),
      h("p", { class: "try" }, h("b", null, "Try it. "), lesson.look, " ", context.live ? h("button", { type: "button", class: "small primary", onclick: () => context.update({ ...lesson.changes, "page.view": lesson.view }) }, "Open the view") : null));
    const questions = panel("Check your understanding", null, h("ol", { class: "questions" }, lesson.questions.map((q, i) => question(q, `${at}.${i}`))));
    const steps = h("div", { class: "controls" }, at > 0 ? h("button", { type: "button", onclick: () => go(at - 1) }, "← Previous lesson") : null, at + 1 < data.lessons.length ? h("button", { type: "button", class: "primary", onclick: () => go(at + 1) }, "Next lesson →") : null);
    element.append(h("div", { class: "lessons" }, h("nav", { "aria-label": "Lessons" }, path), h("div", null, text, questions, steps)));
  },
};

const right = (q, value) => (q.options.length ? value === q.answer : Math.abs(value - q.answer) <= q.tolerance * Math.abs(q.answer) + 1e-12);
const done = (lesson, i) => lesson.questions.every((q, k) => given.has(`${i}.${k}`) && right(q, given.get(`${i}.${k}`)));

function question(q, key) {
  const result = h("p", { role: "status" });
  const judge = (value) => {
    given.set(key, value);
    const good = right(q, value);
    const correct = q.options.length ? q.options[q.answer] : `${format.number(q.answer, 4)} ${q.unit}`;
    clear(result).append(h("b", { class: good ? "tone-good" : "tone-bad" }, good ? "✓ Right. " : "✗ Not yet. "), good ? `${correct}: ${q.why}` : "Try again, or ", good ? "" : h("button", { type: "button", class: "link", onclick: () => clear(result).append(h("b", null, "Answer: "), `${correct}. ${q.why}`) }, "show the answer"));
  };
  const name = `question-${key}`, id = `${name}-value`;
  let input;
  if (q.options.length) input = h("div", { class: "options" }, q.options.map((option, i) => h("label", null, h("input", { type: "radio", name, checked: given.get(key) === i, onchange: () => judge(i) }), h("span", null, option))));
  else {
    const field = h("input", { type: "number", step: "any", id, value: given.get(key) ?? "", "aria-label": q.ask, onkeydown: (event) => event.key === "Enter" && check() });
    const check = () => field.value !== "" && judge(Number(field.value));
    input = h("div", { class: "answer" }, field, h("span", null, q.unit), h("button", { type: "button", class: "small", onclick: check }, "Check"));
  }
  const node = h("li", null, h("fieldset", null, h("legend", null, q.ask), input, result));
  if (given.has(key)) judge(given.get(key));
  return node;
}
