// What is known of training runs: read from a written file, or streamed by the server while somebody looks. The stream goes on where it was when the
// server comes back, and is closed while the page is hidden: a browser has few connections for each server.

import * as source from "meshwright/source.js";

const AGAIN_MS = 1500, LINGER_MS = 400;
export const known = { list: source.live ? null : source.runs, runs: new Map(Object.entries(source.live ? {} : source.run ?? {})), lost: false };
const listeners = new Set();
let stream = null, watched = null, timer = 0, told = false;

/** Call f() when something is new; returns a function that ends this. */
export function subscribe(f) {
  listeners.add(f);
  return () => listeners.delete(f);
}

function tell() {
  if (told) return;
  told = true; // the events of one moment are one drawing
  setTimeout(() => { told = false; listeners.forEach((f) => f()); });
}

/** Follow the list of runs and these runs, until `release`. */
export function watch(names) {
  clearTimeout(timer);
  if (!source.live || JSON.stringify(names) === JSON.stringify(watched)) return;
  watched = names;
  open();
}

/** Nobody looks any more. */
export function release() {
  timer = setTimeout(() => { watched = null; stream?.close(); stream = null; }, LINGER_MS); // another view of runs may follow
}

function open() {
  stream?.close();
  stream = null;
  if (!watched || document.hidden) return;
  const now = (stream = source.watchRuns(watched, new URLSearchParams(watched.filter((name) => known.runs.has(name)).map((name) => [name, known.runs.get(name).seen])).toString()));
  now.addEventListener("open", () => lost(false));
  now.addEventListener("error", () => {
    lost(true);
    if (now.readyState === EventSource.CLOSED && now === stream) setTimeout(() => now === stream && open(), AGAIN_MS);
  });
  now.addEventListener("runs", (event) => {
    known.list = JSON.parse(event.data);
    tell();
  });
  now.addEventListener("run", (event) => {
    take(JSON.parse(event.data));
    tell();
  });
}

function lost(value) {
  if (known.lost === value) return;
  known.lost = value;
  tell();
}

/** Add what is new in a run to what is known of it. */
function take(found) {
  const before = known.runs.get(found.name);
  if (found.error) return void known.runs.set(found.name, { rows: [], events: [], parts: {}, columns: [], ...before, ...found });
  const kept = before && !found.fresh ? before : { rows: [], events: [], parts: {} };
  known.runs.set(found.name, { ...found, error: null, rows: [...kept.rows, ...found.rows], events: [...kept.events, ...found.events], parts: { ...kept.parts, ...found.parts } });
}

document.addEventListener("visibilitychange", open);
