// The slots of the page without a page: {folder, cases} in, for each case what is held after each number of tokens out.
import { readFileSync } from "node:fs";

const { folder, cases } = JSON.parse(readFileSync(0, "utf8"));
const { heldSlots, slotOf, windowStart } = await import(`${folder}/streaming.mjs`);

const held = ({ sinks, window, ends }) =>
  ends.map((seen) => ({ slots: heldSlots(seen, sinks, window), next: slotOf(seen, sinks, window), start: windowStart(seen, sinks, window) }));

console.log(JSON.stringify(cases.map(held)));
