// A block map: requests with shared beginnings, a small scheduler, and who holds which block when.
import { picture, text } from "./drawings.mjs";
import { drawn, mount } from "./panel.mjs";
import { BlockPool, ServedRequest, ServingScheduler } from "./scheduler.mjs";
import { count, some } from "./words.mjs";

const SHARED = 16; // tokens of each system prompt
const MOST_REQUESTS = 12;
const MOST_STEPS = 2000;
const BEGINNINGS = { S: "system prompt S", T: "system prompt T", "": "nothing shared" };
const POLICIES = { chunked: "chunked", continuous: "continuous", static: "static" };
const single = (least, most) => [...Array(most - least + 1).keys()].map((step) => least + step);
const letter = (index) => String.fromCharCode(65 + index);
const hue = (id) => `r${(id.charCodeAt(0) - 65) % 9}`;
const listed = (ids) => (ids.length < 2 ? ids.join("") : `${ids.slice(0, -1).join(", ")} and ${ids.at(-1)}`);
const verb = (ids, one, many) => `${listed(ids)} ${ids.length === 1 ? one : many}`;

/** The token at a place of a request's text: of its system prompt, or its own. */
const tokenAt = (asked, id, place) => (asked.begins && place < SHARED ? `${asked.begins}${place}` : `${id}${place}`);

/** All steps of some requests: who holds what at the end of each, and how far everybody is. */
export function blockSteps({ blocks, block_size, budget, policy, requests }) {
  const pool = new BlockPool(blocks, block_size);
  const scheduler = new ServingScheduler(pool, { policy, tokenBudget: budget });
  const everybody = requests.map((asked, index) => {
    const contents = (place, size) => single(place * size, (place + 1) * size - 1).map((at) => tokenAt(asked, letter(index), at)).join();
    return Object.assign(new ServedRequest(letter(index), (asked.begins ? SHARED : 0) + asked.own, asked.answer, contents), { comes: asked.step });
  });
  const refused = everybody.filter((request) => !scheduler.takes(request)).map(({ id }) => id);
  const coming = everybody.filter((request) => scheduler.takes(request)).sort((a, b) => a.comes - b.comes || a.id.localeCompare(b.id));
  const leftBy = Array(blocks).fill(null);
  const states = [];
  let out = 0;
  while (states.length < MOST_STEPS) {
    const running = scheduler.running.map(({ id }) => id);
    const holders = single(0, blocks - 1).map((block) => scheduler.running.filter(({ table }) => table.includes(block)).map(({ id }) => id));
    holders.forEach((who, block) => who.length && (leftBy[block] = who.at(-1)));
    const filled = single(0, blocks - 1).map((block) => Math.max(0, ...scheduler.running.map((request) => Math.min(Math.max(request.computed - request.table.indexOf(block) * block_size, 0), block_size) * request.table.includes(block))));
    const requests = everybody.map(({ id, tokens, computed, table, finished, preemptions, comes }) => ({ id, tokens, computed, table: [...table], finished, preemptions, comes }));
    states.push({ running, waiting: scheduler.waiting.map(({ id }) => id), holders, leftBy: [...leftBy], filled, requests, used: blocks - pool.free, queries: scheduler.queries, hits: scheduler.hits, out });
    while (coming.length && coming[0].comes <= states.length - 1) scheduler.add(coming.shift());
    if (!scheduler.unfinished && !coming.length) break;
    const plan = scheduler.schedule();
    const fed = [...plan.tokens].map(([{ id }, tokens]) => [id, tokens]);
    out += plan.preempted.length;
    for (const [request, tokens] of plan.tokens) scheduler.computed(request, tokens);
    states.at(-1).next = { fed, preempted: plan.preempted.map(({ id }) => id) };
  }
  return { states, refused };
}

/** The answer, in the words of the Python class. */
export function blockWords({ running, waiting, holders, used, queries, hits, out }, step, blocks) {
  const shared = holders.filter((who) => who.length > 1).length;
  const who = [running.length ? verb(running, "runs", "run") : "nobody runs", ...(waiting.length ? [verb(waiting, "waits", "wait")] : [])];
  return `After ${some(step, "step")}: ${who.join(", ")}. ${count(used)} of ${some(blocks, "block")} are held, ${count(shared)} of them by more than one. Found in the cache: ${count(hits)} of ${some(queries, "prompt token")}. Thrown out so far: ${count(out)}.`;
}

/** One row a block: bars over the steps so far, and at the right what is in it now. */
function mapDrawing(width, states, step, blocks, blockSize, words) {
  const [left, right, height] = [26, 74, Math.max(Math.min(Math.floor(300 / blocks), 20), 9)];
  const wide = (width - left - right) / Math.max(step + 1, 24);
  const x = (at) => left + at * wide;
  const bars = single(0, blocks - 1).flatMap((block) => {
    const found = [];
    let from = 0;
    const key = (at) => `${states[at].holders[block]}|${states[at].leftBy[block]}`;
    for (let at = 1; at <= step + 1; at++) {
      if (at <= step && key(at) === key(from)) continue;
      found.push(...blockBar(states[from], block, x(from), wide * (at - from), height));
      from = at;
    }
    return [...found, ...nowCell(states[step], block, width - right + 10, height, blockSize)];
  });
  const names = single(0, blocks - 1).filter((block) => height >= 12 || block % 5 === 0).map((block) => text(left - 5, block * height + height / 2 + 4, String(block), { "text-anchor": "end", class: "kvc-tick" }));
  const bottom = blocks * height;
  return picture(
    width, bottom + 22, words, ...bars, ...names,
    drawn("line", { x1: x(step + 1), x2: x(step + 1), y1: 0, y2: bottom, class: "kvc-now" }),
    text(left, bottom + 16, "steps", { class: "kvc-tick" }),
    text(width, bottom + 16, "now, holders", { class: "kvc-tick", "text-anchor": "end" }),
  );
}

