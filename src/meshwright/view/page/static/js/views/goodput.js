// Goodput against the checkpoint interval, by Daly's formula, with Young's and Daly's optima.

import { axis, choice, figure, format, h, label, line, linear, log, panel, scatter, stat, svg } from "meshwright/draw.js";

const MTBF = [["", "as Llama 3’s GPUs"], "30min", "1h", "3h", "12h", "3d"], SAVE = [["", "10 s (default)"], "1s", "30s", "60s", "5min"], RESTART = [["", "5 min (default)"], "30s", "2min", "10min", "30min"];

export const view = {
  name: "goodput",
  title: "Goodput and checkpoints",
  tab: "Goodput",
  workspace: "plan",
  sentence: "Saving often wastes time on saves, saving seldom loses work at a failure. The curve is flat around its top: half or twice the best interval costs little.",
  draw(element, data, context) {
    element.append(h("div", { class: "stats" },
      stat("Goodput", format.percent(data.goodput), { detail: "share of wall time that is useful", tone: data.goodput > 0.9 ? "good" : "warn" }),
      stat("Save every", format.seconds(data.daly_s), { detail: `Daly; Young ${format.seconds(data.young_s)}`, formula: data.formulas.daly_s }),
      stat("Failure every", format.seconds(data.mtbf_s), { detail: `${format.whole(data.gpus)} GPUs together`, formula: data.formulas.mtbf_s }),
      stat("MFU × goodput", format.percent(data.effective_mfu), { detail: `MFU ${format.percent(data.mfu)}` }),
      stat("Checkpoint", format.bytes(data.checkpoint_bytes), { detail: "weights, masters, moments", formula: data.formulas.checkpoint_bytes })));
    const box = panel("Goodput by interval", data.note);
    element.append(box);
    if (context.live) {
      const select = (name, values, key) => choice(name, values, context.options[key] ?? "", (v) => context.setOptions({ [key]: v }));
      box.append(h("div", { class: "controls" }, select("Time between failures", MTBF, "mtbf"), select("A save blocks for", SAVE, "checkpoint"), select("Restart takes", RESTART, "restart")));
    }
    const c = figure(box, { height: 300, left: 68, right: 20, bottom: 42, label: data.note });
    const first = data.curve[0].interval_s, last = data.curve[data.curve.length - 1].interval_s, low = Math.min(...data.curve.map((p) => p.goodput));
    const ticks = [1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 43200, 86400, 259200, 604800, 2592000].filter((t) => t >= first && t <= last);
    const x = log([first, last], [0, c.width]), y = linear([Math.max(0, Math.floor(low * 10) / 10), 1], [c.height, 0]);
    axis(c, x, "bottom", { label: "time between checkpoints", ticks: c.width < 420 ? ticks.filter((_, i) => i % 2 === 0) : ticks, format: (v) => format.seconds(v) });
    axis(c, y, "left", { label: "goodput", format: (v) => format.percent(v, y.domain[0] > 0.85 ? 1 : 0) });
    line(c, data.curve.map((p) => ({ x: p.interval_s, y: p.goodput })), { x, y });
    scatter(c, data.curve.filter((_, i) => i % 4 === 0).map((p) => ({ x: p.interval_s, y: p.goodput, formula: p.formula })), { x, y, radius: 4 });
    c.plot.append(svg("line", { x1: x(data.daly_s), x2: x(data.daly_s), y1: 0, y2: c.height, stroke: "optimizer", "stroke-width": 1.8, "stroke-dasharray": "5 4" }));
    label(c, `Daly ${format.seconds(data.daly_s)}`, x(data.daly_s) + 5, c.height - 8, { size: 11, colour: "optimizer", halo: true });
    scatter(c, [{ x: data.young_s, y: data.goodput, shape: "diamond", colour: "tp", formula: data.formulas.young_s }], { x, y, radius: 5 });
    if (data.assumed.length) box.append(h("p", { class: "sentence" }, `Assumed: ${data.assumed.join("; ")}.`));
  },
};
