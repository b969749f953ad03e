// Where the time of one decode step goes: weights, KV cache, and the launches that nothing hides.
import { cacheChoice, deviceChoice, dtypeOf, memoryWarning, modelChoice, shapeNote, weightsChoice } from "./choices.mjs";
import { criticalBatch, decodePass, passTime } from "./cost.mjs";
import { picture, pieces } from "./drawings.mjs";
import { mount } from "./panel.mjs";
import { count, decimal, duration, some, three } from "./words.mjs";

const micros = (least, most) => [...Array(most - least + 1).keys()].map((step) => least + step);

mount("decode-step", (panel, catalogue, setting) => {
  const model = modelChoice(panel, catalogue, setting);
  const device = deviceChoice(panel, catalogue, setting);
  const weights = weightsChoice(panel, catalogue, setting);
  const kv = cacheChoice(panel, catalogue, setting);
  const past = panel.number("Tokens that each cache holds", setting.past, 0, setting.past);
  const batch = panel.number("Requests in the step", setting.batch, 1, 1024);
  const launch = panel.number("Time to start one kernel, µs", setting.launch_us, 0, 30, micros);

  return () => {
    const [shape, card] = [model.value, device.value];
    const notes = [weights.fit(shape), kv.fit(shape)];
    past.bound(0, shape.max_seq_len - 1);
    const dtype = dtypeOf(card, catalogue);
    const step = passTime(shape, decodePass(past.value, batch.value), card, dtype, weights.value, kv.value, launch.value * 1e-6);
    const parts = [["weights", step.linear + step.head], ["cache", step.attention], ["idle", step.overhead]];
    const share = (seconds) => `${three((100 * seconds) / step.seconds)} %`;
    const hidden = card.asynchronous ? `while the device works; ${duration(step.overhead)} of waiting are left` : "and on a CPU it is the same processor";
    const names = { weights: "weights", cache: "KV cache", idle: "overhead" };
    panel.say({
      answer: `A decode step of ${shape.name} on ${card.label} with ${some(batch.value, "request")} and ${some(past.value, "token")} in each cache takes ${duration(step.seconds)}: ${parts.map(([kind, seconds]) => `${names[kind]} ${share(seconds)}`).join(", ")}.`,
      warnings: [...notes, memoryWarning(shape, card, batch.value, past.value + 1, weights.value, kv.value)],
      figures: [...parts.map(([kind, seconds]) => [names[kind], duration(seconds), kind]), ["answer tokens a second", three(batch.value / step.seconds), "plain"]],
      sums: [
        `weights: ${decimal(step.moved.linear + step.moved.head)} ÷ ${decimal(card.bandwidth)}/s = ${duration((step.moved.linear + step.moved.head) / card.bandwidth)}${step.arithmetic ? "; arithmetic takes longer in some of the products" : ""}`,
        `KV cache: ${decimal(step.moved.attention)} ÷ ${decimal(card.bandwidth)}/s = ${duration(step.moved.attention / card.bandwidth)}`,
        `overhead: the host starts ${count(step.launches)} kernels × ${launch.value} µs = ${duration(step.host)}, ${hidden}`,
      ],
      limits: [
        `The kernels are those of kvlab's own eager path, and the time to start one is an assumption: measure yours. A compiled path starts fewer, a CUDA graph starts all of them at once: slide to 0. Weights and cache are read at the full bandwidth, which nobody reaches.`,
        `All requests share one reading of the weights, each brings its own cache. From about ${count(criticalBatch(card, dtype, weights.value))} requests on, arithmetic (${dtype.name}) outlasts the reading of the weights.`,
        shapeNote(shape),
      ],
    });
    panel.picture.replaceChildren(
      picture(panel.width, 48, `A bar in pieces: ${parts.map(([kind, seconds]) => `${names[kind]} ${duration(seconds)}`).join(", ")}.`, ...pieces(panel.width, 4, 40, step.seconds, parts.map(([kind, seconds]) => [kind, seconds, names[kind]]))),
    );
  };
});
