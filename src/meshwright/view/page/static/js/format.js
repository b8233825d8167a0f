// Numbers as text: a value in SI units becomes three significant digits with the unit that a person would choose.

const PREFIXES = [[1e15, " P"], [1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]], SUFFIXES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

// Formatters by their number of decimal places: making one takes longer than all other work of a chip.
const formatters = [];
const written = (value, places) => (formatters[places] ??= new Intl.NumberFormat("en-US", { maximumFractionDigits: places })).format(value);

/** Three significant digits without an exponent: 1234 → "1,234", 12.345 → "12.3". */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const places = size === 0 ? 0 : Math.max(0, Math.min(12, digits - 1 - Math.floor(Math.log10(size))));
  return written(value, places).replace("-", "−");
}

/** A whole number with separators: 16384 → "16,384". */
export const whole = (value) => (value === null || value === undefined ? "–" : written(Math.round(value), 0));

/** A value with the largest prefix [factor, text] that it reaches: 1.5e9 → "1.5 GB". */
function scaled(value, unit, digits, prefixes = PREFIXES) {
  const [factor, prefix] = prefixes.find(([least]) => Math.abs(value) >= least * 0.9995) ?? [1, unit && " "];
  return `${number(factor === 1 ? value : value / factor, digits)}${prefix}${unit}`;
}

const TIMES = [[86400, "days"], [3600, "h"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

/** Seconds: 0.08192 → "81.9 ms", 93784 → "1.09 days". */
export function seconds(value, digits = 3) {
  if (!value || !Number.isFinite(value)) return value === 0 ? "0 s" : number(value);
  const [factor, unit] = TIMES.find(([least]) => Math.abs(value) >= least) ?? TIMES.at(-1);
  const text = number(value / factor, digits);
  return `${text} ${text === "1" && unit === "days" ? "day" : unit}`;
}

/** Bytes with decimal prefixes: 6.06e12 → "6.06 TB". */
export const bytes = (value, digits = 3) => scaled(value, "B", digits);
/** Bytes per second: 4e10 → "40 GB/s". */
export const rate = (value, digits = 3) => scaled(value, "B/s", digits);
/** Memory given in GiB: 61.52 → "61.5 GiB"; below 1 GiB in MiB. */
export const gib = (value, digits = 3) => (Math.abs(value) >= 1 || value === 0 ? `${number(value, digits)} GiB` : `${number(value * 1024, digits)} MiB`);
/** Floating-point operations: 9.89e14 → "989 TFLOP". */
export const flops = (value, digits = 3) => scaled(value, "FLOP", digits);
/** A count with a short suffix: 7.06e10 → "70.6B". */
export const count = (value, digits = 3) => scaled(value, "", digits, SUFFIXES);
/** A share from 0 to 1: 0.2727 → "27.3%". */
export const percent = (value, places = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(places).replace("-", "−")}%`);
/** A signed change: 0.12 → "+12%"; what rounds to zero has no sign. */
export function change(value, places = 0) {
  const text = Math.abs(100 * value).toFixed(places);
  return `${Number(text) === 0 ? "±" : value > 0 ? "+" : "−"}${text}%`;
}
/** The formatter for a unit as Python names it: s, bytes, gib, flops, share, count, …; `minutes` are seconds of which a person thinks so. */
export const by = {
  s: seconds, bytes, gib, flops, share: percent, count, rate, number, whole, plain: (value) => value, percent: (value) => percent(value, 0),
  change: (value) => change(value, 1), minutes: (value) => (value >= 60 && value < 3600 ? `${value / 60} min` : seconds(value)), times: (value) => `${number(value)}×`,
};
