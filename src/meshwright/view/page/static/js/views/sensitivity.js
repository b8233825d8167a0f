// Sensitivity: a tornado of the throughput with one quantity 20% less or more.

import { axis, band, figure, format, h, label, legend, linear, panel, rect } from "meshwright/draw.js";

export const view = {
  title: "What matters most",
  sentence: "Change of this plan’s throughput if one quantity were 20% less (hatched) or 20% more (solid). Buy or tune what has the longest bar.",
  draw(element, data) {
    const box = element.appendChild(panel("Throughput", data.note));
    const rows = data.rows, small = box.clientWidth < 480;
    const c = figure(box, { height: 50 + 40 * rows.length, left: small ? 116 : 168, right: 52, bottom: 42, label: rows.map((r) => r.formula).join("; ") });
    const most = Math.max(0.02, ...rows.flatMap((r) => [Math.abs(r.less ?? 0), Math.abs(r.more ?? 0)])) * 1.12;
    const x = linear([-most, most], [0, c.width]), y = band(rows.map((r) => r.what), [0, c.height], { gap: 0.3 });
    axis(c, x, "bottom", { label: "change of tokens per second", format: (v) => format.change(v), ticks: small ? 3 : 6 });
    axis(c, y, "left", { format: (name) => (small && name.length > 18 ? `${name.slice(0, 17)}…` : name) });
    for (const row of rows) {
      const half = y.width / 2;
      [["less", 0, "hatch"], ["more", half, null]].forEach(([key, down, pattern]) => {
        const value = row[key];
        if (value === null) return label(c, `${key}: not possible`, x(0) + 4, y(row.what) + down + half / 2, { middle: true, size: 10, colour: "quiet" });
        rect(c, Math.min(x(0), x(value)), y(row.what) + down, Math.abs(x(value) - x(0)), half - 1, { fill: value < 0 ? "tp" : "compute", pattern, formula: row.formula });
        label(c, format.change(value, 1), x(value) + (value < 0 ? -4 : 4), y(row.what) + down + half / 2, { anchor: value < 0 ? "end" : "start", middle: true, size: 10, halo: true });
      });
    }
    box.append(legend([{ label: "20% less: slower", colour: "tp", pattern: "hatch" }, { label: "20% more: faster", colour: "compute" }, { label: "20% less: faster", colour: "compute", pattern: "hatch" }, { label: "20% more: slower", colour: "tp" }]));
    const notes = rows.filter((r) => r.note);
    if (notes.length) box.append(h("ul", null, notes.map((r) => h("li", { class: "sentence" }, `${r.what}: ${r.note}`))));
  },
};
