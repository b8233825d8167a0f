// A model or a cluster of the user's own: the numbers that decide the cost, and a name.

import { h } from "meshwright/draw.js";
import { ANY, check, entry, words } from "meshwright/fields.js";
import * as state from "meshwright/state.js";

/** A field for each part of a model's shape that decides the cost, with the values of the present model. `shape()` has them all, once it is known. */
export function ownModel(catalog, shape, mendAfter, follow) {
  const table = () => (typeof state.get().model === "string" ? { extends: state.get().model, name: `own ${state.get().model}` } : state.get().model);
  const change = (key) => (value, fail) => mendAfter({ model: { ...table(), [key]: value?.value ?? value ?? catalog.fields.model[key].default } }, fail);
  const fields = Object.entries(catalog.shape).map(([key, label]) => {
    const { about, values, default: usual } = catalog.fields.model[key], widget = values ? words : typeof usual === "boolean" ? check : entry;
    return follow(widget(label, about, change(key)), () => shape() && [...(values ? [ANY(values)] : []), shape()[key]]);
  });
  const name = follow(entry("Name", "", change("name"), { type: "text" }), () => shape() && [shape().name]);
  return h("div", { class: "fields" }, name, h("details", null, h("summary", null, "Own shape"), h("div", { class: "pair" }, fields)));
}

/** The accelerator, devices per node, and the links inside and between nodes. */
export function ownCluster(catalog, mendAfter, follow) {
  const now = () => {
    const { name, accelerator, levels } = typeof state.get().cluster === "string" ? {} : state.get().cluster, [inside, outside] = levels ?? [];
    const nameOr = (value, usual) => (typeof value === "string" ? value : usual);
    return { name: levels ? name : "own", accelerator: nameOr(accelerator, "h100-sxm"), node: inside?.size ?? 8, inside: nameOr(inside?.link, "nvlink4"), outside: nameOr(outside?.link, "ib-ndr") };
  };
  const change = (part, fail) => {
    const c = { ...now(), ...part };
    mendAfter({ cluster: { name: c.name, accelerator: c.accelerator, levels: [{ name: "node", size: c.node, link: c.inside }, { name: "network", size: 16384, link: c.outside }], gpus: state.at("cluster.gpus") ?? c.node } }, fail);
  };
  const pick = (label, kind, key) => follow(words(label, "", (c) => change({ [key]: c.value })), () => [ANY(catalog[kind].map((e) => e.name)), now()[key]]);
  const type = (label, key, options) => follow(entry(label, "", (value, fail) => value && change({ [key]: value }, fail), options), () => [now()[key]]);
  return h("details", null, h("summary", null, "Own cluster"), h("div", { class: "pair" }, type("Name", "name", { type: "text" }), pick("Accelerator", "accelerators", "accelerator"), type("GPUs per node", "node", { min: 1 }), pick("Link inside a node", "links", "inside"), pick("Link between nodes", "links", "outside")));
}
