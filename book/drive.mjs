// Drives a page in headless Chromium and tells what it read there.
// Usage: node drive.mjs SITE_FOLDER CHROMIUM < {path, width, scheme, steps}; prints {read, console, outside, missing}.
import { readFileSync } from "node:fs";
import { launch, serve, watch } from "./chromium.mjs";

const [root, executablePath] = process.argv.slice(2);
const { path, width, scheme, steps } = JSON.parse(readFileSync(0, "utf8"));
const read = [];

// A step is [what, selector, ...]; `evaluate` takes an expression instead.
const DO = {
  select: (page, target, value) => page.locator(target).selectOption(value),
  fill: (page, target, value) => page.locator(target).fill(value),
  press: (page, target, key) => page.locator(target).press(key),
  text: async (page, target) => read.push(await page.locator(target).innerText()),
  value: async (page, target) => read.push(await page.locator(target).inputValue()),
  attribute: async (page, target, name) => read.push(await page.locator(target).getAttribute(name)),
  evaluate: async (page, expression) => read.push(await page.evaluate(expression)),
  shot: (page, target, file) => page.locator(target).screenshot({ path: file }),
  /** Take hold of an element's middle and pull it sideways. */
  drag: async (page, target, by) => {
    const { x, y, width, height } = await page.locator(target).boundingBox();
    await page.mouse.move(x + width / 2, y + height / 2);
    await page.mouse.down();
    for (let part = 1; part <= 8; part += 1) await page.mouse.move(x + width / 2 + (Number(by) * part) / 8, y + height / 2);
    await page.mouse.up();
  },
};

const [server, base] = await serve(root);
const browser = await launch(executablePath);
const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
const page = await context.newPage();
page.setDefaultTimeout(10_000);
const seen = await watch(page, base);
try {
  await page.goto(base + path, { waitUntil: "load" });
  for (const [what, ...how] of steps) await DO[what](page, ...how);
} finally {
  await browser.close();
  server.close();
}
console.log(JSON.stringify({ read, ...seen }));
