// Widgets of the inputs. Each is { node, follow(…) }: follow() shows the present value and keeps the focus.

import { clear, format, formula, h } from "meshwright/draw.js";

let serial = 0;
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b); // a value may be a list
/** Choices that are all legal. */
export const ANY = (values) => values.map((value) => ({ value, legal: true, reason: "", changes: {} }));
const unique = (name) => `${name.replace(/\W/g, "-")}-${serial++}`;

/** A line below a field that says why its value is not possible; the field is marked. `fail("")` takes it away. */
function complaint(input) {
  const node = h("p", { class: "why", id: unique("why"), role: "status" });
  const fail = (why) => {
    node.textContent = why;
    input?.setAttribute("aria-invalid", String(Boolean(why)));
    if (why) input?.setAttribute("aria-describedby", node.id);
  };
  return { node, fail };
}

/** An input with its label above it. */
export const field = (input, label, about, ...more) => h("div", { class: "field" }, h("label", { for: input.id, title: about || null }, label), input, ...more);
const signed = (value, text) => (Math.abs(value) < 1e-9 ? "±0" : `${value > 0 ? "+" : "−"}${text(Math.abs(value), 2)}`);
const hasEffect = (c) => c.saves_s !== undefined, effects = (c) => [signed(-c.saves_s, format.seconds), signed(c.more_gib, format.gib)];
const toneOf = (c) => (c.fits === false ? "tone-bad" : Math.abs(c.saves_s) < 1e-9 ? null : c.saves_s > 0 ? "tone-good" : "tone-warn");

/** What a value does: to the step, to the memory, and which other fields follow; or why it is not possible, with the arithmetic. */
function described(name, c) {
  if (!c.legal) return `${name}: not possible\n${c.reason}`;
  const follows = Object.entries(c.changes ?? {}).map(([path, value]) => `${path.replace("plan.", "")} = ${value}`).join(", ");
  const effect = hasEffect(c) ? [`step ${effects(c)[0]}`, `memory ${effects(c)[1]}${c.fits ? "" : ": does not fit"}`] : [];
  return [name, ...effect, ...(follows ? [`with ${follows}`] : []), ...(c.not_run ? [`${c.not_run} does not run it`] : [])].join("\n");
}

/** A row of values, one chosen: radio buttons drawn as chips, each with its change of step time and of memory.
 *  choices: [{ value, legal, reason, changes, saves_s, more_gib, fits }]. `number`: any other number may be typed. */
export function chips(label, about, pick, { text = String, most = 14, number = false } = {}) {
  const name = unique(label), row = h("div", { class: "chips" });
  const exact = number ? h("input", { type: "number", min: 1, step: 1, "aria-label": `${label}, exact`, onchange: typed }) : null;
  const why = complaint(exact);
  const node = h("fieldset", { class: "field" }, h("legend", { title: about }, label, exact), row, why.node);
  let drawn = "", now = null, choices = [];
  function typed() {
    const value = Number(exact.value);
    if (!Number.isInteger(value) || value < 1) return why.fail("A whole number from 1 is needed");
    why.fail("");
    pick(choices.find((c) => c.value === value && c.legal) ?? { value, changes: {}, typed: true }, why.fail);
  }
  function choose(c) {
    if (c.legal) return pick(c, why.fail);
    mark();
    why.fail(`${text(c.value)}: ${c.reason}`);
  }
  const mark = () => row.querySelectorAll("input").forEach((input) => { input.checked = input.value === String(now); });
  const chip = (c) => {
    const words = described(`${label}: ${text(c.value)}`, c);
    const input = h("input", { type: "radio", name, value: String(c.value), "aria-label": text(c.value), "aria-description": words.split("\n").slice(1).join(", ") || null, "aria-disabled": c.legal ? null : "true", onchange: () => choose(c) });
    const tones = [toneOf(c), c.fits ? null : "tone-bad"], small = hasEffect(c) && c.value !== now && effects(c).map((effect, i) => h("small", { class: tones[i] }, effect));
    return h("label", null, formula(input, words), h("span", { class: c.fits === false ? "too-large" : null }, text(c.value), small));
  };
  return {
    node,
    follow(offered, value) {
      choices = offered;
      const shown = around(offered, value, most), key = JSON.stringify([shown, value]);
      if (now !== value && exact && document.activeElement !== exact) exact.value = String(value);
      if (now !== value) why.fail("");
      now = value;
      if (key !== drawn) {
        const focused = row.contains(document.activeElement) ? document.activeElement.value : null;
        clear(row).append(...shown.map(chip));
        drawn = key;
        if (focused !== null) [...row.querySelectorAll("input")].find((i) => i.value === focused)?.focus({ preventScroll: true });
      }
      mark();
    },
  };
}

