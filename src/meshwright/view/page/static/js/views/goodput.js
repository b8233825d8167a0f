// Goodput against the checkpoint interval, by Daly's formula, with Young's and Daly's optima.

import { curves } from "meshwright/curves.js";
import { choice, format, h, panel, stat } from "meshwright/draw.js";

const MTBF = [["", "as Llama 3’s GPUs"], "30min", "1h", "3h", "12h", "3d"], SAVE = [["", "10 s (default)"], "1s", "30s", "60s", "5min"], RESTART = [["", "5 min (default)"], "30s", "2min", "10min", "30min"];

export const view = {
  title: "Goodput and checkpoints",
  sentence: "Saving often wastes time on saves, saving seldom loses work at a failure. The curve is flat around its top: half or twice the best interval costs little.",
  draw(element, data, context) {
    element.append(h("div", { class: "stats" },
      stat("Goodput", format.percent(data.goodput), { detail: "share of wall time that is useful", tone: data.goodput > 0.9 ? "good" : "warn" }),
      stat("Save every", format.seconds(data.daly_s), { detail: `Daly; Young ${format.seconds(data.young_s)}`, formula: data.formulas.daly_s }),
      stat("Failure every", format.seconds(data.mtbf_s), { detail: `${format.whole(data.gpus)} GPUs together`, formula: data.formulas.mtbf_s }),
      stat("MFU × goodput", format.percent(data.effective_mfu), { detail: `MFU ${format.percent(data.mfu)}` }),
      stat("Checkpoint", format.bytes(data.checkpoint_bytes), { detail: "weights, masters, moments", formula: data.formulas.checkpoint_bytes })));
    const box = element.appendChild(panel("Goodput by interval", data.note));
    if (context.live) {
      const select = (name, values, key) => choice(name, values, context.options[key] ?? "", (v) => context.setOptions({ [key]: v }));
      box.append(h("div", { class: "controls" }, select("Time between failures", MTBF, "mtbf"), select("A save blocks for", SAVE, "checkpoint"), select("Restart takes", RESTART, "restart")));
    }
    const low = Math.min(...data.curve.map((p) => p.goodput)), from = Math.max(0, Math.floor(low * 10) / 10), ends = [data.curve[0], data.curve.at(-1)].map((p) => p.interval_s);
    const ticks = [1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 259200, 604800, 2592000].filter((t) => t >= ends[0] && t <= ends[1]);
    curves(box, { label: data.note, height: 300, left: 68, x: { log: 10, label: "time between checkpoints", ticks, format: (v) => format.seconds(v) }, y: { from, to: 1, label: "goodput", format: (v) => format.percent(v, from > 0.85 ? 1 : 0) },
      marks: [{ at: data.daly_s, words: `Daly ${format.seconds(data.daly_s)}`, colour: "optimizer", low: true }],
      series: [{ points: data.curve.map((p) => ({ x: p.interval_s, y: p.goodput })), colour: "compute", dots: false }, { points: data.curve.filter((_, i) => i % 4 === 0).map((p) => ({ x: p.interval_s, y: p.goodput, formula: p.formula })), colour: "compute", only: true },
        { points: [{ x: data.young_s, y: data.goodput, formula: data.formulas.young_s }], colour: "tp", shape: "diamond", radius: 5, only: true }] });
    if (data.assumed.length) box.append(h("p", { class: "sentence" }, `Assumed: ${data.assumed.join("; ")}.`));
  },
};
