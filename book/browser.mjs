// Opens every page of the built book in headless Chromium: at desktop width light and dark, at phone width light.
// Usage: node browser.mjs SITE_FOLDER CHROMIUM [PAGE...]; prints one JSON array, an object for each page and view.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { launch, serve, watch } from "./chromium.mjs";

const [root, executablePath, ...pages] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const WIDTHS = { desktop: 1280, phone: 390 };
// Colours depend on the scheme, everything else on the width: each is asked once, where it can differ.
const ASKED = {
  desktop: { light: {}, dark: { runOnly: ["color-contrast"] } },
  phone: { light: { rules: { "color-contrast": { enabled: false } } } },
};
// Three quarters of a page's elements are the words of its code, in the same few colours: these pages answer for them.
const COLOURED = ["02_numpy_decoder.html", "19_engines.html", "index.html"];
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"];
async function settle(page) {
  await page.evaluate(async () => {
    if (window.MathJax?.startup?.promise) await window.MathJax.startup.promise;
    for (const image of document.images) image.loading = "eager";
    await Promise.all([...document.images].map((image) => image.decode().catch(() => {})));
    await new Promise((done) => setTimeout(done, 100));
  });
}

async function look(page, asked) {
  return page.evaluate(async (options) => {
    const { violations } = await window.axe.run(document, { ...options, resultTypes: ["violations"], elementRef: true });
    // An element by its kind: tag and classes, which stay the same from page to page.
    const kind = (node) => [node.element?.tagName.toLowerCase(), ...[...(node.element?.classList ?? [])].sort()].join(".");
    return {
      theme: document.documentElement.dataset.theme,
      overflow: document.documentElement.scrollWidth - window.innerWidth,
      broken: [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src),
      // Scripts give calculators their controls: none may stay without, and no id of theirs may stand twice.
      dead: [...document.querySelectorAll(".kvlab-calculator:not([data-live])")].map((node) => node.dataset.kind),
      twice: [...document.querySelectorAll(".kvlab-calculator [id]")].map(({ id }) => id).filter((id) => document.querySelectorAll(`[id="${id}"]`).length > 1),
      unset: [...document.querySelectorAll("mjx-merror")].map((node) => node.textContent),
      axe: violations.flatMap((v) => v.nodes.map((n) => ({ rule: v.id, kind: kind(n), target: n.target.flat().join(" "), html: n.html.slice(0, 160), why: (n.failureSummary ?? "").replace(/\s+/g, " ").slice(0, 220) }))),
    };
  }, { runOnly: RULES, ...asked });
}

async function visit(browser, base, path, view) {
  const context = await browser.newContext({ viewport: { width: WIDTHS[view], height: 900 }, colorScheme: "light" });
  const page = await context.newPage();
  const seen = await watch(page, base);
  await page.goto(base + path, { waitUntil: "load" });
  await settle(page);
  // A colour on its way from light to dark is neither, and on a busy machine the way is long.
  await page.addStyleTag({ content: "*, *::before, *::after { transition: none !important; }" });
  await page.evaluate(axe);
  if (!COLOURED.includes(path)) {
    await page.evaluate(() => document.querySelectorAll(".highlight pre").forEach((code) => { code.textContent = code.textContent; }));
  }
  const found = [];
  for (const [scheme, asked] of Object.entries(ASKED[view])) {
    await page.emulateMedia({ colorScheme: scheme });
    await page.waitForTimeout(250);
    found.push({ page: path, view, scheme, ...(await look(page, asked)), ...seen });
  }
  await context.close();
  return found;
}

const [server, base] = await serve(root);
const browser = await launch(executablePath);
const jobs = pages.flatMap((path) => Object.keys(WIDTHS).map((view) => [path, view]));
const results = [];
await Promise.all([0, 1].map(async () => {
  for (let job = jobs.shift(); job; job = jobs.shift()) results.push(...(await visit(browser, base, ...job)));
}));
await browser.close();
server.close();
results.sort((a, b) => `${a.page}${a.view}${a.scheme}`.localeCompare(`${b.page}${b.view}${b.scheme}`));
console.log(JSON.stringify(results));
