// Goodput against the checkpoint interval, by Daly's formula, with Young's and Daly's optima.

import { curves } from "meshwright/charts.js";
import { choice, controls, format, panel, sentence, stat, stats } from "meshwright/draw.js";

const CHOICES = {
  mtbf: ["Time between failures", [["", "as Llama 3’s GPUs"], "30min", "1h", "3h", "12h", "3d"]],
  checkpoint: ["A save blocks for", [["", "10 s (default)"], "1s", "30s", "60s", "5min"]],
  restart: ["Restart takes", [["", "5 min (default)"], "30s", "2min", "10min", "30min"]],
};
const TICKS = [1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 259200, 604800, 2592000];

export const view = {
  title: "Goodput and checkpoints",
  sentence: "Saving often wastes time on saves, saving seldom loses work at a failure. The curve is flat around its top: half or twice the best interval costs little.",
  draw(element, data, context) {
    const { curve, goodput, daly_s: daly, young_s: young, formulas } = data, box = panel("Goodput by interval", data.note);
    element.append(stats(
      stat("Goodput", format.percent(goodput), { detail: "share of wall time that is useful", tone: goodput > 0.9 ? "good" : "warn" }),
      stat("Save every", format.seconds(daly), { detail: `Daly; Young ${format.seconds(young)}`, formula: formulas.daly_s }),
      stat("Failure every", format.seconds(data.mtbf_s), { detail: `${format.whole(data.gpus)} GPUs together`, formula: formulas.mtbf_s }),
      stat("MFU × goodput", format.percent(data.effective_mfu), { detail: `MFU ${format.percent(data.mfu)}` }),
      stat("Checkpoint", format.bytes(data.checkpoint_bytes), { detail: "weights, masters, moments", formula: formulas.checkpoint_bytes })), box);
    const select = ([key, [name, values]]) => choice(name, values, context.options[key] ?? "", (v) => context.setOptions({ [key]: v }));
    if (context.live) box.append(controls(...Object.entries(CHOICES).map(select)));
    const from = Math.max(0, Math.floor(Math.min(...curve.map((p) => p.goodput)) * 10) / 10), points = curve.map((p) => ({ x: p.interval_s, y: p.goodput, formula: p.formula }));
    curves(box, { label: data.note, height: 300, left: 68, y: { from, to: 1, label: "goodput", format: (v) => format.percent(v, from > 0.85 ? 1 : 0) },
      x: { log: 10, label: "time between checkpoints", ticks: TICKS.filter((t) => t >= points[0].x && t <= points.at(-1).x), format: (v) => (v >= 60 && v < 3600 ? `${v / 60} min` : format.seconds(v)) },
      marks: [{ at: daly, words: `Daly ${format.seconds(daly)}`, colour: "optimizer", low: true }], series: [
        { points, colour: "compute", dots: false },
        { points: points.filter((_, i) => i % 4 === 0), colour: "compute", only: true },
        { points: [{ x: young, y: goodput, formula: formulas.young_s }], colour: "tp", shape: "diamond", radius: 5, only: true }] });
    if (data.assumed.length) box.append(sentence(`Assumed: ${data.assumed.join("; ")}.`));
  },
};
