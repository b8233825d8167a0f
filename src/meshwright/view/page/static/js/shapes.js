// Whether the data of a view has its shape (static/shapes.json). A page that was opened before the server was replaced by another version finds
// so what it cannot draw, and says it.

const KINDS = { string: (v) => typeof v === "string", number: (v) => typeof v === "number", integer: Number.isInteger, boolean: (v) => typeof v === "boolean", object: (v) => typeof v === "object" };

/** The path of the first value of some views' data { view: data } that has not its type, or "". Of a list the first item stands for all. */
export async function misfit(views) {
  const shapes = await fetch("/static/shapes.json").then((found) => found.json()).catch(() => ({}));
  return Object.entries(views).map(([view, data]) => (shapes[view] && data ? check(shapes[view], data, view) : "")).find(Boolean) ?? "";
}

function check(shape, value, path) {
  if (shape === "any" || value === null) return "";
  if (typeof shape === "string") return KINDS[shape.replace("?", "")](value) ? "" : path;
  if (Array.isArray(shape)) return !Array.isArray(value) ? path : value.length ? check(shape[0], value[0], `${path}[0]`) : "";
  if ("?" in shape) return check(shape["?"], value, path);
  if (typeof value !== "object") return path;
  for (const [key, inner] of Object.entries("*" in shape ? Object.fromEntries(Object.keys(value).slice(0, 1).map((k) => [k, shape["*"]])) : shape)) {
    const name = key.replace(/\?$/, ""), missing = value[name] === undefined;
    const found = missing ? (key.endsWith("?") ? "" : `${path}.${name}`) : check(inner, value[name], `${path}.${name}`);
    if (found) return found;
  }
  return "";
}
