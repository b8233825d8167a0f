// The pipeline timeline on canvas: one lane per rank, schedules under each other at one time scale; drag to pan, wheel or + and − to zoom.

import { canvas, colourOf, format, h, hide, legend, panel, show, stat, table } from "meshwright/draw.js";

const COLOURS = { F: "forward", B: "backward", I: "pp", W: "weight" };
const CLOSING = { dp: "dp", sums: "tp", optimizer: "ep", overhead: "host" };
const HEAD = 24, GAP = 14, FOOT = 26, MOST_RECTANGLES = 2500;
let time = format.seconds; // how times are written: seconds, or units of a schedule that belongs to no plan
let place = null; // { from, to } seconds that are shown; kept while the same pipeline is drawn again

export const view = {
  name: "timeline",
  title: "Pipeline timeline",
  short: "Timeline",
  workspace: "plan",
  sentence: "One lane per pipeline rank, time to the right. Gaps are the bubble. All schedules have the same time scale; drag to pan, use the wheel or + and − to zoom.",
  draw(element, data, context) {
    const first = data.panels[0];
    time = data.unit ? (value, digits) => `${format.number(value, digits)} ${data.unit}` : format.seconds;
    element.append(h("div", { class: "stats" },
      stat("Step", time(first.step_time_s), { detail: `${first.schedule}, simulated`, formula: first.formulas.step_time_s }),
      stat("Bubble", format.percent(first.bubble_fraction), { detail: "idle share of the schedule", formula: first.formulas.bubble_fraction, tone: first.bubble_fraction > 0.2 ? "warn" : "" }),
      stat("In flight, most", format.number(Math.max(...first.in_flight)), { detail: "micro-batches on one rank" }),
      stat("Micro-batches", format.whole(first.microbatches), { detail: `on ${first.ranks} ${first.ranks === 1 ? "rank" : "ranks"}` })));
    const shown = [...data.panels, ...(context.compare ? [{ ...context.compare.panels[0], schedule: `plan 2: ${context.compare.panels[0].schedule}` }] : [])];
    const box = panel("Schedules", data.note);
    element.append(box);
    if (data.choices.length && data.pipeline && context.live) box.append(choose(data, context));
    const stage = h("div");
    box.append(stage);
    lanes(stage, data, shown);
    box.append(legend([...kindsOf(shown).map((k) => ({ label: `${k} ${data.kinds[k]}`, colour: COLOURS[k] })), ...closingOf(shown).map((part) => ({ label: { dp: "reduce gradients", sums: "sum partial gradients" }[part] ?? part, colour: CLOSING[part] })), { label: "bubble", colour: "bubble", pattern: "hatch" }]));
    if (shown.length > 1) box.append(comparison(shown));
    if (data.stages.length > 1) element.append(cards(data));
  },
};

const kindsOf = (panels) => ["F", "B", "I", "W"].filter((k) => panels.some((p) => p.lanes.some((lane) => lane.kind.includes(k))));
const closingOf = (panels) => Object.keys(CLOSING).filter((part) => panels.some((p) => p.closing.some((c) => c.part === part)));

/** One toggle for every schedule; those that this plan cannot run are disabled with the reason. */
function choose(data, context) {
  const shown = new Set(data.panels.slice(1).map((p) => p.schedule));
  return h("div", { class: "controls", role: "group", "aria-label": "Schedules to compare" }, data.choices.filter((c) => c.name !== data.panels[0].schedule).map((c) => h("button", {
    type: "button", class: "small", disabled: !c.legal, title: c.legal ? c.about : c.reason, "aria-pressed": String(shown.has(c.name)),
    onclick: () => {
      shown.has(c.name) ? shown.delete(c.name) : shown.add(c.name);
      context.setOptions({ schedules: [...shown].slice(-3) });
    },
  }, c.name)));
}

