// Errors in the one shape of Meshwright, and short messages.

import { h } from "meshwright/draw.js";

/** A box with what is wrong, why, the valid values and the fix. */
export function refusal(error) {
  const valid = (error.valid ?? []).slice(0, 24).map(String).join(", ");
  return h("div", { class: "notice error", role: "alert" },
    h("p", null, h("b", null, error.code ? `${error.code}: ` : ""), plain(error.what)),
    error.why ? h("p", null, `${plain(error.why)}.`.replace(/\.\.$/, ".")) : null,
    valid ? h("p", null, "Valid: ", valid) : null,
    error.fix ? h("p", null, `Fix: ${plain(error.fix)}`) : null);
}

/** Words of an error without the options of a command: "--set plan.tp=8" → "plan.tp = 8". */
const plain = (text) => text.replace(/--set (\S+?)=(\S+)/g, "$1 = $2").replaceAll("`", "");

let timer = 0;
/** A message at the corner of the page for three seconds. */
export function toast(text) {
  document.getElementById("toast")?.remove();
  document.body.append(h("div", { id: "toast", role: "status" }, text));
  clearTimeout(timer);
  timer = setTimeout(() => document.getElementById("toast")?.remove(), 3000);
}
