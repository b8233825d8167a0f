// The inputs: model, cluster, stack, workload and plan. A choice is applied with the changes that keep the plan legal, which
// the server says (/api/choices): no rule of a legal plan is written here.

import { button, clear, format, h } from "meshwright/draw.js";
import { ANY, check, chips, entry, picker, words } from "meshwright/fields.js";
import * as files from "meshwright/files.js";
import { refusal, toast } from "meshwright/notice.js";
import { ownCluster, ownModel } from "meshwright/own.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const AXES = ["dp", "tp", "cp", "pp", "ep"];
let catalog = null, choices = null, asked = null, timer = 0;
const widgets = []; // functions that show the present state
let form = null, problems = null;

/** What the catalog says of the field at a path: { about, default, values }. */
const fieldOf = (path) => path.split(".").reduce((found, key) => found?.[key], catalog.fields) ?? {};
/** The value at a path of the plan file, or its default. */
const now = (path) => state.at(path) ?? fieldOf(path).default;
const about = (path) => fieldOf(path).about ?? "";
const nameOf = (part) => (typeof part === "string" ? part : part.name ?? part.extends ?? "own");

/** Set values; one that equals its default is left out, so that addresses stay short. */
function apply(changes) {
  const out = {};
  for (const [path, value] of Object.entries(changes)) {
    const fallback = fieldOf(path).default;
    out[path] = fallback !== undefined && JSON.stringify(fallback) === JSON.stringify(value) ? null : value;
  }
  state.update(out);
}

/** Whether the choices that are shown were computed for the present state. */
const fresh = () => choices?.key === JSON.stringify(state.config());

/** Plan fields named alone get their path: { shard: 8 } → { "plan.shard": 8 }. */
const paths = (changes) => Object.fromEntries(Object.entries(changes).map(([k, v]) => [k.includes(".") ? k : `plan.${k}`, v]));
const choose = (path) => (choice, fail) => (choice.typed || !fresh() ? mendAfter({ [path]: choice.value }, fail) : apply({ ...paths(choice.changes), [path]: choice.value }));

let pending = {}, fails = {}; // changes that wait for the plan that makes them legal, and where to say that one is not possible
let turn = 0; // of the newest question: an older answer is dropped

/** Apply changes, and the changes of the plan that make it legal with them. The last input wins: what waits is asked for again with it.
 *  `fail(why, error)` marks a field; without it the reason stands above the knobs. `illegal`: a plan that nothing makes legal is shown with
 *  its error, not refused. Returns what followed, or null. */
export async function mendAfter(changes, fail = null, illegal = !fail) {
  pending = { ...pending, ...changes };
  for (const path of Object.keys(changes)) fails[path] = fail;
  const mine = ++turn, next = structuredClone(state.config());
  for (const [path, value] of Object.entries(pending)) {
    const [section, field] = path.split(".");
    if (field === undefined) next[section] = value;
    else next[section] = { ...(typeof next[section] === "string" ? { extends: next[section] } : next[section]), [field]: value };
  }
  const settle = () => {
    const settled = { changes: pending, fails: Object.values(fails) };
    [pending, fails] = [{}, {}];
    return settled;
  };
  try {
    const found = await source.mend(next);
    if (mine !== turn) return null;
    if (found.problem && !found.mend && !illegal) throw new source.Refusal({ ...found.problem, why: [found.problem.why, "No other values of the plan make it legal"].filter(Boolean).join(". ") });
    const mend = found.mend ?? {};
    apply({ ...settle().changes, ...mend });
    const followed = Object.entries(mend).map(([path, value]) => `${path.replace("plan.", "")} = ${value}`).join(", ");
    if (followed) toast(`The plan follows: ${followed}`);
    return followed;
  } catch (error) {
    if (mine !== turn) return null;
    const words = source.shape(error), marked = settle().fails.filter(Boolean);
    marked.forEach((mark) => mark([words.what, words.why].filter(Boolean).join(". "), words));
    if (!marked.length) clear(problems).append(refusal(words));
    return null;
  }
}

