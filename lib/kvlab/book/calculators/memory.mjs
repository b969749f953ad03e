// Weights and KV cache against the memory of a device.
import { cacheChoice, deviceChoice, modelChoice, shapeNote, weightsChoice } from "./choices.mjs";
import { cacheBytes, largestBatch, longestContext, weightBytes } from "./cost.mjs";
import { picture, pieces, text } from "./drawings.mjs";
import { drawn, mount } from "./panel.mjs";
import { binary, count, some } from "./words.mjs";

const percents = (least, most) => [...Array((most - least) / 5 + 1).keys()].map((step) => least + 5 * step);

function card_drawing(width, weights, cache, usable, memory) {
  const total = Math.max(memory, weights + cache) * 1.002;
  const place = (bytes) => (width * bytes) / total;
  const limit = place(usable);
  const side = limit > width / 2 ? { "text-anchor": "end", x: limit - 4 } : { x: limit + 4 };
  return picture(
    width, 84, `A bar: weights ${binary(weights)}, cache ${binary(cache)}, limit ${binary(usable)}, memory of the device ${binary(memory)}.`,
    drawn("rect", { x: 0.5, y: 24.5, width: Math.max(place(memory) - 1, 1), height: 35, class: "kvc-outline" }),
    ...pieces(width, 27, 30, total, [["weights", weights, "weights"], ["cache", cache, "KV cache"]]),
    drawn("line", { x1: limit, x2: limit, y1: 8, y2: 66, class: "kvc-limit" }),
    text(0, 14, `may be used: ${binary(usable)}`, side),
    text(Math.min(place(memory), width), 78, `memory: ${binary(memory)}`, { "text-anchor": place(memory) > width / 2 ? "end" : "start" }),
  );
}

mount("memory", (panel, catalogue, setting) => {
  const model = modelChoice(panel, catalogue, setting);
  const device = deviceChoice(panel, catalogue, setting, false);
  const weights = weightsChoice(panel, catalogue, setting);
  const kv = cacheChoice(panel, catalogue, setting);
  const tokens = panel.number("Tokens of a request", setting.tokens, 1, setting.tokens);
  const batch = panel.number("Requests", setting.batch, 1, 4096);
  const share = panel.number("Share of the memory to use, %", setting.percent, 5, 100, percents);

  return () => {
    const [shape, card] = [model.value, device.value];
    const notes = [weights.fit(shape), kv.fit(shape)];
    tokens.bound(1, shape.max_seq_len);
    const usable = (card.memory_bytes * share.value) / 100;
    const [model_bytes, each] = [weightBytes(shape, weights.value), cacheBytes(shape, tokens.value, kv.value)];
    const held = batch.value * each;
    const need = model_bytes + held;
    const most = largestBatch(shape, usable, tokens.value, weights.value, kv.value);
    const longest = longestContext(shape, usable, batch.value, weights.value, kv.value);
    const verdict = need <= usable ? "That fits into" : "That does not fit into";
    panel.say({
      answer: `${shape.name} with ${some(batch.value, "request")} of ${some(tokens.value, "token")} needs ${binary(need)}. ${verdict} ${share.value} % of ${card.label} (${binary(usable)}), which has room for ${some(most, "such request")}.`,
      warnings: notes,
      figures: [["weights", binary(model_bytes), "weights"], ["KV cache", binary(held), "cache"], [need <= usable ? "left" : "missing", binary(Math.abs(usable - need)), "plain"]],
      sums: [
        `weights: ${count(model_bytes)} bytes; cache: ${some(batch.value, "request")} × ${count(each)} = ${count(held)} bytes`,
        most
          ? `requests: (${binary(usable)} − ${binary(model_bytes)}) ÷ ${binary(each)} = ${count(most)} of ${some(tokens.value, "token")}`
          : `not one request of ${some(tokens.value, "token")} fits beside the weights`,
        longest
          ? `longest: ${some(batch.value, "request")} of ${some(longest, "token")}${longest === shape.max_seq_len ? " (all that the model can read)" : ""}`
          : "no token of these requests fits beside the weights",
      ],
      limits: [
        "Weights and cache only: activations, logits and the runtime itself need some of the rest. “GB” of a card is taken as GiB, as its driver shows it.",
        shapeNote(shape),
      ],
    });
    panel.picture.replaceChildren(card_drawing(panel.width, model_bytes, held, usable, card.memory_bytes));
  };
});
