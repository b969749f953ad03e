// Numbers in words; words.py writes the same.
const grouped = (digits) => digits.replace(/^\d+/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));

/** A whole number with commas. */
export const count = (value) => grouped(Math.round(value).toFixed(0));

/** Three digits that count, at least the whole part. */
export function three(value) {
  if (!value) return "0";
  const shown = (decimals) => grouped(value.toFixed(decimals));
  const decimals = Math.max(2 - Math.floor(Math.log10(value)), 0);
  return decimals > 0 && Number(value.toFixed(decimals)) >= 10 ** (3 - decimals) ? shown(decimals - 1) : shown(decimals);
}

const scaled = (value, units) => {
  if (!value) return `0 ${units.at(-1)[1]}`;
  const [size, unit] = units.find(([size]) => value >= size * 0.9995) ?? units.at(-1);
  return `${three(value / size)} ${unit}`;
};

export const binary = (bytes) => scaled(bytes, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "bytes"]]);
export const decimal = (bytes) => scaled(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]);
export const operations = (flops) => scaled(flops, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"]]);
export const duration = (seconds) => scaled(seconds, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
export const some = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
