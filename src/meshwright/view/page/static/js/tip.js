// One tooltip for the page: the formula of a quantity, shown on hover and on keyboard focus; Escape hides it.

const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);
let owner = null;

function place(target, event) {
  const box = target.getBoundingClientRect();
  const pointer = event && event.clientX !== undefined && !event.type.startsWith("focus");
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

const texts = new WeakMap(); // by element
const under = (event) => event.target.closest?.(".has-tip");

/** Give `element` a tooltip: on hover, and on focus (it becomes focusable unless `focus` is false). Returns the element. */
export function formula(element, text, { focus = true } = {}) {
  if (!text) return element;
  if (focus && !element.matches("button, a, input, select, summary, [tabindex]")) element.setAttribute("tabindex", "0");
  texts.set(element, text);
  element.classList.add("has-tip");
  return element;
}

// One listener of each kind for all of them: a drawing has hundreds.
document.addEventListener("pointermove", (event) => {
  const target = under(event);
  if (target) show(target, texts.get(target), event);
});
for (const kind of ["pointerout", "focusout"]) {
  document.addEventListener(kind, (event) => {
    const target = under(event);
    if (target && !target.contains(event.relatedTarget)) hide();
  });
}
document.addEventListener("focusin", (event) => texts.has(event.target) && event.target.matches(":focus-visible") && show(event.target, texts.get(event.target), event));
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
document.addEventListener("scroll", hide, { capture: true, passive: true });
