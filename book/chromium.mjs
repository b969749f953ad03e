// Headless Chromium and a local server, for the checks of the pages.
import { createReadStream, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize, resolve } from "node:path";
import { chromium } from "playwright-core";

const TYPES = {
  ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
  ".png": "image/png", ".json": "application/json", ".woff": "font/woff", ".woff2": "font/woff2",
};

/** A local server for a folder: [server, address]. */
export function serve(folder) {
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

/** Note what a page complains about and what it asks for; nothing but the site is let through. */
export async function watch(page, base) {
  const seen = { console: [], outside: [], missing: [] };
  page.on("console", (message) => message.type() === "error" && seen.console.push(message.text().slice(0, 300)));
  page.on("pageerror", (error) => seen.console.push(`uncaught: ${error.message}`.slice(0, 300)));
  page.on("request", (request) => /^(data|blob):/.test(request.url()) || request.url().startsWith(base) || seen.outside.push(request.url()));
  page.on("response", (response) => response.status() >= 400 && seen.missing.push(`${response.status()} ${response.url()}`));
  await page.route((url) => !url.href.startsWith(base), (route) => route.abort());
  return seen;
}

/** The browser, without anything that talks to the outside. */
export function launch(executablePath) {
  return chromium.launch({
    executablePath,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  });
}
