// Files, dropped anywhere on the page or chosen with a button. The first bytes of a file say where it goes: traces (what `explain` reads) and
// recordings (of `check`) are sent to this machine's own server and shown in Runs; every other file is read as a part of a plan (/api/file), and
// the page says what it changed and what it could not read. Files that are none of these are refused and change nothing.

import { button, clear, empty, format, h } from "meshwright/draw.js";
import { refusal } from "meshwright/notice.js";
import * as save from "meshwright/save.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const RECORDED = /(^|\/)rank-\d+\/(rank\.json|step-\d+\.(json|safetensors))$/, TRACE = /\.json(\.gz)?$/i;
const HEAD = 1 << 16; // bytes of a file that are looked at
const MOST_BYTES = 1 << 16, MOST_FILES = 8; // of a plan, and how many of its parts are opened together
const VIEWS = { trace: "traced", recording: "checked" };
const results = new Map(); // by view: { data, files, reference } or { error, files }
const listeners = new Set(), notice = h("div", { id: "files", "aria-live": "polite" });
let reading = null; // { view, files, stop }
let gpus = () => 0, apply = null, shownFor = "";

const failed = (what, why, valid) => ({ what, why, valid });

/** Take files that are dropped anywhere. `readGpus` and `mendAfter` are those of the inputs. */
export function begin(readGpus, mendAfter) {
  [gpus, apply] = [readGpus, mendAfter];
  document.querySelector("main").prepend(notice);
  state.subscribe(() => shownFor && JSON.stringify(state.config()) !== shownFor && clear(notice)); // what was said is of an older state
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.toggle("over", kind === "dragover");
      if (kind === "drop") take(event.dataTransfer);
    });
  }
}

/** A button that opens files, or with `folder` a folder of them. */
export function picker(words, { folder = false } = {}) {
  const input = h("input", { type: "file", multiple: true, class: "hidden", tabindex: "-1", "aria-hidden": "true", webkitdirectory: folder, onchange: async () => {
    await take(input.files);
    input.value = "";
  } });
  return h("span", null, button(words, () => input.click()), input);
}

/** The files of a drop or of a file input, with folders: [{ name: "many/rank-00000/rank.json", file }]. */
async function listed(transfer) {
  if (transfer instanceof FileList) return [...transfer].map((file) => ({ name: file.webkitRelativePath || file.name, file }));
  const entries = [...transfer.items].filter((item) => item.kind === "file").map((item) => item.webkitGetAsEntry?.() ?? item.getAsFile());
  return (await Promise.all(entries.map((entry) => walk(entry)))).flat();
}

async function walk(entry) {
  if (entry instanceof File) return [{ name: entry.name, file: entry }];
  if (entry.isFile) return [{ name: entry.fullPath.slice(1), file: await new Promise((done, failed) => entry.file(done, failed)) }];
  const reader = entry.createReader(), found = [];
  for (;;) { // a reader gives at most a hundred entries at a time
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) return (await Promise.all(found.map(walk))).flat();
    found.push(...some);
  }
}

/** The beginning of a file as text, unpacked if it is compressed. */
async function head(file) {
  try {
    const start = file.slice(0, HEAD), packed = /\.gz$/i.test(file.name);
    if (!packed) return await start.text();
    const reader = start.stream().pipeThrough(new DecompressionStream("gzip")).pipeThrough(new TextDecoderStream()).getReader();
    return (await reader.read()).value ?? "";
  } catch {
    return "";
  }
}

async function take(transfer) {
  const files = await listed(transfer), recorded = files.filter(({ name }) => RECORDED.test(name)), traces = [];
  if (!files.length) return;
  if (!recorded.length) for (const each of files) if (TRACE.test(each.name) && /"traceEvents"|"ph"\s*:\s*"[XMBE]"/.test(await head(each.file))) traces.push(each);
  clear(notice);
  if (!recorded.length && !traces.length) return open(files);
  const view = VIEWS[recorded.length ? "recording" : "trace"];
  state.set("page.view", view);
  read(view, recorded.length ? recorded : traces);
}

