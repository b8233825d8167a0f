// The frame: navigation, inputs, verdict, and the view that is shown. A change of the state aborts what was asked before and asks again;
// an answer of an older state is dropped.

import { h, clear, format } from "meshwright/draw.js";
import * as actions from "meshwright/actions.js";
import * as inputs from "meshwright/inputs.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";
import { refusal } from "meshwright/notice.js";
import * as verdict from "meshwright/verdict.js";
import { VIEWS } from "meshwright/views.js";

const find = (id) => document.getElementById(id);
const parts = { workspaces: find("workspaces"), nav: find("views"), view: find("view"), verdict: find("verdict"), subject: find("subject") };
let answers = new Map(); // by view name: { data, compare, final, error } for the present plan file
let asked = null; // the AbortController of the request that runs
let shown = null; // { view, body }
let pressed = false; // a pointer is down in the view: what it presses must stay until the click
let postponed = false; // a drawing waits for that

/** Names of the Python views whose data a view draws; of its optional ones, those that there are. */
const needs = (view) => (view.needs ?? [view.name]).filter((name) => source.has(name) || !view.optional?.includes(name));
/** Whether the options of a view only change how it is drawn. */
const isLocal = (name) => Boolean(VIEWS.find((view) => view.name === name)?.localOptions);
const available = (view) => source.live || (!view.liveOnly && needs(view).every(source.has));
const current = () => VIEWS.find((view) => view.name === state.get().page.view && available(view)) ?? VIEWS.find(available) ?? VIEWS[0];

let links = []; // [view, link]
const WORKSPACES = { plan: "Plan", learn: "Learn", runs: "Runs" };
const inWorkspace = (name) => VIEWS.filter((view) => view.workspace === name && available(view));

/** The workspaces in the header, and the views of the present one. */
function navigation() {
  const { workspace } = current();
  const button = h("button", { type: "button", id: "views-button", "aria-expanded": "false", onclick: () => {
    const closed = parts.nav.classList.toggle("closed");
    button.setAttribute("aria-expanded", String(!closed));
  } });
  links = [];
  const tabs = Object.entries(WORKSPACES).filter(([name]) => inWorkspace(name).length).map(([name, title]) => {
    const views = inWorkspace(name), tab = link(views.includes(current()) ? current() : views[0], title);
    if (name === workspace) tab.setAttribute("aria-current", "true");
    return h("li", null, tab);
  });
  clear(parts.workspaces).append(h("ul", null, tabs));
  links = []; // the tabs are made anew; the links of views follow
  const views = inWorkspace(workspace);
  clear(parts.nav).append(button, h("ul", null, views.map((view) => h("li", null, link(view)))));
  parts.nav.hidden = views.length < 2;
  parts.workspaces.hidden = tabs.length < 2;
  document.body.dataset.workspace = source.bare ? "none" : workspace;
}

function link(view, title = view.short ?? view.title) {
  const node = h("a", { onclick: (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a new tab or window
    event.preventDefault();
    state.set("page.view", view.name);
  } }, title);
  const { page, ...rest } = state.get();
  node.href = state.address({ ...rest, page: { ...page, view: view.name } });
  links.push([view, node]);
  return node;
}

/** Let the links lead to the present state with another view. */
function follow() {
  const now = current();
  navigation();
  for (const [view, node] of links) {
    if (view === now) node.setAttribute("aria-current", "page");
    else node.removeAttribute("aria-current");
  }
  document.title = `${now.title} · Meshwright`;
  document.getElementById("views-button").textContent = `View: ${now.title} ▾`;
  parts.nav.classList.add("closed");
}

function frame() {
  const view = current();
  if (shown?.view === view) return shown;
  shown?.view.leave?.();
  const body = h("div", { class: "body" });
  clear(parts.view).append(h("h2", { id: "title" }, view.title), h("p", { class: "sentence" }, (view.sentence ?? "").split("`").map((text, i) => (i % 2 ? h("code", null, text) : text))), body);
  parts.view.dataset.view = view.name;
  parts.view.classList.toggle("own-title", Boolean(view.ownTitle));
  shown = { view, body };
  return shown;
}

function context(view, refreshing) {
  const names = needs(view), compared = names.map((name) => answers.get(name)?.compare ?? null);
  return {
    compare: compared.every((c) => c === null) ? null : view.needs ? Object.fromEntries(names.map((name, i) => [name, compared[i]])) : compared[0],
    options: state.get().page.options[view.name] ?? {},
    setOptions: (options) => state.set(`page.options.${view.name}`, { ...state.get().page.options[view.name], ...options }),
    set: state.set,
    update: state.update,
    state: state.get,
    go: (name) => state.set("page.view", name),
    refreshing,
    live: source.live,
  };
}

