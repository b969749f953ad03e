// Time to the first token and for each further one, at the limits of a device.
import { cacheChoice, deviceChoice, dtypeChoice, memoryWarning, modelChoice, peakNote, shapeNote, weightsChoice } from "./choices.mjs";
import { predict } from "./cost.mjs";
import { picture, text } from "./drawings.mjs";
import { drawn, mount } from "./panel.mjs";
import { decimal, duration, operations, some, three } from "./words.mjs";

const percents = (least, most) => [...Array((most - least) / 5 + 1).keys()].map((step) => least + 5 * step);

/** The device at a share of its peaks. */
export function reach(card, compute, bandwidth) {
  const flops = Object.fromEntries(Object.entries(card.flops).map(([dtype, peak]) => [dtype, peak * compute]));
  return { ...card, flops, bandwidth: card.bandwidth * bandwidth };
}

function line(name, pass, card, dtype) {
  const [arithmetic, bytes] = [pass.flops / card.flops[dtype.name], pass.bytes / card.bandwidth];
  return `${name}: arithmetic ${operations(pass.flops)} ÷ ${operations(card.flops[dtype.name])}/s = ${duration(arithmetic)}, bytes ${decimal(pass.bytes)} ÷ ${decimal(card.bandwidth)}/s = ${duration(bytes)}; in each operator the slower of the two counts, together ${duration(pass.seconds)}`;
}

function timeline(width, { ttft, tpot, e2e }, tokens) {
  const place = (seconds) => (width * seconds) / e2e;
  const first = place(ttft);
  const step = place(tpot);
  const marks = step >= 5 ? [...Array(tokens - 1).keys()] : [];
  const words = `One request over time: prefill until ${duration(ttft)}, then decode steps until ${duration(e2e)}.`;
  return picture(
    width, 66, words,
    drawn("rect", { x: 0, y: 18, width: Math.max(first, 1), height: 28, class: "kvc-prefill" }),
    drawn("rect", { x: first, y: 18, width: Math.max(width - first, 0), height: 28, class: "kvc-decode" }),
    ...marks.map((at) => drawn("line", { x1: first + at * step, x2: first + at * step, y1: 18, y2: 46, class: "kvc-gap" })),
    drawn("path", { d: `M${first - 5},8 h10 l-5,8 z`, class: "kvc-ink" }),
    text(first > width / 2 ? first - 9 : first + 9, 14, `first token ${duration(ttft)}`, { "text-anchor": first > width / 2 ? "end" : "start" }),
    text(0, 62, "0"),
    text(width, 62, duration(e2e), { "text-anchor": "end" }),
  );
}

mount("latency", (panel, catalogue, setting) => {
  const model = modelChoice(panel, catalogue, setting);
  const device = deviceChoice(panel, catalogue, setting);
  const dtype = dtypeChoice(panel, catalogue, setting);
  const weights = weightsChoice(panel, catalogue, setting);
  const kv = cacheChoice(panel, catalogue, setting);
  const prompt = panel.number("Tokens of a prompt", setting.prompt_tokens, 1, setting.prompt_tokens);
  const answer = panel.number("Tokens of an answer", setting.new_tokens, 1, setting.new_tokens);
  const batch = panel.number("Requests at once", setting.batch, 1, 1024);
  const compute = panel.number("Share of the FLOP/s peak, %", 100, 5, 100, percents);
  const bandwidth = panel.number("Share of the bandwidth, %", 100, 5, 100, percents);

  return () => {
    const [shape, card] = [model.value, device.value];
    const notes = [weights.fit(shape), kv.fit(shape)];
    dtype.fit(card);
    prompt.bound(1, shape.max_seq_len);
    answer.bound(1, shape.max_seq_len - prompt.value + 1);
    const part = { prompt: prompt.value, answer: answer.value, batch: batch.value, dtype: dtype.value, weights: weights.value, kv: kv.value };
    const reached = reach(card, compute.value / 100, bandwidth.value / 100);
    const found = predict(shape, reached, part);
    const limit = compute.value === 100 && bandwidth.value === 100;
    panel.say({
      answer: `${shape.name} on ${card.label}: the first token of ${some(part.prompt, "prompt token")} comes after ${duration(found.ttft)}${limit ? " at the earliest" : ""}, each further one after ${duration(found.tpot)}${limit ? " or more" : ""}.`,
      warnings: [...notes, memoryWarning(shape, card, part.batch, part.prompt + part.answer - 1, part.weights, part.kv)],
      figures: [["TTFT", duration(found.ttft), "prefill"], ["TPOT", duration(found.tpot), "decode"], [`all ${some(part.answer, "token")}`, duration(found.e2e), "plain"], ["answer tokens a second", three(part.batch / found.tpot), "plain"]],
      key: [["prefill", "prefill"], ["decode", "decode, one step a token"]],
      sums: [line("prefill", found.prefill, reached, part.dtype), line("one decode step", found.decode, reached, part.dtype)],
      limits: [
        limit
          ? peakNote
          : "The shares are yours: measure what your engine reaches of each peak (MFU, MBU) and put it in. One share for a whole pass is a coarse picture.",
        "Nobody waits in a queue here, all requests start together, and weights narrower than the arithmetic are widened at no cost.",
        shapeNote(shape),
      ],
    });
    panel.picture.replaceChildren(timeline(panel.width, found, part.answer));
  };
});
