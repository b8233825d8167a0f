// The frame: navigation, inputs, verdict, and the views that are open. A change of the state aborts what was asked before and asks again;
// an answer of an older state is dropped.

import { clear, empty, h, keepFocus, panel as boxed, sentence } from "meshwright/draw.js";
import * as actions from "meshwright/actions.js";
import * as inputs from "meshwright/inputs.js";
import * as save from "meshwright/save.js";
import * as scenarios from "meshwright/scenarios.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";
import { refusal, verdict } from "meshwright/notice.js";
import { VIEWS } from "meshwright/views.js";

const find = (id) => document.getElementById(id);
const parts = { workspaces: find("workspaces"), nav: find("views"), view: find("view"), verdict: find("verdict"), scenarios: find("scenarios"), subject: find("subject") };
const answers = new Map(); // by view name: { data, final, error, stale } for the present plan file
let asked = null; // the AbortController of the request that runs
let shown = []; // { view, section, body, drawn } of each panel that is open
let pressed = false; // a pointer is down in the view: what it presses must stay until the click
let postponed = false; // a drawing waits for that

/** Names of the Python views whose data a view draws. */
const needs = (view) => view.needs ?? [view.name];
/** Whether the options of a view only change how it is drawn. */
const isLocal = (name) => Boolean(VIEWS.find((view) => view.name === name)?.localOptions);
const available = (view) => source.live || (!view.liveOnly && needs(view).every(source.has));
const current = () => VIEWS.find((view) => view.name === state.get().page.view && !view.within && available(view)) ?? VIEWS.find(available) ?? VIEWS[0];

const WORKSPACES = { plan: "Plan", learn: "Learn", runs: "Runs" };
const inWorkspace = (name) => VIEWS.filter((view) => view.workspace === name && !view.within && available(view));
/** The views that are shown together: in the workspace Plan the overview with the views within it, and below it those of the open tab. */
function open() {
  const now = current(), first = inWorkspace("plan")[0];
  if (now.workspace !== "plan") return [now];
  return [first, ...VIEWS.filter((view) => view.within === first.name && available(view)), ...inWorkspace("plan").filter((view) => view !== first && view.tab === now.tab)];
}

/** The workspaces in the header, and the tabs of the present one: a tab opens all views of its name; one that is open closes. */
function navigation() {
  const now = current(), views = inWorkspace(now.workspace), isPlan = now.workspace === "plan", { page, ...rest } = state.get();
  const item = (view, title, isCurrent) => h("li", null, h("a", { href: state.address({ ...rest, page: { ...page, view: view.name } }), "aria-current": isCurrent }, title));
  const workspaces = Object.entries(WORKSPACES).map(([name, title]) => ({ name, title, own: inWorkspace(name) })).filter(({ own }) => own.length);
  clear(parts.workspaces).append(h("ul", null, workspaces.map(({ name, title, own }) => item(own.includes(now) ? now : own[0], title, name === now.workspace && "true"))));
  parts.workspaces.hidden = workspaces.length < 2;
  const tabs = views.slice(isPlan ? 1 : 0).filter((view, i, all) => all.findIndex((other) => other.tab === view.tab) === i);
  clear(parts.nav).append(h("ul", null, tabs.map((view) => item(isPlan && view.tab === now.tab ? views[0] : view, view.tab, view.tab === now.tab && "page"))));
  parts.nav.hidden = views.length < 2;
  document.body.dataset.workspace = source.bare ? "none" : now.workspace;
  document.title = `${now.title} · Meshwright`;
}

/** The panels of the open views; one that stays open keeps its drawing. */
function frame() {
  const views = open(), now = current();
  if (views.length === shown.length && views.every((view, i) => view === shown[i].view)) return mark(now);
  for (const panel of shown) if (!views.includes(panel.view)) panel.view.leave?.();
  shown = views.map((view) => shown.find((panel) => panel.view === view) ?? panelOf(view));
  const [first, ...others] = shown.filter(({ view }) => !view.within).map((panel) => panel.section);
  if (views[0].workspace === "plan") parts.view.replaceChildren(first, parts.scenarios, parts.nav, ...others);
  else {
    parts.view.before(parts.nav);
    parts.view.replaceChildren(first, ...others);
  }
  mark(now);
  if (others.length) shown.find((panel) => panel.view === now)?.section.scrollIntoView({ block: "nearest" });
}

/** The section of a view; of one within another view a panel, which that view places. */
function panelOf(view) {
  const body = h("div", { class: view.within ? null : "body" }), kind = view.ownTitle ? "view own-title" : "view";
  const section = view.within ? boxed(view.title, null, body) : h("section", { class: kind, dataset: { name: view.name } }, h("h2", null, view.title), sentence(view.sentence ?? ""), body);
  return { view, body, drawn: null, section };
}

function mark(now) {
  parts.view.dataset.view = now.name;
  for (const { view, section } of shown) section.firstChild.id = view === now ? "title" : "";
}

function context(view) {
  return {
    options: state.get().page.options[view.name] ?? {},
    setOptions: (options) => state.set(`page.options.${view.name}`, { ...state.get().page.options[view.name], ...options }),
    set: state.set,
    update: state.update,
    section: (name) => shown.find(({ view: one }) => one.name === name)?.section,
    live: source.live,
  };
}

/** Draw the open views with the answers that are there. `again`: also those whose answers did not change. */
function draw(again = true) {
  if (pressed) return void (postponed = true);
  frame();
  const heights = shown.map(({ body }) => body.offsetHeight); // read together: each change of the page would compute the layout again
  const busy = shown.map((panel, i) => drawPanel(panel, again, heights[i])).some(Boolean);
  for (const { view, body } of shown) if (view.within) outdate(body, answers.get(view.name)?.stale);
  parts.view.classList.toggle("refreshing", busy);
  parts.view.setAttribute("aria-busy", String(busy));
}

