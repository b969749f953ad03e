// Prefill and decode as two dots on the roofline of a device; the dots can be dragged.
import { cacheChoice, deviceChoice, dtypeChoice, memoryWarning, modelChoice, peakNote, shapeNote, weightsChoice } from "./choices.mjs";
import { decodePass, passTime, prefillPass, ridge } from "./cost.mjs";
import { text } from "./drawings.mjs";
import { drawn, mount } from "./panel.mjs";
import { count, decimal, duration, operations, some, three } from "./words.mjs";

const INTENSITY = [0.25, 32768]; // FLOP a byte, left and right edge
const DEEP = 1 / 8192; // of the peak, lower edge

class Chart {
  /** The axes are drawn anew each time; the handles stay, for they are being dragged. */
  constructor(panel, ways) {
    this.panel = panel;
    this.ways = ways;
    this.ground = drawn("g");
    this.handles = Object.fromEntries(Object.entries(ways).map(([phase, way]) => [phase, this.handle(phase, way)]));
    this.svg = drawn("svg", { role: "group" }, this.ground, this.handles.prefill, this.handles.decode);
    panel.picture.append(this.svg);
  }

  handle(phase, { control, label, pass }) {
    const turn = (value) => {
      control.set(value);
      this.panel.update();
    };
    let grip = 0; // from where it was taken to the middle of the dot
    const drag = (event) => {
      if (!handle.hasPointerCapture(event.pointerId)) return;
      const wanted = Math.log(this.intensityAt(event.clientX + grip));
      const off = (value) => {
        const { flops, bytes } = pass(value);
        return Math.abs(Math.log(flops / bytes) - wanted);
      };
      turn(control.scale.reduce((best, value) => (off(value) < off(best) ? value : best)));
    };
    const keys = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 4, PageDown: -4, Home: -Infinity, End: Infinity };
    const handle = drawn(
      "g",
      {
        role: "slider", tabindex: 0, class: `kvc-handle kvc-${phase}`, "aria-label": label,
        onpointerdown: (event) => {
          event.preventDefault();
          const { left, width } = handle.querySelector(".kvc-dot").getBoundingClientRect();
          grip = left + width / 2 - event.clientX;
          handle.focus();
          handle.setPointerCapture(event.pointerId);
        },
        onpointermove: drag,
        onkeydown: (event) => {
          if (!(event.key in keys)) return;
          event.preventDefault();
          const { scale, value } = control;
          const by = keys[event.key];
          const at = by > 0 ? scale.findLastIndex((rung) => rung <= value) : scale.findIndex((rung) => rung >= value);
          turn(scale[Math.min(Math.max(at + by, 0), scale.length - 1)]);
        },
      },
      drawn("circle", { r: 22, class: "kvc-reach" }),
      drawn("circle", { r: 8, class: "kvc-dot" }),
      text(0, 0, phase, { class: "kvc-name" }),
    );
    return handle;
  }

  draw(card, dtype, passes) {
    const width = this.panel.width;
    const height = Math.min(Math.max(Math.round(width * 0.62), 250), 380);
    const peak = card.flops[dtype.name];
    const box = { left: 44, right: width - 8, top: 34, bottom: height - 40 };
    const [low, high] = INTENSITY.map(Math.log);
    const [floor, ceiling] = [peak * DEEP, peak * 2].map(Math.log);
    const x = (value) => box.left + ((Math.log(value) - low) / (high - low)) * (box.right - box.left);
    const y = (value) => box.bottom - ((Math.log(Math.max(value, peak * DEEP)) - floor) / (ceiling - floor)) * (box.bottom - box.top);
    this.intensityAt = (pixel) => {
      const part = (pixel - this.svg.getBoundingClientRect().left - box.left) / (box.right - box.left);
      return Math.exp(low + part * (high - low));
    };
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) this.svg.setAttribute(name, value);
    this.svg.setAttribute("aria-label", `Roofline: FLOP/s that can be reached over FLOP a byte, for ${card.label}`);
    this.ground.replaceChildren(...axes(box, x, y, peak), ...roof(box, x, y, card, peak));
    this.place("prefill", passes.prefill, x, y, box);
    this.place("decode", passes.decode, x, y, box);
  }

  place(phase, { flops, bytes, seconds }, x, y, box) {
    const [handle, { control }] = [this.handles[phase], this.ways[phase]];
    const at = [x(flops / bytes), y(flops / seconds)];
    handle.setAttribute("transform", `translate(${at.map((value) => value.toFixed(1)).join(" ")})`);
    const name = handle.querySelector("text");
    const right = at[0] > box.right - 70;
    for (const [key, value] of Object.entries({ x: right ? -4 : 14, y: 28, "text-anchor": right ? "end" : "start" })) name.setAttribute(key, value);
    const said = { "aria-valuemin": control.least, "aria-valuemax": control.most, "aria-valuenow": control.value, "aria-valuetext": `${count(control.value)}, ${three(flops / bytes)} FLOP a byte` };
    for (const [key, value] of Object.entries(said)) handle.setAttribute(key, value);
  }
}

