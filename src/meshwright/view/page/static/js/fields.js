// Widgets of the inputs. Each is { node, follow(…) }: follow() shows the present value and keeps the focus.

import { clear, format, h } from "meshwright/draw.js";

let serial = 0;
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b); // a value may be a list
const unique = (name) => `${name.replace(/\W/g, "-")}-${serial++}`;

/** Values that are not possible, each with its reason: a list that opens. */
function reasons(choices, text) {
  const illegal = choices.filter((c) => !c.legal);
  if (!illegal.length) return null;
  const groups = new Map();
  for (const c of illegal) groups.set(c.reason, [...(groups.get(c.reason) ?? []), text(c.value)]);
  const names = illegal.map((c) => text(c.value)).join(", ");
  return h("details", { class: "why" }, h("summary", null, `not possible: ${names.length > 34 ? `${names.slice(0, 32)}…` : names}`),
    h("ul", null, [...groups].map(([reason, values]) => h("li", null, h("b", null, values.join(", ")), `: ${reason}`))));
}

/** What a value would do to the step and the memory: a short text under it, the whole in its tip. */
const sign = (value) => (value > 0 ? "+" : "−");
const described = (c) => (c.saves_s === undefined ? null : `step ${sign(-c.saves_s)}${format.seconds(Math.abs(c.saves_s))}, memory ${sign(c.more_gib)}${format.gib(Math.abs(c.more_gib))}${c.fits ? "" : ": does not fit"}`);
function effect(c) {
  const { saves_s: saves, fits } = c, none = Math.abs(saves) < 1e-9;
  if (saves === undefined) return null;
  return h("small", { title: described(c), class: !fits ? "tone-bad" : none ? null : saves > 0 ? "tone-good" : "tone-warn" }, none ? "±0" : `${sign(-saves)}${format.seconds(Math.abs(saves), 2)}`);
}

