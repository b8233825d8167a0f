// The explorer of collectives: play a program step by step, compare the algorithms by message size, see duals and the family of operations.

import { curves } from "meshwright/charts.js";
import { centred, choice, clear, controls, empty, figure, format, formula, h, label, legend, panel, rect, stat, stats, svg, table } from "meshwright/draw.js";
import { playback } from "meshwright/playback.js";

const COLOURS = ["compute", "tp", "optimizer", "ep", "cp", "pp", "dp", "quiet", "bad", "host"], DASHES = [null, "7 4", "2 3", "9 3 2 3"];
const STEPS_PER_S = 1.1; // while it plays

export const view = {
  title: "Collectives, step by step",
  sentence: "A collective is a program: in each step ranks send chunks of their buffers. Play it, then see which algorithm is the fastest for which message.",
  draw(element, data, context) {
    const { operation, operations, algorithm, algorithms, program, size_bytes: bytes, cluster, formulas, ranks } = data, { live, setOptions } = context;
    const set = (options) => setOptions({ operation, ranks, ...options }), about = operations.find((o) => o.name === operation);
    const nearest = data.size_choices.reduce((a, b) => (Math.abs(b.bytes - bytes) < Math.abs(a.bytes - bytes) ? b : a)).text, [first, ...more] = about.used.split(",");
    const offered = [["", `the library’s choice (${data.chosen ? "automatic" : algorithm})`], ...algorithms.filter((a) => a.runs).map((a) => a.name)];
    if (live) element.append(controls(
      choice("Operation", operations.map((o) => o.name), operation, (one) => setOptions({ operation: one, algorithm: "" })),
      choice("Algorithm", offered, data.chosen ? algorithm : "", (one) => set({ algorithm: one })), choice("Ranks", data.rank_choices, ranks, (one) => set({ ranks: one })),
      choice("Message", data.size_choices.map((s) => s.text), nearest, (size) => set({ size }))));
    element.append(stats(
      data.time_s !== null && stat("Time", format.seconds(data.time_s), { detail: bytes ? `${format.bytes(bytes)} on ${cluster}` : cluster, formula: formulas.time_s }),
      algorithm && stat("Steps", format.whole(data.steps), { detail: algorithm }),
      stat("Dual", about.dual || "itself", { detail: about.dual ? "the same moves backward" : "reversed it is the same" }),
      stat("Used for", first, { detail: more.join(",") })));
    if (algorithm) {
      const play = element.appendChild(panel(`${algorithm} ${operation}`, `${about.about}. t = ${algorithms.find((a) => a.name === algorithm)?.formula ?? ""}`));
      program ? player(play, program) : play.append(empty("Too many moves to draw: choose fewer ranks."));
    }
    if (data.comparison) sizes(element.appendChild(panel("Which algorithm for which size", `${ranks} ranks on ${cluster}: ${formulas.crossovers}.`)), data);
    const explore = live ? " Choose one to explore it." : "";
    family(element.appendChild(panel("The family of collectives", `Solid: an operation composed of two others. Dashed: duals, each the other one played backward.${explore}`)), data, context);
  },
};

/** What every slot (rank, chunk) holds before each step: the set of ranks whose data is in it. */
function states(program) {
  const chunks = program.chunk_sizes.length, ends = program.ranks + program.switches.length;
  let now = Array.from({ length: ends }, () => Array(chunks).fill(null));
  program.starts.forEach((list, rank) => list.forEach((c) => { now[rank][c] = new Set([rank]); }));
  const out = [{ slots: now, changed: new Map() }];
  for (let step = 0, i = 0; step < program.steps; step++) {
    const next = now.map((row) => [...row]), changed = new Map();
    for (; i < program.moves.length && program.moves[i].step === step; i++) {
      const m = program.moves[i];
      for (let c = m.chunk; c < m.chunk + m.width; c++) {
        const sent = now[m.source][c] ?? new Set([m.source]);
        next[m.target][c] = m.reduce ? new Set([...(next[m.target][c] ?? []), ...sent]) : new Set(sent);
        changed.set(`${m.target}/${c}`, m.reduce);
      }
    }
    now = next;
    out.push({ slots: now, changed });
  }
  return out;
}

/** The player of a program; with `inputs`, the values that each rank starts with, its slots show sums of them. */
export function player(element, program, inputs = null) {
  const frames = states(program), chunks = program.chunk_sizes.length, valueOf = inputs ? values(program, inputs) : null;
  const wide = element.clientWidth > 720, box = h("div", { style: { display: "grid", "grid-template-columns": wide ? "19rem minmax(0, 1fr)" : "minmax(0, 1fr)", gap: ".6rem", "align-items": "center" } }), ring = h("div"), matrix = h("div");
  const go = playback(element, { end: program.steps, stops: frames.map((_, k) => k), rate: STEPS_PER_S, snap: Math.floor, name: "Step", words: (k) => (k === 0 ? `start, before step 0 of ${program.steps}` : `after step ${k - 1} of ${program.steps}`), show: (k) => {
    circle(clear(ring), program, k);
    slots(clear(matrix), program, frames[k], chunks, wide ? element.clientWidth - 340 : element.clientWidth - 24, valueOf);
  } });
  box.append(ring, matrix);
  element.append(box, legend([{ label: "holds one rank’s data", colour: "pp" }, { label: "sum of more ranks: darker", colour: "compute" }, { label: "received in this step", colour: "focus" }, { label: "empty", colour: "grid" }]));
  go(0);
}