function axes(box, x, y, peak) {
  const marks = [];
  for (let power = 0; power <= 4; power += 1) {
    const at = x(10 ** power);
    marks.push(drawn("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "kvc-grid" }));
    marks.push(text(at, box.bottom + 16, count(10 ** power), { "text-anchor": "middle", class: "kvc-tick" }));
  }
  for (let power = Math.ceil(Math.log10(peak * DEEP)); 10 ** power < peak * 2; power += 1) {
    const at = y(10 ** power);
    marks.push(drawn("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "kvc-grid" }));
    marks.push(text(box.left - 6, at + 4, short(10 ** power), { "text-anchor": "end", class: "kvc-tick" }));
  }
  return [...marks, text(0, 14, "FLOP/s", { class: "kvc-tick" }), text((box.left + box.right) / 2, box.bottom + 34, "FLOP a byte", { "text-anchor": "middle" })];
}

/** 10 T for 10^13. */
function short(value) {
  const [size, letter] = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([size]) => value >= size * 0.999);
  return `${Math.round(value / size)} ${letter}`;
}

function roof(box, x, y, card, peak) {
  const edge = peak / card.bandwidth;
  const start = Math.max(INTENSITY[0], (peak * DEEP) / card.bandwidth);
  const slope = [x(start), y(start * card.bandwidth)];
  const path = `M${slope.join(",")} L${x(edge)},${y(peak)} H${box.right}`;
  const turn = (Math.atan2(y(peak) - slope[1], x(edge) - slope[0]) * 180) / Math.PI;
  const middle = [(slope[0] + x(edge)) / 2, (slope[1] + y(peak)) / 2];
  return [
    drawn("path", { d: path, class: "kvc-roof" }),
    drawn("line", { x1: x(edge), x2: x(edge), y1: y(peak), y2: box.bottom, class: "kvc-edge" }),
    text(0, -7, `${decimal(card.bandwidth)}/s`, { "text-anchor": "middle", transform: `translate(${middle.join(" ")}) rotate(${turn})` }),
    text(box.right, y(peak) - 7, `${operations(peak)}/s`, { "text-anchor": "end" }),
    text(x(edge) + 5, box.bottom - 7, `ridge ${three(edge)}`, { "text-anchor": "start" }),
  ];
}

mount("roofline", (panel, catalogue, setting) => {
  const model = modelChoice(panel, catalogue, setting);
  const device = deviceChoice(panel, catalogue, setting);
  const dtype = dtypeChoice(panel, catalogue, setting);
  const weights = weightsChoice(panel, catalogue, setting);
  const kv = cacheChoice(panel, catalogue, setting);
  const prompt = panel.number("Prompt tokens", setting.prompt_tokens, 1, setting.prompt_tokens);
  const batch = panel.number("Requests in the batch", setting.batch, 1, 1024);

  const passOf = (phase, tokens, requests) => {
    const pass = phase === "prefill" ? prefillPass(tokens, requests) : decodePass(tokens, requests);
    return passTime(model.value, pass, device.value, dtype.value, weights.value, kv.value);
  };
  const ways = {
    prefill: { control: prompt, label: "Prefill: prompt tokens", pass: (tokens) => passOf("prefill", tokens, batch.value) },
    decode: { control: batch, label: "Decode: requests in the batch", pass: (requests) => passOf("decode", prompt.value, requests) },
  };
  const chart = new Chart(panel, ways);

  return () => {
    const [shape, card] = [model.value, device.value];
    const notes = [weights.fit(shape), kv.fit(shape)];
    dtype.fit(card);
    prompt.bound(1, shape.max_seq_len - 1);
    const [prefill, decode] = [ways.prefill.pass(prompt.value), ways.decode.pass(batch.value)];
    const edge = ridge(card, dtype.value);
    const side = (pass) => (pass.flops / pass.bytes > edge ? "right of the ridge, where arithmetic is the limit" : "left of the ridge, where bytes are the limit");
    panel.say({
      answer: `${shape.name} on ${card.label}, ${some(batch.value, "request")} of ${some(prompt.value, "token")}: prefill does ${three(prefill.flops / prefill.bytes)} FLOP a byte, decode ${three(decode.flops / decode.bytes)}; the ridge is at ${three(edge)}.`,
      warnings: [...notes, memoryWarning(shape, card, batch.value, prompt.value + 1, weights.value, kv.value)],
      figures: [["one prefill", duration(prefill.seconds), "prefill"], ["one decode step", duration(decode.seconds), "decode"]],
      key: [["prefill", "prefill: drag it, or use its arrow keys, to change the prompt"], ["decode", "decode: drag it, or use its arrow keys, to change the batch"]],
      sums: [
        `ridge: ${operations(card.flops[dtype.value.name])}/s ÷ ${decimal(card.bandwidth)}/s = ${three(edge)} FLOP a byte`,
        `prefill: ${operations(prefill.flops)} ÷ ${decimal(prefill.bytes)} = ${three(prefill.flops / prefill.bytes)}, ${side(prefill)}`,
        `decode: ${operations(decode.flops)} ÷ ${decimal(decode.bytes)} = ${three(decode.flops / decode.bytes)}, ${side(decode)}`,
      ],
      limits: [
        `${peakNote} A dot below the roof has some operators on either side of the ridge: attention of a batch reads a cache for each request, however many there are.`,
        shapeNote(shape),
      ],
    });
    chart.draw(card, dtype.value, { prefill, decode });
  };
});