/** A row of values, one chosen: radio buttons drawn as chips. choices: [{ value, legal, reason, changes }]. */
export function chips(label, about, pick, { text = String, most = 14 } = {}) {
  const name = unique(label), row = h("div", { class: "chips" }), why = h("div", null);
  const node = h("fieldset", { class: "field" }, h("legend", { title: about }, label), row, why);
  let drawn = "";
  return {
    node,
    follow(choices, value) {
      const shown = around(choices, value, most), key = JSON.stringify(shown);
      if (key !== drawn) {
        const focused = row.contains(document.activeElement) ? document.activeElement.value : null;
        clear(row).append(...shown.map((c) => h("label", { title: c.reason || null }, h("input", { type: "radio", name, value: String(c.value), "aria-label": text(c.value), "aria-description": described(c), disabled: !c.legal && c.value !== value, onchange: () => pick(c) }), h("span", { class: c.fits === false ? "too-large" : null }, text(c.value), effect(c)))));
        clear(why).append(...[reasons(shown.filter((c) => c.value !== value), text)].filter(Boolean));
        drawn = key;
        if (focused !== null) [...row.querySelectorAll("input")].find((i) => i.value === focused)?.focus({ preventScroll: true });
      }
      for (const input of row.querySelectorAll("input")) input.checked = input.value === String(value);
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

const worded = (c) => {
  const node = effect(c);
  return node ? `  (${node.textContent}${c.fits ? "" : ", does not fit"})` : "";
};

/** A select of words, illegal ones disabled with their reason. */
export function words(label, about, pick, { text = String } = {}) {
  const id = unique(label), why = h("div", null);
  let current = [];
  const select = h("select", { id, onchange: () => pick(current[select.selectedIndex]) });
  const node = h("div", { class: "field" }, h("label", { for: id, title: about }, label), select, why);
  let drawn = "";
  return {
    node,
    follow(choices, value) {
      current = choices;
      const key = JSON.stringify(choices);
      if (key !== drawn) {
        clear(select).append(...choices.map((c) => h("option", { value: String(c.value), disabled: !c.legal, title: c.reason || null }, c.legal ? `${text(c.value)}${worded(c)}` : `${text(c.value)} (not possible)`)));
        clear(why).append(...[reasons(choices.filter((c) => !same(c.value, value)), text)].filter(Boolean));
        drawn = key;
      }
      select.selectedIndex = choices.findIndex((c) => same(c.value, value));
    },
  };
}

/** A slider over the sizes that are offered, and a number field for any other. begin() is called when a movement starts. */
export function size(label, pick, { text = format.whole, begin = () => {}, type = null } = {}) {
  const id = unique(label), why = h("p", { class: "why" });
  let stops = [], value = 0, moving = false;
  const start = () => {
    if (!moving) begin();
    moving = true;
  };
  const range = h("input", { type: "range", id, min: 0, max: 0, step: 1, value: 0, oninput: () => {
    start();
    const stop = stops[Number(range.value)];
    show(stop.value);
    why.textContent = stop.legal ? "" : stop.reason;
    if (stop.legal) pick(stop);
  }, onchange: () => { moving = false; } });
  const exact = h("input", { type: "number", min: 1, "aria-label": `${label}, exact`, onchange: () => {
    const wanted = Math.round(Number(exact.value));
    moving = false;
    if (wanted >= 1) (type ?? pick)(stops.find((s) => s.value === wanted) ?? { value: wanted, changes: {}, typed: true });
  } });
  const output = h("output", { for: id });
  const show = (v) => {
    value = v;
    output.textContent = text(v);
    range.setAttribute("aria-valuetext", text(v));
    if (document.activeElement !== exact) exact.value = String(v);
  };
  return {
    node: h("div", { class: "field size" }, h("label", { for: id }, h("span", null, label), output), h("div", { class: "with-number" }, range, exact), why),
    follow(choices, present) {
      if (!moving) stops = choices;
      range.max = String(Math.max(0, stops.length - 1));
      const at = stops.findIndex((s) => s.value >= present);
      if (!moving) range.value = String(at < 0 ? stops.length - 1 : at);
      if (!moving || value !== present) show(present);
      const stop = stops.find((s) => s.value === present);
      why.textContent = stop && !stop.legal ? stop.reason : "";
    },
  };
}

/** A checkbox. */
export function check(label, about, pick) {
  const input = h("input", { type: "checkbox", onchange: () => pick(input.checked) });
  const reason = h("span", { class: "why" });
  return {
    node: h("label", { class: "control check", title: about }, input, h("span", null, label), reason),
    follow(value, { disabled = false, why = "" } = {}) {
      input.checked = Boolean(value);
      input.disabled = disabled;
      reason.textContent = disabled ? why : "";
      input.closest("label").title = disabled ? why : about;
    },
  };
}

/** A number or a text that is sent when it is complete. */
export function entry(label, about, pick, { type = "number", min = 0, placeholder = "" } = {}) {
  const id = unique(label);
  const input = h("input", { type, id, min: type === "number" ? min : null, step: "any", placeholder, onchange: () => pick(type === "number" ? (input.value === "" ? null : Number(input.value)) : input.value.trim() || null) });
  return {
    node: h("div", { class: "field" }, h("label", { for: id, title: about }, label), input),
    follow(value) {
      if (document.activeElement !== input) input.value = value ?? "";
    },
  };
}

/** A box to search entries [{ name, about }]: type, arrow keys, Enter. */
export function picker(label, pick) {
  const id = unique(label), listId = `${id}-list`;
  let entries = [], shown = [], at = 0, current = "";
  const list = h("div", { class: "list", id: listId, role: "listbox", "aria-label": label, hidden: true });
  const input = h("input", { type: "search", id, role: "combobox", "aria-expanded": "false", "aria-controls": listId, "aria-autocomplete": "list", spellcheck: "false",
    onfocus: () => { input.select(); open(""); }, oninput: () => open(input.value), onblur: () => setTimeout(close, 120), onkeydown: key });
  const about = h("small", { class: "about" });
  function open(query) {
    const parts = query.toLowerCase().split(/\s+/).filter(Boolean);
    shown = entries.filter((e) => parts.every((p) => `${e.name} ${e.about ?? ""}`.toLowerCase().includes(p)));
    at = Math.max(0, shown.findIndex((e) => e.name === current));
    clear(list).append(...shown.map((e, i) => h("div", { role: "option", id: `${listId}-${i}`, "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); choose(e); } }, h("span", null, e.name), h("small", null, e.about ?? ""))));
    if (!shown.length) list.append(h("div", { role: "option", "aria-disabled": "true", "aria-selected": "false" }, "no entry matches"));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark();
  }
  function mark() {
    [...list.children].forEach((node, i) => node.setAttribute("aria-selected", String(i === at && shown.length > 0)));
    input.setAttribute("aria-activedescendant", shown.length ? `${listId}-${at}` : "");
    list.children[at]?.scrollIntoView({ block: "nearest" });
  }
  function close() {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
    input.value = current;
  }
  function choose(e) {
    current = e.name;
    close();
    pick(e.name);
  }
  function key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") close();
    if (event.key === "Enter") {
      event.preventDefault();
      if (!list.hidden && shown[at]) choose(shown[at]);
    }
    if (move) {
      event.preventDefault();
      if (list.hidden) open("");
      else at = (at + move + shown.length) % Math.max(1, shown.length);
      mark();
    }
  }
  return {
    node: h("div", { class: "field" }, h("label", { for: id }, label), input, list, about),
    follow(found, name) {
      entries = found;
      current = name;
      if (document.activeElement !== input) input.value = name;
      about.textContent = entries.find((e) => e.name === name)?.about ?? "";
    },
  };
}

/** A place to drop a file on, and a button that opens one. take(text, name) gets its content. */
export function drop(words, accept, take) {
  const file = h("input", { type: "file", accept, class: "hidden", tabindex: "-1", "aria-hidden": "true", onchange: () => read(file.files[0]) });
  const node = h("div", { class: "drop", ondragover: (event) => { event.preventDefault(); node.classList.add("over"); }, ondragleave: () => node.classList.remove("over"), ondrop: (event) => {
    event.preventDefault();
    node.classList.remove("over");
    read(event.dataTransfer.files[0]);
  } }, h("button", { type: "button", class: "small", onclick: () => file.click() }, words), " or drop it here", file);
  const read = async (found) => {
    if (!found) return;
    take(await found.text(), found.name);
    file.value = "";
  };
  return node;
}
