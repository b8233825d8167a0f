// Scenarios: named whole configurations, pinned beside the present one, compared in a table and in charts that share their axes.
// They are in the address (up to eight) and in a file. The charts of all scenarios light up together.

import { bars } from "meshwright/charts.js";
import { button, clear, format, h, panel, table } from "meshwright/draw.js";
import { toast } from "meshwright/notice.js";
import * as part from "meshwright/parts.js";
import * as save from "meshwright/save.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const NEEDS = ["verdict", "memory", "waterfall"];
const known = new Map(); // by configuration: what the server answered, or a promise of it
const complete = (found) => NEEDS.every((view) => found[view]?.data);
const nameOf = (entry) => (typeof entry === "string" ? entry : entry.name ?? entry.extends ?? "own");

/** The present configuration as a scenario, with a name that says what it is. */
function present(name = "") {
  const { model, cluster, plan } = state.get(), degrees = ["tp", "pp", "cp", "ep"].filter((k) => plan[k] > 1).map((k) => `${k} ${plan[k]}`).join(" ");
  return { name: name || `${nameOf(model)}, ${format.whole(cluster.gpus ?? 0)} × ${nameOf(cluster)}, ${degrees || "dp"} zero ${plan.zero ?? 0}`, config: structuredClone(state.config()) };
}

/** All that a file of scenarios has: the pinned ones, or the present one. */
export const all = () => (state.get().page.pins.length ? state.get().page.pins : [present()]);

export function pin() {
  const { pins } = state.get().page, one = present();
  if (pins.length >= state.MOST_PINS) return toast(`At most ${state.MOST_PINS} scenarios; remove one first`);
  if (pins.some((other) => JSON.stringify(other.config) === JSON.stringify(one.config))) return toast("This configuration is a scenario already");
  const again = pins.filter((other) => other.name.replace(/ \(\d+\)$/, "") === one.name).length;
  state.set("page.pins", [...pins, { ...one, name: again ? `${one.name} (${again + 1})` : one.name }]);
}

async function answers(config) {
  const key = JSON.stringify(config);
  if (known.size > 64) known.clear();
  if (!known.has(key)) {
    const found = {}, asked = source.views({ config, views: NEEDS, options: {} }, undefined, (answer) => { found[answer.view] = answer; });
    known.set(key, asked.catch((error) => { found.verdict = { error: source.shape(error) }; }).then(() => {
      if (!complete(found)) known.delete(key); // the server may have been busy: it is asked again with the next drawing
      return found;
    }));
  }
  return known.get(key);
}

let turn = 0; // of the newest drawing
/** Draw the comparison, if anything is pinned. */
export async function draw(element) {
  const mine = ++turn, { pins } = state.get().page;
  element.hidden = !pins.length || document.body.dataset.workspace !== "plan";
  if (element.hidden) return;
  const rows = [present("Now"), ...pins], found = await Promise.all(rows.map((one) => answers(one.config)));
  if (mine !== turn) return;
  const catalog = await source.catalog();
  const list = rows.map((one, i) => ({ ...one, i, ...found[i], data: complete(found[i]) ? found[i].verdict.data : null }));
  const drawn = list.filter((one) => one.data);
  clear(element).append(h("h2", null, "Scenarios"));
  const titles = ["Step time by part", "Memory of the fullest GPU"], [time, room] = titles.map((title) => panel(title, null));
  element.append(h("div", { class: "columns", hidden: !drawn.length }, time, room), panel(null, null, compared(list, catalog)));
  const piece = (one, name, value, words, look) => ({ value, ...look, formula: `${one.name}\n${name} ${words}`, name });
  const timed = (one) => one.waterfall.data.groups.map((p) => piece(one, part.NAMES[p.part], p.s, format.seconds(p.s), part.step(p.part)));
  const held = ({ memory: { data }, ...one }) => data.stages[data.fullest].parts.map((p) => piece(one, p.name, p.gib, format.gib(p.gib), part.memory(p.name)));
  chart(time, titles[0], drawn, "step time, s", timed, (one) => format.seconds(one.data.step_time_s));
  chart(room, titles[1], drawn, "GiB per GPU", held, (one) => format.gib(one.data.memory_gib), (one) => one.data.memory_limit_gib);
  save.attach(element, "scenarios");
  link(element);
}