function circle(element, program, step) {
  const n = program.ranks, size = 280, middle = size / 2, radius = 108, moves = step ? program.moves.filter((m) => m.step === step - 1) : [];
  const c = figure(element, { width: size, height: size, left: 0, right: 0, top: 0, bottom: 0, label: step ? `Step ${step - 1}: ${moves.slice(0, 16).map((m) => `rank ${m.source} sends to ${m.target}`).join(", ")}` : `${n} ranks before the first step` });
  const at = (r) => (r < n ? [middle + radius * Math.sin((2 * Math.PI * r) / n), middle - radius * Math.cos((2 * Math.PI * r) / n)] : [middle + 16 * (r - n), middle]);
  const pairs = new Map();
  for (const m of moves) pairs.set(`${m.source}>${m.target}`, { ...m, chunks: [...(pairs.get(`${m.source}>${m.target}`)?.chunks ?? []), ...Array.from({ length: m.width }, (_, i) => m.chunk + i)] });
  c.root.prepend(svg("defs", null, svg("marker", { id: "arrow-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" }, svg("path", { d: "M0,0L8,4L0,8Z", fill: "tp" }))));
  for (const m of pairs.values()) {
    const [x1, y1] = at(m.source), [x2, y2] = at(m.target), length = Math.hypot(x2 - x1, y2 - y1) || 1, bend = 0.12 * length, mx = (x1 + x2) / 2 + (bend * (y2 - y1)) / length, my = (y1 + y2) / 2 - (bend * (x2 - x1)) / length;
    const cut = (x, y) => { const d = Math.hypot(mx - x, my - y) || 1; return [x + ((mx - x) * 17) / d, y + ((my - y) * 17) / d]; }, [a, b] = cut(x1, y1), [p, q] = cut(x2, y2);
    const path = svg("path", { d: `M${a},${b}Q${mx},${my} ${p},${q}`, fill: "none", stroke: "tp", "stroke-width": 2, "marker-end": "url(#arrow-head)" });
    formula(path, `rank ${m.source} → ${m.target < n ? `rank ${m.target}` : "switch"}: chunk ${m.chunks.slice(0, 12).join(", ")}${m.reduce ? ", which is added" : ", which is stored"}`, { focus: false });
    c.plot.append(path);
  }
  for (let r = 0; r < n + program.switches.length; r++) {
    const [x, y] = at(r);
    c.plot.append(svg("circle", { cx: x, cy: y, r: 14, fill: r < n ? "surface" : "grid", stroke: "compute", "stroke-width": 2 }));
    centred(c, r < n ? r : "sw", x, y, { size: 12, weight: 600 });
  }
}

/** What a slot shows: the sums over the ranks in it of their values of this chunk; more than three values as the first and the last. */
function values(program, inputs) {
  const at = program.chunk_sizes.map((_, k) => program.chunk_sizes.slice(0, k).reduce((a, b) => a + b, 0));
  return (held, chunk) => {
    const own = (rank) => { // a rank that starts with some chunks has only their values
      const start = program.starts[rank].length === program.chunk_sizes.length ? at[chunk] : program.starts[rank].filter((c) => c < chunk).reduce((sum, c) => sum + program.chunk_sizes[c], 0);
      return inputs[rank].slice(start, start + program.chunk_sizes[chunk]);
    };
    const sums = [...held].map(own).reduce((a, b) => a.map((v, i) => v + (b[i] ?? 0)));
    return (sums.length > 3 ? [sums[0], "…", sums.at(-1)] : sums).map((v) => (typeof v === "number" ? format.number(v) : v)).join(" ");
  };
}

