// What stands where at step t: block tables, KV lengths, places. Any step, forward or back.

const KEYFRAME_EVERY = 32;
const OP = { GAINED: 0, OLD: 1, NEW: 2, LOST: 3, RELEASED: 4, CACHED: 5, CPU_GAINED: 6, CPU_LOST: 7 };

/** The books in the middle of a step: the model has run, nobody has left yet. */
class Books {
  constructor() {
    this.tables = new Map();
    this.cpu = new Map();
    this.cached = new Set();
    this.context = new Map(); // request -> tokens with KV
    this.place = new Map();
    this.evictions = new Map();
    this.reasons = new Map(); // why it finished, or was refused
    this.finishing = new Set();
    this.lost = new Map(); // block -> who lost it in this step
    this.taken = new Set();
  }

  copy() {
    const twin = new Books();
    for (const [name, table] of this.tables) twin.tables.set(name, table.slice());
    for (const [name, table] of this.cpu) twin.cpu.set(name, table.slice());
    twin.cached = new Set(this.cached);
    for (const name of ["context", "place", "evictions", "reasons"]) twin[name] = new Map(this[name]);
    return twin;
  }

  /** Up to the middle of step t. */
  begin(trace, t) {
    this.finishing.clear();
    this.lost.clear();
    this.taken.clear();
    for (const { request, source, target, how } of trace.entries("move", t)) {
      const [from, to] = [PLACES[source], PLACES[target]];
      if (to === "finished" || to === "refused") this.reasons.set(request, trace.texts[how]);
      if (to === "finished" && trace.inLane(request, t)) {
        this.finishing.add(request);
        continue;
      }
      if (from === "outside" && to === "waiting") this.reasons.delete(request);
      if (from === "running") this.evictions.set(request, (this.evictions.get(request) ?? 0) + 1);
      if (from === "running" && to === "waiting") this.context.set(request, 0);
      this.place.set(request, to);
    }
    this.apply(trace.entries("op", t));
    const { lane_request: requests, lane_phase: phases, lane_context: contexts } = trace.columns;
    const padding = PHASE_NAMES.indexOf("padding");
    for (let i = trace.starts.lane[t]; i < trace.starts.lane[t + 1]; i++) {
      if (phases.data[i] !== padding) this.context.set(requests.data[i], contexts.data[i]);
    }
  }

  apply(ops) {
    let old = -1;
    for (const { kind, request, block } of ops) {
      if (kind === OP.GAINED) {
        if (!this.tables.has(request)) this.tables.set(request, []);
        this.tables.get(request).push(block);
        this.cached.delete(block);
        this.taken.add(block);
      } else if (kind === OP.OLD) old = block;
      else if (kind === OP.NEW) {
        const table = this.tables.get(request);
        table.splice(table.indexOf(block), 1);
        table[table.indexOf(old)] = block;
      } else if (kind === OP.LOST) {
        remove(this.tables, request, block);
        this.lost.set(block, request);
      } else if (kind === OP.CPU_GAINED) {
        if (!this.cpu.has(request)) this.cpu.set(request, []);
        this.cpu.get(request).push(block);
      } else if (kind === OP.CPU_LOST) remove(this.cpu, request, block);
    }
    this.cache(ops);
  }

  cache(ops) {
    const fresh = ops.filter((op) => op.kind === OP.CACHED);
    if (!fresh.length) return;
    const held = new Set();
    for (const table of this.tables.values()) for (const block of table) held.add(block);
    for (const { block } of fresh) if (!held.has(block)) this.cached.add(block);
  }

  /** From the middle of step t to its end. */
  end(trace, t) {
    const ops = trace.entries("op", t);
    for (const { kind, request, block } of ops) {
      if (kind === OP.RELEASED) remove(this.tables, request, block);
    }
    this.cache(ops);
    for (const request of this.finishing) this.place.set(request, "finished");
    this.finishing.clear();
  }
}

function remove(tables, request, block) {
  const table = tables.get(request);
  if (!table) return;
  const index = table.indexOf(block);
  if (index >= 0) table.splice(index, 1);
  if (!table.length) tables.delete(request);
}

/** Finds the books of any step. Stepping forward goes on from where it is; back starts at the
 * keyframe before. */
class Replay {
  constructor(trace) {
    this.trace = trace;
    this.keyframes = [new Books()]; // [k]: before step k * KEYFRAME_EVERY
    this.books = null;
    this.t = -1;
  }

  at(t) {
    if (this.books && this.t === t) return this.books;
    const goOn = this.books && t > this.t && t - this.t < KEYFRAME_EVERY;
    if (!goOn) {
      const key = Math.min(Math.floor(t / KEYFRAME_EVERY), this.keyframes.length - 1);
      this.books = this.keyframes[key].copy();
      this.t = key * KEYFRAME_EVERY;
      this.books.begin(this.trace, this.t);
    }
    while (this.t < t) {
      this.books.end(this.trace, this.t);
      this.t++;
      if (this.t === this.keyframes.length * KEYFRAME_EVERY) this.keyframes.push(this.books.copy());
      this.books.begin(this.trace, this.t);
    }
    return this.books;
  }

  /** The device pool at step t, a column a fact: `owner` (the first; -1: free), `sharers` of all
   * that have several (block -> requests), `filled` tokens, `written` in this step. */
  pool(t) {
    const { trace } = this;
    if (this.poolOf !== t || this.lastPool.owner.length !== trace.blocks) {
      this.lastPool = this.makePool(this.at(t), t);
      this.poolOf = t;
    }
    return this.lastPool;
  }

  makePool(books, t) {
    const { trace } = this;
    const size = trace.about.block_size;
    const owner = new Int32Array(trace.blocks).fill(-1);
    const filled = new Int32Array(trace.blocks);
    const written = new Uint8Array(trace.blocks);
    const sharers = new Map();
    for (const [request, table] of books.tables) {
      let left = books.context.get(request) ?? 0;
      for (const block of table) {
        if (owner[block] < 0) {
          owner[block] = request;
          filled[block] = Math.max(0, Math.min(size, left));
        } else if (sharers.has(block)) sharers.get(block).push(request);
        else sharers.set(block, [owner[block], request]);
        left -= size;
      }
    }
    const { lane_request: requests, lane_new: news, lane_context: contexts } = trace.columns;
    for (let i = trace.starts.lane[t]; i < trace.starts.lane[t + 1]; i++) {
      const table = books.tables.get(requests.data[i]);
      if (!news.data[i] || !table) continue;
      const first = Math.floor((contexts.data[i] - news.data[i]) / size);
      const last = Math.min(Math.floor((contexts.data[i] - 1) / size), table.length - 1);
      for (let index = first; index <= last; index++) written[table[index]] = 1;
    }
    return { owner, sharers, filled, written };
  }

  /** One block of the pool: {owners, filled, written}; null: nobody has it. */
  block(t, block) {
    const { owner, sharers, filled, written } = this.pool(t);
    if (!(owner[block] >= 0)) return null;
    const owners = sharers.get(block) ?? [owner[block]];
    return { owners, filled: filled[block], written: written[block] === 1 };
  }

  blocks(t) {
    return Array.from({ length: this.trace.blocks }, (_, block) => this.block(t, block));
  }
}
