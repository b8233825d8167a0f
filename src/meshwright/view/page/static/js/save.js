// Files that the browser saves: any text, tables as CSV, figures as SVG and PNG.

import { button, h } from "meshwright/draw.js";

/** Save a text, or a Blob, under a name. */
export function download(name, content) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: "application/octet-stream" }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Buttons that save what each panel of an element shows: its figures and its tables. */
export function attach(element, view) {
  for (const [k, panel] of [...element.querySelectorAll(".panel")].entries()) {
    const name = `${view}${k ? `-${k + 1}` : ""}`, figure = panel.querySelector(":scope > svg.figure, :scope > div > svg.figure"), canvas = panel.querySelector("canvas:not([aria-hidden])"), table = panel.querySelector("table");
    const as = (kind, action) => button(kind, action, { class: "link", "aria-label": `Save as ${kind}` });
    const buttons = [
      figure && as("SVG", () => download(`${name}.svg`, drawn(figure))),
      (figure || canvas) && as("PNG", async () => download(`${name}.png`, await pixels(canvas ?? figure))),
      table && as("CSV", () => download(`${name}.csv`, csv(table))),
    ].filter(Boolean);
    if (buttons.length && !panel.querySelector(":scope > .save")) panel.append(h("p", { class: "save" }, buttons));
  }
}

/** A table as comma-separated values, as the page shows them. */
function csv(table) {
  const cell = (node) => (/[",\n]/.test(node.innerText) ? `"${node.innerText.replace(/"/g, '""')}"` : node.innerText);
  return [...table.rows].map((row) => [...row.cells].filter((node) => !node.querySelector("button, .hidden")).map(cell).join(",")).join("\r\n");
}

/** A figure as a file of its own: what the style sheet gives is written into the elements. */
export function drawn(figure) {
  const copy = figure.cloneNode(true), from = [figure, ...figure.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    to[i].removeAttribute("class");
    for (const key of ["fill", "stroke", "opacity", "stroke-width", "stroke-dasharray", "paint-order", "font-size", "font-family"]) to[i].style.setProperty(key, style.getPropertyValue(key));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.style.setProperty("background", getComputedStyle(document.documentElement).getPropertyValue("--surface"));
  return new XMLSerializer().serializeToString(copy);
}

/** A figure or a canvas as PNG, at twice its size. */
async function pixels(figure) {
  if (figure instanceof HTMLCanvasElement) return new Promise((done) => figure.toBlob(done));
  const box = figure.getBoundingClientRect(), image = new Image(), canvas = h("canvas", { width: 2 * box.width, height: 2 * box.height });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn(figure))}`;
  await image.decode();
  const paper = canvas.getContext("2d");
  paper.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--surface");
  paper.fillRect(0, 0, canvas.width, canvas.height);
  paper.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done));
}
