// The communication roofline: what a device sends through each level of links against its ceiling; and the roofline of the whole step.

import { bars, curves } from "meshwright/charts.js";
import { empty, format, panel, sentence, table } from "meshwright/draw.js";

const LEVELS = ["compute", "tp", "optimizer", "ep", "cp"], DASHES = [null, null, "7 5", "2 4", "9 3 2 3"];
const SHAPES = { tp: "square", cp: "triangle", ep: "diamond", pp: "cross", dp: "circle" }, MOST_ROWS = 12;

export const view = {
  title: "Communication roofline",
  sentence: "Each line is one level of links: flat at its bandwidth, falling where latency dominates. " +
    "Each mark is a collective of this plan, in the colour of the level that it really crosses.",
  draw(element, { levels, points, measured, calibrated, step, note }) {
    const box = element.appendChild(panel("Collectives against the level that they cross", note));
    chart(box, levels, points.filter((p) => p.sent_bytes > 0), measured);
    if (points.length && !measured.length) box.append(sentence(`No bench points: the links are those of the catalog (${calibrated || "uncalibrated"}).`));
    const more = points.length > MOST_ROWS, caption = more ? `The ${MOST_ROWS} collectives that take longest, of ${points.length}` : "All collectives of the step";
    if (points.length) box.append(table([
      ["collective", (p) => `${p.name} (${p.axis})`], ["operation", (p) => `${p.operation}, ${p.algorithm}`], ["ranks", "ranks", "plain"],
      ["buffer", "buffer_bytes", "bytes"], ["level", (p) => levels[p.level].name], ["of ceiling", "share", "percent", (p) => p.formula],
      ["bound by", (p) => (p.share < 0.5 ? "latency" : "bandwidth")], ["per step", "step_seconds", "s", (p) => p.formula]], points.slice(0, MOST_ROWS), { caption }));
    const advice = `${step.regime}: ${step.level} links allow the least. Advice: ${step.advice.join("; ") || "none"}.`;
    const whole = element.appendChild(panel("The whole step", advice)), used = step.ceilings.filter((c) => c.bytes > 0);
    const row = (c) => ({ label: c.level, text: `${format.percent(c.efficiency, 0)} · ${format.seconds(c.seconds)}`,
      parts: [{ value: c.efficiency, colour: LEVELS[step.ceilings.indexOf(c) % 5], formula: c.formula }] });
    const x = { most: 1, label: "share of the peak FLOP/s that the bandwidth of the level allows", unit: "percent" };
    if (used.length) bars(whole, used.map(row), { left: 74, right: 120, tall: 34, x });
    else whole.append(empty("Nothing is sent."));
  },
};

/** Below its s*, where half of the ceiling is reached, a level is bound by latency: this part is shaded. */
function chart(element, levels, points, measured) {
  const all = [...points, ...measured], sizes = all.map((p) => p.sent_bytes), top = Math.max(...levels.map((l) => l.bandwidth)) * 1.5;
  const low = Math.max(1e6, Math.min(...all.map((p) => p.rate), ...levels.map((l) => l.bandwidth / 300)) / 2);
  const from = Math.min(1e3, ...sizes.filter((s) => s > 100)), to = Math.max(1e9, ...sizes) * 1.6;
  const inside = ([n, rate]) => n >= from && n <= to && rate >= low, dot = (p) => ({ x: p.sent_bytes, y: p.rate, formula: p.formula, stroke: p.stroke });
  const marks = new Map(points.map((p) => [`${p.axis} through ${levels[p.level].name}`, p])), words = (x, y, label) => ({ x, y, label, radius: 0 });
  const of = (name, { axis, level }) => ({ name, only: true, radius: 5.5, colour: LEVELS[level % 5], shape: SHAPES[axis],
    points: points.filter((p) => p.axis === axis && p.level === level).map(dot) });
  curves(element, {
    label: `Roofline: ${levels.map((l) => `${l.name} ${format.rate(l.bandwidth)}`).join(", ")}; ${points.length} collectives`, height: 380, left: 74, inset: 0,
    x: { log: 10, from, to, label: "bytes that one device sends through the level in one call", unit: "bytes" },
    y: { log: 10, from: low, to: top, label: "bytes per second of one device", unit: "rate", ticks: 6 },
    series: [
      ...levels.map((l, k) => ({ colour: LEVELS[k % 5], area: 0.05, only: true, dots: false, points: [from, Math.max(from, l.crossover_bytes)].map((x) => ({ x, y: l.bandwidth })) })),
      ...levels.map((l, k) => ({ name: `${l.name}: ${format.rate(l.bandwidth)}`, colour: LEVELS[k % 5], dash: DASHES[k % 5], width: 2.4 - 0.3 * k,
        formula: l.formula, dots: false, points: l.curve.filter(inside).map(([x, y]) => ({ x, y })) })),
      { only: true, focus: false, colour: "quiet", points: [words(from, low * 1.5, "latency-bound"), words(to, top, "bandwidth-bound")] },
      ...levels.map((l, k) => ({ only: true, radius: 3, shape: "diamond", focus: false, colour: LEVELS[k % 5],
        points: [{ x: l.crossover_bytes, y: l.bandwidth / 2, label: `s* ${format.bytes(l.crossover_bytes)}`, down: 12, formula: l.formula }] })),
      ...(measured.length ? [{ name: "measured", only: true, focus: false, colour: "surface", points: measured.map((p) => dot({ ...p, stroke: LEVELS[p.level % 5] })) }] : []),
      ...[...marks].map(([name, p]) => of(name, p)),
    ],
  });
}
