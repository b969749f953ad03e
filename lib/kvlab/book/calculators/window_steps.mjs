// A window that rolls over a text, with and without sinks: what is held, in which slot, and what the model paid for it.
import { picture, text } from "./drawings.mjs";
import { drawn, element, mount } from "./panel.mjs";
import { heldSlots, slotOf, windowStart } from "./streaming.mjs";
import { count, some, three } from "./words.mjs";

const single = (least, most) => [...Array(most - least + 1).keys()].map((step) => least + step);
const ALL = "contiguous";
const FIRST = 24; // tokens before which a mean says nothing yet: the chart begins here
const DASHES = { [ALL]: "none", 0: "none", 1: "2 3", 4: "7 3" };
const HUES = { [ALL]: "ink", 0: "r5", 1: "r1", 4: "cache" };
const NAMES = { [ALL]: "all kept", 0: "no sinks", 1: "1 sink", 4: "4 sinks" };
const kindOf = (sinks, slots) => `streaming:${sinks}+${slots - sinks}`;
const shown = (piece) => piece.replaceAll("\n", "⏎");
const span = (first, past) => (past - first === 1 ? `${count(first)}` : `${count(first)} to ${count(past - 1)}`);

/** exp of the mean loss after each token, in thousandths of a nat as they were recorded. */
export function perplexities(losses) {
  let sum = 0;
  return losses.map((loss, index) => Math.exp((sum += loss) / 1000 / (index + 1)));
}

/** The tokens that are held, as ranges: [first, past the last]. */
export function heldRanges(read, sinks, window) {
  const start = windowStart(read, sinks, window);
  const apart = Math.min(sinks, read);
  return start === apart ? [[0, read]] : [[0, apart], [start, read]].filter(([first, past]) => past > first);
}

/** The answer, in the words of the Python class. */
export function windowWords({ tokens, losses }, read, sinks, slots) {
  const ranges = heldRanges(read, sinks, slots - sinks);
  const held = ranges.reduce((sum, [first, past]) => sum + past - first, 0);
  const means = (kind) => three(perplexities(losses[kind].slice(0, read)).at(-1));
  const kind = kindOf(sinks, slots);
  const who = sinks ? `${some(sinks, "sink")} and a window of ${count(slots - sinks)} hold` : `a window of ${count(slots)} without sinks holds`;
  return `After ${some(read, "token")}, ${who} ${count(held)}: ${ranges.map(([first, past]) => span(first, past)).join(" and ")}. The next one, “${shown(tokens[read])}”, costs ${three(losses[kind][read - 1] / 1000)} nats. Perplexity so far: ${means(kind)}; with all tokens kept ${means(ALL)}.`;
}

/** The text above, the slots below, and which part lies where. */
function mapDrawing(width, read, total, sinks, window, words) {
  const [across, at] = [width - 2, 1];
  const place = (position) => at + (across * position) / total;
  const slot = (index) => at + (across * index) / (sinks + window);
  const start = windowStart(read, sinks, window);
  const apart = Math.min(sinks, read);
  // The last slot of the ring divides the window: what was written on this round, and what is left of the round before.
  const turn = read - ((((read - sinks) % window) + window) % window);
  const parts = [["r2", 0, apart], ["cache-pale", start, Math.max(turn, start)], ["cache", Math.max(turn, start), read]].filter(([, first, past]) => past > first);
  const [top, low, tall] = [20, 84, 20];
  const box = (kind, x, y, to) => drawn("rect", { x, y, width: Math.max(to - x, 1), height: tall, class: `kvc-${kind}` });
  const bridge = (kind, first, past) => {
    const from = slotOf(first, sinks, window);
    return drawn("path", { d: `M${place(first)},${top + tall} H${place(past)} L${slot(from + past - first)},${low} H${slot(from)} z`, class: `kvc-${kind} kvc-pale` });
  };
  const next = slot(slotOf(read, sinks, window) + 0.5);
  const end = place(total) - place(read) > 50 ? [text(width, 12, count(total), { "text-anchor": "end", class: "kvc-tick" })] : [];
  return picture(
    width, low + tall + 34, words,
    text(0, 12, "the text", { class: "kvc-strong" }),
    drawn("rect", { x: place(0), y: top + 0.5, width: across, height: tall - 1, class: "kvc-outline" }),
    ...(start > apart ? [box("idle", place(apart), top, place(start))] : []),
    ...parts.map(([kind, first, past]) => box(kind, place(first), top, place(past))),
    ...parts.map(([kind, first, past]) => bridge(kind, first, past)),
    drawn("rect", { x: slot(0), y: low + 0.5, width: across, height: tall - 1, class: "kvc-outline" }),
    ...parts.map(([kind, first, past]) => box(kind, slot(slotOf(first, sinks, window)), low, slot(slotOf(first, sinks, window) + past - first))),
    drawn("line", { x1: place(read), x2: place(read), y1: top - 4, y2: top + tall + 4, class: "kvc-limit" }),
    text(Math.min(Math.max(place(read), 70), width - 44), 12, count(read), { "text-anchor": "middle", class: "kvc-tick" }),
    ...end,
    drawn("path", { d: `M${next - 5},${low + tall + 9} h10 l-5,-7 z`, class: "kvc-ink" }),
    text(0, low + tall + 28, "the slots", { class: "kvc-strong" }),
    text(Math.min(Math.max(next, 130), width - 44), low + tall + 28, "next written", { "text-anchor": "middle", class: "kvc-tick" }),
  );
}