function section(title, summary, ...children) {
  const note = h("span", null);
  widgets.push(() => { note.textContent = summary(); });
  return h("section", null, h("h3", null, title, note), h("div", { class: "fields" }, children));
}

/** A widget that follows the state; `read` gives what it shows, or nothing while that is not known. */
function follow(widget, read) {
  widgets.push(() => {
    const shown = read();
    if (shown) widget.follow(...shown);
  });
  return widget.node;
}

/** The field at a path: a widget with what is offered for it now; `read` gives its value. */
function knob(path, label, { widget = chips, read = () => now(path), ...options } = {}) {
  const offered = () => choices?.fields[path.replace("plan.", "")] ?? choices?.sizes[path] ?? ANY([read()]);
  return follow(widget(label, about(path), choose(path), options), () => [offered(), read()]);
}

const degree = (field, label, text, most = 6) => knob(`plan.${field}`, label, { text, most });
const word = (field, label, text) => knob(`plan.${field}`, label, { widget: words, text });
/** A field that is shown only where the server offers values for it: elsewhere it has no effect. */
const where = (field, node) => when(() => choices?.fields[field], node);
const flag = (field, label, show = () => ({})) => follow(check(label, about(`plan.${field}`), (value) => apply({ [`plan.${field}`]: value })), () => [now(`plan.${field}`), show()]);
/** A size of the work, of which any number may be typed. */
const size = (path, label, read) => knob(path, label, { read, text: format.whole, most: 5, number: true });

const gpus = () => state.at("cluster.gpus") ?? choices?.world ?? 0;
const hasSequence = () => !choices || "workload.seq" in choices.sizes;
/** A node that is shown only where a condition holds. */
function when(condition, node) {
  widgets.push(() => { node.hidden = !condition(); });
  return node;
}

const adapted = (node) => when(() => now("adapter.rank"), node);

/** The knobs that decide most, above the result: every value with its effect. */
function knobs() {
  const model = picker("Model", (name) => mendAfter({ model: name }));
  const cluster = picker("Cluster", (name) => mendAfter({ cluster: { extends: name, gpus: gpus() || 8 } }));
  return h("div", { class: "knobs" },
    follow(model, () => [catalog.models, nameOf(state.get().model)]), follow(cluster, () => [catalog.clusters, nameOf(state.get().cluster)]),
    presets(), h("div", { class: "field drop" }, files.picker("Open files"), h("small", null, "or drop them anywhere")), when(() => now("plan.pp") > 1, word("schedule", "Pipeline schedule")), knob("workload.precision", "Precision"), when(() => now("plan.pp") > 1, degree("virtual", "Stages per rank, virtual", undefined, 4)),
    size("cluster.gpus", "GPUs", gpus), size("workload.batch", "Global batch, samples"),
    when(hasSequence, size("workload.seq", "Sequence, tokens")), degree("zero", "ZeRO stage"), degree("recompute", "Recompute"),
    degree("tp", "Tensor parallel, tp"), degree("pp", "Pipeline stages, pp"), degree("cp", "Context parallel, cp"),
    when(() => (choices?.fields.ep?.length ?? 1) > 1, degree("ep", "Expert parallel, ep")),
    degree("microbatch", "Micro-batch, samples"),
    when(() => choices?.sizes["workload.imbalance"], knob("workload.imbalance", "Expert imbalance: busiest rank over the mean")),
    adapted(knob("adapter.rank", "Adapters (LoRA), rank")), adapted(knob("adapter.base", "Frozen base")),
    adapted(knob("adapter.targets", "Adapted matrices", { widget: words, read: () => [now("adapter.targets")].flat(), text: (v) => v.join(", ") || "as PEFT does" }))); // a file may have one name instead of a list
}

