// A comparison of two recordings of `check`: the network as a strip of modules with the first difference marked, and what the terminal shows.

import { button, contentWidth, controls, figure, framed, h, label, legend, panel, rect, svg } from "meshwright/draw.js";
import { read, zone } from "meshwright/files.js";
import * as source from "meshwright/source.js";
import { parts } from "meshwright/views/sheet.js";

const CELL = 14, LANE = 26, LEFT = 220, TOP = 40;

export const view = {
  title: "Recordings compared",
  ownTitle: !source.live,
  needs: source.live ? [] : ["checked"],
  sentence: "Two recordings of the same steps, on one device and on many: where they first differ, and what its numbers look like.",
  draw(element, data) {
    zone(element, "checked", "Drop the folders of two recordings here, or of one: what meshwright check record wrote. Of two, the one on fewer ranks is the reference.", data.checked, comparison);
  },
};

function comparison(element, data, result) {
  const names = [...new Set((result?.files ?? []).map(({ name }) => name.split("/").at(-3)).filter((name) => name && !/^perturbed-\d/.test(name)))];
  const exchange = () => read("checked", result.files, names.find((name) => name !== (result.reference || data.reference)));
  element.append(controls(h("h2", null, data.title), names.length === 2 && button("Exchange reference and candidate", exchange, { class: "small" })));
  if (data.lanes.length) strip(element, data);
  parts(element, data.parts);
}

/** Green within its bound, red beyond it, the stronger the further; hatched where nothing was seen. */
function look(cell) {
  if (!cell) return { fill: "bubble", pattern: "hatch" };
  const [error, bound] = cell;
  return { fill: error <= bound ? "good" : `color-mix(in oklab, var(--bad) ${Math.round(Math.min(100, 45 + 10 * Math.log10(Math.max(error / bound, 1))))}%, var(--surface))` };
}

function strip(element, { lanes, modules, first }) {
  const frame = framed("Modules");
  const box = element.appendChild(panel("The network, module by module", "In the order of computation, from left to right. Point at a cell for its error and its bound.", frame));
  const width = Math.max(contentWidth(frame), LEFT + CELL * modules.length + 24);
  const chart = figure(frame, { width, height: TOP + LANE * lanes.length + 24, left: LEFT, top: TOP, right: 24, bottom: 24, label: first?.text ?? "No module differs" });
  chart.root.style.maxWidth = "none";
  if (first) mark(chart, first);
  lanes.forEach(({ name, cells }, i) => {
    label(chart, name, -12, LANE * i + 14, { anchor: "end", size: 11, colour: "quiet" });
    cells.forEach((cell, j) => rect(chart, CELL * j, LANE * i, CELL - 2, LANE - 6, { ...look(cell), round: 2, focus: false, formula: `${modules[j] || "model"}\n${name}: ${cell ? `${cell[0].toExponential(1)}, bound ${cell[1].toExponential(1)}` : "not seen"}` }));
  });
  let before = -Infinity;
  for (const [at, text] of blocks(modules)) {
    if (CELL * at - before < 6.5 * text.length + 8) continue;
    label(chart, text, CELL * at, LANE * lanes.length + 12, { size: 11, colour: "quiet" });
    before = CELL * at;
  }
  box.append(legend([{ label: "equal within rounding", colour: "good" }, { label: "differs", colour: "bad" }, { label: "not seen", colour: "bubble", pattern: "hatch" }]));
}

/** A triangle above the module where the first difference is, a line to its cell, and what it looks like. */
function mark(chart, first) {
  const x = CELL * first.module + CELL / 2 - 1, isLeft = 6.5 * first.text.length > LEFT + x;
  chart.plot.append(svg("path", { d: `M${x - 5},-12h10l-5,9Z`, fill: "bad" }), svg("path", { d: `M${x},-3V${LANE * first.lane}`, stroke: "bad" }));
  label(chart, first.text, x, -18, { anchor: isLeft ? "start" : "end", size: 11, weight: 600, colour: "bad" });
}

/** Where each block of the network begins, and its name: layers.3. */
function blocks(modules) {
  const out = [];
  modules.forEach((name, at) => {
    const words = name.split("."), number = words.findIndex((word) => /^\d+$/.test(word)), block = number < 0 ? "" : words.slice(Math.max(0, number - 1), number + 1).join(".");
    if (block && out.at(-1)?.[1] !== block) out.push([at, block]);
  });
  return out;
}
