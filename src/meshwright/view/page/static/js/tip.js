// One tooltip for the page: the formula of a quantity, shown on hover and on keyboard focus; Escape hides it.

const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);
let owner = null;

function place(target, event) {
  const box = target.getBoundingClientRect();
  const pointer = event && event.clientX !== undefined && event.type !== "focus";
  const x = pointer ? event.clientX : box.left + box.width / 2;
  const y = pointer ? event.clientY : box.top;
  const width = tip.offsetWidth, height = tip.offsetHeight, edge = 8;
  const left = Math.min(Math.max(edge, x - width / 2), document.documentElement.clientWidth - width - edge);
  const above = y - height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > edge ? above : Math.min((pointer ? y : box.bottom) + 18, window.innerHeight - height - edge)}px`;
}

/** Show `text` (a string, or a function that returns one; lines separated by \n) near `target`. */
export function show(target, text, event) {
  const lines = String(typeof text === "function" ? text(event) : text).split("\n");
  if (!lines[0]) return hide();
  tip.replaceChildren(...lines.map((line, i) => {
    const row = document.createElement(i ? "div" : "strong");
    row.textContent = line;
    return row;
  }));
  tip.hidden = false;
  if (owner !== target) {
    owner?.removeAttribute("aria-describedby");
    owner = target;
    target.setAttribute("aria-describedby", "tip");
  }
  place(target, event);
}

export function hide() {
  tip.hidden = true;
  owner?.removeAttribute("aria-describedby");
  owner = null;
}

/** Give `element` a tooltip: on hover, and on focus (it becomes focusable unless `focus` is false). Returns the element. */
export function formula(element, text, { focus = true } = {}) {
  if (!text) return element;
  const focusable = element.matches("button, a, input, select, summary, [tabindex]");
  if (focus && !focusable) element.setAttribute("tabindex", "0");
  element.addEventListener("pointerenter", (event) => show(element, text, event));
  element.addEventListener("pointermove", (event) => show(element, text, event));
  element.addEventListener("pointerleave", hide);
  element.addEventListener("focus", (event) => element.matches(":focus-visible") && show(element, text, event));
  element.addEventListener("blur", hide);
  element.classList.add("has-tip");
  return element;
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
document.addEventListener("scroll", hide, { capture: true, passive: true });
