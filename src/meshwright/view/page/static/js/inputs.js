// The inputs: model, cluster, stack, workload and plan. A choice is applied with the changes that keep the plan legal, which
// the server says (/api/choices): no rule of a legal plan is written here.

import { clear, format, h } from "meshwright/draw.js";
import { check, chips, drop, entry, picker, size, words } from "meshwright/fields.js";
import { refusal, toast } from "meshwright/notice.js";
import { ownCluster, ownModel } from "meshwright/own.js";
import * as source from "meshwright/source.js";
import * as state from "meshwright/state.js";

const AXES = ["dp", "tp", "cp", "pp", "ep"];
const ANY = (values) => values.map((value) => ({ value, legal: true, reason: "", changes: {} }));
let catalog = null, choices = null, base = null, asked = null, timer = 0;
const widgets = []; // functions that show the present state
let form = null, problems = null, unread = null; // problems: of the present state; unread: why a file could not be read, until the next change

const plan = (field) => state.get().plan[field] ?? catalog.fields.plan[field].default;
const workload = (field) => state.get().workload[field] ?? catalog.fields.workload[field].default;
const about = (section, field) => catalog.fields[section]?.[field]?.about ?? "";
const nameOf = (part) => (typeof part === "string" ? part : part.extends ?? part.name ?? "own");

/** Set values; one that equals its default is left out, so that addresses stay short. */
function apply(changes) {
  const out = {};
  for (const [path, value] of Object.entries(changes)) {
    const [section, field] = path.split("."), fallback = catalog.fields[section]?.[field]?.default;
    out[path] = fallback !== undefined && JSON.stringify(fallback) === JSON.stringify(value) ? null : value;
  }
  state.update(out);
}

/** Whether the choices that are shown were computed for the present state. */
const fresh = () => choices?.key === JSON.stringify(state.config());

const planChoice = (field) => (choice) => (!fresh() ? mendAfter({ [`plan.${field}`]: choice.value }) : apply({ ...Object.fromEntries(Object.entries(choice.changes).map(([k, v]) => [`plan.${k}`, v])), [`plan.${field}`]: choice.value }));

/** While a slider moves, every position starts from the plan for which its stops were computed, so that moving back restores it. */
const beginMove = () => { base = choices?.plan ?? null; };
function sizeChoice(path) {
  return (choice) => {
    if (choice.typed) return mendAfter({ [path]: choice.value });
    const restored = {};
    if (base) for (const key of new Set([...Object.keys(base), ...Object.keys(state.get().plan)])) restored[`plan.${key}`] = base[key] ?? null;
    apply({ ...restored, ...choice.changes, [path]: choice.value });
  };
}

/** Apply changes, and the changes of the plan that make it legal with them. */
async function mendAfter(changes) {
  const next = structuredClone(state.config());
  for (const [path, value] of Object.entries(changes)) {
    const [section, field] = path.split(".");
    if (field === undefined) next[section] = value;
    else next[section] = { ...(typeof next[section] === "string" ? { extends: next[section] } : next[section]), [field]: value };
  }
  try {
    const found = await source.choices(next);
    if (found.problem && found.mend) {
      const words = Object.entries(found.mend).map(([path, value]) => `${path.replace("plan.", "")} = ${value}`).join(", ");
      toast(`The plan follows: ${words}`);
    }
    apply({ ...changes, ...(found.mend ?? {}) });
  } catch (error) {
    clear(problems).append(refusal(error.error ?? { what: String(error) }));
  }
}

function section(title, summary, ...children) {
  const note = h("span", null);
  widgets.push(() => { note.textContent = summary(); });
  return h("section", null, h("h3", null, title, note), h("div", { class: "fields" }, children));
}

/** A widget that follows the state: make(…) and how it reads its value. */
function follow(widget, read) {
  widgets.push(() => widget.follow(...read()));
  return widget.node;
}

const fieldChoices = (field, values) => choices?.fields[field] ?? ANY(values ?? [plan(field)]);
const degree = (field, label, text) => follow(chips(label, about("plan", field), planChoice(field), { text, most: 8 }), () => [fieldChoices(field), plan(field)]);
const word = (field, label, text) => follow(words(label, about("plan", field), planChoice(field), { text }), () => [fieldChoices(field), plan(field)]);
/** A field that is shown only where the server offers values for it: elsewhere it has no effect. */
const where = (field, node) => when(() => choices?.fields[field], node);
const flag = (field, label, show = () => ({})) => follow(check(label, about("plan", field), (value) => apply({ [`plan.${field}`]: value })), () => [plan(field), show()]);
const sized = (path, label, read, text) => follow(size(label, sizeChoice(path), { text, begin: beginMove }), () => [choices?.sizes[path] ?? ANY([read()]), read()]);

