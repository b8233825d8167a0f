// The grid of ranks: a block per pipeline stage and data-parallel replica, nodes outlined; the groups of the chosen rank are lit.

import { centred, figure, format, formula, legend, panel, svg, table } from "meshwright/draw.js";

export const view = {
  title: "The grid of ranks",
  sentence: "Every square is a GPU; a frame is a node. Choose a rank to light the groups it belongs to: ranks of a group exchange messages on the links that their frame shares, or between frames.",
  localOptions: true,
  draw(element, data, context) {
    const box = element.appendChild(panel("Ranks and nodes", data.note));
    if (data.world === 1) return;
    const rank = Math.min(context.options.rank ?? 0, data.drawn - 1);
    grid(box, data, rank, context);
    box.append(legend(data.axes.map((a) => ({ label: `${a.axis} group of rank ${rank}`, colour: a.axis }))));
    box.append(groups(data, rank));
  },
};

/** The groups of the chosen rank, one row per axis. */
const groups = (data, rank) => table([
  "axis", ["ranks per group", "size", "plain"], ["groups", "groups", "whole"],
  ["links", "level"], [`group of rank ${rank}`, (a) => members(a, rank).slice(0, 16).join(", ") + (members(a, rank).length > 16 ? ", …" : ""), null, (a) => a.formula],
], data.axes, { caption: `World = ${Object.entries(data.sizes).map(([a, n]) => `${a} ${n}`).join(" × ")} = ${format.whole(data.world)} ranks, the first axis fastest` });

/** Axes that each rank shares with the chosen one. */
function groupsOf(data, rank) {
  const groups = new Map();
  for (const axis of data.axes) for (const r of members(axis, rank)) groups.set(r, [...(groups.get(r) ?? []), axis.axis]);
  return groups;
}

const members = (axis, rank) => axis.group_of.flatMap((g, r) => (g === axis.group_of[rank] ? [r] : []));

function grid(element, data, rank, context) {
  const node = Math.min(data.node_size, data.drawn), nodes = Math.ceil(data.drawn / node), across = Math.min(node, 8), down = Math.ceil(node / across);
  const width = element.clientWidth || 640, side = Math.max(5, Math.min(22, Math.floor(Math.sqrt((width * 420) / (data.drawn * 1.5))))), box = { w: across * side + 8, h: down * side + 8 };
  const columns = Math.max(1, Math.floor((width - 8) / (box.w + 6))), rows = Math.ceil(nodes / columns);
  const groups = groupsOf(data, rank);
  const c = figure(element, { height: rows * (box.h + 6) + 14, left: 4, right: 4, top: 4, bottom: 4, label: `${data.drawn} ranks in nodes of ${node}; rank ${rank} chosen: ${data.axes.map((a) => `${a.axis} group ${members(a, rank).slice(0, 8).join(", ")}`).join("; ")}` });
  c.root.setAttribute("role", "group");
  const position = (r) => { const n = Math.floor(r / node), i = r % node; return [(n % columns) * (box.w + 6) + 4 + (i % across) * side, Math.floor(n / columns) * (box.h + 6) + 4 + Math.floor(i / across) * side]; };
  for (let n = 0; n < nodes; n++) c.plot.append(svg("rect", { x: (n % columns) * (box.w + 6), y: Math.floor(n / columns) * (box.h + 6), width: box.w, height: box.h, rx: 4, fill: "none", stroke: "line" }));
  const base = svg("g", { fill: "grid" });
  c.plot.append(base);
  for (let r = 0; r < data.drawn; r++) {
    const [x, y] = position(r), mine = groups.get(r) ?? [], size = side - 1.5;
    if (r === rank) c.plot.append(svg("rect", { x, y, width: size, height: size, rx: 2, fill: "ink" }));
    else if (!mine.length) base.append(svg("rect", { x, y, width: size, height: size, rx: 2 }));
    else mine.forEach((axis, k) => c.plot.append(svg("rect", { x: x + (k * size) / mine.length, y, width: size / mine.length, height: size, rx: 1, fill: axis })));
    if (side >= 17 && data.drawn <= 512) centred(c, r, x + size / 2, y + size / 2, { size: 8, colour: r === rank ? "surface" : mine.length ? "black" : "quiet" });
  }
  // One target for all ranks: pointer and arrow keys move the chosen rank.
  const target = svg("rect", { x: 0, y: 0, width: c.width, height: c.height, fill: "transparent", tabindex: "0", role: "slider", "aria-label": "Chosen rank; arrow keys change it", "aria-valuemin": "0", "aria-valuemax": String(data.drawn - 1), "aria-valuenow": String(rank) });
  const at = (event) => {
    const scale = c.root.getBoundingClientRect(), x = ((event.clientX - scale.left) * c.root.viewBox.baseVal.width) / scale.width - 4, y = ((event.clientY - scale.top) * c.root.viewBox.baseVal.height) / scale.height - 4;
    const column = Math.floor(x / (box.w + 6)), row = Math.floor(y / (box.h + 6)), i = Math.floor((x - column * (box.w + 6) - 4) / side), j = Math.floor((y - row * (box.h + 6) - 4) / side);
    const r = (row * columns + column) * node + j * across + i;
    return i >= 0 && i < across && j >= 0 && j < down && column < columns && r < data.drawn ? r : null;
  };
  formula(target, (event) => { const r = event?.clientX === undefined ? rank : at(event); return r === null ? "" : `rank ${r} on node ${Math.floor(r / node)}${groups.has(r) && r !== rank ? `\nwith rank ${rank} in: ${groups.get(r).join(", ")}` : ""}`; }, { focus: false });
  target.addEventListener("click", (event) => { const r = at(event); if (r !== null) context.setOptions({ rank: r }); });
  target.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, PageDown: node, PageUp: -node }[event.key];
    if (by) { event.preventDefault(); context.setOptions({ rank: Math.max(0, Math.min(data.drawn - 1, rank + by)) }); }
  });
  c.plot.append(target);
}
