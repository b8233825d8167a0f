// The shape of the data of every view (view/page/shapes.py), and whether data has it. A page that was opened before the server was replaced by
// another version finds so what it cannot draw, and says it.

const SHAPES = {}; // filled in when the file is sent

const KINDS = { string: (v) => typeof v === "string", number: (v) => typeof v === "number", integer: Number.isInteger, boolean: (v) => typeof v === "boolean", object: (v) => typeof v === "object" };

/** The path of the first value of a view's data that has not its type, or "". Of a list the first item stands for all. */
export const misfit = (view, data) => (SHAPES[view] && data ? check(SHAPES[view], data, view) : "");

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
