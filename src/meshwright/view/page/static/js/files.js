// One drop zone for any file: the server says what a file is (/api/file), and the page what it changed and what it could not read.
// Traces and recordings open in Runs. A file that is none of these is refused and changes nothing.

import { clear, h } from "meshwright/draw.js";
import { listed, onDrop, openInRuns } from "meshwright/dropped.js";
import { refusal } from "meshwright/notice.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const notice = h("div", { "aria-live": "polite" });
let gpus = () => 0, apply = null, shownFor = "";

/** Take files that are dropped anywhere on the workspace Plan. Returns the place of the notices. */
export function begin(readGpus, mendAfter) {
  [gpus, apply] = [readGpus, mendAfter];
  onDrop("plan", take);
  state.subscribe(() => shownFor && JSON.stringify(state.config()) !== shownFor && clear(notice)); // what was said is of an older state
  return notice;
}

/** The button that opens files. */
export function picker() {
  const input = h("input", { type: "file", multiple: true, class: "hidden", tabindex: "-1", "aria-hidden": "true", onchange: async () => {
    await take(input.files);
    input.value = "";
  } });
  return h("div", { class: "field drop" }, h("button", { type: "button", onclick: () => input.click() }, "Open a file"), h("small", null, "or drop one anywhere"), input);
}

async function take(transfer) {
  const found = await listed(transfer);
  if (!found.length || (await openInRuns(found))) return;
  const plan = found.find(({ name }) => /(^|\/)plan\.toml$/.test(name)) ?? found[0]; // of a run folder its plan
  try {
    await open(plan.file, plan === found[0] ? plan.file.name : plan.name);
  } catch (error) {
    clear(notice).append(refusal(error.error ?? { code: "", what: `'${plan.name}' could not be read`, why: String(error), valid: [], fix: "" }));
  }
}

async function open(file, name) {
  const before = structuredClone(state.get()), text = await file.text();
  let json = null;
  try { json = JSON.parse(text); } catch { /* not JSON: the server reads it */ }
  const lines = (json === null ? text : JSON.stringify(json, null, 1)).split("\n");
  const read = Array.isArray(json?.scenarios) ? scenarios(json) : await source.file({ name, lines, gpus: gpus() });
  if (read.scenarios) state.set("page.pins", read.scenarios);
  else if ((await apply(read.config, (why, error) => { throw new source.Refusal(error); }, true)) === null) return;
  const now = state.get(), changed = [...state.SECTIONS, ...(read.scenarios ? ["scenarios"] : [])].filter((key) => JSON.stringify(key === "scenarios" ? now.page.pins : now[key]) !== JSON.stringify(key === "scenarios" ? before.page.pins : before[key]));
  shownFor = JSON.stringify(state.config());
  clear(notice).append(h("div", { class: "notice good" },
    h("p", null, h("b", null, `${name}: ${read.kind}. `), changed.length ? `Changed: ${changed.join(", ")}. ` : "It changed nothing. ", h("button", { type: "button", class: "small", onclick: () => { state.update(before); clear(notice); } }, "Undo")),
    read.unread.length ? h("details", null, h("summary", null, `Not read: ${read.unread.length} ${read.unread.length === 1 ? "entry" : "entries"}`), h("p", null, read.unread.join(", "))) : null));
}

/** The scenarios of a file that the page wrote. */
function scenarios({ scenarios: list }) {
  const legal = list.filter((one) => typeof one?.name === "string" && one.config && typeof one.config === "object" && state.SECTIONS.every((key) => one.config[key]));
  if (!legal.length) throw new source.Refusal({ code: "", what: "the file has no scenario with a name and all sections", why: "", valid: state.SECTIONS, fix: "" });
  return { kind: `${legal.length} scenarios`, scenarios: legal.slice(0, state.MOST_PINS), unread: list.filter((one) => !legal.includes(one)).map((one, i) => one?.name ?? `scenario ${i + 1}`) };
}
