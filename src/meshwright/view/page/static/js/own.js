// A model or a cluster of the user's own: the numbers that decide the cost, and a name.

import { h } from "meshwright/draw.js";
import { ANY, check, entry, words } from "meshwright/fields.js";

/** A field for each part of a model's shape that decides the cost, with the values of the present model. `shape()` has them all. */
export function ownModel(state, catalog, shape, mendAfter, widgets) {
  const table = () => (typeof state.get().model === "string" ? { extends: state.get().model, name: `own ${state.get().model}` } : state.get().model);
  const change = (key) => (value, fail) => mendAfter({ model: { ...table(), [key]: value?.value ?? value ?? catalog.fields.model[key].default } }, fail);
  const shown = (field, read) => (widgets.push(() => shape() && field.follow(...read(shape()))), field.node);
  const name = shown(entry("Name", "", change("name"), { type: "text" }), (now) => [now.name]);
  const fields = catalog.shape.map((key) => {
    const { about, values, default: usual } = catalog.fields.model[key], label = key.replace(/_/g, " "), pick = change(key);
    if (values) return shown(words(label, about, pick), (now) => [ANY(values), now[key]]);
    return shown(typeof usual === "boolean" ? check(label, about, pick) : entry(label, about, pick), (now) => [now[key]]);
  });
  return h("div", { class: "fields" }, name, h("details", null, h("summary", null, "Own shape"), h("div", { class: "pair" }, fields)));
}

/** The accelerator, devices per node, and the links inside and between nodes. */
export function ownCluster(state, catalog, mendAfter, widgets) {
  const present = () => (typeof state.get().cluster === "string" ? {} : state.get().cluster);
  const names = (kind) => catalog[kind].map((e) => e.name);
  const now = () => {
    const [inside, outside] = present().levels ?? [];
    return { name: present().levels ? present().name : "own", accelerator: typeof present().accelerator === "string" ? present().accelerator : "h100-sxm", node: inside?.size ?? 8, inside: typeof inside?.link === "string" ? inside.link : "nvlink4", outside: typeof outside?.link === "string" ? outside.link : "ib-ndr" };
  };
  const change = (part, fail) => {
    const c = { ...now(), ...part };
    mendAfter({ cluster: { name: c.name, accelerator: c.accelerator, levels: [{ name: "node", size: c.node, link: c.inside }, { name: "network", size: 16384, link: c.outside }], gpus: state.at("cluster.gpus") ?? c.node } }, fail);
  };
  const pick = (label, kind, key) => {
    const field = words(label, "", (c) => change({ [key]: c.value }));
    widgets.push(() => field.follow(ANY(names(kind)), now()[key]));
    return field.node;
  };
  const type = (label, key, options) => {
    const field = entry(label, "", (value, fail) => value && change({ [key]: value }, fail), options);
    widgets.push(() => field.follow(now()[key]));
    return field.node;
  };
  return h("details", null, h("summary", null, "Own cluster"), h("div", { class: "pair" }, type("Name", "name", { type: "text" }), pick("Accelerator", "accelerators", "accelerator"), type("GPUs per node", "node", { min: 1 }), pick("Link inside a node", "links", "inside"), pick("Link between nodes", "links", "outside")));
}
