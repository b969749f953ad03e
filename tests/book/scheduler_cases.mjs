// Runs the scheduler of the page without a page: {folder, cases} in, what each of them did out, step by step.
import { readFileSync } from "node:fs";

const { folder, cases } = JSON.parse(readFileSync(0, "utf8"));
const { BlockPool, ServedRequest, ServingScheduler } = await import(`${folder}/scheduler.mjs`);

const ids = (requests) => [...requests].map(({ id }) => id);
const pairs = (map) => [...map].map(([{ id }, tokens]) => [id, tokens]);

/** Contents of a block: the prompt's tokens, then one of the request's own for each token of the answer. */
const contents = ({ id, prompt }) => (index, size) =>
  [...Array(size).keys()].map((at) => prompt[index * size + at] ?? `${id}.${index * size + at}`).join();

function served(one) {
  const pool = new BlockPool(one.blocks, one.block_size);
  const options = { policy: one.policy, tokenBudget: one.token_budget, maxRunning: one.max_running, reusePrefixes: one.reuse };
  const scheduler = new ServingScheduler(pool, options);
  const coming = one.requests.map((asked, id) => ({ id, ...asked }));
  const steps = [];
  for (let step = 0; coming.length || scheduler.unfinished; step++) {
    const refused = [];
    while (coming.length && coming[0].step <= step) {
      const asked = coming.shift();
      const request = new ServedRequest(asked.id, asked.prompt.length, asked.answer, contents(asked));
      if (scheduler.takes(request)) scheduler.add(request);
      else refused.push(asked.id);
    }
    const plan = scheduler.schedule();
    const emitted = [...plan.tokens].filter(([request, fed]) => scheduler.computed(request, fed));
    steps.push({
      refused,
      fed: pairs(plan.tokens),
      admitted: pairs(plan.admitted),
      preempted: ids(plan.preempted),
      emitted: emitted.map(([{ id }]) => id),
      tables: scheduler.running.map(({ id, table }) => [id, [...table]]),
      waiting: ids(scheduler.waiting),
      holders: [...pool.holders],
      found: [scheduler.queries, scheduler.hits],
    });
  }
  return steps;
}

console.log(JSON.stringify(cases.map(served)));
