// The arithmetic of kvlab.cost for the calculators: the same figures from the same data (tests/book/test_calculators.py).
// A model is what catalogue.py makes of a shape, a format is {bits, group, overhead_bits}, a device has bandwidth, flops
// (peaks by dtype) and memory_bytes. A pass is {requests, fed, past}: equal rows, each with one position that needs logits.

export const bytesOf = (format) => (format.bits + (format.group ? format.overhead_bits / format.group : 0)) / 8;

const WIDE = { bits: 16, group: 0, overhead_bits: 0 };
const unquantized = (format) => (format.bits >= 16 ? format : WIDE);
const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);

/** Cached elements of one token in one layer. */
export const cachedElements = (model) => (model.mla ? model.mla.kv_lora_rank + model.mla.rope_head_dim : 2 * model.n_kv_head * model.head_dim);

/** Bytes that one more token adds while no window is full. */
export const tokenBytes = (model, kv) => model.n_layer * cachedElements(model) * bytesOf(kv);

/** Bytes of the cache of one request. */
export function cacheBytes(model, tokens, kv) {
  const held = sum(model.windows, ([window, layers]) => layers * (window === null ? tokens : Math.min(tokens, window)));
  return Math.ceil(held * cachedElements(model) * bytesOf(kv));
}

/** Bytes of all weights; embedding, norms and biases stay at 16 bits beside a narrower format. */
export function weightBytes(model, format) {
  const { attention, mlp, head, embedding, vectors } = model.parameters;
  return Math.ceil((attention + mlp + head) * bytesOf(format)) + Math.ceil((embedding + vectors) * bytesOf(unquantized(format)));
}

/** Requests of so many tokens that fit beside the weights. */
export function largestBatch(model, memory, tokens, weights, kv) {
  return Math.max(Math.floor((memory - weightBytes(model, weights)) / cacheBytes(model, tokens, kv)), 0);
}

/** Tokens that each of a batch of requests can hold beside the weights, at most the model's context. */
export function longestContext(model, memory, batch, weights, kv) {
  const fits = (tokens) => weightBytes(model, weights) + batch * cacheBytes(model, tokens, kv) <= memory;
  let [held, refused] = [0, model.max_seq_len + 1];
  if (!fits(0)) return 0;
  while (refused - held > 1) {
    const middle = Math.floor((held + refused) / 2);
    if (fits(middle)) held = middle;
    else refused = middle;
  }
  return held;
}

/** Experts of a layer that so many tokens visit, expected. */
export const expertsTouched = (moe, tokens) => moe.n_experts * (1 - (1 - moe.experts_per_token / moe.n_experts) ** tokens);

/** (query, key) pairs that the attention rule lets through, in one row. */
export function visiblePairs(fed, past, window) {
  if (window === null || past + fed <= window) return fed * past + (fed * (fed + 1)) / 2;
  const growing = Math.max(Math.min(window - past, fed), 0);
  return visiblePairs(growing, past, null) + (fed - growing) * window;
}

/** Operations of attention in one layer and row. Latents take the cheaper of two ways: brought out again, or as they are. */
export function attentionFlops(model, fed, past, window) {
  const { mla, n_head: heads, head_dim: dim } = model;
  const pairs = visiblePairs(fed, past, window);
  if (!mla) return 4 * heads * dim * pairs;
  const outAgain = past * mla.kv_lora_rank * (dim - mla.rope_head_dim + mla.v_head_dim);
  const onHeads = pairs * (dim + mla.v_head_dim) + outAgain;
  return 2 * heads * Math.min(onHeads, pairs * (2 * mla.kv_lora_rank + mla.rope_head_dim));
}

/** The matrix products, attention and head of a pass, each kind once for all layers: FLOPs, bytes, kernels. */
export function operators(model, { requests, fed, past }, width, weights, kv) {
  const tokens = requests * fed;
  const found = model.matrices.map((matrix) => linear(matrix, tokens, bytesOf(weights), width));
  if (model.moe) found.push(experts(model, tokens, bytesOf(weights), width));
  for (const [window, layers] of model.windows) found.push(attention(model, { requests, fed, past }, window, layers, width, bytesOf(kv)));
  const head = { name: "head", calls: 1, inputs: model.hidden_size, outputs: model.vocab_size };
  const kept = bytesOf(model.tie_embeddings ? unquantized(weights) : weights);
  found.push({ ...linear(head, requests, kept, width), part: "head" });
  return found.map((operator) => ({ ...operator, launches: model.launches[operator.name] }));
}

