// The grid of ranks: a block per pipeline stage and data-parallel replica, nodes outlined; the groups of the chosen rank are lit.

import { figure, format, formula, h, label, legend, panel, svg, table } from "meshwright/draw.js";

const COLOURS = { tp: "tp", cp: "cp", pp: "pp", dp: "dp", ep: "ep" };

export const view = {
  name: "ranks",
  title: "The grid of ranks",
  tab: "Ranks",
  workspace: "plan",
  sentence: "Every square is a GPU; a frame is a node. Choose a rank to light the groups it belongs to: ranks of a group exchange messages on the links that their frame shares, or between frames.",
  localOptions: true,
  draw(element, data, context) {
    const box = panel("Ranks and nodes", data.note);
    element.append(box);
    if (data.world === 1) return;
    const rank = Math.min(context.options.rank ?? 0, data.drawn - 1);
    grid(box, data, rank, context);
    box.append(legend(data.axes.map((a) => ({ label: `${a.axis} group of rank ${rank}`, colour: COLOURS[a.axis] }))));
    box.append(groups(data, rank));
    const cube = panel("The same ranks on the axes of the plan", "Columns: tensor- (and context-) parallel ranks; rows: pipeline stages; sheets: data-parallel replicas. A group of one axis is a line of this grid.");
    element.append(cube);
    sheets(cube, data, rank, context);
  },
};

/** The groups of the chosen rank, one row per axis. */
const groups = (data, rank) => table([
  { title: "axis", key: "axis" }, { title: "ranks per group", key: "size", align: "right" }, { title: "groups", key: "groups", text: (v) => format.whole(v), align: "right" },
  { title: "links", key: "level" }, { title: `group of rank ${rank}`, value: (a) => members(a, rank).slice(0, 16).join(", ") + (members(a, rank).length > 16 ? ", …" : ""), formula: (a) => a.formula },
], data.axes, { caption: `World = ${Object.entries(data.sizes).map(([a, n]) => `${a} ${n}`).join(" × ")} = ${format.whole(data.world)} ranks, the first axis fastest` });

/** Sheets of tp·cp × pp, one behind the other for the data-parallel ranks. */
function sheets(element, data, rank, context) {
  const { tp, cp, pp, dp } = data.coordinates, size = (list) => Math.max(...list) + 1;
  const columns = size(tp) * size(cp), rows = size(pp), most = Math.min(size(dp), 12), width = element.clientWidth - 40;
  const side = Math.max(4, Math.min(24, (width * 0.62) / columns, 300 / rows)), dx = Math.min((width - columns * side) / Math.max(1, most - 1), columns * side * 0.55 + 14, 150), dy = Math.min(16, 120 / most);
  const mine = dp[rank], near = Math.max(0, Math.min(mine - Math.floor(most / 2), size(dp) - most)), groups = groupsOf(data, rank);
  const c = figure(element, { height: rows * side + dy * (most - 1) + 34, left: 8, right: 8, top: 20, bottom: 8, label: `Grid of tp ${size(tp)}, cp ${size(cp)}, pp ${rows} and dp ${size(dp)}; rank ${rank} at tp ${tp[rank]}, pp ${pp[rank]}, dp ${dp[rank]}` });
  c.root.setAttribute("role", "group");
  const sheet = Array.from({ length: most }, () => svg("g")), at = (s) => [s * dx, (most - 1 - s) * dy];
  for (let s = most - 1; s >= 0; s--) {
    const [x, y] = at(s);
    sheet[s].append(svg("rect", { x: x - 3, y: y - 3, width: columns * side + 5, height: rows * side + 5, rx: 4, fill: "surface", stroke: "line" }));
    c.plot.append(sheet[s]);
    label(c, `dp ${near + s}`, x + columns * side, y - 7, { anchor: "end", size: 10, colour: near + s === mine ? "ink" : "quiet", weight: near + s === mine ? 700 : null });
  }
  for (let r = 0; r < data.drawn; r++) {
    const s = dp[r] - near;
    if (s < 0 || s >= most) continue;
    const [x0, y0] = at(s), x = x0 + (cp[r] * size(tp) + tp[r]) * side, y = y0 + pp[r] * side, lit = groups.get(r) ?? [];
    const node = svg("rect", { x, y, width: side - 1.2, height: side - 1.2, rx: 2, fill: r === rank ? "ink" : lit.length ? COLOURS[lit[0]] : "grid" });
    formula(node, `rank ${r}: tp ${tp[r]}, cp ${cp[r]}, pp ${pp[r]}, dp ${dp[r]}${lit.length && r !== rank ? `\nwith rank ${rank} in: ${lit.join(", ")}` : ""}`, { focus: false });
    node.addEventListener("click", () => context.setOptions({ rank: r }));
    sheet[s].append(node);
  }
  if (most < size(dp)) element.append(h("p", { class: "sentence" }, `${most} of ${size(dp)} data-parallel replicas, near that of rank ${rank}.`));
}

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
    else mine.forEach((axis, k) => c.plot.append(svg("rect", { x: x + (k * size) / mine.length, y, width: size / mine.length, height: size, rx: 1, fill: COLOURS[axis] })));
    if (side >= 17 && data.drawn <= 512) label(c, r, x + size / 2, y + size / 2, { anchor: "middle", middle: true, size: 8, colour: r === rank ? "surface" : mine.length ? "black" : "quiet" }).style.pointerEvents = "none";
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
