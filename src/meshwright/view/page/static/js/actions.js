// The buttons of the page: find the best plan, compare, copy, theme.

import { clear, format, h } from "meshwright/draw.js";
import { toast } from "meshwright/notice.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const STORED = "meshwright-theme";
let search = null; // the AbortController of a search that runs

/** Build the buttons. */
export function begin(element) {
  theme();
  element.append(...(source.live ? [h("span", { class: "of-plan" }, best(), compare(), copy("Copy plan.toml", "toml"), copy("Copy command", "command"), copySettings())] : []), themeButton(), inputsButton());
}

function best() {
  const status = h("span", { class: "search", role: "status" });
  const button = h("button", { type: "button", class: "primary", id: "best", title: "Search all plans for the fastest that fits", onclick: () => (search ? search.abort() : find()) }, "Find the best");
  async function find() {
    const started = performance.now(), config = state.config();
    search = new AbortController();
    button.textContent = "Stop the search";
    let words = "common plans first";
    const tick = () => { clear(status).append(h("progress", { "aria-label": "Search" }), ` ${((performance.now() - started) / 1000).toFixed(1)} s, ${words}`); };
    const timer = setInterval(tick, 200);
    tick();
    let found = null;
    try {
      await source.views({ config, views: ["leaders"], options: {}, compare: null }, search.signal, (answer) => {
        if (answer.error) throw new source.Refusal(answer.error);
        found = answer.data;
        words = `best so far ${format.seconds(found.leaders[0].step_time_s)}`;
      });
      if (JSON.stringify(config) === JSON.stringify(state.config())) state.update({ plan: found.leaders[0].plan, "page.view": "leaders" });
      toast(`Best of ${format.whole(found.searched)} plans: ${format.seconds(found.leaders[0].step_time_s)} per step, found in ${((performance.now() - started) / 1000).toFixed(1)} s`);
    } catch (error) {
      toast(error.name === "AbortError" ? "The search was stopped; the plan is unchanged" : `${error.error?.code ?? ""} ${error.message}`);
    } finally {
      clearInterval(timer);
      clear(status);
      search = null;
      button.textContent = "Find the best";
    }
  }
  return [button, status];
}

function compare() {
  const button = h("button", { type: "button", id: "compare", "aria-pressed": "false", title: "Keep the present plan as plan 2 in every view, and go on changing plan 1", onclick: () => {
    const on = state.get().page.compare !== null;
    state.set("page.compare", on ? null : structuredClone(state.get().plan));
    if (!on) toast("The present plan is kept as plan 2; change the inputs to see both");
  } }, "Compare with mine");
  state.subscribe(show);
  function show() {
    const on = state.get().page.compare !== null;
    button.setAttribute("aria-pressed", String(on));
    button.textContent = on ? "Stop comparing" : "Compare with mine";
  }
  show();
  return button;
}

function copy(label, key) {
  return h("button", { type: "button", onclick: async () => {
    try {
      const text = (await source.text(state.config()))[key];
      await navigator.clipboard.writeText(text);
      toast(`Copied: ${text.split("\n")[0]}${text.includes("\n") ? " …" : ""}`);
    } catch (error) {
      toast(error.error?.what ?? `Could not copy: ${error.message}`);
    }
  } }, label);
}

/** A menu of frameworks: choosing one copies its settings for the present plan. */
function copySettings() {
  const select = h("select", { id: "copy-settings", "aria-label": "Copy as settings of another framework", onchange: async () => {
    const name = select.value, title = select.selectedOptions[0].textContent;
    select.selectedIndex = 0;
    try {
      const found = (await source.text(state.config())).settings[name];
      if (found.error) throw new source.Refusal(found.error);
      await navigator.clipboard.writeText(found.text);
      toast(`Copied: settings of ${title}${found.lost.length ? `; they cannot express ${found.lost.join(", ")}` : ""}`);
    } catch (error) {
      toast(error.error?.what ?? `Could not copy: ${error.message}`);
    }
  } }, h("option", { value: "" }, "Copy as … settings"));
  source.catalog().then(({ frameworks }) => select.append(...frameworks.map(({ name, title }) => h("option", { value: name }, title))));
  return select;
}

function theme(wanted) {
  let stored = null;
  try {
    if (wanted) localStorage.setItem(STORED, wanted);
    stored = localStorage.getItem(STORED);
  } catch { /* storage is off: the theme lasts until the page is left */ }
  const dark = wanted ?? stored ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark;
  document.dispatchEvent(new CustomEvent("meshwright:theme"));
}

function themeButton() {
  const button = h("button", { type: "button", id: "theme", onclick: () => {
    theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    show();
  } });
  const show = () => { button.textContent = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark"; button.title = `Use the ${button.textContent.toLowerCase()} theme`; };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { theme(); show(); });
  show();
  return button;
}

function inputsButton() {
  const form = document.getElementById("inputs");
  const button = h("button", { type: "button", id: "inputs-button", "aria-expanded": "false", "aria-controls": "inputs", onclick: () => {
    const closed = form.classList.toggle("closed");
    button.setAttribute("aria-expanded", String(!closed));
    if (!closed) form.scrollIntoView();
  } }, "Inputs");
  form.classList.add("closed");
  return button;
}