const gpus = () => state.at("cluster.gpus") ?? choices?.world ?? 0;
const hasSequence = () => !choices || "workload.seq" in choices.sizes;
const ofWorkload = (field, label) => {
  const pick = (c) => (fresh() ? apply({ ...c.changes, [`workload.${field}`]: c.value }) : mendAfter({ [`workload.${field}`]: c.value }));
  return follow(words(label, about("workload", field), pick), () => [choices?.sizes[`workload.${field}`] ?? ANY([workload(field)]), workload(field)]);
};
/** A node that is shown only where a condition holds. */
function when(condition, node) {
  widgets.push(() => { node.hidden = !condition(); });
  return node;
}

/** The knobs that decide most, above the result: every value with its effect. */
function knobs() {
  const model = picker("Model, from the catalog", (name) => mendAfter({ model: name }));
  const cluster = picker("Cluster, from the catalog", (name) => mendAfter({ cluster: { extends: name, gpus: gpus() || 8 } }));
  const node = () => catalog.clusters.find((c) => c.name === nameOf(state.get().cluster))?.node ?? state.at("cluster.levels")?.[0]?.size ?? 8;
  const nodes = (n) => `${format.whole(n)} = ${n >= node() ? `${format.number(n / node())} × ${node()}` : "part of a node"}`;
  return h("div", { class: "knobs" }, h("div", { class: "sizes" }, presets(),
    follow(model, () => [catalog.models, nameOf(state.get().model)]), follow(cluster, () => [catalog.clusters, nameOf(state.get().cluster)]),
    sized("cluster.gpus", "GPUs", gpus, nodes), sized("workload.batch", "Global batch, samples", () => workload("batch")),
    when(hasSequence, sized("workload.seq", "Sequence, tokens", () => workload("seq"))), ofWorkload("precision", "Precision")), h("div", { class: "degrees" },
    degree("tp", "Tensor parallel, tp"), degree("pp", "Pipeline stages, pp"), degree("cp", "Context parallel, cp"),
    when(() => (choices?.fields.ep?.length ?? 1) > 1, degree("ep", "Expert parallel, ep")), degree("zero", "ZeRO stage"),
    degree("microbatch", "Micro-batch, samples"), degree("recompute", "Recompute"),
    when(() => plan("pp") > 1, word("schedule", "Pipeline schedule")), when(() => plan("pp") > 1, degree("virtual", "Stages per rank, virtual"))));
}

function modelSection() {
  const file = drop("Open a config.json", ".json,application/json", async (text, name) => {
    try {
      const table = await source.model(JSON.parse(text));
      const file = name.replace(/\.json$/, ""); // config.json names no model: then its architecture does
      mendAfter({ model: { ...table, name: /^config/.test(file) ? table.name : file } });
    } catch (error) {
      clear(unread).append(refusal(error.error ?? { code: "", what: `'${name}' is not JSON`, why: String(error), valid: [], fix: "" }));
    }
  });
  return section("Model", () => nameOf(state.get().model), file, ownModel(state, mendAfter, widgets));
}

function clusterSection() {
  const file = drop("Open a calibrated cluster.toml", ".toml", async (text, name) => {
    try {
      const { cluster } = await source.cluster(text);
      mendAfter({ cluster: typeof cluster === "string" ? { extends: cluster, gpus: gpus() } : { ...cluster, gpus: cluster.gpus || gpus() } });
    } catch (error) {
      clear(unread).append(refusal(error.error ?? { code: "", what: `'${name}' could not be read`, why: String(error), valid: [], fix: "" }));
    }
  });
  return section("Cluster", () => nameOf(state.get().cluster), file, ownCluster(state, catalog, mendAfter, widgets));
}

function workloadSection() {
  const stack = words("Training stack", "how the framework behaves: launches, fusion, overlap", (c) => mendAfter({ stack: c.value }));
  const tokens = entry("Token budget, such as 15T", about("workload", "tokens"), (value) => apply({ "workload.tokens": value ?? 0 }), { type: "text", placeholder: "none" });
  const perStep = () => (hasSequence() ? `${format.count(workload("batch") * workload("seq"))} tokens` : `${format.count(workload("batch"))} samples`);
  return section("Workload and stack", () => `${perStep()} per step`,
    follow(stack, () => [ANY(catalog.stacks.map((s) => s.name)), nameOf(state.get().stack)]),
    h("div", { class: "pair" }, ofWorkload("optimizer", "Optimizer"), ofWorkload("scaling", "fp8 scales"), follow(tokens, () => [workload("tokens") || ""])));
}