/** The text around the edges of what is held, in words with a name before each part. */
function textLines(tokens, read, sinks, window) {
  const start = windowStart(read, sinks, window);
  const apart = Math.min(sinks, read);
  const words = (first, past) => tokens.slice(first, past).map(shown).join("");
  const line = (name, kind, ...parts) => element("p", {}, element("strong", {}, name), " ", ...parts.map((part) => (part === null ? " … " : element("span", { class: kind }, part))));
  const split = read - start > 44 ? [words(start, start + 8), null, words(read - 32, read)] : [words(start, read)];
  const gone = start - apart > 12 ? [null, words(start - 12, start)] : [words(apart, start)];
  return element(
    "div", { class: "kvc-text" },
    ...(apart ? [line("sinks", "kvc-kept", words(0, apart))] : []),
    ...(start > apart ? [line("forgotten", "kvc-gone", ...gone)] : []),
    ...(read > start ? [line("window", "kvc-held", ...split)] : []),
    line("next", "kvc-next", shown(tokens[read])),
  );
}

/** Perplexity so far of every setting, on a logarithmic axis that stays the same whatever is chosen. */
function chart(width, lines, chosen, read, total, words) {
  const box = { left: 34, right: width - 6, top: 24, bottom: 164 };
  const [least, most] = [10, 400].map(Math.log);
  const x = (position) => box.left + ((box.right - box.left) * position) / total;
  const y = (value) => Math.min(Math.max(box.bottom - ((Math.log(value) - least) / (most - least)) * (box.bottom - box.top), box.top), box.bottom);
  const path = (values, first, past) => {
    const places = single(first, past).filter((place) => place === first || place === past || place % 4 === 0);
    return `M${places.map((place) => `${x(place).toFixed(1)},${y(values[place - 1]).toFixed(1)}`).join(" L")}`;
  };
  const curve = (name, first, past, pale) => (past > first ? [drawn("path", { d: path(lines[name], first, past), "stroke-dasharray": DASHES[name], class: `kvc-line kvc-${HUES[name]}${name === chosen ? " kvc-chosen" : ""}${pale}` })] : []);
  const order = Object.keys(lines).sort((a, b) => (a === chosen) - (b === chosen));
  const grid = [10, 20, 50, 100, 200, 400].flatMap((value) => [
    drawn("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value), class: "kvc-grid" }),
    text(box.left - 5, y(value) + 4, count(value), { "text-anchor": "end", class: "kvc-tick" }),
  ]);
  const shift = read > total / 2 ? [-5, "end"] : [5, "start"];
  return picture(
    width, box.bottom + 22, words,
    text(0, 12, "perplexity so far", { class: "kvc-strong" }), ...grid,
    ...order.flatMap((name) => [...curve(name, Math.max(read, FIRST), total - 1, " kvc-pale"), ...curve(name, FIRST, read, "")]),
    drawn("line", { x1: x(read), x2: x(read), y1: box.top, y2: box.bottom, class: "kvc-now" }),
    text(x(read) + shift[0], box.top + 10, "now", { "text-anchor": shift[1], class: "kvc-tick" }),
    text(box.left, box.bottom + 16, "0", { class: "kvc-tick" }),
    text(box.right, box.bottom + 16, `${count(total)} tokens`, { "text-anchor": "end", class: "kvc-tick" }),
  );
}

/** What happens to the slots when the next token comes. */
function slotSums(read, sinks, window) {
  if (read < sinks) return [`token ${count(read)} is a sink: it takes slot ${count(read)} and keeps it`];
  const slot = slotOf(read, sinks, window);
  const old = heldSlots(read, sinks, window)[slot];
  const leaves = old === null ? "which is free" : `where token ${count(old)} is overwritten`;
  const far = Math.min(read, sinks + window - 1);
  return [
    `token ${count(read)} goes to slot ${sinks ? `${sinks} + (${count(read)} − ${sinks})` : count(read)} mod ${count(window)} = ${count(slot)}, ${leaves}`,
    ...(sinks ? [`it sees the first sink ${some(far, "position")} away, in the text ${count(read)}`] : []),
  ];
}

mount("window-steps", (panel, recorded, setting) => {
  const { tokens, losses, model } = recorded;
  const last = tokens.length - 1;
  const every = Object.keys(losses).filter((kind) => kind !== ALL).map((kind) => kind.match(/\d+/g).map(Number));
  const offered = (values) => ({ "": [...new Set(values)].sort((a, b) => a - b).map((value) => [String(value), value ? count(value) : "none"]) });
  const read = panel.number("Tokens read", setting.read, 1, last, single);
  const move = (to) => read.set(Math.min(Math.max(to, 1), last));
  panel.buttons(
    ["Back", () => move(read.value - 1)],
    ["One token", () => move(read.value + 1)],
    ["A window on", () => move(read.value + Number(slots.value) - Number(sinks.value))],
    ["First one leaves", () => move(Number(slots.value))],
  );
  const sinks = panel.choice("Sinks", offered(every.map(([first]) => first)), String(setting.sinks));
  const slots = panel.choice("Slots, sinks and window together", offered(every.map(([first, window]) => first + window)), String(setting.slots));
  const means = Object.fromEntries(Object.entries(losses).map(([kind, each]) => [kind, perplexities(each)]));

  return () => {
    const [kept, all] = [Number(sinks.value), Number(slots.value)];
    const window = all - kept;
    const words = windowWords(recorded, read.value, kept, all);
    const kinds = Object.fromEntries([[ALL, ALL], ...[0, 1, 4].map((number) => [String(number), kindOf(number, all)])]);
    const lines = Object.fromEntries(Object.entries(kinds).map(([name, kind]) => [name, means[kind]]));
    const now = (name) => three(lines[name][read.value - 1]);
    const names = Object.keys(kinds).sort((a, b) => (b === ALL) - (a === ALL));
    panel.say({
      answer: words,
      figures: names.map((name) => [NAMES[name], now(name), HUES[name]]),
      key: [["r2", "sinks"], ["cache-pale", "window, written a round ago"], ["cache", "window, written on this round"], ["idle", "forgotten"]],
      sums: [...slotSums(read.value, kept, window), `the next token costs ${names.map((name) => `${three(losses[kinds[name]][read.value - 1] / 1000)} (${NAMES[name]})`).join(", ")} nats`],
      limits: [
        `Recorded: ${model} over the first ${count(tokens.length)} tokens of Macbeth, in float32. All caches of a size hold equally many tokens; sinks take the place of older ones.`,
        "The slots are those of kvlab.cache.StreamingCache, and are tested to hold the same tokens.",
      ],
    });
    const told = `Perplexity after ${some(read.value, "token")}, ${count(all)} slots: ${names.map((name) => `${NAMES[name]} ${now(name)}`).join(", ")}.`;
    const map = `The text and the slots. Held: ${heldRanges(read.value, kept, window).map(([first, past]) => span(first, past)).join(" and ")}. The next token goes to slot ${count(slotOf(read.value, kept, window))}.`;
    panel.picture.replaceChildren(
      mapDrawing(panel.width, read.value, tokens.length, kept, window, map),
      textLines(tokens, read.value, kept, window),
      chart(panel.width, lines, sinks.value, read.value, tokens.length, told),
    );
  };
});
