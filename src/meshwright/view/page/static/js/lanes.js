// Lanes of spans on one time axis, on canvas: pipeline schedules, measured and simulated steps, traced ranks. Keys are those of Perfetto.
//
//   lanes(element, [{ title, note, height, lanes: [{ name, start, end, colour(i), text(i), alpha(i), about(i), key(i) }] }], { total, label })
//
// w and s zoom, a and d pan, a click selects a span, f fits the view to it, a drag with Shift measures a time. A minimap shows the share of busy
// lanes over the whole time, and which part is drawn below; spans too short to be told apart are drawn as the mix of their colours.

import { button, colourOf, contentWidth, format, h, hide, show } from "meshwright/draw.js";

const HEAD = 22, GAP = 12, RULER = 26, MAP = 30, LEFT = 76, RIGHT = 8;
const LEAST_PX = 2.2; // mean width of spans below which they are mixed
let serial = 0;
const FONT = "11px system-ui, sans-serif";
const HELP = "w s zoom · a d pan · drag moves · Shift and drag measures · click selects, f fits it · 0 shows all";

/** Draw groups of lanes. `place`: { from, to } that is kept between drawings; `begin`: how much is shown at first; `time`: how times are written. */
export function lanes(element, groups, { total, label, place = {}, begin = total, time = format.seconds, lane = 18 }) {
  if (!(place.to > place.from) || place.total !== total) Object.assign(place, { from: 0, to: Math.min(begin, total), total });
  let top = 0, lit = null, range = null, chosen = null, frame = 0;
  for (const group of groups) {
    Object.assign(group, { top: top + HEAD, lane: group.lane ?? lane });
    top += HEAD + group.lanes.length * group.lane + GAP;
  }
  const map = h("canvas", { role: "img", "aria-label": "The whole time, and which part of it is drawn below", class: "minimap" });
  const node = h("canvas", { role: "application", tabindex: "0", "aria-label": `${label}. ${HELP}`, "aria-describedby": `lanes-${++serial}` });
  const details = h("output", { class: "sentence", id: `lanes-${serial}` }, HELP);
  const by = (words, title, action) => button(words, action, { class: "small", "aria-label": title, title });
  element.append(map, node, h("div", { class: "controls lanes-controls" }, by("+", "Zoom in (w)", () => zoom(0.5)), by("−", "Zoom out (s)", () => zoom(2)), by("◀", "Earlier (a)", () => pan(-0.25)), by("▶", "Later (d)", () => pan(0.25)), by("All", "Show everything (0)", () => move(0, total)), details));
  const colours = new Map(), paintOf = (name) => colours.get(name) ?? (colours.set(name, colourOf(name)), colours.get(name));
  const width = Math.max(260, Math.floor(contentWidth(element))), across = width - LEFT - RIGHT; // the page draws again when it changes
  const scale = () => across / (place.to - place.from), at = (t) => LEFT + (t - place.from) * scale(), seconds = (px) => px / scale();

  function paint() {
    const g = prepared(node, width, top + RULER), k = scale();
    g.font = FONT;
    g.textBaseline = "middle";
    for (const group of groups) {
      const height = group.lanes.length * group.lane;
      g.fillStyle = paintOf("ink");
      g.font = `600 ${FONT}`;
      g.fillText(group.title, LEFT, group.top - 10);
      const wide = g.measureText(group.title).width;
      g.font = FONT;
      g.fillStyle = paintOf("quiet");
      g.fillText(group.note ?? "", LEFT + wide + 8, group.top - 10);
      g.textAlign = "end";
      group.lanes.forEach((one, r) => r % Math.ceil(12 / group.lane) === 0 && g.fillText(one.name, LEFT - 8, group.top + (r + 0.5) * group.lane));
      g.textAlign = "start";
      g.save();
      g.beginPath();
      g.rect(LEFT, group.top, across, height);
      g.clip();
      g.fillStyle = paintOf("grid");
      g.fillRect(LEFT, group.top, width, height);
      group.lanes.forEach((one, r) => spans(g, one, group.top + r * group.lane, group.lane - (group.lane > 8 ? 1.5 : 0.5), k));
      g.restore();
    }
    ruler(g, k);
    if (range) {
      const [a, b] = range.map(at);
      g.globalAlpha = 0.18;
      g.fillStyle = paintOf("accent");
      g.fillRect(a, 0, b - a, top);
      g.globalAlpha = 1;
    }
    overview();
  }

  function spans(g, one, y, height, k) {
    const first = firstAfter(one.reach ?? one.end, place.from), last = firstAfter(one.start, place.to);
    if (last <= first) return;
    if ((k * (one.end[last - 1] - one.start[first])) / (last - first) < LEAST_PX) return mixed(g, one, y, height, k, first, last);
    for (let i = first; i < last; i++) {
      const x = at(one.start[i]), wide = Math.max(0.6, (one.end[i] - one.start[i]) * k - (k * (one.end[i] - one.start[i]) > 5 ? 0.8 : 0));
      g.globalAlpha = one.alpha?.(i) ?? 1;
      g.fillStyle = paintOf(one.colour(i));
      g.fillRect(x, y, wide, height);
      g.globalAlpha = 1;
      const words = wide > 16 && height > 9 ? one.text?.(i) : null;
      if (words && g.measureText(words).width < wide - 4) {
        g.fillStyle = paintOf("on-fill");
        g.textAlign = "center";
        g.fillText(words, x + wide / 2, y + height / 2 + 0.5);
        g.textAlign = "start";
      }
      const isLit = lit !== null && one.key?.(i) === lit, isChosen = chosen?.one === one && chosen.i === i;
      if (isLit || isChosen) {
        g.strokeStyle = paintOf("ink");
        g.lineWidth = isChosen ? 2 : 1.4;
        g.strokeRect(x + 0.5, y + 0.5, Math.max(1, wide - 1), height - 1);
      }
    }
  }

  /** Short spans as bins that hold several of them: each has the mix of their colours, and what is idle stays empty. */
  function mixed(g, one, y, height, k, first, last) {
    const bin = Math.max(3, Math.ceil((6 * k * (one.end[last - 1] - one.start[first])) / (last - first))), count = Math.ceil((width - LEFT) / bin), bins = Array.from({ length: count }, () => new Map());
    for (let i = first; i < last; i++) {
      const from = Math.max(0, (at(one.start[i]) - LEFT) / bin), to = Math.min(count, (at(one.end[i]) - LEFT) / bin), name = one.colour(i);
      for (let b = Math.floor(from); b < to; b++) bins[b].set(name, (bins[b].get(name) ?? 0) + Math.min(to, b + 1) - Math.max(from, b));
    }
    bins.forEach((shares, b) => {
      let up = y;
      for (const name of [...shares.keys()].sort()) { // stacked, so that a mix reads as its shares
        const tall = height * Math.min(1, shares.get(name));
        g.fillStyle = paintOf(name);
        g.fillRect(LEFT + b * bin, up, bin + 0.5, tall);
        up += tall;
      }
    });
  }

  function ruler(g, k) {
    const rough = 90 / k, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
    g.textAlign = "center";
    for (let t = Math.ceil(place.from / step) * step; t <= place.to + step * 1e-6 && at(t) < width - 20; t += step) {
      g.fillStyle = paintOf("line");
      g.fillRect(at(t), top, 1, 5);
      g.fillStyle = paintOf("quiet");
      g.fillText(time(Math.abs(t) < step / 1e6 ? 0 : t, 4), at(t), top + 15);
    }
    g.textAlign = "start";
  }

  let profile = null;
  function overview() {
    const g = prepared(map, width, MAP);
    profile ??= busy(groups[0].lanes, total, 240);
    const x = (t) => LEFT + (t / total) * across;
    g.fillStyle = paintOf("grid");
    g.fillRect(LEFT, 4, across, MAP - 10);
    g.fillStyle = paintOf("hidden");
    profile.forEach((share, b) => g.fillRect(LEFT + (b * across) / profile.length, 4 + (MAP - 10) * (1 - share), across / profile.length + 0.5, (MAP - 10) * share));
    g.fillStyle = paintOf("quiet");
    g.font = FONT;
    g.textAlign = "end";
    g.textBaseline = "middle";
    g.fillText("all", LEFT - 8, MAP / 2 - 1);
    g.strokeStyle = paintOf("accent");
    g.lineWidth = 2;
    g.strokeRect(Math.max(LEFT, x(place.from)), 3, Math.max(4, x(Math.min(total, place.to)) - Math.max(LEFT, x(place.from))), MAP - 8);
  }

  const repaint = () => { frame ||= requestAnimationFrame(() => { frame = 0; paint(); }); };
  function move(from, to) {
    const span = Math.max(total / 1e5, Math.min(to - from, total)), low = Math.max(0, Math.min(from, total - span));
    Object.assign(place, { from: low, to: low + span });
    repaint();
  }
  const pan = (share) => move(place.from + share * (place.to - place.from), place.to + share * (place.to - place.from));
  function zoom(factor, px = (width + LEFT) / 2) {
    const t = place.from + seconds(px - LEFT);
    move(t - (t - place.from) * factor, t + (place.to - t) * factor);
  }
  function hit(x, y) {
    const group = groups.find((one) => y >= one.top && y < one.top + one.lanes.length * one.lane);
    if (!group || x < LEFT) return null;
    const one = group.lanes[Math.floor((y - group.top) / group.lane)], t = place.from + seconds(x - LEFT), slack = seconds(1.5);
    const i = firstAfter(one.start, t + slack) - 1;
    return i >= 0 && one.end[i] >= t - slack ? { one, i } : null;
  }
  function choose(found) {
    chosen = found;
    details.textContent = found ? found.one.about(found.i).replace(/\n/g, " · ") : HELP;
    repaint();
  }
  const fit = () => chosen && move(chosen.one.start[chosen.i] - 0.5 * (chosen.one.end[chosen.i] - chosen.one.start[chosen.i]), chosen.one.end[chosen.i] + 0.5 * (chosen.one.end[chosen.i] - chosen.one.start[chosen.i]));
  function next(by) {
    const one = chosen?.one ?? groups[0].lanes[0], i = chosen ? Math.max(0, Math.min(one.start.length - 1, chosen.i + by)) : firstAfter(one.end, place.from);
    if (i >= one.start.length) return;
    choose({ one, i });
    if (one.start[i] < place.from || one.end[i] > place.to) move(one.start[i] - (place.to - place.from) / 2, one.start[i] + (place.to - place.from) / 2);
  }
  const nearer = () => zoom(0.7), farther = () => zoom(1 / 0.7), earlier = () => pan(-0.15), later = () => pan(0.15), whole = () => move(0, total);
  const KEYS = {
    w: nearer, ArrowUp: nearer, "+": nearer, "=": nearer, s: farther, ArrowDown: farther, "-": farther, a: earlier, ArrowLeft: earlier, d: later, ArrowRight: later,
    0: whole, Home: whole, f: fit, ",": () => next(-1), ".": () => next(1), Escape: () => { range = null; choose(null); },
  };
  node.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    KEYS[event.key]();
    event.preventDefault();
  });
  let held = null;
  node.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, last: event.offsetX, moved: 0, measure: event.shiftKey || event.offsetY > top };
    node.setPointerCapture(event.pointerId);
  });
  node.addEventListener("pointermove", (event) => {
    if (held) {
      held.moved = Math.max(held.moved, Math.abs(event.offsetX - held.x));
      const by = seconds(held.last - event.offsetX);
      held.last = event.offsetX;
      hide();
      if (!held.measure) return move(place.from + by, place.to + by);
      range = [held.x, event.offsetX].map((px) => place.from + seconds(px - LEFT)).sort((a, b) => a - b);
      details.textContent = `${time(range[0], 4)} to ${time(range[1], 4)}: ${time(range[1] - range[0], 4)}`;
      return repaint();
    }
    const found = hit(event.offsetX, event.offsetY), key = found?.one.key?.(found.i) ?? null;
    if (key !== lit) { lit = key; repaint(); }
    found ? show(node, found.one.about(found.i), event) : hide();
  });
  node.addEventListener("pointerup", (event) => {
    if (held && held.moved < 4) { range = null; choose(hit(event.offsetX, event.offsetY)); }
    held = null;
  });
  node.addEventListener("pointerleave", () => { hide(); if (lit !== null) { lit = null; repaint(); } });
  node.addEventListener("dblclick", whole);
  node.addEventListener("wheel", (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(place.from + seconds(event.deltaX), place.to + seconds(event.deltaX));
    else if (event.ctrlKey || event.shiftKey || document.activeElement === node) zoom(Math.exp(event.deltaY / 400), event.offsetX);
    else return;
    event.preventDefault();
  }, { passive: false });
  const centre = (event) => {
    const t = ((event.offsetX - LEFT) / across) * total, half = (place.to - place.from) / 2;
    move(t - half, t + half);
  };
  map.addEventListener("pointerdown", (event) => { map.setPointerCapture(event.pointerId); centre(event); });
  map.addEventListener("pointermove", (event) => event.buttons && centre(event));
  paint();
}