/** Draw the view with the answers that are there; keep the old drawing until new data has come. */
function draw() {
  if (pressed) return void (postponed = true);
  const { view, body } = frame(), names = needs(view), found = names.map((name) => answers.get(name));
  const busy = found.some((a) => !a || !a.final || a.stale);
  parts.view.classList.toggle("refreshing", busy);
  parts.view.setAttribute("aria-busy", String(busy));
  const failed = found.find((a) => a?.error);
  if (failed && !view.drawsErrors) return clear(body).append(refusal(failed.error));
  if (found.some((a) => !a?.data)) {
    if (!body.firstChild) body.append(h("p", { class: "empty" }, "Computing …"));
    return;
  }
  if (found.length && found.every((a) => a.stale)) return;
  const data = view.needs ? Object.fromEntries(names.map((name, i) => [name, found[i].data])) : found[0].data;
  const height = body.offsetHeight, focused = focusPath(body);
  body.style.minHeight = `${height}px`; // the page does not jump while the view is drawn again
  clear(body);
  try {
    view.draw(body, data, context(view, busy));
  } catch (error) {
    console.error(error);
    body.append(refusal({ code: "", what: `the view "${view.title}" could not be drawn`, why: String(error), valid: [], fix: "" }));
  }
  body.style.minHeight = "";
  focused?.();
}

// A view draws its controls anew; the control in the same place gets the focus back.
function focusPath(body) {
  const active = document.activeElement;
  if (!active || !body.contains(active)) return null;
  const index = [...body.querySelectorAll("button, select, input, a, [tabindex]")].indexOf(active);
  return () => [...body.querySelectorAll("button, select, input, a, [tabindex]")][index]?.focus({ preventScroll: true });
}

/** Ask for what the view and the verdict need and do not have. `answered` is called once each of them has a first answer. */
async function refresh(answered = () => {}) {
  const view = current(), now = state.get();
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  const names = [...new Set(["verdict", ...needs(view)])].filter((name) => source.has(name) && (!answers.get(name)?.final || answers.get(name).stale));
  const waiting = new Set(names);
  if (!names.length) {
    draw();
    return queueMicrotask(answered);
  }
  const options = Object.fromEntries(names.filter((name) => now.page.options[name] && !isLocal(name)).map((name) => [name, now.page.options[name]]));
  draw();
  try {
    await source.views({ config: state.config(now), views: names, options, compare: now.page.compare }, signal, (answer) => {
      if (signal.aborted) return;
      answers.set(answer.view, { data: answer.data, compare: answer.compare_data ?? null, final: answer.final !== false, error: answer.error ?? null });
      if (answer.view === "verdict") announce();
      if (needs(current()).includes(answer.view)) schedule();
      if (waiting.delete(answer.view) && !waiting.size) answered();
    });
    if (waiting.size && !signal.aborted) answered(); // the server ended early
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    for (const name of names) answers.set(name, { data: null, compare: null, final: true, error: error.error ?? { code: "", what: String(error), why: "", valid: [], fix: "" } });
    announce();
    schedule();
    answered();
  }
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  queueMicrotask(() => {
    scheduled = false;
    draw();
  });
}

function announce() {
  const found = answers.get("verdict");
  if (found) verdict.bar(parts.verdict, found, source.live ? state.update : null);
  const data = found?.data;
  if (data?.subject) clear(parts.subject).append(h("b", null, data.subject.model), ` on ${format.whole(data.subject.gpus)} × ${data.subject.accelerator} · `, data.subject.plan);
}

/** What an answer depends on, besides the options of its view. */
const keyOf = (s) => JSON.stringify([state.config(s), s.page.compare]);

function changed(now, before) {
  if (keyOf(now) !== keyOf(before)) for (const answer of answers.values()) answer.stale = true;
  for (const name of Object.keys({ ...before.page.options, ...now.page.options })) {
    const same = JSON.stringify(now.page.options[name]) === JSON.stringify(before.page.options[name]);
    if (!same && !isLocal(name) && answers.has(name)) answers.get(name).stale = true;
  }
  refresh(inputs.askSoon); // its request leaves first: links and inputs follow while the server computes
  follow();
  inputs.update();
}

function begin() {
  state.begin(source.state);
  actions.begin(find("actions"));
  inputs.begin(find("inputs"));
  follow();
  state.subscribe(changed);
  let width = parts.view.clientWidth;
  new ResizeObserver(() => {
    if (Math.abs(parts.view.clientWidth - width) < 2) return;
    width = parts.view.clientWidth;
    draw();
  }).observe(parts.view);
  document.addEventListener("meshwright:theme", draw);
  parts.view.addEventListener("pointerdown", () => { pressed = true; });
  for (const kind of ["pointerup", "pointercancel"]) {
    window.addEventListener(kind, () => {
      pressed = false;
      if (postponed) setTimeout(draw); // after the click
      postponed = false;
    });
  }
  find("skip").addEventListener("click", (event) => {
    event.preventDefault();
    parts.view.focus();
  });
  refresh();
}

begin();
