// The controls of a drawing that plays: a button, steps to and fro, and a slider.

import { button, controls, h } from "meshwright/draw.js";

/** Append the controls; show(t) draws a moment from 0 to `end`, words(t) says it. `stops`: the moments of the steps, ascending; `rate`: units in a second;
 *  `snap(t)`: the moment that is shown at t while it plays. Returns a function that goes to a moment. */
export function playback(element, { end, stops, rate, step = 1, name, words, show, snap = (t) => t }) {
  let now = 0, playing = 0; // the animation frame that is asked for
  const output = h("output"), input = h("input", { type: "range", min: 0, max: end, step, value: 0, "aria-label": name, oninput: () => jump(Number(input.value)) });
  const turn = button("▶ Play", () => (playing ? stop() : play()), { class: "primary" });
  const near = (by) => stops[by > 0 ? "find" : "findLast"]((t) => by * (t - now) > 1e-9) ?? (by > 0 ? end : 0);
  const to = (label, mark, at) => button(mark, () => jump(at()), { "aria-label": label });
  element.append(controls(turn, to("Previous step", "◀", () => near(-1)), to("Next step", "▶", () => near(1)), to("Last step", "▶▎", () => end), h("label", { class: "control", style: { flex: "1 1 12rem" } }, output, input)));
  function go(t) {
    now = input.value = t;
    output.textContent = words(t);
    input.setAttribute("aria-valuetext", output.textContent);
    show(t);
  }
  function stop() {
    cancelAnimationFrame(playing);
    playing = 0;
    turn.textContent = "▶ Play";
  }
  const jump = (t) => (stop(), go(t));
  function play() {
    if (now >= end) go(0);
    const from = now, began = performance.now();
    turn.textContent = "❚❚ Pause";
    const frame = (time) => {
      const t = Math.max(now, snap(Math.min(end, from + ((time - began) / 1000) * rate)));
      if (t !== now) go(t);
      if (now >= end || !turn.isConnected) stop();
      else playing = requestAnimationFrame(frame);
    };
    playing = requestAnimationFrame(frame);
  }
  return go;
}
