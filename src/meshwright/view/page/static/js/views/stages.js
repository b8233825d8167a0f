// Between the stages: bandwidth that is needed and available, the best number of chunks, and the achieved step time.

import { axis, band, bars, figure, format, h, label, line, linear, log, panel, scatter, stat, svg } from "meshwright/draw.js";

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
    const columns = h("div", { class: "columns" });
    element.append(columns);
    const step = panel("Achieved step time", "Without overlap, as planned, and if all communication were hidden."), chunk = panel("Chunks of the gradient reduction", "More chunks hide more of the transfer but each costs a call: T(k) = k·o + t/k.");
    columns.append(step, ...(data.chunks ? [chunk] : []));
    steps(step, data.step);
    if (data.chunks) chunks(chunk, data.chunks);
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
  c.plot.append(svg("line", { x1: 0, x2: c.width, y1: y(top), y2: y(top), stroke: "optimizer", "stroke-width": 2, "stroke-dasharray": "6 4" }));
  label(c, `available: ${format.number(top)} Gb/s`, c.width, y(top) - 6, { anchor: "end", size: 11, colour: "optimizer", halo: true });
}

function chunks(element, d) {
  const c = figure(element, { height: 230, left: 66, right: 16, bottom: 42, label: d.formula });
  const x = log([1, Math.max(...d.curve.map(([k]) => k), 2)], [6, c.width - 6], { base: 2 }), y = log([Math.min(...d.curve.map(([, t]) => t)) * 0.45, Math.max(...d.curve.map(([, t]) => t)) * 1.3], [c.height, 0]);
  axis(c, x, "bottom", { label: "chunks k", format: (v) => format.count(v) });
  axis(c, y, "left", { label: "exposed and overhead", format: (v) => format.seconds(v), ticks: 4 });
  line(c, d.curve.map(([k, t]) => ({ x: k, y: t })), { x, y });
  const at = (k) => d.curve.find(([n]) => n === k)?.[1];
  scatter(c, [{ x: d.best, y: at(d.best), colour: "optimizer", formula: d.formula }, { x: d.now, y: at(d.now), colour: "tp", shape: "diamond", formula: d.formula }], { x, y, radius: 6 });
  for (const [k, words, up] of [[d.best, `best ${d.best}`, 16], [d.now, `this plan ${d.now}`, -12]]) label(c, words, x(k), y(at(k)) + up, { anchor: x(k) > c.width * 0.75 ? "end" : x(k) < c.width * 0.2 ? "start" : "middle", size: 11, halo: true });
  element.append(h("p", { class: "sentence" }, d.formula));
}

function steps(element, rows) {
  const all = [...rows.map((r) => ({ ...r, colour: { "no overlap": "tp", "this plan": "compute", "all hidden": "optimizer" }[r.name] }))];
  const top = Math.max(...all.map((r) => r.step_time_s)), unit = top >= 1 ? ["s", 1] : ["ms", 1e3];
  const c = figure(element, { height: 54 + 34 * all.length, left: 82, right: 72, bottom: 42, label: all.map((r) => `${r.name}: ${format.seconds(r.step_time_s)}`).join(", ") });
  const x = linear([0, top], [0, c.width]), y = band(all.map((r) => r.name), [0, c.height], { gap: 0.3 });
  axis(c, x, "bottom", { label: `step time, ${unit[0]}`, format: (v) => format.number(v * unit[1]), ticks: 4 });
  axis(c, y, "left");
  bars(c, all.map((r) => ({ label: r.name, value: r.step_time_s, colour: r.colour, formula: r.formula, text: format.seconds(r.step_time_s) })), { x, y });
}