/** Take model, workload, stack and plan from settings of another framework; data parallelism takes the GPUs that are left. */
async function openSettings(text, name) {
  try {
    const { config, read } = await source.settings(text, name, gpus());
    state.update({ ...config, page: state.get().page });
    const others = [["unknown", read.unknown], ["not modelled", read.not_modelled], ["without effect", read.no_effect]].filter(([, keys]) => keys.length);
    toast(`${read.framework}: ${Object.keys(read.understood).length} keys read${others.map(([kind, keys]) => `, ${keys.length} ${kind}`).join("")}`);
    clear(problems);
  } catch (error) {
    clear(unread).append(refusal(error.error ?? { code: "", what: `'${name}' could not be read`, why: String(error), valid: [], fix: "" }));
  }
}

function planSection() {
  const overlap = AXES.map((axis) => {
    const box = check(axis, `overlap ${axis} communication with compute`, (on) => apply({ "plan.overlap": AXES.filter((a) => (a === axis ? on : overlaps().includes(a))) }));
    return follow(box, () => [overlaps().includes(axis)]);
  });
  const stackOverlap = () => catalog.stacks.find((s) => s.name === nameOf(state.get().stack))?.overlap ?? ["dp"];
  const overlaps = () => plan("overlap") ?? stackOverlap();
  const needs = (test, why) => () => ({ disabled: !test(), why });
  const layers = entry("Layers of each stage, such as 7, 9, 9, 7", about("plan", "layers_per_stage"), (value) => apply({ "plan.layers_per_stage": (value?.match(/\d+/g) ?? []).map(Number) }), { type: "text", placeholder: "as even as possible" });
  const stageLayers = follow(layers, () => [[plan("layers_per_stage")].flat().join(", ")]);
  when(() => plan("pp") > 1, stageLayers);
  const file = drop("Open settings of another framework", ".toml,.yaml,.yml,.json,.sh,.txt", openSettings);
  return section("Plan", () => `${format.whole(choices?.world ?? gpus())} GPUs`, file,
    flag("sp", "Sequence parallel, sp", needs(() => plan("tp") > 1, "(needs tp above 1)")),
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
      flag("prefetch", "ZeRO-3: prefetch the next layer", needs(() => plan("zero") === 3, "(needs ZeRO-3)")), flag("reshard", "ZeRO-3: free weights after forward", needs(() => plan("zero") === 3, "(needs ZeRO-3)")))));
}

function presets() {
  const select = h("select", { id: "preset", onchange: () => {
    const found = catalog.presets[select.selectedIndex - 1];
    if (!found) return;
    const keep = state.get().page;
    state.update({ ...found.state, page: { ...keep, ...found.page, options: { ...keep.options, ...found.page?.options } } });
    select.selectedIndex = 0;
  } }, h("option", null, "…"), catalog.presets.map((p) => h("option", { title: p.about }, p.title)));
  return h("div", { class: "field" }, h("label", { for: "preset" }, "Start from"), select);
}

/** Build the form; in a written file it says how to open the live page instead. */
export async function begin(element) {
  form = element;
  form.addEventListener("submit", (event) => event.preventDefault());
  if (!source.live) {
    form.append(h("div", { class: "notice" }, h("p", null, "This file shows one plan. To change its inputs, open the live page:"), h("p", null, h("code", null, source.command))), readOnly());
    return;
  }
  problems = h("div", { "aria-live": "polite" });
  unread = h("div", { "aria-live": "polite" });
  try {
    catalog = await source.catalog();
  } catch (error) {
    form.append(refusal(error.error));
    return;
  }
  const all = h("details", { id: "all-settings" }, h("summary", null, "All settings and files"), h("div", { class: "sections" }, modelSection(), clusterSection(), workloadSection(), planSection()));
  form.append(problems, unread, knobs(), all);
  show();
  ask();
}

function readOnly() {
  const rows = Object.entries(state.config()).map(([name, part]) => [h("dt", null, name), h("dd", null, typeof part === "string" ? part : Object.entries(part).map(([k, v]) => h("div", null, `${k} = ${typeof v === "object" ? JSON.stringify(v) : v}`)))]);
  return h("dl", { class: "read-only" }, rows);
}

const show = () => widgets.forEach((f) => f());

// The choices are asked for once the views have their first answers and no other change has come: computing them never delays a view.
const PAUSE_MS = 120;

/** Show a new state now, and later what can be chosen in it. */
export function update() {
  if (!catalog) return;
  asked?.abort();
  clearTimeout(timer);
  show();
  if (!fresh()) [problems, unread].forEach(clear); // else only the view or its options changed
}

/** The views have been answered: ask for the choices of the present state, unless they are known. */
export function askSoon() {
  if (!catalog || fresh()) return;
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
    if (found.problem) problems.append(h("div", { class: "notice error" }, h("p", null, h("b", null, `${found.problem.code}: `), found.problem.what), found.mend ? h("button", { type: "button", onclick: () => apply(found.mend) }, "Change the plan to the nearest legal one") : null));
    show();
  } catch (error) {
    if (error.name !== "AbortError" && error.error) clear(problems).append(refusal(error.error));
  }
}
