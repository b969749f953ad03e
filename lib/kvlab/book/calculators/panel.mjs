// The panel of a calculator: native controls with labels, an answer that is read out, a drawing, the sum with its numbers.
const SVG = "http://www.w3.org/2000/svg";

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** An HTML element with attributes, listeners (`onclick`) and children. */
export const element = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const drawn = (tag, attributes = {}, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

/** Ids are counted on the page, not in the module: every output brings a module of its own. */
function newId() {
  globalThis.kvlabCalculatorIds = (globalThis.kvlabCalculatorIds ?? 0) + 1;
  return `kvlab-calculator-${globalThis.kvlabCalculatorIds}`;
}

/** A number keeps its unit on its line. */
const together = (words) => words.replace(/(\d) (?=[KMGTP]?(?:i?B|FLOP)\b|kB\b|[mµ]?s\b|%)/g, "$1\u00a0");

/** 1, 2, 3, 4, 6, 8, 12, 16, ... from the first number to the last. */
export function rungs(least, most) {
  const found = new Set([least, most]);
  for (let power = 1; power <= most; power *= 2) for (const value of [power, power * 1.5]) if (value > least && value < most && value % 1 === 0) found.add(value);
  return [...found].sort((a, b) => a - b);
}

/** Give every calculator of this kind on the page its controls. */
export function mount(kind, start) {
  for (const root of document.querySelectorAll(`.kvlab-calculator[data-kind="${kind}"]:not([data-live])`)) {
    const { catalogue, setting } = JSON.parse(root.querySelector("script").textContent);
    const panel = new Panel(root.getAttribute("aria-label"));
    panel.update = start(panel, catalogue, setting);
    root.replaceChildren(...panel.parts);
    root.dataset.live = "";
    panel.follow();
  }
}

class Panel {
  constructor(title) {
    this.controls = element("div", { class: "kvc-controls" });
    this.headline = element("output", { class: "kvc-answer", "aria-live": "polite" });
    this.warnings = element("div", { class: "kvc-warnings" });
    this.figures = element("div", { class: "kvc-figures" });
    this.picture = element("div", { class: "kvc-picture" });
    this.key = element("ul", { class: "kvc-key" });
    this.sums = element("ul", { class: "kvc-sums" });
    this.limits = element("div", { class: "kvc-limits" });
    const right = element("div", { class: "kvc-results" }, this.headline, this.warnings, this.figures, this.picture, this.key, this.sums);
    this.parts = [element("div", { class: "kvc-title" }, title), element("div", { class: "kvc-body" }, this.controls, right), this.limits];
  }

  /** Draw now, and again when a control or the width changes. */
  follow() {
    this.update();
    this.controls.addEventListener("input", () => this.update());
    let width = this.width;
    new ResizeObserver(() => {
      if (this.width === width) return;
      width = this.width;
      this.update();
    }).observe(this.picture);
  }

  /** Room for a drawing, in pixels. */
  get width() {
    return Math.max(Math.floor(this.picture.clientWidth), 240);
  }

  /** A list to choose from: groups of [value, words] under a name; the groups may change later. */
  choice(label, groups, value) {
    const id = newId();
    const list = element("select", { id });
    this.controls.append(element("div", { class: "kvc-field" }, element("label", { for: id }, label), list));
    const control = {
      offer(groups, value) {
        const option = ([name, words, off]) => element("option", { value: name, disabled: Boolean(off), selected: name === value }, words);
        list.replaceChildren(...Object.entries(groups).flatMap(([name, options]) => (name ? [element("optgroup", { label: name }, ...options.map(option))] : options.map(option))));
      },
      get value() {
        return list.value;
      },
    };
    control.offer(groups, value);
    return control;
  }

  /** Buttons in a row: [words, what happens]; the panel is drawn again after it. */
  buttons(...pairs) {
    const made = pairs.map(([words, act]) => element("button", { type: "button", onclick: () => (act(), this.update()) }, words));
    this.controls.append(element("div", { class: "kvc-field kvc-buttons" }, ...made));
  }

  /** A whole number to type or to slide; the slider goes in steps of about a half. */
  number(label, value, least, most, steps = rungs) {
    const id = newId();
    let scale = steps(least, most);
    const distance = (rung, wanted) => Math.abs(Math.log((rung + 0.5) / (wanted + 0.5)));
    const nearest = (wanted) => scale.reduce((best, rung, at) => (distance(rung, wanted) < distance(scale[best], wanted) ? at : best), 0);
    const field = element("input", { type: "number", id, min: least, max: most, step: 1, value, inputmode: "numeric" });
    const slider = element("input", { type: "range", min: 0, step: 1, "aria-label": `${label}, slider` });
    const control = {
      value,
      set(wanted, exact = true) {
        const whole = Number.isFinite(wanted) ? Math.round(wanted) : control.value;
        control.value = Math.min(Math.max(whole, control.least), control.most);
        if (exact) field.value = control.value;
        slider.value = nearest(control.value);
        slider.setAttribute("aria-valuetext", String(control.value));
      },
      /** Another range, for a model that holds more or less. */
      bound(least, most) {
        [control.least, control.most, scale] = [least, most, steps(least, most)];
        [field.min, field.max, slider.max] = [least, most, scale.length - 1];
        control.set(control.value, document.activeElement !== field);
      },
      get scale() {
        return scale;
      },
    };
    // While a number is being typed, the field is left alone; when it is done, it shows what was taken.
    field.addEventListener("input", () => field.value && control.set(Number(field.value), false));
    field.addEventListener("change", () => control.set(control.value));
    slider.addEventListener("input", () => control.set(scale[slider.value]));
    control.bound(least, most);
    this.controls.append(element("div", { class: "kvc-field" }, element("label", { for: id }, label), element("div", { class: "kvc-pair" }, field, slider)));
    return control;
  }

  /** What came out: a sentence, what is wrong with it, large figures, the key of the drawing, the sums, what they take for granted. */
  say({ answer, warnings = [], figures = [], key = [], sums = [], limits = [] }) {
    const paragraphs = (words) => words.filter(Boolean).map((text) => element("p", {}, text));
    if (this.headline.textContent !== answer) this.headline.textContent = answer;
    this.figures.replaceChildren(...figures.map(([name, value, kind]) => element("div", { class: `kvc-figure kvc-${kind ?? "plain"}` }, element("span", {}, name), element("strong", {}, value))));
    this.key.replaceChildren(...key.map(([kind, words]) => element("li", {}, element("span", { class: `kvc-swatch kvc-${kind}`, "aria-hidden": "true" }), words)));
    this.sums.replaceChildren(...sums.map((words) => element("li", {}, together(words))));
    this.warnings.replaceChildren(...paragraphs(warnings));
    this.limits.replaceChildren(...paragraphs(limits));
  }
}
