// Packed bytes -> columns that can grow. The other half of widgets/codec.py and columns.py.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const PLACES = ["outside", "waiting", "running", "swapped", "finished", "refused"];
const PHASE_NAMES = ["prefill", "recompute", "decode", "padding", "sits_out"];
const HELD_REASONS = [
  "no_blocks", "watermark", "no_slot", "no_token_budget", "preempted_this_step",
  "batch_not_drained", "batch_filling", "slot_released_late", "swapped_first",
];
const RUNS = {
  lane: ["request", "slot", "phase", "new", "context", "padding"],
  waiting: ["request"],
  swapped: ["request"],
  move: ["request", "source", "target", "how"],
  evict: ["request", "mode", "culprit", "needed", "free"],
  op: ["kind", "request", "block"],
};

/** A typed array that grows by doubling, so that appending a step costs the same at any length. */
class Column {
  constructor(Type) {
    this.data = new Type(256);
    this.length = 0;
  }

  append(values) {
    const needed = this.length + values.length;
    if (needed > this.data.length) {
      const larger = new this.data.constructor(Math.max(needed, 2 * this.data.length));
      larger.set(this.data.subarray(0, this.length));
      this.data = larger;
    }
    this.data.set(values, this.length);
    this.length = needed;
  }
}

/** {header, columns} of one packed block of bytes. */
function unpack(bytes) {
  if (bytes.byteOffset % 8) bytes = bytes.slice(); // typed arrays must start at a multiple of 8
  const { buffer, byteOffset } = bytes;
  const text = new TextDecoder();
  if (text.decode(bytes.subarray(0, 4)) !== "MBT1") throw new Error("not a packed trace");
  const length = new DataView(buffer, byteOffset).getUint32(4, true);
  const header = JSON.parse(text.decode(bytes.subarray(8, 8 + length)));
  const columns = {};
  let offset = Math.ceil((8 + length) / 8) * 8;
  for (const [name, dtype, count] of header.columns) {
    columns[name] = new ARRAYS[dtype](buffer, byteOffset + offset, count);
    offset += Math.ceil(columns[name].byteLength / 8) * 8;
  }
  return { header, columns };
}

