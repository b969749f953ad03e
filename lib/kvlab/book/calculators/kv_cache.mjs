// How many bytes the KV cache holds, and what the model's design saves.
import { cacheChoice, modelChoice, shapeNote } from "./choices.mjs";
import { bytesOf, cacheBytes, cachedElements, tokenBytes, weightBytes } from "./cost.mjs";
import { bars } from "./drawings.mjs";
import { mount } from "./panel.mjs";
import { binary, count, some } from "./words.mjs";

/** The same requests in designs that keep more, and the weights to compare with. */
function others(shape, tokens, batch, kv) {
  const found = [];
  if (shape.windows.some(([window]) => window !== null)) {
    found.push(["cache-pale", "if no layer had a window", batch * cacheBytes({ ...shape, windows: [[null, shape.n_layer]] }, tokens, kv)]);
  }
  if (shape.mla || shape.n_kv_head < shape.n_head) {
    const value = shape.mla ? shape.mla.v_head_dim : shape.head_dim;
    const each = (shape.n_head * (shape.head_dim + value)) / cachedElements(shape);
    found.push(["cache-pale", `if all ${shape.n_head} heads kept keys and values`, each * batch * cacheBytes(shape, tokens, kv)]);
  }
  return [...found, ["weights", "the weights, in 16 bits", weightBytes(shape, { bits: 16, group: 0, overhead_bits: 0 })]];
}

function sums(shape, tokens, batch, kv, held) {
  const width = Number(bytesOf(kv).toPrecision(5));
  const element = width === 1 ? "1 byte" : `${width} bytes`;
  const each = shape.mla
    ? `(latent ${shape.mla.kv_lora_rank} + rotary ${shape.mla.rope_head_dim}) × ${element}`
    : `keys and values: 2 × ${some(shape.n_kv_head, "KV head")} × ${shape.head_dim} dimensions × ${element}`;
  const layer = cachedElements(shape) * bytesOf(kv);
  const exact = (bytes) => (bytes % 1 ? bytes.toFixed(1) : count(bytes));
  const first = `one token, one layer: ${each} = ${exact(layer)} bytes`;
  const [[window]] = shape.windows;
  if (shape.windows.length === 1 && window === null) {
    return [first, `one token: × ${shape.n_layer} layers = ${exact(tokenBytes(shape, kv))} bytes`, `× ${some(tokens, "token")} × ${some(batch, "request")} = ${count(held)} bytes`];
  }
  const parts = shape.windows.map(([window, layers]) => `${layers} × ${count(window === null ? tokens : Math.min(tokens, window))}`);
  return [
    first,
    `layers × tokens that they keep: ${parts.join(" + ")}${shape.windows.map(([window]) => (window === null ? "" : ` (a window of ${count(window)})`)).join("")}`,
    `together, × ${some(batch, "request")} = ${count(held)} bytes`,
  ];
}

mount("kv-cache", (panel, catalogue, setting) => {
  const model = modelChoice(panel, catalogue, setting);
  const kv = cacheChoice(panel, catalogue, setting);
  const tokens = panel.number("Tokens of a request", setting.tokens, 1, setting.tokens);
  const batch = panel.number("Requests", setting.batch, 1, 1024);

  return () => {
    const [shape, note] = [model.value, kv.fit(model.value)];
    tokens.bound(1, shape.max_seq_len);
    const held = batch.value * cacheBytes(shape, tokens.value, kv.value);
    const rows = [["cache", "this cache", held], ...others(shape, tokens.value, batch.value, kv.value)].map(([kind, words, bytes]) => [kind, words, bytes, binary(bytes)]);
    panel.say({
      answer: `The KV cache of ${shape.name} takes ${binary(held)} (${count(held)} bytes) for ${some(batch.value, "request")} of ${some(tokens.value, "token")} in ${kv.value.name}.`,
      warnings: [note],
      sums: sums(shape, tokens.value, batch.value, kv.value, held),
      limits: [
        "Every token fed counts, prompt and answer; the last token of an answer is never fed. A paged pool rounds each request up to whole blocks, and activations and weights come on top.",
        shapeNote(shape),
      ],
    });
    panel.picture.replaceChildren(bars(panel.width, rows, `Bars: ${rows.map(([, words, , shown]) => `${words} ${shown}`).join("; ")}.`));
  };
});