/** One chart of stacked bars, a bar for each scenario on the same axis: labels leave out what all names share. */
function chart(box, title, list, unit, partsOf, text, limitOf = () => 0) {
  const words = list.map(({ name }) => name.split(", ")), pinned = words.slice(1);
  const own = words.map((parts, i) => (i && parts.filter((part) => pinned.length < 2 || !pinned.every((other) => other.includes(part))).join(", ")) || list[i].name);
  const rows = list.map((one, i) => ({ key: { scenario: one.i }, label: own[i].length > 23 ? `${own[i].slice(0, 17)}…${own[i].slice(-5)}` : own[i], text: text(one),
    tone: one.data.fits ? "ink" : "bad", limit: limitOf(one), parts: partsOf(one) }));
  bars(box, rows, { left: 150, right: 74, weight: 600, focus: false, x: { label: unit }, label: `${title}: ${list.map((one) => `${one.name} ${text(one)}`).join("; ")}` });
}

/** Results, and every field in which two scenarios differ. What differs from the present configuration is marked. */
function compared(list, catalog) {
  const fallback = (path) => path.split(".").slice(1).reduce((found, key) => found?.[key], catalog.fields[path.split(".")[0]])?.default;
  const flat = list.map(({ config }) => Object.fromEntries(state.SECTIONS.flatMap((section) => leaves(typeof config[section] === "string" ? { name: config[section] } : config[section], section))));
  const names = [...new Set(flat.flatMap(Object.keys))], value = (i, path) => flat[i][path] ?? fallback(path);
  const differing = names.filter((path) => new Set(list.map((_, i) => JSON.stringify(value(i, path)))).size > 1);
  const text = (v) => (v === undefined || v === null ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v));
  const result = (what, read) => ({ what, cells: list.map((one) => (one.data ? read(one.data) : "–")) });
  const rows = [
    result("step", (d) => format.seconds(d.step_time_s)), result("likely", (d) => `${format.seconds(d.step_time_low_s)} to ${format.seconds(d.step_time_high_s)}`),
    result("MFU", (d) => format.percent(d.mfu)), result("memory", (d) => `${format.gib(d.memory_gib)} of ${format.gib(d.memory_limit_gib)}`), result("fits", (d) => (d.fits ? "yes" : "no")),
    result("per second", (d) => `${format.count(d.tokens_per_s)} ${d.unit}`), result("per second and GPU", (d) => `${format.count(d.tokens_per_s / d.gpus)} ${d.unit}`),
    ...(list.every((one) => one.data) ? [] : [{ what: "error", cells: list.map((one) => NEEDS.map((view) => one[view]?.error?.what).find(Boolean) ?? "–") }]),
    ...differing.map((path) => ({ what: path, cells: list.map((_, i) => text(value(i, path))), field: true })),
  ];
  const marked = (row, i) => (row.field && i && row.cells[i] !== row.cells[0] ? h("mark", null, row.cells[i]) : row.cells[i]);
  const node = table([["", "what"], ...list.map((one, i) => [heading(one), (row) => marked(row, i)])], rows, { caption: "Scenarios: results, and the fields that differ" });
  for (const row of node.querySelectorAll("tr")) [...row.cells].slice(1).forEach((cell, i) => { cell.dataset.scenario = i; });
  return node;
}

const leaves = (value, path) => (value !== null && typeof value === "object" && !Array.isArray(value) ? Object.entries(value).flatMap(([key, v]) => leaves(v, `${path}.${key}`)) : [[path, value]]);

/** The head of a column: a name to change, and what can be done with the scenario. */
function heading({ name, config, i }) {
  if (!i) return "Now";
  const { pins } = state.get().page, change = (list) => state.set("page.pins", list), at = i - 1;
  return h("span", { class: "pin" }, h("input", { type: "text", value: name, title: name, maxlength: 80, "aria-label": `Name of scenario ${i}`, onchange: (event) => change(pins.map((one, k) => (k === at ? { ...one, name: event.currentTarget.value.trim() || name } : one))) }),
    button("open", () => state.update(structuredClone(config)), { class: "link" }), button("remove", () => change(pins.filter((_, k) => k !== at)), { class: "link" }));
}

/** What belongs to one scenario lights up together: bars in both charts and the column of the table. */
function link(element) {
  const light = (i) => { for (const node of element.querySelectorAll("[data-scenario]")) node.classList.toggle("linked", node.dataset.scenario === i); };
  element.onpointerover = (event) => light(event.target.closest("[data-scenario]")?.dataset.scenario);
  element.onpointerleave = () => light(undefined);
}
