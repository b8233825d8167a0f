// Where data comes from: the server, or the JSON inside a file that a command wrote. Views do not see the difference.

const element = document.getElementById("meshwright-data");
const embedded = element ? JSON.parse(element.textContent) : null;

/** Whether a server answers: false in a written file. */
export const live = embedded === null;
/** The state in a written file, or null. */
export const state = embedded?.state ?? null;
/** Whether this is a written file whose views belong to no plan. */
export const bare = Boolean(embedded?.bare);
/** The command that opens the live page. */
export const command = embedded?.command ?? "meshwright web";
/** Whether a written file has the data of a view. */
export const has = (name) => live || name in embedded.views;

/** An error in the one shape of Meshwright: { code, what, why, valid, fix }. */
export class Refusal extends Error {
  constructor(error) {
    super(error.what);
    this.error = error;
  }
}

/** Any error in that shape. */
export const shape = (error) => error.error ?? { what: String(error) };

async function failure(response) {
  try {
    const body = await response.json();
    if (body.error) return new Refusal(body.error);
  } catch { /* not JSON: described below */ }
  return new Refusal({ code: `HTTP ${response.status}`, what: "the server did not answer", why: response.statusText });
}

async function ask(path, { body, signal, type = "application/json" } = {}) {
  const options = body === undefined ? { signal } : { method: "POST", headers: { "Content-Type": type }, body: body instanceof Blob ? body : JSON.stringify(body), signal };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal({ code: "offline", what: "the server does not answer", why: "It was stopped, or the connection broke", fix: command });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

const json = async (path, options) => (await ask(path, options)).json();

/** Data of views: onanswer({ view, data, final, error }) for each line as it arrives. Throws a Refusal, or AbortError. */
export async function views({ config, views: names, options }, signal, onanswer) {
  if (!live) {
    for (const view of names) {
      const found = embedded.views[view];
      onanswer({ view, final: true, ...(found ?? { error: { what: "this file does not have this view", why: "It was written without it", fix: command } }) });
    }
    return;
  }
  const response = await ask("/api/views", { body: { config, views: names, options }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) if (line.trim()) onanswer(JSON.parse(line));
    if (done) return;
  }
}

let loaded = null;
/** The catalog, asked for until it is there: inputs and actions both need it. */
export const catalog = () => (loaded ??= (live ? json("/api/catalog") : Promise.resolve(embedded.catalog)).catch((error) => {
  loaded = null;
  throw error;
}));
export const choices = (config, signal) => json("/api/choices", { body: config, signal });
export const mend = (config) => json("/api/mend", { body: config });
export const text = (config, signal) => json("/api/text", { body: config, signal });
export const trace = (config) => json("/api/trace", { body: config });
/** The view of dropped files: { view, data }. Their bytes go to this server as they are read from the disk. */
export const dropped = (files, reference, signal) => json(`/api/dropped${reference ? `?reference=${encodeURIComponent(reference)}` : ""}`, { body: new Blob(files.flatMap(({ name, file }) => [`${JSON.stringify({ name, size: file.size })}\n`, file])), type: "application/x-meshwright-files", signal });
/** What a file is: { kind, config, unread, problems }. */
export const file = (body) => json("/api/file", { body });
/** Whether there may be training runs: a server knows some, or `meshwright report` wrote them into the file. */
export const hasRuns = live || Boolean(embedded.runs);
/** The runs of a written file: their list, and each by its name. */
export const runs = embedded?.runs ?? null, run = embedded?.run ?? null;
/** The stream of what is new in the list of runs and in these. `seen`: what is known of them already. */
export const watchRuns = (names, seen) => new EventSource(`/api/watch?${new URLSearchParams([...names.map((name) => ["run", name]), ["seen", seen]])}`);