/** Start and end seconds of every action of a panel, by lane. */
function decoded(one, ticks) {
  const second = one.makespan_s / ticks;
  return one.lanes.map((lane) => {
    const n = lane.start.length, start = new Float64Array(n), end = new Float64Array(n);
    for (let i = 0; i < n; i++) {
      const stage = lane.stage.length ? lane.stage[i] : null;
      start[i] = lane.start[i] * second;
      end[i] = start[i] + one.durations[lane.kind[i]][stage ?? one.lanes.indexOf(lane)] * second;
    }
    return { ...lane, start, end };
  });
}

function lanes(element, data, shown) {
  const panels = shown.map((one) => ({ ...one, actions: decoded(one, data.ticks) }));
  const total = Math.max(...panels.map((p) => p.step_time_s));
  const ranks = Math.max(...panels.map((p) => p.ranks)), lane = Math.max(6, Math.min(22, Math.floor(420 / (ranks * Math.min(2, panels.length)))));
  let top = 0;
  for (const p of panels) Object.assign(p, { top: top + HEAD, lane, height: p.ranks * lane }), (top += HEAD + p.height + GAP);
  const key = `${panels[0].ranks}/${panels[0].microbatches}/${total.toPrecision(3)}`;
  if (place?.key !== key) place = { key, from: 0, to: total };
  let lit = null; // { microbatch }
  const left = 58;
  const colours = Object.fromEntries([...Object.entries(COLOURS), ...Object.entries(CLOSING)].map(([k, name]) => [k, colourOf(name)]));
  const ink = colourOf("ink"), quiet = colourOf("quiet"), surface = colourOf("surface"), grid = colourOf("grid"), bubble = colourOf("bubble"), focus = colourOf("focus");

  const paint = (g, width, height) => {
    const scale = (width - left - 8) / (place.to - place.from), at = (t) => left + (t - place.from) * scale;
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    for (const p of panels) {
      g.fillStyle = ink;
      g.fillText(`${p.schedule}${p.virtual > 1 ? ` × ${p.virtual}` : ""}`, left, p.top - 11);
      g.fillStyle = quiet;
      g.fillText(`${time(p.step_time_s)} · bubble ${format.percent(p.bubble_fraction)}`, left + 8 + g.measureText(`${p.schedule}${p.virtual > 1 ? ` × ${p.virtual}` : ""}`).width, p.top - 11);
      g.textAlign = "end";
      const every = Math.ceil(13 / p.lane);
      for (let r = 0; r < p.ranks; r += every) g.fillText(`rank ${r}`, left - 6, p.top + r * p.lane + p.lane / 2);
      g.textAlign = "start";
      g.save();
      g.beginPath();
      g.rect(left, p.top, width - left - 8, p.height);
      g.clip();
      g.fillStyle = grid;
      g.fillRect(at(0), p.top, p.makespan_s * scale, p.height);
      hatch(g, at(0), p.top, p.makespan_s * scale, p.height, bubble, left, width);
      actions(g, p, at, scale, colours, surface, width);
      let t = p.makespan_s;
      for (const part of p.closing) {
        g.fillStyle = colours[part.part];
        g.fillRect(at(t), p.top, part.seconds * scale, p.height - 1);
        t += part.seconds;
      }
      if (lit !== null) outline(g, p, at, scale, lit, focus);
      g.restore();
    }
    ruler(g, at, width, height, left, quiet, grid);
  };
  const drawn = canvas(element, paint, { height: top + FOOT, label: `Timelines of ${panels.map((p) => `${p.schedule}: ${time(p.step_time_s)}, bubble ${format.percent(p.bubble_fraction)}`).join("; ")}. Arrow keys pan, + and − zoom, 0 shows all.` });
  interact(drawn, { panels, total, left, lit: (value) => { if (value !== lit) { lit = value; drawn.repaint(); } }, data });
}