function workloadSection() {
  const stack = words("Training stack", "how the framework behaves: launches, fusion, overlap", (c) => mendAfter({ stack: c.value }));
  const tokens = entry("Token budget, such as 15T", about("workload.tokens"), (value, fail) => mendAfter({ "workload.tokens": value ?? 0 }, fail), { type: "text", placeholder: "none" });
  const perStep = () => (hasSequence() ? `${format.count(now("workload.batch") * now("workload.seq"))} tokens` : `${format.count(now("workload.batch"))} samples`);
  return section("Workload and stack", () => `${perStep()} per step`,
    follow(stack, () => [ANY(catalog.stacks.map((s) => s.name)), nameOf(state.get().stack)]),
    h("div", { class: "pair" }, knob("workload.optimizer", "Optimizer", { widget: words }), knob("workload.scaling", "fp8 scales", { widget: words }), follow(tokens, () => [now("workload.tokens") || ""])));
}

/** What trains: everything, or low-rank adapters over a frozen base. Their other knobs follow once there is a rank. */
function adapterSection() {
  const ranks = () => [...new Set([0, 8, 16, 64, now("adapter.rank")])].sort((a, b) => a - b);
  const rank = chips("Rank of adapters (LoRA)", about("adapter.rank"), (c, fail) => mendAfter(c.value ? { "adapter.rank": c.value } : { adapter: {} }, fail), { text: (v) => (v ? String(v) : "none") });
  return section("Fine-tuning", () => (now("adapter.rank") ? `adapters of rank ${now("adapter.rank")}` : "all parameters train"), follow(rank, () => [ANY(ranks()), now("adapter.rank")]));
}

function planSection() {
  const overlap = AXES.map((axis) => {
    const box = check(axis, `overlap ${axis} communication with compute`, (on) => apply({ "plan.overlap": AXES.filter((a) => (a === axis ? on : overlaps().includes(a))) }));
    return follow(box, () => [overlaps().includes(axis)]);
  });
  const stackOverlap = () => catalog.stacks.find((s) => s.name === nameOf(state.get().stack))?.overlap ?? ["dp"];
  const overlaps = () => [now("plan.overlap") ?? stackOverlap()].flat();
  const needs = (test, why) => () => ({ disabled: !test(), why });
  const layers = entry("Layers of each stage, such as 7, 9, 9, 7", about("plan.layers_per_stage"), (value) => apply({ "plan.layers_per_stage": (value?.match(/\d+/g) ?? []).map(Number) }), { type: "text", placeholder: "as even as possible" });
  const stageLayers = follow(layers, () => [[now("plan.layers_per_stage")].flat().join(", ")]);
  when(() => now("plan.pp") > 1, stageLayers);
  return section("Plan", () => `${format.whole(choices?.world ?? gpus())} GPUs`,
    flag("sp", "Sequence parallel, sp", needs(() => now("plan.tp") > 1, "(needs tp above 1)")),
    degree("shard", "Data parallel, sharded"), degree("replicate", "Data parallel, replicated"),
    when(() => (choices?.fields.ep?.length ?? 1) > 1, degree("expert_tp", "Tensor parallel inside experts (0: tp)")), stageLayers,
    h("details", null, h("summary", null, "Dtypes, overlap, and more"), h("div", { class: "fields-inner" },
      h("div", { class: "pair" }, word("param_dtype", "Parameters"), word("grad_dtype", "Gradients"), word("state_dtype", "Optimizer states"), word("gather_dtype", "Gathers")),
      where("comm_dtype", word("comm_dtype", "Gradient messages", (v) => v ?? "as the gradients")),
      flag("master", "fp32 master weights"),
      h("fieldset", { class: "field" }, h("legend", null, "Overlap with compute"), h("div", { class: "chips" }, overlap)),
      where("bucket", degree("bucket", "Gradient buckets", format.bytes)),
      where("wrap", degree("wrap", "ZeRO: layers gathered together", (n) => (n ? String(n) : "all"))),
      word("compression", "Gradient compression"), where("compression_ratio", degree("compression_ratio", "Share of elements sent", (v) => `${v * 100}%`)),
      where("compression_rank", degree("compression_rank", "Rank of PowerSGD")), where("compression_threshold", degree("compression_threshold", "Threshold, × root mean square")),
      where("order", word("order", "Order of the axes, fastest first", (v) => v.join(", ") || "the stack’s")), word("offload", "Offload to the host"),
      word("cp_kind", "Context parallelism"), word("tp_form", "Tensor-parallel form"), word("reduce", "Reduce gradients"),
      flag("prefetch", "ZeRO-3: prefetch the next layer", needs(() => now("plan.zero") === 3, "(needs ZeRO-3)")), flag("reshard", "ZeRO-3: free weights after forward", needs(() => now("plan.zero") === 3, "(needs ZeRO-3)")))));
}

