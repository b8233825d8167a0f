// The course: the list of chapters, the text of one with its figures, a question that checks itself, and progress that is kept in this browser.

import { choice, format, h } from "meshwright/draw.js";
import { embedded } from "meshwright/figures.js";
import { refusal } from "meshwright/notice.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const STORED = "meshwright-course";
const texts = new Map(); // chapters that were read, by key
let built = null; // the chapter on the page, or on its way: { key, width, node }
let turned = false; // a button led to the chapter: the keyboard goes on at its title

export const view = {
  title: "Learn distributed training",
  needs: [],
  localOptions: true,
  liveOnly: true,
  ownTitle: true,
  draw(element, _, context) {
    const key = context.options.chapter ?? progress().last ?? "", width = element.clientWidth;
    const go = (chapter) => {
      turned = true;
      context.setOptions({ chapter });
      document.getElementById("view").scrollIntoView({ block: "start" });
    };
    if (built && (built.key === key || !key) && Math.abs(built.width - width) < 2) return element.append(built.node);
    const now = (built = { key, width, node: h("div", { class: "course" }, h("p", { class: "empty" }, "Loading the chapter …")) });
    element.append(now.node);
    const show = (data) => {
      texts.set(key, data).set(data.chapter.key, data);
      now.key = data.chapter.key;
      remember({ last: now.key });
      if (built !== now) return;
      now.node.replaceChildren(...page(data, go));
      if (turned) now.node.querySelector("h2").focus({ preventScroll: true });
      turned = false;
    };
    if (texts.has(key)) show(texts.get(key));
    else ask(key ? { chapter: key } : {}).then(show, (error) => { now.key = null; now.node.replaceChildren(h("div", null, refusal(error.error ?? { what: String(error) }), h("button", { type: "button", onclick: () => go(null) }, "To the course"))); });
  },
};

/** The data of the view with some options. A plan that the server cannot read stops no chapter: the figures then show the example's. */
async function ask(options, signal) {
  let found = null;
  const of = (config) => source.views({ config, views: ["learn"], options: { learn: options } }, signal, (answer) => { found = answer; });
  try {
    await of(state.config());
  } catch (error) {
    if (!(error instanceof source.Refusal) || error.error.code === "offline") throw error;
    await of(state.example());
  }
  if (found.error) throw new source.Refusal(found.error);
  return found.data;
}

/** What this browser keeps: { last, done: { chapter: chosen option } }. Where storage is refused, it lasts until the page is left. */
let kept = null;
function progress() {
  if (kept) return kept;
  try { kept = JSON.parse(localStorage.getItem(STORED)); } catch { /* refused, or not ours */ }
  kept = kept && typeof kept === "object" ? kept : {};
  kept.done = kept.done && typeof kept.done === "object" ? kept.done : {};
  return kept;
}
function remember(changes) {
  Object.assign(progress(), changes);
  try { localStorage.setItem(STORED, JSON.stringify(kept)); } catch { /* refused */ }
}

function page({ contents, chapter }, go) {
  const all = contents.flatMap((part) => part.chapters), at = all.findIndex((one) => one.key === chapter.key);
  const part = contents.find((one) => one.chapters.some(({ key }) => key === chapter.key)).part;
  const list = h("nav", { class: "contents", "aria-label": "Chapters" });
  const drawList = () => list.replaceChildren(
    h("p", { class: "sentence" }, `${all.filter(({ key }) => isDone(key)).length} of ${all.length} answered`),
    choice("Chapter", all.map(({ key, title }, i) => [key, `${i + 1}. ${title}${isDone(key) ? " ✓" : ""}`]), chapter.key, go),
    ...contents.map((one) => h("section", null, h("h3", null, one.part), h("ol", null, one.chapters.map(({ key, title }) => h("li", null, h("button", { type: "button", "aria-current": key === chapter.key ? "step" : null, onclick: () => go(key) }, title, isDone(key) ? h("span", { class: "tone-good", "aria-label": "answered" }, " ✓") : "")))))));
  drawList();
  const step = (by, words) => (all[at + by] ? h("button", { type: "button", class: by > 0 ? "primary" : null, onclick: () => go(all[at + by].key) }, words(all[at + by].title)) : null);
  const article = h("article", { class: "chapter", dataset: { chapter: chapter.key } }, h("p", { class: "sentence" }, `${part} · chapter ${at + 1} of ${all.length}`), h("h2", { tabindex: "-1" }, chapter.title),
    ...chapter.blocks.map((block) => DRAWN[block.kind](block, chapter.key, go, drawList)), h("div", { class: "controls" }, step(-1, (title) => `← ${title}`), step(1, (title) => `${title} →`)));
  return [list, article];
}

const isDone = (key) => progress().done[key]?.right === true;

/** Inline text: strings and [kind, text, target]. A link goes to a chapter; other pages of the documentation are named only. */
const inline = (parts, go) => parts.map((part) => {
  if (typeof part === "string") return part;
  const [kind, text, target] = part, to = /^([\w-]+)\.md/.exec(target)?.[1];
  if (kind === "link") return to && go ? h("button", { type: "button", class: "link", onclick: () => go(to) }, text) : text;
  return h({ bold: "b", italic: "em", code: "code" }[kind], null, text);
});

const DRAWN = {
  text: (block, _, go) => h("p", null, inline(block.text, go)),
  heading: (block) => h("h3", null, inline(block.text)),
  list: (block, _, go) => h("ul", { class: "points" }, block.items.map((item) => h("li", null, inline(item, go)))),
  table: (block, _, go) => h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", null, h("thead", null, h("tr", null, block.head.map((cell) => h("th", { scope: "col" }, inline(cell, go))))), h("tbody", null, block.rows.map((row) => h("tr", null, row.map((cell, i) => h(i ? "td" : "th", { class: "text", scope: i ? null : "row" }, inline(cell, go)))))))),
  figure: (block) => embedded(block.name, inline(block.words), ask),
  more: (block, _, go) => h("details", { class: "more" }, h("summary", null, inline(block.ask)), h("p", null, inline(block.answer, go))),
  question,
  number: (block, _, go) => h("section", { class: "panel" }, h("h3", null, "The same number by command and in Python"), block.text.map((text) => h("p", null, inline(text, go))),
    h("pre", { class: "command", tabindex: "0" }, block.commands.map((command) => `$ ${command}`).join("\n")), h("pre", { class: "command", tabindex: "0" }, block.python), h("p", { class: "sentence" }, `Both give ${format.number(block.number, 6)}.`)),
};

/** A question with options of which one is right; each has the reason. The first right answer counts as done. */
function question(block, key, go, changed) {
  const result = h("p", { role: "status" }), given = progress().done[key]?.chosen;
  const judge = (i) => {
    const option = block.options[i];
    result.replaceChildren(h("b", { class: option.right ? "tone-good" : "tone-bad" }, option.right ? "✓ " : "✗ "), ...[inline(option.why, go)].flat());
  };
  const choose = (i) => {
    remember({ done: { ...progress().done, [key]: { chosen: i, right: block.options[i].right || isDone(key) } } });
    judge(i);
    changed();
  };
  const options = block.options.map((option, i) => h("label", null, h("input", { type: "radio", name: `question-${key}`, checked: given === i, onchange: () => choose(i) }), h("span", null, inline(option.text))));
  if (block.options[given]) judge(given);
  return h("section", { class: "panel question" }, h("h3", null, "Check yourself"), h("fieldset", null, h("legend", null, inline(block.ask)), h("div", { class: "options" }, options)), result);
}
