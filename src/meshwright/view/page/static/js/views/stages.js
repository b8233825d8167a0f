// Between the stages: bandwidth that is needed and available, and the best number of chunks.

import { curves } from "meshwright/curves.js";
import { axis, band, bars, figure, format, h, label, log, panel, stat, threshold } from "meshwright/draw.js";

const gigabits = (bytes) => `${format.number((bytes * 8) / 1e9)} Gb/s`;

export const view = {
  name: "stages",
  title: "Between the stages",
  tab: "Traffic",
  workspace: "plan",
  sentence: "A boundary is fast enough if sending one micro-batch forward and back takes no longer than computing it.",
  draw(element, data) {
    const b = data.bandwidth;
    if (b) {
      element.append(h("div", { class: "stats" },
        stat("Needed, most", gigabits(b.most_needed), { detail: format.rate(b.most_needed), formula: b.rows.reduce((a, r) => (r.needed > a.needed ? r : a)).formula, tone: b.most_needed > b.available ? "bad" : "good" }),
        stat("Available", gigabits(b.available), { detail: `${b.level} links, one device` }),
        stat("Message", format.bytes(b.message_bytes), { detail: "per micro-batch and direction" })));
      const box = panel("Bandwidth between stages", data.note);
      element.append(box);
      needs(box, b);
    } else element.append(h("p", { class: "notice" }, data.note));
    if (!data.chunks) return;
    const chunk = panel("Chunks of the gradient reduction", "More chunks hide more of the transfer but each costs a call: T(k) = k·o + t/k.");
    element.append(chunk);
    chunks(chunk, data.chunks);
  },
};

function needs(element, b) {
  const rows = b.rows.slice(0, 64), values = rows.map((r) => (r.needed * 8) / 1e9), top = (b.available * 8) / 1e9;
  const c = figure(element, { height: 230, left: 62, right: 16, bottom: 42, label: rows.map((r) => r.formula).slice(0, 4).join("; ") });
  const x = band(rows.map((r) => String(r.stage)), [0, c.width], { gap: 0.3, most: 90 }), y = log([Math.min(...values, top) * 0.5, Math.max(...values, top) * 1.8], [c.height, 0]);
  axis(c, y, "left", { label: "Gb/s", format: (v) => format.number(v) });
  const every = Math.ceil(rows.length / 16);
  rows.forEach((r, i) => i % every === 0 && label(c, `${r.stage}`, x(String(r.stage)) + x.width / 2, c.height + 16, { anchor: "middle", size: 11, colour: "quiet" }));
  label(c, "stage", c.width / 2, c.height + 31, { anchor: "middle", size: 11, colour: "quiet" });
  rows.forEach((r, i) => bars(c, [{ label: String(r.stage), start: y.domain[0], value: values[i] - y.domain[0], colour: r.needed > b.available ? "bad" : "pp", formula: r.formula, text: rows.length <= 12 ? format.number(values[i]) : null }], { x, y }));
  threshold(c, y(top), `available: ${format.number(top)} Gb/s`, { flat: true, colour: "optimizer" });
}

function chunks(element, d) {
  const at = (k) => d.curve.find(([n]) => n === k)?.[1], point = (k, words, colour, shape) => ({ name: `${words} ${k}`, points: [{ x: k, y: at(k), formula: d.formula }], colour, shape, radius: 6, only: true });
  curves(element, { label: d.formula, height: 230, left: 66, x: { log: 2, label: "chunks k", format: format.count }, y: { log: 10, label: "exposed and overhead", format: (v) => format.seconds(v), ticks: 4 },
    series: [{ points: d.curve.map(([k, t]) => ({ x: k, y: t })), colour: "compute", dots: false }, point(d.best, "best", "optimizer"), point(d.now, "this plan", "tp", "diamond")] });
  element.append(h("p", { class: "sentence" }, d.formula));
}