function slots(element, program, frame, chunks, width, valueOf) {
  const n = program.ranks, left = 48, side = Math.max(3, Math.min(64, (Math.min(width, 900) - left - 8) / chunks)), high = Math.max(14, Math.min(40, 300 / n));
  const c = figure(element, { width: left + 8 + side * chunks, height: 30 + high * n, left, right: 4, top: 22, bottom: 4, label: `What each of ${n} ranks holds of ${chunks} chunks` });
  const every = Math.ceil(18 / side);
  for (let k = 0; k < chunks; k += every) label(c, k, (k + 0.5) * side, -6, { anchor: "middle", size: 10, colour: "quiet" });
  label(c, "chunk", -6, -6, { anchor: "end", size: 10, colour: "quiet" });
  for (let r = 0; r < n; r++) {
    label(c, `rank ${r}`, -6, r * high + high / 2, { anchor: "end", middle: true, size: 10.5, colour: "quiet" });
    for (let k = 0; k < chunks; k++) {
      const held = frame.slots[r][k], fresh = frame.changed.has(`${r}/${k}`);
      const node = svg("rect", { x: k * side + 0.5, y: r * high + 1, width: Math.max(1, side - 1.5), height: high - 2, rx: side > 8 ? 2 : 0, fill: held ? `color-mix(in oklab, var(--compute) ${Math.round((100 * held.size) / n)}%, var(--pp))` : "grid", stroke: fresh ? "focus" : "none", "stroke-width": 2 });
      if (held && side > 10) formula(node, `rank ${r}, chunk ${k}: data of ${held.size === n ? `all ${n} ranks` : `rank ${[...held].sort((a, b) => a - b).join(" + ")}`}`, { focus: false });
      c.plot.append(node);
      if (held && side >= 20 && high >= 16) centred(c, valueOf ? valueOf(held, k) : held.size === 1 ? [...held][0] : `Σ${held.size}`, (k + 0.5) * side, (r + 0.5) * high, { size: 9.5, colour: held.size > n * 0.6 ? "heat-ink-high" : "black" });
    }
  }
}

/** The times of the algorithms by size. */
export function sizes(element, data) {
  const d = data.comparison, [least, most] = [d.size_bytes[0], d.size_bytes.at(-1)], formulaOf = (name) => data.algorithms.find((a) => a.name === name)?.formula ?? "";
  const series = Object.entries(d.time_s).map(([name, times], i) => ({ name, colour: COLOURS[i % 10], dash: DASHES[Math.floor(i / 3) % 4], width: name === data.algorithm ? 3.2 : 1.8, dots: false, formula: `${name}: t = ${formulaOf(name)}`, points: d.size_bytes.map((n, k) => ({ x: n, y: times[k] })) }));
  if (data.size_bytes >= least && data.size_bytes <= most) series.push({ name: "the chosen call, as priced", colour: "focus", shape: "diamond", radius: 6, only: true, points: [{ x: data.size_bytes, y: data.time_s, formula: data.formulas.time_s }] });
  curves(element, { label: `Times by size; ${data.formulas.crossovers}`, height: 320, left: 66, series, marks: d.crossovers.map((cross) => ({ at: cross.size_bytes, words: cross.after, colour: "quiet" })),
    x: { log: 10, from: least, to: most, label: "bytes of the full buffer", format: (v) => format.bytes(v), ticks: 6 }, y: { log: 10, label: "simulated time", format: (v) => format.seconds(v), ticks: 6 } });
  element.append(table([["algorithm", "name"], ["time without shared links; n: full buffer", "formula"]], data.algorithms.filter((a) => a.runs), { caption: "Formulas of the algorithms" }));
}

const PLACES = { broadcast: [0, 0], reduce: [0, 1], scatter: [0, 2], gather: [0, 3], "all-gather": [1, 0.5], "reduce-scatter": [1, 2], "all-reduce": [2, 1.2], "all-to-all": [2, 2.4], "point-to-point": [1, 3], barrier: [2, 3.3] };

/** The operations, with what they are composed of and their duals. */
export function family(element, data, context) {
  const c = figure(element, { height: 250, left: 4, right: 4, top: 4, bottom: 4, label: data.family.map((f) => `${f.whole} = ${f.parts.join(" + ")}`).join("; ") });
  const w = Math.min(132, c.width / 3 - 12), at = (name) => [PLACES[name][0] * ((c.width - w) / 2), PLACES[name][1] * 62 + 2];
  const edge = (a, b, attributes) => { const [x1, y1] = at(a), [x2, y2] = at(b); c.plot.append(svg("path", { d: PLACES[a][0] === PLACES[b][0] ? `M${x1 + w / 2},${y1 + 15}L${x2 + w / 2},${y2 + 15}` : `M${x1 + w},${y1 + 15}C${(x1 + w + x2) / 2},${y1 + 15} ${(x1 + w + x2) / 2},${y2 + 15} ${x2},${y2 + 15}`, fill: "none", "stroke-width": 1.8, ...attributes })); };
  for (const f of data.family) for (const part of f.parts) edge(part, f.whole, { stroke: "compute" });
  for (const o of data.operations) if (o.dual && o.name < o.dual) edge(...(PLACES[o.name][0] <= PLACES[o.dual][0] ? [o.name, o.dual] : [o.dual, o.name]), { stroke: "tp", "stroke-dasharray": "5 4" });
  for (const o of data.operations) {
    const [x, y] = at(o.name), chosen = o.name === data.operation;
    const choose = context.live ? () => context.setOptions({ operation: o.name, algorithm: "" }) : null;
    rect(c, x, y, w, 30, { fill: chosen ? "accent" : "raised", stroke: "line", round: 6, focus: false, name: `Explore ${o.name}`, onclick: choose, formula: `${o.name}: ${o.about}\nused for ${o.used}${o.dual ? `; dual: ${o.dual}` : ""}` });
    centred(c, o.name, x + w / 2, y + 15, { size: w < 110 ? 10.5 : 12, colour: chosen ? "accent-ink" : "ink" });
  }
}
