// A scheduler playground: the same requests under a policy and a token budget, on a clock that counts tokens.
import { picture, text } from "./drawings.mjs";
import { drawn, mount } from "./panel.mjs";
import { BlockPool, ServedRequest, ServingScheduler } from "./scheduler.mjs";
import { count, duration, some } from "./words.mjs";

const BLOCK = 16;
const POLICIES = { chunked: "chunked: decodes first, prompts in pieces", continuous: "continuous: whole prompts first", static: "static: a batch at a time" };
const every = (step) => (least, most) => [...Array(Math.floor((most - least) / step) + 1).keys()].map((at) => least + step * at);

/** Serve requests to their end. A step takes so many microseconds and so many more for each token; all numbers are whole. */
export function servedTimes({ requests, policy, budget, blocks, step_us, token_us }) {
  // Where prompts are read whole, the budget must hold the longest of them, and its answer after a preemption.
  const whole = policy === "chunked" ? 1 : Math.max(...requests.map(({ prompt, answer }) => prompt + answer - 1));
  const scheduler = new ServingScheduler(new BlockPool(blocks, BLOCK), { policy, tokenBudget: Math.max(budget, whole) });
  const lives = requests.map((asked) => ({ ...asked, request: new ServedRequest(asked.id, asked.prompt, asked.answer), spans: [], tokens: [] }));
  const of = new Map(lives.map((life) => [life.request, life]));
  const coming = lives.filter(({ request }) => scheduler.takes(request)).sort((a, b) => a.at_ms - b.at_ms);
  let [now, steps] = [0, 0];
  while (coming.length || scheduler.unfinished) {
    if (!scheduler.unfinished) now = Math.max(now, coming[0].at_ms * 1000);
    while (coming.length && coming[0].at_ms * 1000 <= now) scheduler.add(coming.shift().request);
    const plan = scheduler.schedule();
    const end = now + step_us + token_us * plan.total;
    for (const [request, fed] of plan.tokens) {
      const life = of.get(request);
      life.spans.push([now, end, fed === 1 && life.tokens.length ? "decode" : "prefill"]);
      if (scheduler.computed(request, fed)) life.tokens.push(end);
    }
    [now, steps] = [end, steps + 1];
  }
  return { lives, end: now, steps, budget: scheduler.tokenBudget };
}

/** First token and longest gap of a request, in seconds; null where there is none. */
export function lifeFigures({ at_ms, tokens }) {
  const gaps = tokens.slice(1).map((time, index) => time - tokens[index]);
  return { ttft: tokens.length ? (tokens[0] - at_ms * 1000) / 1e6 : null, gap: gaps.length ? Math.max(...gaps) / 1e6 : null };
}

/** The answer, in the words of the Python class. */
export function timelineWords({ lives, end, budget }, policy) {
  const longest = lives.reduce((a, b) => (b.prompt > a.prompt ? b : a));
  const others = lives.filter((life) => life !== longest && life.tokens.length);
  const gaps = others.map((life) => lifeFigures(life).gap ?? 0);
  const { ttft } = lifeFigures(longest);
  const first = ttft === null ? "can never fit" : `has its first token after ${duration(ttft)}`;
  return `${policy}, ${some(budget, "token")} a step: ${longest.id} with the longest prompt ${first}; the longest gap in the answers of the others is ${duration(Math.max(0, ...gaps))}; everything is done after ${duration(end / 1e6)}.`;
}

function timelineDrawing(width, { lives, end }, words) {
  const [left, height] = [22, 30];
  const x = (time) => left + ((width - left - 4) * time) / (end || 1);
  const rows = lives.flatMap((life, row) => {
    const y = row * height;
    const from = life.at_ms * 1000;
    const to = Math.max(from, ...life.spans.map(([, stop]) => stop));
    const wait = drawn("rect", { x: x(from), y: y + 11, width: Math.max(x(to) - x(from), 1), height: 6, class: "kvc-idle" });
    const spans = joined(life.spans).map(([start, stop, kind]) => drawn("rect", { x: x(start), y: y + 5, width: Math.max(x(stop) - x(start), 0.6), height: 18, class: `kvc-${kind}` }));
    const mark = life.tokens.length ? [drawn("path", { d: `M${x(life.tokens[0]) - 4},${y} h8 l-4,6 z`, class: "kvc-ink" })] : [];
    return [text(0, y + 19, life.id, { class: "kvc-strong" }), wait, ...spans, ...mark];
  });
  const bottom = lives.length * height;
  return picture(width, bottom + 18, words, ...rows, text(left, bottom + 14, "0", { class: "kvc-tick" }), text(width - 4, bottom + 14, duration(end / 1e6), { class: "kvc-tick", "text-anchor": "end" }));
}

/** Spans of one kind that touch are drawn as one. */
function joined(spans) {
  const found = [];
  for (const [start, stop, kind] of spans) {
    const last = found.at(-1);
    if (last && last[2] === kind && last[1] === start) last[1] = stop;
    else found.push([start, stop, kind]);
  }
  return found;
}

mount("scheduler-timeline", (panel, catalogue, setting) => {
  const policy = panel.choice("Policy", { "": Object.entries(POLICIES) }, setting.policy);
  const budget = panel.number("Token budget of a step", setting.budget, 1, 8192);
  const long = setting.requests.reduce((a, b) => (b.prompt > a.prompt ? b : a));
  const prompt = panel.number("Prompt tokens of the longest", long.prompt, 1, 8192);
  const comes = panel.number("It comes at, ms", long.at_ms, 0, 2000, every(50));
  const blocks = panel.number(`Blocks of ${BLOCK} tokens`, setting.blocks, 8, 2048);
  const step = panel.number("A step takes, µs", setting.step_us, 0, 100_000, every(1000));
  const token = panel.number("And each token, µs", setting.token_us, 0, 2000, every(10));

  return () => {
    const requests = setting.requests.map((asked) => (asked === long ? { ...asked, prompt: prompt.value, at_ms: comes.value } : asked));
    const run = servedTimes({ requests, policy: policy.value, budget: budget.value, blocks: blocks.value, step_us: step.value, token_us: token.value });
    const words = timelineWords(run, policy.value);
    const never = run.lives.filter(({ tokens }) => !tokens.length).map(({ id }) => id);
    const out = run.lives.reduce((sum, { request }) => sum + request.preemptions, 0);
    panel.say({
      answer: words,
      warnings: [
        never.length ? `The pool can never hold ${never.join(", ")}: refused.` : "",
        run.budget > budget.value ? `Prompts are read whole, so a step must hold ${some(run.budget, "token")}: the budget was raised.` : "",
        out ? `Thrown out, and read again: ${count(out)} times.` : "",
      ],
      figures: [["steps", count(run.steps), "plain"], ["all done after", duration(run.end / 1e6), "plain"]],
      key: [["prefill", "prefill"], ["decode", "decode"], ["idle", "waiting"], ["ink", "first token"]],
      sums: run.lives.filter(({ tokens }) => tokens.length).map((life) => {
        const { ttft, gap } = lifeFigures(life);
        return `${life.id}: ${some(life.prompt, "prompt token")}, first token after ${duration(ttft)}${gap === null ? "" : `, longest gap ${duration(gap)}`}`;
      }),
      limits: [
        "A step takes a fixed time and a time for each token, and nothing for what caches hold: a sketch of a machine, not a measurement.",
        "First come, first served, no shared beginnings. The rules are those of kvlab.serving.Scheduler, and are tested to plan the same.",
      ],
    });
    panel.picture.replaceChildren(timelineDrawing(panel.width, run, words));
  };
});