/** Dim what a slow answer of an older state shows; its buttons do nothing, but keep the focus. */
function outdate(node, stale) {
  node.classList.toggle("outdated", Boolean(stale));
  for (const button of node.querySelectorAll("button")) button.ariaDisabled = stale ? "true" : null;
}

/** Draw one view; returns whether an answer is missing. The old drawing stays until new data has come. */
function drawPanel(panel, again, height) {
  const { view, body } = panel, found = needs(view).map((name) => answers.get(name));
  const busy = found.some((a) => !a || !a.final || a.stale), failed = found.find((a) => a?.error);
  const drawn = JSON.stringify([found.map((a) => a?.serial), state.get().page.options[view.name]]);
  if (!again && panel.drawn === drawn) return busy;
  panel.drawn = drawn;
  if (failed) clear(body).append(refusal(failed.error));
  else if (found.some((a) => !a?.data)) {
    if (!body.firstChild) body.append(empty("Computing …"));
  } else if (!found.some((a) => a.stale)) fill(panel, found, height);
  return busy;
}

/** Draw one view with its answers. */
function fill({ view, body }, found, height) {
  const data = view.needs ? Object.fromEntries(view.needs.map((name, i) => [name, found[i].data])) : found[0].data;
  body.style.minHeight = `${height}px`; // the page does not jump while the view is drawn again
  keepFocus(body, () => {
    clear(body);
    try {
      view.draw(body, data, context(view));
      save.attach(body, view.name);
    } catch (error) {
      console.error(error);
      body.append(refusal({ what: `the view "${view.title}" could not be drawn`, why: String(error), fix: "reload the page: the server may be of another version than this tab" }));
    }
  });
  body.style.minHeight = "";
}

let serial = 0; // of answers
/** Ask for what the open views and the verdict need and do not have. `answered` is called once the first view can be drawn. */
async function refresh(answered = () => {}) {
  const now = state.get();
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  const names = [...new Set(["verdict", ...open().flatMap(needs)])].filter((name) => source.has(name) && (!answers.get(name)?.final || answers.get(name).stale));
  const first = open()[0], waiting = new Set(names.filter((name) => needs(first).includes(name)));
  if (!waiting.size) queueMicrotask(answered);
  if (!names.length) return draw();
  const options = Object.fromEntries(names.filter((name) => now.page.options[name] && !isLocal(name)).map((name) => [name, now.page.options[name]]));
  const received = (name, answer) => {
    const before = answers.get(name), { data = null, final = true, error = null } = answer;
    if (!final && before?.final && !before.stale) return; // computed elsewhere, and late
    const isSame = before?.data && !before.stale && JSON.stringify(data) === JSON.stringify(before.data); // not drawn again
    answers.set(name, { data, final, error, serial: isSame ? before.serial : serial++ });
    schedule();
    if (waiting.delete(name) && !waiting.size) answered();
  };
  try {
    const answering = source.views({ config: state.config(now), views: names, options }, signal, (answer) => signal.aborted || received(answer.view, answer));
    draw(false); // the server computes meanwhile
    await answering;
    if (waiting.size && !signal.aborted) answered(); // the server ended early
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    for (const name of names) received(name, { error: source.shape(error) });
  }
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  queueMicrotask(() => {
    scheduled = false;
    draw(false);
    announce();
  });
}

let announced = null; // the answer in the verdict's bar

function announce() {
  const found = answers.get("verdict");
  if (!found || found === announced) return;
  announced = found;
  verdict(parts.verdict, found);
  const data = found.data;
  if (data?.subject) clear(parts.subject).append(h("b", null, data.subject[0]), " ", data.subject[1]);
}

/** What an answer depends on, besides the options of its view. */
const keyOf = (s) => JSON.stringify(state.config(s));

function changed(now, before) {
  if (keyOf(now) !== keyOf(before)) for (const answer of answers.values()) answer.stale = true;
  for (const name of Object.keys({ ...before.page.options, ...now.page.options })) {
    const same = JSON.stringify(now.page.options[name]) === JSON.stringify(before.page.options[name]);
    if (!same && !isLocal(name) && answers.has(name)) answers.get(name).stale = true;
  }
  refresh(() => { // its request leaves first: links and inputs follow while the server computes
    inputs.askSoon();
    scenarios.draw(parts.scenarios);
  });
  navigation();
  inputs.update();
}

function begin() {
  state.begin(source.state);
  actions.begin(find("actions"));
  inputs.begin(find("inputs"));
  navigation();
  state.subscribe(changed);
  let width = parts.view.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(parts.view.clientWidth - width) < 2) return;
    width = parts.view.clientWidth;
    redraw();
  }).observe(parts.view);
  document.addEventListener("meshwright:theme", redraw);
  parts.view.addEventListener("click", (event) => event.target.closest(".outdated") && event.stopPropagation(), true);
  parts.view.addEventListener("pointerdown", () => { pressed = true; });
  for (const kind of ["pointerup", "pointercancel"]) {
    window.addEventListener(kind, () => {
      pressed = false;
      if (postponed) setTimeout(() => draw()); // after the click
      postponed = false;
    });
  }
  find("skip").addEventListener("click", (event) => {
    event.preventDefault();
    parts.view.focus();
  });
  refresh(redraw);
}

function redraw() {
  draw();
  scenarios.draw(parts.scenarios);
}

begin();