/** Open the parts of a plan, all as one change that can be undone. Of a run folder only its plan, of a folder of a model only its config.json. */
async function open(files) {
  const before = structuredClone(state.get()), base = ({ name }) => name.split("/").at(-1);
  const chosen = ["plan.toml", "config.json"].map((main) => files.find((one) => one.name.includes("/") && base(one) === main)).find(Boolean);
  const opened = [], refused = [], parts = {};
  for (const one of (chosen ? [chosen] : files).slice(0, MOST_FILES)) {
    try {
      const found = await part(one.file, base(one));
      opened.push({ name: base(one), ...found });
      Object.assign(parts, found.config);
    } catch (error) {
      refused.push({ name: base(one), error: error.error ?? failed(`'${base(one)}' could not be read`, String(error)) });
    }
  }
  const error = (found) => clear(notice).append(refusal(found));
  if (!opened.length) return error(refused[0].error);
  const pins = opened.find((one) => one.scenarios)?.scenarios;
  if (Object.keys(parts).length && (await apply(parts, (_, found) => error(found), true)) === null) return;
  if (pins) state.set("page.pins", pins);
  if (document.body.dataset.workspace !== "plan") state.set("page.view", "overview");
  const now = state.get(), changed = [...state.SECTIONS.filter((key) => JSON.stringify(now[key]) !== JSON.stringify(before[key])), ...(pins ? ["scenarios"] : [])];
  const unread = opened.flatMap((one) => one.unread), problems = opened.flatMap((one) => one.problems ?? []), left = chosen ? 0 : files.length - opened.length - refused.length;
  const undo = () => { state.update(before); clear(notice); };
  shownFor = JSON.stringify(state.config());
  clear(notice).append(h("div", { class: "notice good" },
    h("p", null, opened.map(({ name, kind }) => h("b", null, `${name}: ${kind}. `)), changed.length ? `Changed: ${changed.join(", ")}. ` : "It changed nothing. ", button("Undo", undo, { class: "small" })),
    refused.map((one) => h("p", null, `Not opened: ${one.name}. ${one.error.what}`)), left ? h("p", null, `${left} more files were not opened: at most ${MOST_FILES} are.`) : null,
    problems.map(({ code, what, why, fix }) => h("p", null, h("b", null, code), ` ${[what, why, fix && `Fix: ${fix}`].filter(Boolean).join(". ")}`)),
    unread.length ? h("details", null, h("summary", null, `Not read: ${unread.length} ${unread.length === 1 ? "entry" : "entries"}`), h("p", null, unread.join(", "))) : null));
}

/** What one file is: { kind, config, unread, problems, scenarios }. */
async function part(file, name) {
  if (file.size > MOST_BYTES) throw new source.Refusal(failed(`'${name}' has ${format.bytes(file.size)}`, `A part of a plan has at most ${format.bytes(MOST_BYTES)}; traces and recordings may be larger`));
  const text = await file.text();
  let json = null, lines = text;
  try {
    json = JSON.parse(text);
    lines = JSON.stringify(json, null, 1);
  } catch { /* not JSON, or too deep: the server says what is wrong */ }
  if (Array.isArray(json?.scenarios)) return scenarios(json);
  return source.file({ name, lines: lines.split("\n"), gpus: gpus() });
}

/** The scenarios of a file that the page wrote. */
function scenarios({ scenarios: list }) {
  const legal = list.filter((one) => typeof one?.name === "string" && one.config && typeof one.config === "object" && state.SECTIONS.every((key) => key === "adapter" || one.config[key]));
  if (!legal.length) throw new source.Refusal(failed("the file has no scenario with a name and all sections", "", state.SECTIONS));
  return { kind: `${legal.length} scenarios`, config: {}, scenarios: legal.slice(0, state.MOST_PINS).map(({ name, config }) => ({ name, config: { adapter: {}, ...config } })), unread: list.filter((one) => !legal.includes(one)).map((one, i) => one?.name ?? `scenario ${i + 1}`) };
}

// Traces and recordings.

const announce = () => listeners.forEach((f) => f());

/** Send files to the server and keep what it answers. `reference`: of two recordings the one that is right. */
export async function read(view, files, reference = "") {
  reading?.stop.abort();
  const now = (reading = { view, files, stop: new AbortController() });
  announce();
  try {
    const answer = await source.dropped(files, reference, now.stop.signal);
    results.set(answer.view, { data: answer.data, files, reference });
  } catch (error) {
    if (error.name !== "AbortError") results.set(view, { error: error.error ?? failed(String(error)), files });
  }
  if (reading === now) reading = null;
  announce();
}

/** The buttons above a view of such files, and what was read: calls draw(element, data) with it. A written file has its data already. */
export function zone(element, view, words, data, draw) {
  if (!source.live) return draw(element, data);
  const status = h("div", { "aria-live": "polite" }), body = h("div"), folder = view === VIEWS.recording;
  element.append(h("div", { class: "drop" }, h("p", null, words), h("p", null, picker(folder ? "Choose a folder" : "Choose files", { folder }))), status, body);
  const show = () => {
    if (!body.isConnected) return void listeners.delete(show);
    const result = results.get(view), busy = reading?.view === view;
    const what = busy && (reading.files.length === 1 ? reading.files[0].name : `${reading.files.length} files`);
    clear(status);
    if (busy) status.append(empty([h("progress", { "aria-label": "Reading" }), ` Reading ${what} … `, button("Stop", () => reading.stop.abort(), { class: "small" })]));
    else if (result?.error) status.append(refusal(result.error));
    body.replaceChildren();
    if (busy || !result?.data) return;
    draw(body, result.data, result);
    save.attach(body, view);
  };
  listeners.add(show);
  show();
}
