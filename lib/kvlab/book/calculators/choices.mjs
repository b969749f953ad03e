// The choices that calculators share: a model, a device, formats, and the dtype of the arithmetic.
import { cacheBytes, weightBytes } from "./cost.mjs";
import { binary } from "./words.mjs";

const ARITHMETIC = ["float32", "float16", "bfloat16", "fp8"];

function byFamily(models) {
  const groups = {};
  for (const name of Object.keys(models)) {
    const family = models[name].status === "yours" ? "yours" : name.match(/^[a-z]+/)[0];
    (groups[family] ??= []).push([name, name]);
  }
  return groups;
}

/** The model; `value` is its entry of the catalogue. */
export function modelChoice(panel, { models }, setting) {
  const control = panel.choice("Model", byFamily(models), setting.model);
  return { get value() { return models[control.value]; } };
}

/** The device; those without a peak are left out where times are asked for. */
export function deviceChoice(panel, { devices }, setting, timed = true) {
  const usable = Object.values(devices).filter((device) => !timed || ARITHMETIC.some((dtype) => dtype in device.flops));
  const control = panel.choice("Device", { "": usable.map(({ name, label }) => [name, label]) }, setting.device);
  return { get value() { return devices[control.value]; } };
}

/** The dtype of the arithmetic; `fit` offers what the device has a peak for. */
export function dtypeChoice(panel, { formats }, setting) {
  const control = panel.choice("Arithmetic", {}, "");
  let last;
  return {
    fit(device, wanted = control.value || setting.dtype) {
      if (device === last) return;
      last = device;
      const found = ARITHMETIC.filter((dtype) => dtype in device.flops);
      const best = ["bfloat16", "float16", ...found].find((dtype) => found.includes(dtype));
      control.offer({ "": found.map((dtype) => [dtype, dtype]) }, found.includes(wanted) ? wanted : best);
    },
    get value() { return formats[control.value]; },
  };
}

/** The dtype that a device computes in when nobody chooses: 16 bits where it has them. */
export const dtypeOf = (device, { formats }) => formats[["bfloat16", "float16", "float32", "fp8"].find((dtype) => dtype in device.flops)];

/** A storage format; `fit` takes away those whose groups do not divide the model, and says so when it must choose another. */
function formatChoice(panel, label, formats, wanted, refusals) {
  const control = panel.choice(label, {}, "");
  let last;
  let note = "";
  let taken = "";
  return {
    fit(model) {
      if (model === last) return control.value === taken ? note : "";
      last = model;
      const reason = (name) => model[refusals][name];
      let chosen = control.value || wanted;
      note = "";
      if (reason(chosen)) {
        const alike = Object.keys(formats).filter((name) => formats[name].bits === formats[chosen].bits && !reason(name));
        const other = alike.find((name) => formats[name].group) ?? alike[0] ?? "bfloat16";
        note = `${label}: in ${formats[chosen].name}, ${reason(chosen)}; ${formats[other].title} was taken instead.`;
        chosen = taken = other;
      }
      control.offer({ "": Object.values(formats).map(({ name, title }) => [name, title, reason(name)]) }, chosen);
      return note;
    },
    get value() { return formats[control.value]; },
  };
}

export const weightsChoice = (panel, { formats }, setting) => formatChoice(panel, "Weights stored as", formats, setting.weights, "weights_refused");
export const cacheChoice = (panel, { formats }, setting) => formatChoice(panel, "KV cache stored as", formats, setting.kv, "cache_refused");

/** What stands beside figures that nobody verified. */
export const shapeNote = (model) => (/^(verified|yours)$/.test(model.status) ? "" : `Shape of ${model.name}: ${model.status}.`);
/** A warning where weights and caches are larger than the memory of the device: the times are then those of a dream. */
export function memoryWarning(model, card, batch, tokens, weights, kv) {
  const need = weightBytes(model, weights) + batch * cacheBytes(model, tokens, kv);
  return need > card.memory_bytes ? `Weights and caches need ${binary(need)}, the device has ${binary(card.memory_bytes)}: this does not run there.` : "";
}

export const peakNote = "Times are limits: no operator beats the peaks of the device, and a real engine takes longer.";