/** The actions of a panel: few as rectangles with the number of their micro-batch where it fits, many as one image. */
function actions(g, p, at, scale, colours, surface, width) {
  const gap = p.lane > 8 ? 1 : 0.5, all = p.actions.reduce((sum, lane) => sum + lane.start.length, 0);
  if ((all * Math.min(1, (place.to - place.from) / p.makespan_s)) > MOST_RECTANGLES) return image(g, p, at(place.from), scale, colours, width, gap);
  for (let r = 0; r < p.actions.length; r++) {
    const lane = p.actions[r], y = p.top + r * p.lane, n = lane.start.length;
    let kind = "";
    for (let i = firstAfter(lane.end, place.from); i < n && lane.start[i] < place.to; i++) {
      const x = at(lane.start[i]), width = (lane.end[i] - lane.start[i]) * scale;
      if (p.virtual > 1) { // later stages of a rank are lighter
        g.fillStyle = surface;
        g.fillRect(x, y, width > 4 ? width - 0.7 : width, p.lane - gap);
        g.globalAlpha = 1 - (0.4 * p.chunk_of[lane.stage[i]]) / (p.virtual - 1);
        kind = "";
      }
      if (lane.kind[i] !== kind) g.fillStyle = colours[(kind = lane.kind[i])];
      g.fillRect(x, y, width > 4 ? width - 0.7 : width, p.lane - gap);
      g.globalAlpha = 1;
      if (width > 15 && p.lane > 11) {
        const text = String(lane.microbatch[i]);
        if (width > 7 * text.length + 4) {
          g.fillStyle = lane.kind[i] === "F" || lane.kind[i] === "B" ? surface : "#10161d";
          g.textAlign = "center";
          g.fillText(text, x + width / 2, y + p.lane / 2);
          g.textAlign = "start";
          kind = "";
        }
      }
    }
  }
}

/** Thousands of actions as an image with one row of pixels per rank: a pixel has the mix of the colours that fall on it. */
function image(g, p, left, scale, colours, width, gap) {
  const ratio = window.devicePixelRatio || 1, columns = Math.max(1, Math.round((width - left - 8) * ratio)), zoom = scale * ratio;
  picture.width = columns;
  picture.height = p.ranks;
  const context = picture.getContext("2d"), pixels = context.createImageData(columns, p.ranks), sums = new Float32Array(4 * columns);
  const rgb = Object.fromEntries(Object.keys(COLOURS).map((k) => [k, [1, 3, 5].map((i) => parseInt(colours[k].slice(i, i + 2), 16))]));
  p.actions.forEach((lane, r) => {
    sums.fill(0);
    for (let i = firstAfter(lane.end, place.from); i < lane.start.length && lane.start[i] < place.to; i++) {
      const [red, green, blue] = rgb[lane.kind[i]], from = Math.max(0, (lane.start[i] - place.from) * zoom);
      let to = Math.min(columns, (lane.end[i] - place.from) * zoom);
      if (to - from > 4) to -= 0.7;
      for (let x = Math.floor(from); x < to; x++) {
        const share = Math.min(to, x + 1) - Math.max(from, x), k = 4 * x;
        sums[k] += share * red;
        sums[k + 1] += share * green;
        sums[k + 2] += share * blue;
        sums[k + 3] += share;
      }
    }
    for (let x = 0, k = 4 * r * columns; x < columns; x++, k += 4) {
      const covered = sums[4 * x + 3];
      if (covered > 0) for (let j = 0; j < 3; j++) pixels.data[k + j] = sums[4 * x + j] / covered;
      pixels.data[k + 3] = 255 * Math.min(1, covered);
    }
  });
  context.putImageData(pixels, 0, 0);
  g.imageSmoothingEnabled = false;
  for (let r = 0; r < p.ranks; r++) g.drawImage(picture, 0, r, columns, 1, left, p.top + r * p.lane, columns / ratio, p.lane - gap);
}
const picture = document.createElement("canvas");

/** The first place of an ascending list whose value is at least `value`. */
function firstAfter(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    list[middle] < value ? (low = middle + 1) : (high = middle);
  }
  return low;
}