/** At most `most` choices: legal ones first, around the present value, in their order. */
function around(choices, value, most) {
  if (choices.length <= most) return choices;
  const at = choices.findIndex((c) => c.value === value);
  const order = choices.map((c, i) => ({ c, far: Math.abs(i - at) + (c.legal ? 0 : choices.length) })).sort((a, b) => a.far - b.far);
  const kept = new Set(order.slice(0, most).map((o) => o.c));
  return choices.filter((c) => kept.has(c));
}

/** A select of words with their effects; one that is not possible is disabled and says why. */
export function words(label, about, pick, { text = String } = {}) {
  const id = unique(label);
  let current = [];
  const select = h("select", { id, onchange: () => pick(current[select.selectedIndex], () => {}) });
  const beside = (c) => `${effects(c).join(", ")}${c.fits ? "" : ", does not fit"}${c.not_run ? `, not run by ${c.not_run}` : ""}`;
  const effect = (c, value) => (hasEffect(c) && !same(c.value, value) ? ` (${beside(c)})` : "");
  let drawn = "";
  return {
    node: field(select, label, about),
    follow(choices, value) {
      current = choices;
      const key = JSON.stringify([choices, value]);
      if (key !== drawn) clear(select).append(...choices.map((c) => h("option", { value: String(c.value), disabled: !c.legal }, c.legal ? `${text(c.value)}${effect(c, value)}` : `${text(c.value)}: ${c.reason}`)));
      drawn = key;
      select.selectedIndex = choices.findIndex((c) => same(c.value, value));
    },
  };
}

/** A checkbox. */
export function check(label, about, pick) {
  const input = h("input", { type: "checkbox", onchange: () => pick(input.checked) });
  const reason = h("span", { class: "why" });
  return {
    node: h("label", { class: "control check", title: about || null }, input, h("span", null, label), reason),
    follow(value, { disabled = false, why = "" } = {}) {
      input.checked = Boolean(value);
      input.disabled = disabled;
      reason.textContent = disabled ? why : "";
      input.closest("label").title = disabled ? why : about;
    },
  };
}

/** A number or a text that is sent when it is complete. pick(value, fail) may say why it is not possible. */
export function entry(label, about, pick, { type = "number", min = 0, placeholder = "" } = {}) {
  const id = unique(label);
  const input = h("input", { type, id, min: type === "number" ? min : null, step: "any", placeholder, onchange: () => {
    const value = type === "number" ? (input.value === "" ? null : Number(input.value)) : input.value.trim() || null;
    why.fail("");
    if (type === "number" && (input.validity.badInput || value < min)) why.fail(`A number from ${min} is needed`);
    else pick(value, why.fail);
  } });
  const why = complaint(input);
  return {
    node: field(input, label, about, why.node),
    follow(value) {
      if (document.activeElement !== input && input.getAttribute("aria-invalid") !== "true") input.value = value ?? "";
    },
  };
}

/** A box to search entries [{ name, about }]: the browser offers those that match what is typed; Enter takes the first of them. */
export function picker(label, pick) {
  const id = unique(label), list = h("datalist", { id: `${id}-list` }), about = h("small", { class: "about" });
  let entries = [], current = "";
  const take = (found) => {
    if (!found || found.name === current) return;
    current = found.name;
    input.blur();
    pick(current);
  };
  const typed = () => entries.find((e) => e.name === input.value.trim());
  const matching = () => entries.find((e) => input.value.trim().toLowerCase().split(/\s+/).every((part) => `${e.name} ${e.about ?? ""}`.toLowerCase().includes(part)));
  const input = h("input", { type: "text", id, list: list.id, autocomplete: "off", spellcheck: "false", oninput: () => { why.fail(""); take(typed()); }, onfocus: () => { input.placeholder = current; input.value = ""; },
    onblur: () => { input.value = current; why.fail(""); }, onkeydown: (event) => event.key === "Enter" && (event.preventDefault(), input.value && enter(typed() ?? matching())) });
  const why = complaint(input);
  const enter = (found) => (found ? take(found) : why.fail("No name in the catalog has these words"));
  return {
    node: field(input, label, "", list, about, why.node),
    follow(found, name) {
      if (entries !== found) clear(list).append(...found.map((e) => h("option", { value: e.name }, e.about ?? "")));
      [entries, current] = [found, name];
      if (document.activeElement !== input) input.value = name;
      about.textContent = entries.find((e) => e.name === name)?.about ?? "";
    },
  };
}
