// Drawings that several calculators share, at the width of the panel in pixels.
import { drawn } from "./panel.mjs";

const INSIDE = 7; // pixels that one letter of the small text takes, about

export const text = (x, y, words, attributes = {}) => drawn("text", { x, y, ...attributes }, words);

export const picture = (width, height, words, ...children) =>
  drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, ...children);

/** Bars below each other, each with its words above it: [kind, words, value, shown]. */
export function bars(width, rows, words) {
  const most = Math.max(...rows.map(([, , value]) => value));
  const children = rows.flatMap(([kind, label, value, shown], row) => {
    const y = 44 * row;
    return [
      text(0, y + 14, label),
      text(width, y + 14, shown, { "text-anchor": "end", class: "kvc-strong" }),
      drawn("rect", { x: 0, y: y + 20, width: Math.max((width * value) / most, 1), height: 16, rx: 2, class: `kvc-${kind}` }),
    ];
  });
  return picture(width, 44 * rows.length, words, ...children);
}

/** One bar of pieces in a row: [kind, value, words]; words stand where there is room. */
export function pieces(width, y, height, total, parts) {
  let x = 0;
  return parts.flatMap(([kind, value, words]) => {
    const wide = (width * value) / total;
    const from = x;
    x += wide;
    if (!(wide > 0)) return [];
    const piece = drawn("rect", { x: from, y, width: Math.max(wide, 1), height, class: `kvc-piece kvc-${kind}` });
    if (wide < words.length * INSIDE + 12) return [piece];
    return [piece, text(from + wide / 2, y + height / 2 + 4.5, words, { "text-anchor": "middle", class: `kvc-on-${kind}` })];
  });
}
