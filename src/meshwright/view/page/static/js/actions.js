// The buttons of the page: find the best plan, pin a scenario, save and share, theme.

import { button, clear, format, h } from "meshwright/draw.js";
import { toast } from "meshwright/notice.js";
import { download } from "meshwright/save.js";
import * as scenarios from "meshwright/scenarios.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const STORED = "meshwright-theme";
let search = null; // the AbortController of a search that runs

/** Build the buttons. */
export function begin(element) {
  element.append(...(source.live ? [h("span", { class: "of-plan" }, best(), pin(), save())] : []), themeButton(), inputsButton());
}

function best() {
  const status = h("span", { class: "search", role: "status" });
  const start = button("Find the best", () => (search ? search.abort() : find()), { class: "primary", id: "best", title: "Search all plans for the fastest that fits" });
  async function find() {
    const started = performance.now(), config = state.config();
    search = new AbortController();
    start.textContent = "Stop the search";
    let words = "common plans first";
    const tick = () => { clear(status).append(h("progress", { "aria-label": "Search" }), ` ${((performance.now() - started) / 1000).toFixed(1)} s, ${words}`); };
    const timer = setInterval(tick, 200);
    tick();
    let found = null;
    try {
      await source.views({ config, views: ["leaders"], options: {} }, search.signal, (answer) => {
        if (answer.error) throw new source.Refusal(answer.error);
        found = answer.data;
        words = `best so far ${format.seconds(found.step_time_s)}`;
      });
      if (JSON.stringify(config) === JSON.stringify(state.config())) state.update({ plan: found.plan, "page.view": "leaders" });
      toast(`Best of ${format.whole(found.searched)} plans: ${format.seconds(found.step_time_s)} per step, found in ${((performance.now() - started) / 1000).toFixed(1)} s`);
    } catch (error) {
      toast(error.name === "AbortError" ? "The search was stopped; the plan is unchanged" : `${error.error?.code ?? ""} ${error.message}`);
    } finally {
      clearInterval(timer);
      clear(status);
      search = null;
      start.textContent = "Find the best";
    }
  }
  return [start, status];
}

const pin = () => button(["Pin", h("span", { class: "wide" }, " as scenario")], scenarios.pin, { id: "pin", title: "Keep this configuration as a scenario and compare others with it" });

/** A menu: everything that can be taken from the present plan, and a link to it. */
function save() {
  const item = (label, action) => button(label, () => run(action));
  const run = async (action) => {
    try {
      toast((await action()) ?? "Saved");
      menu.open = false;
    } catch (error) {
      toast(error.error?.what ?? `That did not work: ${error.message}`);
    }
  };
  const copy = async (text) => (await navigator.clipboard.writeText(text), `Copied: ${text.split("\n")[0]}`);
  const written = async (kind, name) => {
    const found = (await source.text(state.config()))[kind][name];
    if (found.error) throw new source.Refusal(found.error);
    download(found.file, found.text);
    return `Saved ${found.file}${found.lost?.length ? `; it cannot express ${found.lost.join(", ")}` : ""}`;
  };
  const choose = (label, kind) => h("select", { "aria-label": label, onchange: (event) => {
    const select = event.currentTarget, name = select.value;
    select.selectedIndex = 0;
    run(() => written(kind, name));
  } }, h("option", { value: "" }, `${label} …`));
  const settings = choose("Settings of a framework", "settings"), launch = choose("Launch file", "launch");
  const fill = (select, entries) => select.length > 1 || select.append(...entries.map(({ name, title }) => h("option", { value: name }, title ?? name)));
  const offer = () => source.catalog().then(({ frameworks, launchers }) => (fill(settings, frameworks), fill(launch, launchers)), (error) => toast(error.message));
  const menu = h("details", { class: "menu", ontoggle: () => menu.open && offer(), onkeydown: (event) => event.key === "Escape" && (menu.open = false) }, h("summary", { class: "button" }, "Save or share"), h("div", null,
    item("Copy the link", () => copy(location.href)),
    item("Plan file", async () => download("plan.toml", (await source.text(state.config())).toml)),
    item("Copy the command", async () => copy((await source.text(state.config())).command)),
    settings, launch,
    item("Trace of the step, for Perfetto", async () => download("step-trace.json", JSON.stringify(await source.trace(state.config())))),
    item("Scenarios", () => download("scenarios.json", JSON.stringify({ scenarios: scenarios.all() }, null, 1)))));
  document.addEventListener("click", (event) => menu.contains(event.target) || (menu.open = false));
  return menu;
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
  const other = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  const node = button("", () => turn(other()), { id: "theme" });
  function turn(wanted) {
    theme(wanted);
    node.textContent = other() === "light" ? "Light" : "Dark";
    node.title = `Use the ${other()} theme`;
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => turn());
  turn();
  return node;
}

function inputsButton() {
  const form = document.getElementById("inputs");
  const node = button("Inputs", () => {
    const closed = form.classList.toggle("closed");
    node.setAttribute("aria-expanded", String(!closed));
    if (!closed) form.scrollIntoView();
  }, { id: "inputs-button", "aria-expanded": "false", "aria-controls": "inputs" });
  form.classList.add("closed");
  return node;
}