function blockBar({ holders, leftBy }, block, x, width, height) {
  const who = holders[block].length ? holders[block] : leftBy[block] ? [leftBy[block]] : [];
  const pale = holders[block].length ? "" : " kvc-pale";
  const slice = (height - 1) / who.length;
  return who.map((id, at) => drawn("rect", { x, y: block * height + at * slice, width, height: slice, class: `kvc-${hue(id)}${pale}` }));
}

function nowCell({ holders, filled }, block, x, height, blockSize) {
  const who = holders[block];
  const frame = drawn("rect", { x: x + 0.5, y: block * height + 0.5, width: 39, height: height - 2, class: "kvc-outline" });
  if (!who.length) return [frame];
  const bar = drawn("rect", { x: x + 1, y: block * height + 1, width: (38 * filled[block]) / blockSize, height: height - 3, class: `kvc-${hue(who[0])}` });
  return [bar, frame, text(x + 46, block * height + height / 2 + 4, String(who.length), { class: "kvc-tick" })];
}

/** One line a request: where it stands, and its block table. */
function requestWords({ id, tokens, computed, table, finished, preemptions, comes }, state, refused, step) {
  if (refused.includes(id)) return `${id}: refused, it can never fit`;
  const again = preemptions ? `, thrown out ${preemptions === 1 ? "once" : `${preemptions} times`}` : "";
  if (finished) return `${id}: has ended with ${some(tokens, "token")}${again}`;
  if (state.running.includes(id)) return `${id}: ${computed} of ${some(tokens, "token")} computed, table [${table.join(", ")}]${again}`;
  return comes >= step && !preemptions ? `${id}: comes at step ${comes}` : `${id}: waits with ${some(tokens, "token")}${again}`;
}

mount("block-map", (panel, catalogue, setting) => {
  const requests = setting.requests.map((asked) => ({ ...asked }));
  const step = panel.number("Step", setting.step, 0, MOST_STEPS, single);
  panel.buttons(
    ["One step", () => step.set(step.value + 1)],
    ["Add a request", () => requests.length < MOST_REQUESTS && requests.push({ step: step.value, begins: begins.value, own: own.value, answer: answer.value })],
    ["Take all away", () => (requests.splice(0), step.set(0))],
  );
  const begins = panel.choice("The next one begins with", { "": Object.entries(BEGINNINGS) }, "S");
  const own = panel.number("Its own prompt tokens", 6, 1, 64, single);
  const answer = panel.number("Its answer tokens", 24, 1, 64, single);
  const blocks = panel.number("Blocks in the pool", setting.blocks, 2, 32, single);
  const size = panel.number("Tokens of a block", setting.block_size, 1, 16, single);
  const budget = panel.number("Token budget of a step", setting.budget, 1, 256);
  const policy = panel.choice("Policy", { "": Object.entries(POLICIES) }, setting.policy);

  return () => {
    const asked = { blocks: blocks.value, block_size: size.value, budget: budget.value, policy: policy.value, requests };
    const run = blockSteps(asked);
    step.bound(0, run.states.length - 1);
    const state = run.states[step.value];
    const words = blockWords(state, step.value, blocks.value);
    const { fed = [], preempted = [] } = state.next ?? {};
    const full = requests.length >= MOST_REQUESTS ? `${MOST_REQUESTS} requests are all that fit here.` : "";
    panel.say({
      answer: words,
      warnings: [run.refused.length ? `${verb(run.refused, "is", "are")} refused: the pool, or for whole prompts the budget, can never hold what may come.` : "", full],
      figures: [["held", count(state.used), "cache"], ["free", count(blocks.value - state.used), "plain"], ["thrown out", count(state.out), "plain"]],
      key: state.requests.map((request) => [hue(request.id), requestWords(request, state, run.refused, step.value)]),
      sums: [
        fed.length ? `the next step feeds ${fed.map(([id, tokens]) => `${id} ${some(tokens, "token")}`).join(", ")}` : "",
        preempted.length ? `and throws out ${listed(preempted)}: its blocks are needed, and it joined last` : "",
      ].filter(Boolean),
      limits: [
        `A system prompt is ${SHARED} tokens. A bar in two colours is a block that two requests hold; a pale one is free, and what was written is still there.`,
        "First come, first served. The rules are those of kvlab.serving.Scheduler, and are tested to plan the same.",
      ],
    });
    panel.picture.replaceChildren(mapDrawing(panel.width, run.states, step.value, blocks.value, size.value, words));
  };
});
