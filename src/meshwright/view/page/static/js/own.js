// A model or a cluster of the user's own: the few numbers that describe it.

import { h } from "meshwright/draw.js";
import { entry, words } from "meshwright/fields.js";

const ANY = (values) => values.map((value) => ({ value, legal: true, reason: "", changes: {} }));
const SHAPE = [["layers", "Layers"], ["hidden", "Hidden size"], ["heads", "Attention heads"], ["kv_heads", "KV heads (0: all)"], ["ffn", "FFN width"], ["vocab", "Vocabulary"], ["experts", "Experts (0: dense)"], ["top_k", "Experts per token"]];

/** "Own shape": changes some numbers of the present model. */
export function ownModel(state, mendAfter, widgets) {
  const table = () => (typeof state.get().model === "string" ? { extends: state.get().model } : state.get().model);
  const fields = SHAPE.map(([key, label]) => {
    const field = entry(label, "", (value) => {
      const next = { ...table(), name: "own" };
      if (value === null) delete next[key];
      else next[key] = value;
      mendAfter({ model: next });
    }, { placeholder: "as in the catalog" });
    widgets.push(() => field.follow(table()[key]));
    return field.node;
  });
  return h("details", null, h("summary", null, "Own shape"), h("div", { class: "pair" }, fields));
}

/** "Own cluster": accelerator, devices per node, and the links inside and between nodes. */
export function ownCluster(state, catalog, mendAfter, widgets) {
  const present = () => (typeof state.get().cluster === "string" ? {} : state.get().cluster);
  const names = (kind) => catalog[kind].map((e) => e.name);
  const now = () => {
    const [inside, outside] = present().levels ?? [];
    return { accelerator: typeof present().accelerator === "string" ? present().accelerator : "h100-sxm", node: inside?.size ?? 8, inside: typeof inside?.link === "string" ? inside.link : "nvlink4", outside: typeof outside?.link === "string" ? outside.link : "ib-ndr" };
  };
  const change = (part) => {
    const c = { ...now(), ...part };
    mendAfter({ cluster: { name: "own", accelerator: c.accelerator, levels: [{ name: "node", size: c.node, link: c.inside }, { name: "network", size: 16384, link: c.outside }], gpus: state.at("cluster.gpus") ?? c.node } });
  };
  const pick = (label, kind, key) => {
    const field = words(label, "", (c) => change({ [key]: c.value }));
    widgets.push(() => field.follow(ANY(names(kind)), now()[key]));
    return field.node;
  };
  const node = entry("GPUs per node", "", (value) => value && change({ node: value }), { min: 1 });
  widgets.push(() => node.follow(now().node));
  return h("details", null, h("summary", null, "Own cluster"), h("div", { class: "pair" }, pick("Accelerator", "accelerators", "accelerator"), node.node, pick("Link inside a node", "links", "inside"), pick("Link between nodes", "links", "outside")));
}