function linear({ name, calls, inputs, outputs }, tokens, narrow, width) {
  const moved = inputs * outputs * narrow + tokens * (inputs + outputs) * width;
  return { name, part: "linear", flops: 2 * calls * inputs * outputs * tokens, bytes: calls * moved };
}

function experts({ moe, hidden_size: hidden }, tokens, narrow, width) {
  const active = moe.experts_per_token + moe.n_shared_experts;
  const router = hidden * moe.n_experts;
  const weights = (expertsTouched(moe, tokens) + moe.n_shared_experts) * moe.expert_parameters + router;
  const moved = weights * narrow + tokens * active * 2 * hidden * width;
  return { name: "experts", part: "linear", flops: 2 * moe.layers * tokens * (active * moe.expert_parameters + router), bytes: moe.layers * moved };
}

function attention(model, { requests, fed, past }, window, layers, width, narrow) {
  const held = window === null ? past + fed : Math.min(past + fed, window + fed - 1);
  const moved = requests * (held * cachedElements(model) * narrow + 2 * fed * model.n_head * model.head_dim * width);
  const flops = layers * requests * attentionFlops(model, fed, past, window);
  return { name: window === null ? "attention" : `attention(${window})`, part: "attention", flops, bytes: layers * moved };
}

/**
 * A pass at the peaks of a device: each operator as slow as its arithmetic or its bytes. With launch > 0 the host takes so
 * long for each kernel: on a GPU it runs ahead, and only what outlasts the device counts; on a CPU it adds up.
 */
export function passTime(model, pass, device, dtype, weights, kv, launch = 0) {
  const peak = device.flops[dtype.name];
  const [seconds, moved] = [{ linear: 0, attention: 0, head: 0 }, { linear: 0, attention: 0, head: 0 }];
  const total = { flops: 0, bytes: 0, arithmetic: 0, launches: model.launches.elementwise };
  for (const { part, flops, bytes, launches } of operators(model, pass, bytesOf(dtype), weights, kv)) {
    const [compute, read] = [flops / peak, bytes / device.bandwidth];
    seconds[part] += Math.max(compute, read);
    moved[part] += bytes;
    total.arithmetic += compute > read ? compute : 0;
    total.flops += flops;
    total.bytes += bytes;
    total.launches += launches;
  }
  const kernels = seconds.linear + seconds.attention + seconds.head;
  const host = total.launches * launch;
  const overhead = device.asynchronous ? Math.max(host - kernels, 0) : host;
  return { ...total, ...seconds, moved, host, overhead, seconds: kernels + overhead };
}

/** The pass that reads the prompts. */
export const prefillPass = (tokens, requests) => ({ requests, fed: tokens, past: 0 });

/** One step that gives every request a token. */
export const decodePass = (past, requests) => ({ requests, fed: 1, past });

/** Time to the first token and for each later one, in the middle of the answers. */
export function predict(model, device, { prompt, answer, batch, dtype, weights, kv }) {
  const middle = prompt + Math.floor(Math.max(answer - 2, 0) / 2);
  const prefill = passTime(model, prefillPass(prompt, batch), device, dtype, weights, kv);
  const decode = passTime(model, decodePass(middle, batch), device, dtype, weights, kv);
  return { prefill, decode, ttft: prefill.seconds, tpot: decode.seconds, e2e: prefill.seconds + (answer - 1) * decode.seconds };
}

/** FLOP a byte from which arithmetic is the limit. */
export const ridge = (device, dtype) => device.flops[dtype.name] / device.bandwidth;

/** Tokens in a pass from which the matrix products are bound by arithmetic. */
export const criticalBatch = (device, dtype, weights) => (ridge(device, dtype) * bytesOf(weights)) / 2;
