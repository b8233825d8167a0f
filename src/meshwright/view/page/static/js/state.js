// The state of the page: a plan file as JSON and what the page shows. It lives in the address, so every state can be shared and
// the back button undoes. The fragment has only what differs from the start: #view=memory&plan.tp=4&plan.shard=8

export const MOST_PINS = 8;
export const SECTIONS = ["model", "cluster", "stack", "workload", "plan", "adapter"];
const START = {
  model: "llama3-70b",
  cluster: { extends: "dgx-h100", gpus: 64 },
  stack: "megatron-core",
  workload: { batch: 512, seq: 8192 },
  plan: { tp: 8, sp: true, pp: 2, shard: 4, zero: 1, recompute: "selective" },
  adapter: {},
  page: { view: "overview", pins: [], options: {} },
};

let start = structuredClone(START);
let now = structuredClone(START);
const listeners = [];
let lastChange = { key: "", time: 0 };

const isTable = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** The present state; do not change it in place. */
export const get = () => now;
/** The plan file part of the state: the body of requests. */
export const config = (state = now) => Object.fromEntries(SECTIONS.map((name) => [name, state[name]]));
/** The configuration that the page starts with. */
export const example = () => config(structuredClone(START));
/** Call f(state, before) after each change. */
export const subscribe = (f) => listeners.push(f);

/** The value at a dotted path, or undefined. */
export const at = (path, state = now) => path.split(".").reduce((value, key) => (isTable(value) ? value[key] : undefined), state);

function put(state, path, value) {
  const keys = path.split("."), last = keys.pop();
  let table = state;
  for (const key of keys) {
    if (!isTable(table[key])) table[key] = typeof table[key] === "string" && table === state ? { extends: table[key] } : {};
    table = table[key];
  }
  if (value === null || value === undefined) delete table[last];
  else table[last] = value;
}

/** Change several paths at once: update({ "plan.tp": 4, "plan.shard": 8 }). One step of the history; changes of the same
 *  paths within a second (a slider that moves) are one step. A value of null removes the key. */
export function update(changes) {
  const before = now, next = structuredClone(now);
  for (const [path, value] of Object.entries(changes)) put(next, path, value);
  for (const section of SECTIONS) next[section] ??= structuredClone(START[section]);
  next.page.pins ??= [];
  next.page.options ??= {};
  if (JSON.stringify(next) === JSON.stringify(before)) return;
  now = next;
  const key = Object.keys(changes).sort().join(), time = performance.now();
  const same = key === lastChange.key && time - lastChange.time < 1000;
  lastChange = { key, time };
  history[same ? "replaceState" : "pushState"](null, "", address(now));
  listeners.forEach((f) => f(now, before));
}

/** Change one path. */
export const set = (path, value) => update({ [path]: value });

/** The fragment that restores a state. */
export function address(state) {
  return `#${wordsOf(state)}`;
}

function wordsOf(state) {
  const words = [], of = Object.fromEntries(Object.keys(state).map((key) => [key, start[key]]));
  difference(of, state, "", words);
  return words.join("&");
}

function difference(a, b, prefix, words) {
  for (const key of new Set([...Object.keys(a), ...Object.keys(b)])) {
    const path = prefix + key, [from, to] = [a[key], b[key]];
    if (path === "page.pins") for (const pin of to) words.push(`pin=${encode(JSON.stringify([pin.name, wordsOf(pin.config)]))}`);
    else if (isTable(to) && (isTable(from) || from === undefined || typeof from === "string") && !path.startsWith("page.options.")) {
      if (typeof from === "string") difference({}, to, `${path}.`, words);
      else difference(from ?? {}, to, `${path}.`, words);
    } else if (JSON.stringify(from) !== JSON.stringify(to)) words.push(`${encode(path.replace(/^page\./, ""))}=${encode(word(to))}`);
  }
}

// Readable in the address bar: strings as they are unless they would read back as another type.
const word = (value) => (value === undefined || value === null ? "null" : typeof value === "string" && !/^(true|false|null|[[{"\d-].*)$/.test(value) ? value : JSON.stringify(value));
const encode = (text) => encodeURIComponent(text).replace(/%(2C|3A|2F|5B|5D|22|7B|7D|20)/g, (m) => ({ "%20": "+", "%22": "%22", "%7B": "{", "%7D": "}" })[m] ?? decodeURIComponent(m));

function parse(text) {
  try { return JSON.parse(text); } catch { return text; }
}

/** The state of a fragment; parts that do not parse are left out. */
export function read(fragment) {
  const state = structuredClone(start);
  const page = new Set(["view", "options"]);
  for (const pair of fragment.replace(/^#/, "").split("&").filter(Boolean)) {
    const cut = pair.indexOf("=");
    if (cut < 1) continue;
    const decode = (text) => { try { return decodeURIComponent(text.replace(/\+/g, " ")); } catch { return ""; } };
    const path = decode(pair.slice(0, cut)), first = path.split(".")[0], value = parse(decode(pair.slice(cut + 1)));
    if (/(^|\.)(__proto__|constructor|prototype)(\.|$)/.test(path)) continue;
    if (first === "pin") readPin(state, value);
    else if (page.has(first)) put(state, `page.${path}`, value);
    else if (SECTIONS.includes(first)) putRead(state, path, value);
  }
  if (!isTable(state.page.options)) state.page.options = {};
  if (typeof state.page.view !== "string") state.page.view = START.page.view;
  for (const section of ["workload", "plan", "adapter"]) if (!isTable(state[section])) state[section] = {};
  for (const section of ["model", "cluster", "stack"]) if (!isTable(state[section]) && typeof state[section] !== "string") state[section] = structuredClone(START[section]);
  return state;
}

function readPin(state, value) {
  if (!Array.isArray(value) || value.length !== 2 || !value.every((part) => typeof part === "string") || value[1].includes("pin=")) return;
  if (state.page.pins.length < MOST_PINS) state.page.pins.push({ name: value[0], config: config(read(value[1])) });
}

function putRead(state, path, value) {
  const section = path.split(".")[0];
  // A string section that gets keys becomes a table of those keys: the fragment has all of them.
  if (path.includes(".") && typeof state[section] === "string") state[section] = {};
  put(state, path, value);
}

/** Take the state from the address (or from an offline file) and follow back and forward. */
export function begin(given = null) {
  if (given) start = { ...structuredClone(START), ...structuredClone(given), page: { ...START.page, ...given.page } };
  now = read(location.hash);
  window.addEventListener("popstate", () => {
    const before = now;
    now = read(location.hash);
    lastChange = { key: "", time: 0 };
    if (JSON.stringify(before) !== JSON.stringify(now)) listeners.forEach((f) => f(now, before));
  });
  return now;
}
