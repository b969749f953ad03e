// Runs the calculators' arithmetic without a page: {folder, catalogue, cases, numbers} in, what they make of it out.
import { readFileSync } from "node:fs";

const { folder, catalogue, cases, numbers } = JSON.parse(readFileSync(0, "utf8"));
const cost = await import(`${folder}/cost.mjs`);
const words = await import(`${folder}/words.mjs`);

const answers = cases.map((one) => {
  const [model, device] = [catalogue.models[one.model], catalogue.devices[one.device]];
  const [dtype, weights, kv] = [one.dtype, one.weights, one.kv].map((name) => catalogue.formats[name]);
  const { prompt, answer, batch } = one;
  const found = cost.predict(model, device, { prompt, answer, batch, dtype, weights, kv });
  const launched = cost.passTime(model, cost.decodePass(prompt, batch), device, dtype, weights, kv, one.launch);
  return {
    kv_bytes: cost.cacheBytes(model, prompt, kv),
    token_bytes: cost.tokenBytes(model, kv),
    weight_bytes: cost.weightBytes(model, weights),
    largest_batch: cost.largestBatch(model, device.memory_bytes * one.fraction, prompt, weights, kv),
    longest_context: cost.longestContext(model, device.memory_bytes * one.fraction, batch, weights, kv),
    ttft: found.ttft,
    tpot: found.tpot,
    e2e: found.e2e,
    prefill_flops: found.prefill.flops,
    prefill_bytes: found.prefill.bytes,
    decode_flops: found.decode.flops,
    decode_bytes: found.decode.bytes,
    ridge: cost.ridge(device, dtype),
    critical_batch: cost.criticalBatch(device, dtype, weights),
    step: launched.seconds,
    step_weights: launched.linear + launched.head,
    step_cache: launched.attention,
    step_overhead: launched.overhead,
  };
});
const spoken = numbers.map((value) => [words.count(value), words.three(value), words.binary(value), words.duration(value)]);
console.log(JSON.stringify({ answers, spoken }));
