// Dropped files that Runs shows: traces of any program (what `explain` reads) and recordings of `check`. The files go to this machine's own server.

import { h } from "meshwright/draw.js";
import { refusal } from "meshwright/notice.js";
import * as save from "meshwright/save.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const RECORDED = /(^|\/)rank-\d+\/(rank\.json|step-\d+\.(json|safetensors))$/, TRACE = /\.json(\.gz)?$/i;
const HEAD = 1 << 16; // bytes of a file that are looked at
const VIEWS = { trace: "traced", recording: "checked" };
export const results = new Map(); // by view: { data, files, reference } or { error, files }
let reading = null; // { view, files, stop }
const listeners = new Set();

/** The files of a drop or of a file input, with folders: [{ name: "many/rank-00000/rank.json", file }]. */
export async function listed(transfer) {
  if (transfer instanceof FileList || Array.isArray(transfer)) return [...transfer].map((file) => ({ name: file.webkitRelativePath || file.name, file }));
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

/** What files are, from their names and first bytes: { kind: "trace" | "recording", files } or null. */
export async function recognised(files) {
  const recorded = files.filter(({ name }) => RECORDED.test(name));
  if (recorded.length) return { kind: "recording", files: recorded };
  const traces = [];
  for (const each of files) if (TRACE.test(each.name) && /"traceEvents"|"ph"\s*:\s*"[XMBE]"/.test(await head(each.file))) traces.push(each);
  return traces.length ? { kind: "trace", files: traces } : null;
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

/** If dropped files are traces or recordings, show them in Runs. Returns whether they are; others are for the caller. */
export async function openInRuns(files) {
  const found = await recognised(files);
  if (!found) return false;
  const view = VIEWS[found.kind];
  state.set("page.view", view);
  read(view, found.files);
  return true;
}

/** Send files to the server and keep what it answers. `reference`: of two recordings the one that is right. */
export async function read(view, files, reference = "") {
  reading?.stop.abort();
  const now = (reading = { view, files, stop: new AbortController() });
  announce();
  try {
    const answer = await source.dropped(files, reference, now.stop.signal);
    results.set(answer.view, { data: answer.data, files, reference });
  } catch (error) {
    if (error.name !== "AbortError") results.set(view, { error: error.error ?? { code: "", what: String(error), why: "", valid: [], fix: "" }, files });
  }
  if (reading === now) reading = null;
  announce();
}

const announce = () => listeners.forEach((f) => f());

/** Show what was dropped on Runs, or why it cannot be shown. */
async function take(transfer) {
  const files = await listed(transfer);
  if (!files.length || (await openInRuns(files))) return;
  const now = state.get().page.view, view = Object.values(VIEWS).includes(now) ? now : VIEWS.trace;
  results.set(view, { error: { code: "", what: `${files.length === 1 ? `'${files[0].name}' is` : "these files are"} neither traces nor a recording`, why: "A trace is what torch.profiler exports (.json or .json.gz); a recording is a folder with one folder for each rank", valid: [], fix: "" } });
  state.set("page.view", view);
  announce();
}

/** Call take(transfer) with the files that are dropped anywhere on a workspace. */
export function onDrop(workspace, take) {
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (document.body.dataset.workspace !== workspace || !event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.toggle("over", kind === "dragover");
      if (kind === "drop") take(event.dataTransfer);
    });
  }
}

if (source.live) onDrop("runs", take);

/** The drop zone above a view of dropped files, and what was read: calls draw(element, data) with it. A written file has its data already. */
export function zone(element, view, words, data, draw) {
  if (!source.live) return draw(element, data);
  const status = h("div", { "aria-live": "polite" }), body = h("div"), choose = (folder) => {
    const input = h("input", { type: "file", multiple: true, hidden: true, webkitdirectory: folder, onchange: () => take(input.files) });
    return [h("button", { type: "button", onclick: () => input.click() }, folder ? "Choose a folder" : "Choose files"), input];
  };
  element.append(h("div", { class: "drop" }, h("p", null, words), h("p", null, choose(view === VIEWS.recording))), status, body);
  const show = () => {
    if (!body.isConnected) return void listeners.delete(show);
    const result = results.get(view), busy = reading?.view === view;
    status.replaceChildren(...(busy ? [h("p", { class: "empty" }, h("progress", { "aria-label": "Reading" }), ` Reading ${reading.files.length === 1 ? reading.files[0].name : `${reading.files.length} files`} … `, h("button", { type: "button", class: "small", onclick: () => reading.stop.abort() }, "Stop"))] : result?.error ? [refusal(result.error)] : []));
    body.replaceChildren();
    if (busy || !result?.data) return;
    draw(body, result.data, result);
    save.attach(body, view);
  };
  listeners.add(show);
  show();
}
