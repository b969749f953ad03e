// Opens every page of the built book in headless Chromium, at desktop and phone width, light and dark.
// Usage: node browser.mjs SITE_FOLDER CHROMIUM [PAGE...]; prints one JSON array, an object for each page and view.
import { createReadStream, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join, normalize, resolve } from "node:path";
import { chromium } from "playwright-core";

const [root, executablePath, ...pages] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const WIDTHS = { desktop: 1280, phone: 390 };
// Colours depend on the scheme, everything else on the width: each is asked where it can differ.
const ASKED = {
  "desktop light": {},
  "desktop dark": { runOnly: ["color-contrast"] },
  "phone light": { rules: { "color-contrast": { enabled: false } } },
  "phone dark": { runOnly: ["color-contrast"] },
};
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"];
const TYPES = {
  ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
  ".png": "image/png", ".json": "application/json", ".woff": "font/woff", ".woff2": "font/woff2",
};

function serve(folder) {
  const base = resolve(folder);
  const server = createServer((request, answer) => {
    let path = normalize(join(base, decodeURIComponent(new URL(request.url, "http://x").pathname)));
    try {
      if (!path.startsWith(base)) throw new Error("outside");
      if (statSync(path).isDirectory()) path = join(path, "index.html");
      statSync(path);
    } catch {
      answer.writeHead(404).end();
      return;
    }
    answer.writeHead(200, { "Content-Type": TYPES[extname(path)] ?? "application/octet-stream" });
    createReadStream(path).pipe(answer);
  });
  return new Promise((done) => server.listen(0, "127.0.0.1", () => done([server, `http://127.0.0.1:${server.address().port}/`])));
}

function watch(page, base) {
  const seen = { console: [], outside: [], missing: [] };
  page.on("console", (message) => message.type() === "error" && seen.console.push(message.text().slice(0, 300)));
  page.on("pageerror", (error) => seen.console.push(`uncaught: ${error.message}`.slice(0, 300)));
  page.on("request", (request) => /^(data|blob):/.test(request.url()) || request.url().startsWith(base) || seen.outside.push(request.url()));
  page.on("response", (response) => response.status() >= 400 && seen.missing.push(`${response.status()} ${response.url()}`));
  return seen;
}

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
      unset: [...document.querySelectorAll("mjx-merror")].map((node) => node.textContent),
      axe: violations.flatMap((v) => v.nodes.map((n) => ({ rule: v.id, kind: kind(n), target: n.target.flat().join(" "), html: n.html.slice(0, 160), why: (n.failureSummary ?? "").replace(/\s+/g, " ").slice(0, 220) }))),
    };
  }, { runOnly: RULES, ...asked });
}

async function visit(browser, base, path, view) {
  const context = await browser.newContext({ viewport: { width: WIDTHS[view], height: 900 }, colorScheme: "light" });
  const page = await context.newPage();
  const seen = watch(page, base);
  await page.route((url) => !url.href.startsWith(base), (route) => route.abort());
  await page.goto(base + path, { waitUntil: "load" });
  await settle(page);
  await page.evaluate(axe);
  const found = [];
  for (const scheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: scheme });
    await page.waitForTimeout(250);
    found.push({ page: path, view, scheme, ...(await look(page, ASKED[`${view} ${scheme}`])), ...seen });
  }
  await context.close();
  return found;
}

const [server, base] = await serve(root);
const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const jobs = pages.flatMap((path) => Object.keys(WIDTHS).map((view) => [path, view]));
const results = [];
await Promise.all([0, 1].map(async () => {
  for (let job = jobs.shift(); job; job = jobs.shift()) results.push(...(await visit(browser, base, ...job)));
}));
await browser.close();
server.close();
results.sort((a, b) => `${a.page}${a.view}${a.scheme}`.localeCompare(`${b.page}${b.view}${b.scheme}`));
console.log(JSON.stringify(results));