/** The actions of one micro-batch, outlined on all ranks. */
function outline(g, p, at, scale, microbatch, colour) {
  g.strokeStyle = colour;
  g.lineWidth = 1.6;
  p.actions.forEach((lane, r) => lane.start.forEach((start, i) => {
    if (lane.microbatch[i] === microbatch && lane.end[i] > place.from && start < place.to) g.strokeRect(at(start) + 0.5, p.top + r * p.lane + 0.5, Math.max(1, (lane.end[i] - start) * scale - 1.5), p.lane - 2);
  }));
}

function hatch(g, x, y, width, height, colour, left, right) {
  const from = Math.max(x, left), to = Math.min(x + width, right), tile = document.createElement("canvas");
  tile.width = tile.height = 7;
  const brush = tile.getContext("2d");
  brush.strokeStyle = colour;
  brush.globalAlpha = 0.45;
  for (const k of [-7, 0, 7]) { brush.moveTo(k, 7); brush.lineTo(k + 7, 0); }
  brush.stroke();
  g.fillStyle = g.createPattern(tile, "repeat");
  g.fillRect(from, y, Math.max(0, to - from), height);
}

function ruler(g, at, width, height, left, quiet, grid) {
  const span = place.to - place.from, rough = span / Math.max(2, (width - left) / 110), power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  g.textAlign = "center";
  for (let t = Math.ceil(place.from / step) * step; t <= place.to + step * 1e-6; t += step) {
    if (at(t) > width - 24) break;
    g.fillStyle = grid;
    g.fillRect(at(t), height - FOOT, 1, 5);
    g.fillStyle = quiet;
    g.fillText(time(Math.abs(t) < step / 1e6 ? 0 : t, 4), at(t), height - 12);
  }
  g.textAlign = "start";
}