/** Bytes as they are, or unzipped if they are zipped. */
async function unzip(data) {
  const bytes = data instanceof DataView
    ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    : new Uint8Array(data.buffer ?? data, data.byteOffset ?? 0, data.byteLength);
  if (bytes[0] !== 0x1f || bytes[1] !== 0x8b) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** One run: its columns, its requests, its sentences, its stays in lanes, its events. */
class Trace {
  constructor(about) {
    this.about = about;
    this.n = 0;
    this.columns = {};
    this.starts = {}; // name of a run column -> where each step's entries begin
    for (const name of Object.keys(RUNS)) this.starts[name] = [0];
    this.requests = new Map(); // number -> what is known of it
    this.clauses = [];
    this.texts = [];
    this.stays = []; // by lane: {begin, end, request, phase, enters}
    this.ends = []; // who finished or was refused, in order
    this.events = { admission: [], preemption: [], swap: [], finish: [] };
    this.lanes = about.lanes || 1;
    this.blocks = about.blocks;
    this.peak = { tokens: 1, rate: 0, step_s: 0, rows: 1 };
  }

  append(bytes) {
    const { header, columns } = unpack(bytes);
    for (const [number, id, label, prompt, most, arrival] of header.requests) {
      this.requests.set(number, { number, id, label, prompt, most, arrival });
    }
    this.texts.push(...header.texts);
    for (const clauses of header.clauses) this.clauses.push(clauses);
    for (const [name, values] of Object.entries(columns)) {
      if (name.endsWith("_n")) {
        const starts = this.starts[name.slice(0, -2)];
        for (const count of values) starts.push(starts[starts.length - 1] + count);
      } else {
        this.columns[name] ??= new Column(values.constructor);
        this.columns[name].append(values);
      }
    }
    const before = this.n;
    this.n += header.steps;
    for (let t = before; t < this.n; t++) this.index(t);
  }

  /** The value of a step column. */
  get(name, t) {
    return this.columns[name].data[t];
  }

  /** The entries of a run column at step t, as objects. */
  entries(name, t) {
    const [from, to] = [this.starts[name][t], this.starts[name][t + 1]];
    const parts = RUNS[name].map((part) => [part, this.columns[`${name}_${part}`].data]);
    const out = [];
    for (let i = from; i < to; i++) {
      const entry = {};
      for (const [part, data] of parts) entry[part] = data[i];
      out.push(entry);
    }
    return out;
  }

  /** The numbers of the requests in a queue at step t. */
  queue(name, t) {
    const [from, to] = [this.starts[name][t], this.starts[name][t + 1]];
    return to > from ? this.columns[`${name}_request`].data.subarray(from, to) : [];
  }

  /** Who stands in the lanes at step t, by lane. */
  running(t) {
    const slots = this.columns.lane_slot.data;
    const order = [];
    for (let i = this.starts.lane[t]; i < this.starts.lane[t + 1]; i++) order.push(i);
    order.sort((a, b) => slots[a] - slots[b]);
    const requests = this.columns.lane_request.data;
    return order.map((i) => requests[i]);
  }

  /** What each of them does: request -> code of its phase. */
  phases(t) {
    const { lane_request: requests, lane_phase: phases } = this.columns;
    const found = new Map();
    for (let i = this.starts.lane[t]; i < this.starts.lane[t + 1]; i++) {
      found.set(requests.data[i], phases.data[i]);
    }
    return found;
  }

  label(number) {
    return this.requests.get(number)?.label ?? "?";
  }

  startOf(t) {
    return this.get("start_s", t) - this.get("start_s", 0);
  }

  endOf(t) {
    return this.startOf(t) + this.get("duration_s", t);
  }

  /** Note what drawing will look up again and again. */
  index(t) {
    const [from, to] = [this.starts.lane[t], this.starts.lane[t + 1]];
    const requests = this.columns.lane_request?.data;
    const slots = this.columns.lane_slot?.data;
    const phases = this.columns.lane_phase?.data;
    let busy = 0;
    for (let i = from; i < to; i++) {
      const lane = (this.stays[slots[i]] ??= []);
      const last = lane[lane.length - 1];
      const goesOn = last && last.end === t && last.request === requests[i];
      if (goesOn && last.phase === phases[i]) last.end = t + 1;
      else {
        const stay = { begin: t, end: t + 1, request: requests[i], phase: phases[i] };
        lane.push({ ...stay, enters: !goesOn });
      }
      if (slots[i] >= this.lanes) this.lanes = slots[i] + 1;
      busy++;
    }
    const peak = this.peak;
    peak.rows = Math.max(peak.rows, busy);
    peak.tokens = Math.max(peak.tokens, this.get("tokens", t) + this.get("padding", t));
    peak.step_s = Math.max(peak.step_s, this.get("duration_s", t), this.get("predicted_s", t) || 0);
    peak.rate = Math.max(peak.rate, this.rate(t));
    this.indexEvents(t);
  }

  indexEvents(t) {
    const events = this.events;
    for (const { request, source, target } of this.entries("move", t)) {
      const [from, to] = [PLACES[source], PLACES[target]];
      if (to === "finished" || to === "refused") {
        this.ends.push({ t, request, inLane: to === "finished" && this.inLane(request, t) });
      }
      let kinds = [];
      if (to === "running") kinds = from === "swapped" ? ["admission", "swap"] : ["admission"];
      else if (from === "running" && to === "waiting") kinds = ["preemption"];
      else if (from === "running" && to === "swapped") kinds = ["preemption", "swap"];
      else if (to === "finished") kinds = ["finish"];
      for (const kind of kinds) {
        const list = events[kind];
        if (list[list.length - 1] !== t) list.push(t);
      }
    }
  }

  inLane(request, t) {
    const end = this.starts.lane[t + 1];
    const requests = this.columns.lane_request.data;
    for (let i = this.starts.lane[t]; i < end; i++) if (requests[i] === request) return true;
    return false;
  }

  /** Generated tokens a second, up to the end of step t. */
  rate(t) {
    const elapsed = this.get("elapsed_s", t);
    return elapsed > 0 ? this.get("total_generated", t) / elapsed : 0;
  }
}