function presets() {
  const select = h("select", { id: "preset", onchange: () => {
    const found = catalog.presets[select.selectedIndex - 1];
    if (!found) return;
    state.update({ ...found.state, page: { ...state.get().page, ...found.page } });
    select.selectedIndex = 0;
  } }, h("option", null, "…"), [...new Set(catalog.presets.map((p) => p.group))].map((group) => h("optgroup", { label: group }, catalog.presets.filter((p) => p.group === group).map((p) => h("option", { title: p.about }, p.title)))));
  return h("div", { class: "field" }, h("label", { for: "preset" }, "Start from"), select);
}

/** Build the form; in a written file it says how to open the live page instead. */
export async function begin(element) {
  form = element;
  form.addEventListener("submit", (event) => event.preventDefault());
  if (!source.live) {
    form.append(readOnly(), h("p", { class: "sentence" }, "This file shows one plan. To change its inputs, open the live page: ", h("code", null, source.command)));
    return;
  }
  problems = h("div", { "aria-live": "polite" });
  try {
    catalog = await source.catalog();
  } catch (error) {
    form.replaceChildren(refusal(error.error), button("Try again", () => begin(clear(form))));
    return;
  }
  const all = h("details", { id: "all-settings" }, h("summary", null, "All settings, own model and own cluster"), h("div", { class: "sections" }, section("Model", () => nameOf(state.get().model), ownModel(catalog, () => choices?.model, mendAfter, follow)), section("Cluster", () => nameOf(state.get().cluster), ownCluster(catalog, mendAfter, follow)), workloadSection(), planSection(), adapterSection()));
  files.begin(gpus, mendAfter);
  form.append(problems, knobs(), all);
  show();
  askSoon();
}

function readOnly() {
  const rows = Object.entries(state.config()).filter(([, part]) => Object.keys(part).length).map(([name, part]) => [h("dt", null, name), h("dd", null, typeof part === "string" ? part : Object.entries(part).map(([k, v]) => h("div", null, `${k} = ${typeof v === "object" ? JSON.stringify(v) : v}`)))]);
  return h("dl", { class: "read-only" }, rows.map((row) => h("div", null, row)));
}

const show = () => widgets.forEach((f) => f());

// The choices are asked for once the views have their first answers and no other change has come: computing them never delays a view.
const PAUSE_MS = 10;

/** Show a new state now, and later what can be chosen in it. */
export function update() {
  if (!catalog) return;
  asked?.abort();
  clearTimeout(timer);
  show();
  if (!fresh()) clear(problems); // else only the view or its options changed
  if (Object.keys(pending).length) mendAfter({}); // the state changed while an input waits: it follows from the new state
}

/** The views have been answered: ask for the choices of the present state, unless they are known or nobody sees them. */
export function askSoon() {
  if (!catalog || fresh() || document.body.dataset.workspace !== "plan") return;
  clearTimeout(timer);
  timer = setTimeout(ask, PAUSE_MS);
}

async function ask() {
  clearTimeout(timer);
  asked?.abort();
  asked = new AbortController();
  const { signal } = asked;
  try {
    const config = state.config(), found = await source.choices(config, signal);
    if (signal.aborted) return;
    choices = { ...found, plan: config.plan, key: JSON.stringify(config) };
    clear(problems);
    if (found.problem) problems.append(h("div", { class: "notice error" }, h("p", null, h("b", null, `${found.problem.code}: `), found.problem.what), found.mend ? button("Change the plan to the nearest legal one", () => apply(found.mend)) : null));
    show();
  } catch (error) {
    if (error.name !== "AbortError" && error.error) clear(problems).append(refusal(error.error));
  }
}