/** A canvas of a size in CSS pixels, sharp at any pixel ratio, and empty: its context. */
function prepared(node, width, height) {
  const ratio = window.devicePixelRatio || 1;
  Object.assign(node, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(node.style, { width: `${width}px`, height: `${height}px` });
  const g = node.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return g;
}

/** The share of lanes that are busy in each of `count` equal parts of the time. */
function busy(all, total, count) {
  const sums = new Float64Array(count), long = total / count;
  for (const { start, end } of all) {
    let covered = 0; // spans of a lane may lie inside each other
    for (let i = 0; i < start.length; i++) {
      const from = Math.max(covered, start[i]) / long, to = Math.min(total, end[i]) / long;
      for (let b = Math.floor(from); b < to && b < count; b++) sums[b] += Math.min(to, b + 1) - Math.max(from, b);
      covered = Math.max(covered, end[i]);
    }
  }
  return [...sums].map((sum) => Math.min(1, sum / Math.max(1, all.length)));
}

/** A lane of spans [{ start, end, … }] in any order, which may lie inside each other: describe(span) has colour, text and about. */
export function laneOf(name, spans, describe) {
  const sorted = [...spans].sort((a, b) => a.start - b.start || b.end - a.end), described = sorted.map(describe);
  let most = -Infinity;
  return { name, start: sorted.map((s) => s.start), end: sorted.map((s) => s.end), reach: sorted.map((s) => (most = Math.max(most, s.end))), colour: (i) => described[i].colour, text: (i) => described[i].text, about: (i) => described[i].about };
}

/** The first place of an ascending list whose value is at least `value`. */
export function firstAfter(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    list[middle] < value ? (low = middle + 1) : (high = middle);
  }
  return low;
}