function interact({ node, repaint }, { panels, total, left, lit, data }) {
  let frame = 0;
  const move = (from, to) => {
    const span = Math.min(to - from, total * 1.02), low = Math.max(-0.01 * total, Math.min(from, total * 1.01 - span));
    Object.assign(place, { from: low, to: low + span });
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; repaint(); });
  };
  const seconds = (px) => (px * (place.to - place.from)) / (node.clientWidth - left - 8);
  const zoom = (factor, px) => {
    const t = place.from + seconds(px - left), span = (place.to - place.from) * factor;
    if (span > total / 5e4) move(t - (t - place.from) * factor, t - (t - place.from) * factor + span);
  };
  let held = null;
  node.style.touchAction = "pan-y";
  node.style.cursor = "grab";
  node.addEventListener("pointerdown", (event) => { held = event.clientX; node.setPointerCapture(event.pointerId); node.style.cursor = "grabbing"; });
  node.addEventListener("pointerup", () => { held = null; node.style.cursor = "grab"; });
  node.addEventListener("pointermove", (event) => {
    if (held !== null) {
      const by = seconds(held - event.clientX);
      held = event.clientX;
      move(place.from + by, place.to + by);
      return hide();
    }
    const found = hit(panels, event.offsetX, event.offsetY, left, seconds);
    lit(found ? found.microbatch : null);
    found ? show(node, `${found.kind} (${data.kinds[found.kind]}) of micro-batch ${found.microbatch}, stage ${found.stage}\nrank ${found.rank}: ${time(found.start, 4)} to ${time(found.end, 4)}, ${time(found.end - found.start)}`, event) : hide();
  });
  node.addEventListener("pointerleave", () => { lit(null); hide(); });
  node.addEventListener("wheel", (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(place.from + seconds(event.deltaX), place.to + seconds(event.deltaX));
    else if (event.ctrlKey || event.shiftKey || document.activeElement === node) zoom(Math.exp(event.deltaY / 400), event.offsetX);
    else return;
    event.preventDefault();
  }, { passive: false });
  node.addEventListener("dblclick", () => move(0, total));
  node.addEventListener("keydown", (event) => {
    const span = place.to - place.from, keys = { ArrowLeft: () => move(place.from - span / 8, place.to - span / 8), ArrowRight: () => move(place.from + span / 8, place.to + span / 8), "+": () => zoom(0.7, node.clientWidth / 2), "=": () => zoom(0.7, node.clientWidth / 2), "-": () => zoom(1 / 0.7, node.clientWidth / 2), 0: () => move(0, total) };
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  const button = (text, name, action) => h("button", { type: "button", class: "small", "aria-label": name, onclick: action }, text);
  node.after(h("div", { class: "controls" }, button("+", "Zoom in", () => zoom(0.6, (node.clientWidth + left) / 2)), button("−", "Zoom out", () => zoom(1 / 0.6, (node.clientWidth + left) / 2)), button("◀", "Earlier", () => move(place.from - (place.to - place.from) / 4, place.to - (place.to - place.from) / 4)), button("▶", "Later", () => move(place.from + (place.to - place.from) / 4, place.to + (place.to - place.from) / 4)), button("All", "Show the whole step", () => move(0, total))));
}

function hit(panels, x, y, left, seconds) {
  const p = panels.find((one) => y >= one.top && y < one.top + one.height);
  if (!p || x < left) return null;
  const rank = Math.floor((y - p.top) / p.lane), lane = p.actions[rank], t = place.from + seconds(x - left);
  const i = lane.start.findLastIndex((start) => start <= t);
  if (i < 0 || lane.end[i] < t) return null;
  return { rank, kind: lane.kind[i], microbatch: lane.microbatch[i], stage: lane.stage.length ? lane.stage[i] : rank, start: lane.start[i], end: lane.end[i] };
}

function comparison(panels) {
  return table([
    { title: "schedule", value: (p) => `${p.schedule}${p.virtual > 1 ? ` × ${p.virtual}` : ""}` },
    { title: "step", key: "step_time_s", text: (v) => time(v), align: "right", formula: (p) => p.formulas.step_time_s },
    { title: "bubble", key: "bubble_fraction", text: (v) => format.percent(v), align: "right", formula: (p) => p.formulas.bubble_fraction },
    { title: "in flight", value: (p) => Math.max(...p.in_flight), text: (v) => format.number(v), align: "right" },
    ...(panels.every((p) => p.memory_bytes === null) ? [] : [{ title: "memory", key: "memory_bytes", text: (v, p) => `${format.gib(v / 2 ** 30)}${p.fits ? "" : ", too much"}`, align: "right" }]),
  ], panels, { caption: "The same stages with each schedule" });
}

function cards(data) {
  const most = Math.max(...data.stages.map((s) => s.forward_s + s.backward_s));
  const box = panel("Stages", `Activations flow forward, gradients backward: ${format.bytes(data.stages[0].message_bytes)} per micro-batch and direction at every boundary.`);
  const list = h("ol", { style: { display: "grid", "grid-template-columns": "repeat(auto-fill, minmax(10.5rem, 1fr))", gap: ".5rem" } }, data.stages.slice(0, 64).map((s) => {
    const bar = (value, colour) => h("span", { style: { display: "inline-block", height: "6px", width: `${(88 * value) / most}%`, background: `var(--${colour})` } });
    return h("li", { class: "stat", title: s.formula }, h("span", { class: "name" }, `stage ${s.stage} · rank ${s.rank}`), h("b", null, `${s.layers} ${s.layers === 1 ? "layer" : "layers"}`), h("span", { class: "detail" }, [s.ends.length ? `+ ${s.ends.join(", ")} · ` : "", `${format.count(s.parameters)} parameters`]), h("span", { "aria-hidden": "true" }, bar(s.forward_s, "forward"), bar(s.backward_s, "backward")), h("span", { class: "detail" }, `F ${time(s.forward_s)} · B ${time(s.backward_s)}`), h("span", { class: "detail" }, `${format.gib(s.memory_gib)} · ${format.number(s.in_flight)} in flight`));
  }));
  box.append(list);
  return box;
}
