// Texts of the page. WORDS (by language) stands at the top of the bundle.

class Words {
  constructor(lang) {
    this.table = WORDS[lang] ?? Object.values(WORDS)[0];
  }

  /** The text of a key, its {names} replaced. */
  say(key, values = {}) {
    const text = this.table[key] ?? key;
    return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
  }

  count(noun, n) {
    return this.say(`${noun}.${n === 1 ? "one" : "many"}`, { n });
  }

  heldReason(trace, t) {
    const needed = trace.get("held_needed", t);
    const reason = HELD_REASONS[trace.get("held_reason", t)] ?? "unknown";
    return this.say(`held.${reason}`, {
      needed,
      available: trace.get("held_available", t),
      needed_blocks: this.count("block", needed),
      needed_tokens: this.count("token", needed),
      slots: trace.about.slots,
    });
  }

  sentence(trace, t) {
    const head = this.say("step", { step: trace.get("step", t) });
    const told = trace.clauses[t].join(this.say("semicolon"));
    return head + this.say("colon") + told + this.say("stop");
  }

  /** Why this request runs, or does not. Says what widgets/view.py's View.why says. */
  why(series, t, request) {
    const books = series.replay.at(t);
    const evictions = books.evictions.get(request) ?? 0;
    let text = this.reason(series.trace, books, t, request);
    if (evictions) {
      const key = evictions === 1 ? "evictions.one" : "evictions";
      text += this.say("semicolon") + this.say(key, { n: evictions });
    }
    return text + this.say("stop");
  }

  reason(trace, books, t, request) {
    const who = trace.label(request);
    const place = books.place.get(request);
    const lane = trace.entries("lane", t).find((entry) => entry.request === request);
    const blocks = this.count("block", books.tables.get(request)?.length ?? 0);
    const context = this.count("token", books.context.get(request) ?? 0);
    const reason = books.reasons.get(request);
    if (place === "refused") return this.say("turned_away", { who, knob: reason });
    if (place === undefined) return this.say("not_yet", { who });
    if (books.finishing.has(request) && lane) return this.say("finishing", { who, reason });
    const phase = lane && PHASE_NAMES[lane.phase];
    if (phase === "padding") return this.say("padding", { who, blocks });
    if (phase === "sits_out") {
      if (trace.about.mixes) return this.say("budget_out", { who });
      return this.say("sits_out", { who, context, blocks });
    }
    if (lane) {
      const tokens = this.count("token", lane.new);
      return this.say("runs", { who, phase: this.say(`phase.${phase}`), tokens, context, blocks });
    }
    if (reason !== undefined) return this.say("done", { who, reason });
    if (place === "swapped") {
      if (trace.get("held_request", t) === request) {
        return this.say("swapped.head", { who, reason: this.heldReason(trace, t) });
      }
      const cpu = this.count("block", books.cpu.get(request)?.length ?? 0);
      return this.say("swapped", { who, blocks: cpu });
    }
    return this.waits(trace, t, request, who);
  }

  waits(trace, t, request, who) {
    if (trace.entries("evict", t).some((entry) => entry.request === request)) {
      return this.say("waits.evicted", { who });
    }
    const place = Array.from(trace.queue("waiting", t)).indexOf(request) + 1;
    const head = trace.get("held_request", t);
    if (head < 0 || place === 0) return this.say("waits.free", { who, place });
    const reason = this.heldReason(trace, t);
    if (head === request) return this.say(place === 1 ? "waits.head" : "held", { who, reason });
    return this.say("waits.behind", { who, place, head: trace.label(head), reason });
  }
}
