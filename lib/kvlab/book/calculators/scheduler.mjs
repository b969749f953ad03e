// The rules of kvlab.serving.Scheduler and kvlab.cache.BlockPool in the page: first come, first served; no forks, no drafts.
const ROOT = 0; // what stands before the first block of every sequence

/** Ref-counted blocks with prefix reuse; freed blocks are taken in the order in which they were freed. */
export class BlockPool {
  #free;
  #known = new Map();
  #published = new Map();
  #next = ROOT + 1;

  constructor(blocks, size) {
    [this.blocks, this.size] = [blocks, size];
    this.holders = Array(blocks).fill(0);
    this.#free = new Set(Array(blocks).keys());
  }

  get free() {
    return this.#free.size;
  }

  blocksFor(tokens) {
    return Math.ceil(tokens / this.size);
  }

  /** Free blocks that a sequence needs for more tokens. */
  needed(request, tokens) {
    return Math.max(this.blocksFor(request.computed + tokens) - request.table.length, 0);
  }

  allocate(count) {
    const taken = [...this.#free].slice(0, count);
    for (const block of taken) {
      this.#free.delete(block);
      this.#known.delete(this.#published.get(block));
      this.#published.delete(block);
      this.holders[block] = 1;
    }
    return taken;
  }

  hold(blocks) {
    for (const block of blocks) {
      this.#free.delete(block);
      this.holders[block] += 1;
    }
  }

  /** The last block of the sequence is freed first. */
  release(blocks) {
    for (const block of [...blocks].reverse()) {
      this.holders[block] -= 1;
      if (this.holders[block] === 0) this.#free.add(block);
    }
  }

  /** Make a full block findable: its contents and all before them are the key, compared by equality. */
  publish(before, block, contents) {
    const key = `${before} ${contents}`;
    if (this.#known.has(key)) return this.#known.get(key).number;
    const number = this.#next++;
    this.#known.set(key, { number, block });
    this.#published.set(block, key);
    return number;
  }

  /** The longest run of published blocks that begins a sequence. */
  match(contents) {
    const found = [];
    for (const each of contents) {
      const next = this.#known.get(`${found.at(-1)?.number ?? ROOT} ${each}`);
      if (!next) break;
      found.push(next);
    }
    return found;
  }
}

/** A prompt and its answer in the making: `contents(index, size)` is what a full block holds, null where nobody shares it. */
export class ServedRequest {
  constructor(id, prompt, answer, contents = () => null) {
    Object.assign(this, { id, prompt, answer, contents });
    Object.assign(this, { tokens: prompt, computed: 0, table: [], numbers: [], preemptions: 0, finished: false });
  }

  get remaining() {
    return this.tokens - this.computed;
  }

  get longest() {
    return this.prompt + this.answer - 1;
  }
}

/** Plans steps. `schedule()` says who feeds how many tokens; `computed(request, fed)` books what was done. */
export class ServingScheduler {
  #added = 0;

  constructor(pool, { policy, tokenBudget, maxRunning = 64, reusePrefixes = true }) {
    Object.assign(this, { pool, policy, tokenBudget, maxRunning, reusePrefixes, running: [], waiting: [], queries: 0, hits: 0 });
  }

  get unfinished() {
    return this.running.length + this.waiting.length;
  }

  /** Whether a request can be served at all. */
  takes(request) {
    const whole = { static: request.prompt, continuous: request.longest, chunked: 1 }[this.policy];
    return this.pool.blocksFor(request.longest) <= this.pool.blocks && whole <= this.tokenBudget;
  }

  add(request) {
    request.number = ++this.#added;
    this.#queue(request);
  }

  schedule() {
    const plan = { tokens: new Map(), admitted: new Map(), preempted: [], total: 0 };
    ({ static: () => this.#static(plan), continuous: () => this.#continuous(plan), chunked: () => this.#chunked(plan) })[this.policy]();
    return plan;
  }

  /** Book a step of a request: it emits a token when all that it had is fed. Full blocks become findable. */
  computed(request, fed) {
    const emits = fed === request.remaining;
    request.computed += fed;
    if (emits) request.tokens += 1;
    request.finished = request.tokens === request.prompt + request.answer;
    if (this.reusePrefixes) this.#publish(request);
    if (request.finished) {
      this.running.splice(this.running.indexOf(request), 1);
      this.#release(request);
    }
    return emits;
  }

  #static(plan) {
    if (this.running.length) return this.#decodes(plan);
    while (this.waiting.length && this.waiting[0].remaining <= this.#left(plan)) {
      const request = this.waiting[0];
      if (!this.#admit(plan, request, true)) return;
      this.#give(plan, request, request.remaining);
    }
  }

  #continuous(plan) {
    while (this.waiting.length && this.waiting[0].remaining <= this.#left(plan)) {
      const request = this.waiting[0];
      if (!this.#admit(plan, request)) break;
      this.#give(plan, request, request.remaining);
    }
    if (!plan.tokens.size) this.#decodes(plan);
  }

  #chunked(plan) {
    this.#decodes(plan);
    const begun = this.running.filter((request) => request.remaining > 1).sort((a, b) => a.number - b.number);
    while (this.#left(plan)) {
      const request = this.#nextPrompt(plan, begun);
      if (!request) return;
      this.#give(plan, request, Math.min(request.remaining, this.#left(plan)));
    }
  }

  #nextPrompt(plan, begun) {
    while (begun.length && plan.preempted.includes(begun[0])) begun.shift();
    const first = this.waiting[0];
    const overtakes = first && (!begun.length || first.number < begun[0].number);
    if (overtakes && !plan.preempted.length && this.#admit(plan, first)) return first;
    return begun.shift();
  }

  #decodes(plan) {
    for (const request of [...this.running]) {
      if (!this.#left(plan)) return;
      if (request.remaining === 1 && !plan.preempted.includes(request)) this.#give(plan, request, 1);
    }
  }

  /** Let a request feed tokens; whoever joined last loses its blocks if there are not enough. */
  #give(plan, request, tokens) {
    while (this.pool.needed(request, tokens) > this.pool.free) if (this.#preemptLast(plan) === request) return;
    request.table.push(...this.pool.allocate(this.pool.needed(request, tokens)));
    plan.tokens.set(request, tokens);
    plan.total += tokens;
  }

  #preemptLast(plan) {
    const request = this.running.pop();
    plan.total -= plan.tokens.get(request) ?? 0;
    plan.tokens.delete(request);
    plan.preempted.push(request);
    this.#release(request);
    request.preemptions += 1;
    this.#queue(request);
    return request;
  }

  /** Let the first of those who wait join, if its tokens fit and leave everybody who runs a block to grow. */
  #admit(plan, request, reserve = false) {
    if (this.running.length >= this.maxRunning) return false;
    const { pool } = this;
    const found = this.reusePrefixes ? pool.match(this.#keys(request)) : [];
    const blocks = found.map(({ block }) => block);
    let needed = pool.blocksFor(reserve ? request.longest : request.tokens) - blocks.length;
    needed += blocks.filter((block) => pool.holders[block] === 0).length;
    if (!reserve) for (const other of this.running) needed += 1 + Math.max(pool.blocksFor(other.tokens) - other.table.length, 0);
    if (needed > pool.free) return false;
    this.waiting.shift();
    pool.hold(blocks);
    [request.table, request.numbers, request.computed] = [blocks, found.map(({ number }) => number), blocks.length * pool.size];
    if (reserve) request.table.push(...pool.allocate(pool.needed(request, request.longest - request.computed)));
    this.running.push(request);
    plan.admitted.set(request, request.computed);
    if (this.reusePrefixes && !request.preemptions) [this.queries, this.hits] = [this.queries + request.tokens, this.hits + request.computed];
    return true;
  }

  /** Contents of the full blocks that may be found. The last token is always computed: its logits are needed. */
  *#keys(request) {
    for (let index = 0; index < Math.floor((request.tokens - 1) / this.pool.size); index++) {
      const key = request.contents(index, this.pool.size);
      if (key === null) return;
      yield key;
    }
  }

  #publish(request) {
    const { numbers, table } = request;
    for (let index = numbers.length; index < Math.floor(request.computed / this.pool.size); index++) {
      const key = request.contents(index, this.pool.size);
      if (key === null) return;
      numbers.push(this.pool.publish(numbers.at(-1) ?? ROOT, table[index], key));
    }
  }

  #queue(request) {
    this.waiting.push(request);
    this.waiting.sort((a, b) => a.number - b.number);
  }

  #release(request) {
    this.pool.release(request.table);
    [request.table, request.numbers, request.computed] = [[], [], 0];
  }

  #left(plan) {
    return this.tokenBudget - plan.total;
  }
}
