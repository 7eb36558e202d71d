// The player: where we are, how we move, and a loop that draws only when something changed.

class Player {
  constructor(root, options) {
    this.root = root;
    this.options = options;
    this.words = new Words(options.lang);
    this.axis = options.axis ?? "iterations";
    this.compare = options.mode === "compare";
    this.live = options.mode === "live";
    this.speed = options.speed ?? 2;
    this.position = 0;
    this.followed = null;
    this.gliding = true;
    this.followsEnd = this.live;
    this.stops = [];
    this.series = options.series.map((about) => new Series(this, about));
    this.build();
  }

  build() {
    const { root, words } = this;
    root.classList.add("mb-root");
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-roledescription", "player");
    root.dataset.lmSuppressShortcuts = "true"; // keys are ours, not the notebook's
    root.dataset.mode = this.options.mode;
    this.frame = element("div", { class: "mb-frame" });
    root.append(this.frame);
    if (this.live) this.liveBar = new LiveBar(this.frame, this);
    this.controls = new Controls(this.frame, this);
    this.controls.axis.value = this.axis;
    const lanes = this.compare ? Math.max(...this.series.map((s) => s.trace.about.lanes)) : undefined;
    const panels = this.options.panels ?? ["timeline", "queues", "blocks", "throughput"];
    for (const series of this.series) {
      series.build(this.frame, { panels, compare: this.compare, lanes, live: this.live });
    }
    if (this.compare) {
      this.phases = new PhaseLegend(this.frame, words);
      this.totals = new Totals(this.frame, this);
    }
    this.note = element("div", { class: "mb-why", "data-number": "why" });
    this.keys = element("div", { class: "mb-keys", text: words.say("help.keys") });
    this.tip = element("div", { class: "mb-tip", role: "tooltip", hidden: "" });
    this.spoken = element("div", { class: "mb-spoken", "aria-live": "polite" });
    this.tableBox = element("div", { class: "mb-table", hidden: "" });
    this.frame.append(this.note, this.tableBox, this.keys, this.tip, this.spoken);
    root.addEventListener("keydown", (event) => this.key(event));
    this.stops.push(watchTheme(() => this.dirty()));
    const resize = new ResizeObserver(() => {
      this.sized = (this.sized ?? 0) + 1;
      this.dirty();
    });
    resize.observe(root);
    this.stops.push(() => resize.disconnect());
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
  }

  // -- where we are ---------------------------------------------------------------------------

  get length() {
    if (this.compare && this.axis === "ms") return this.ticks.length;
    return Math.max(0, ...this.series.map((series) => series.trace.n));
  }

  /** The longest of compared runs: one scale for all. */
  get common() {
    if (!this.compare) return null;
    const traces = this.series.map((series) => series.trace).filter((trace) => trace.n);
    return {
      n: Math.max(...traces.map((trace) => trace.n)),
      time: Math.max(...traces.map((trace) => trace.endOf(trace.n - 1))),
    };
  }

  /** Times at which any run begins a step, and the last end. */
  get ticks() {
    const key = this.series.map((series) => series.trace.n).join();
    if (this.ticksKey !== key) {
      this.ticksKey = key;
      const times = new Set([0]);
      for (const { trace } of this.series) {
        for (let t = 0; t < trace.n; t++) times.add(trace.startOf(t));
        if (trace.n) times.add(trace.endOf(trace.n - 1));
      }
      this.tickList = [...times].sort((a, b) => a - b);
    }
    return this.tickList;
  }

  place(series) {
    const { n } = series.trace;
    if (this.compare && this.axis === "ms") {
      const now = this.ticks[this.position];
      const starts = series.trace.columns.start_s?.data.subarray(0, n) ?? [];
      series.t = Math.max(0, lowerBound(starts, now + (starts[0] ?? 0) + 1e-12) - 1);
      series.ended = n > 0 && now >= series.trace.endOf(n - 1);
    } else {
      series.t = Math.max(0, Math.min(this.position, n - 1));
      series.ended = this.compare && this.position > n - 1;
    }
  }

  positionOf(series, t) {
    if (!(this.compare && this.axis === "ms")) return t;
    return lowerBound(this.ticks, series.trace.startOf(t) - 1e-12);
  }

  eventPositions(kind) {
    const positions = new Set();
    for (const series of this.series) {
      for (const t of series.trace.events[kind]) positions.add(this.positionOf(series, t));
    }
    return positions;
  }

  // -- how we move ----------------------------------------------------------------------------

  seek(position, spoken = false) {
    const last = Math.max(0, this.length - 1);
    this.position = Math.max(0, Math.min(last, position));
    this.followsEnd = this.live && this.position === last;
    this.dirty();
    if (spoken) this.announce();
  }

  go(by) {
    this.pause();
    this.seek(this.position + by, true);
  }

  jump(kind, way) {
    this.pause();
    const found = [...this.eventPositions(kind)].sort((a, b) => a - b);
    const next = way > 0
      ? found.find((position) => position > this.position)
      : found.reverse().find((position) => position < this.position);
    if (next !== undefined) this.seek(next, true);
  }

  togglePlay() {
    if (this.playing) this.pause(true);
    else this.start();
  }

  start() {
    if (this.position >= this.length - 1) this.position = 0;
    this.playing = { since: performance.now(), from: this.position };
    this.controls.playing(true);
    this.dirty();
  }

  pause(spoken = false) {
    if (!this.playing) return;
    this.playing = null;
    this.controls.playing(false);
    if (spoken) this.announce();
  }

  setAxis(axis) {
    const [first] = this.series;
    const t = first?.t ?? 0;
    this.axis = axis;
    this.position = first ? this.positionOf(first, t) : 0;
    this.controls.axis.value = axis;
    this.dirty();
  }

  follow(request, series) {
    const same = this.followed?.request === request && this.followed?.series === series;
    this.followed = same || request === null ? null : { request, series };
    this.liveBar?.picked();
    this.dirty();
    this.announce();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { tagName, type } = event.target;
    const typing = tagName === "SELECT" || (tagName === "INPUT" && type !== "range");
    if (typing) return;
    const way = event.shiftKey ? -1 : 1;
    const kinds = { a: "admission", e: "preemption", s: "swap", f: "finish" };
    const moves = {
      ArrowRight: () => this.go(1), ArrowLeft: () => this.go(-1),
      n: () => this.go(1), p: () => this.go(-1),
      Home: () => this.seek(0, true), End: () => this.seek(this.length - 1, true),
      Escape: () => this.follow(null),
    };
    const onButton = tagName === "BUTTON";
    if (event.key === " " && !onButton) moves[" "] = () => this.togglePlay();
    const name = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const act = moves[name] ?? (kinds[name] && (() => this.jump(kinds[name], way)));
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // -- what is shown --------------------------------------------------------------------------

  /** Something changed: draw in the next frame, once. */
  dirty() {
    if (this.frameRequest || this.closed) return;
    this.frameRequest = requestAnimationFrame((now) => {
      this.frameRequest = null;
      this.advance(now);
      this.draw();
      if (this.playing) this.dirty();
    });
  }

  /** While playing: where the clock says we are. */
  advance(now) {
    if (!this.playing) return;
    const { since, from } = this.playing;
    const position = from + Math.floor(((now - since) / 1000) * this.speed);
    if (position >= this.length - 1) {
      this.position = this.length - 1;
      this.pause(true);
    } else this.position = Math.max(this.position, position);
  }

  draw() {
    const theme = pageTheme();
    if (this.paint?.theme !== theme) {
      this.paint = new Paint(theme);
      this.root.dataset.theme = theme;
    }
    this.paint.sized = this.sized ?? 0;
    const length = this.length;
    if (this.followsEnd && length) this.position = length - 1;
    const moved = this.position - (this.drawnAt ?? 0);
    const state = `${this.position}/${length}`;
    this.gliding = !this.calm.matches && Math.abs(moved) === 1 && !(this.playing && this.speed > 5)
      && !(this.live && this.followsEnd);
    if (this.playing && this.stateDrawn === state && this.paint === this.paintDrawn) return;
    [this.stateDrawn, this.paintDrawn] = [state, this.paint];
    for (const series of this.series) {
      this.place(series);
      series.draw(this.paint);
    }
    this.phases?.draw(this.paint);
    this.totals?.draw();
    this.controls.draw(this.paint);
    this.liveBar?.draw();
    this.drawWhy();
    this.drawnAt = this.position;
    this.drawn = (this.drawn ?? 0) + 1;
    const [first] = this.series;
    if (first?.trace.n) {
      this.root.dataset.step = first.trace.get("step", first.t);
      this.root.dataset.position = this.position;
      this.controls.slider.setAttribute("aria-valuetext", this.words.sentence(first.trace, first.t));
    }
  }

  /** Of the followed request, else of the head of the queue: why it runs, or does not. */
  drawWhy() {
    const texts = [];
    for (const series of this.series) {
      const { trace, t } = series;
      if (!trace.n) continue;
      const held = trace.get("held_request", t);
      const request = this.followed ? series.sameRequest(this.followed) : held >= 0 ? held : null;
      if (request === null || request === undefined) continue;
      const name = this.compare ? `${trace.about.title || trace.about.policy}: ` : "";
      texts.push(name + this.words.why(series, t, request));
    }
    setText(this.note, texts.join("  "));
  }

  /** Say it, for those who cannot see it; only when we have come to rest. */
  announce() {
    const [series] = this.series;
    if (!series?.trace.n) return;
    requestAnimationFrame(() => {
      const told = this.words.sentence(series.trace, series.t);
      if (!this.closed && this.spoken.textContent !== told) this.spoken.textContent = told;
      this.options.onRest?.(this.position);
    });
  }

  showTip(event, text = "") {
    this.tip.hidden = !event || !text;
    if (this.tip.hidden) return;
    setText(this.tip, text);
    const box = this.frame.getBoundingClientRect();
    const x = Math.min(event.clientX - box.left + 12, box.width - 220);
    this.tip.style.transform = `translate(${x}px,${event.clientY - box.top + 14}px)`;
  }

  /** The same facts as a table, a row a step. */
  toggleTable() {
    const open = this.tableBox.hidden;
    this.tableBox.hidden = !open;
    this.controls.table.setAttribute("aria-expanded", String(open));
    if (open) this.tableBox.replaceChildren(...this.series.map((series) => this.tableOf(series)));
  }

  tableOf({ trace }) {
    const { words } = this;
    const heads = ["number.steps", "number.batch", "number.waiting", "number.free_blocks"];
    const cell = (tag, text) => element(tag, { text });
    const table = element("table", {},
      element("caption", { text: trace.about.title || trace.about.policy }),
      element("tr", {}, ...heads.map((key) => cell("th", words.say(key))), cell("th", "")));
    const shown = Math.min(trace.n, 500);
    for (let t = 0; t < shown; t++) {
      const numbers = ["step", "running_count", "waiting_count", "free"].map((name) => trace.get(name, t));
      const sentence = trace.clauses[t].join(words.say("semicolon"));
      table.append(element("tr", {}, ...numbers.map((n) => cell("td", String(n))), cell("td", sentence)));
    }
    if (trace.n > shown) {
      table.append(element("tr", {}, cell("td", words.say("more", { n: trace.n - shown }))));
    }
    return table;
  }

  /** All that step t holds, for tests: must equal Python's view. */
  probe(t, index = 0) {
    const series = this.series[index];
    const { trace, replay } = series;
    const books = replay.at(t);
    const id = (number) => trace.requests.get(number)?.id ?? null;
    const ids = (numbers) => Array.from(numbers, id);
    const tables = (map) => Object.fromEntries([...map].map(([number, table]) => [id(number), table.slice()]));
    const why = {};
    const places = {};
    for (const [number, place] of books.place) {
      places[id(number)] = place;
      why[id(number)] = this.words.why(series, t, number);
    }
    return {
      step: trace.get("step", t),
      sentence: this.words.sentence(trace, t),
      waiting: ids(trace.queue("waiting", t)),
      swapped: ids(trace.queue("swapped", t)),
      lanes: trace.entries("lane", t).map((lane) =>
        [lane.slot, id(lane.request), PHASE_NAMES[lane.phase], lane.new, lane.context, lane.padding]),
      finishing: ids(books.finishing).sort(),
      tables: tables(books.tables),
      cpu_tables: tables(books.cpu),
      cached: [...books.cached].sort((a, b) => a - b),
      written: replay.blocks(t).flatMap((cell, block) => (cell?.written ? [block] : [])),
      filled: replay.blocks(t).map((cell) => cell?.filled ?? 0),
      lost: Object.fromEntries([...books.lost].map(([block, number]) => [block, id(number)])),
      places,
      why,
      numbers: shownNumbers(series, t),
    };
  }

  close() {
    this.closed = true;
    this.playing = null;
    if (this.frameRequest) cancelAnimationFrame(this.frameRequest);
    for (const stop of this.stops) stop();
    this.root.replaceChildren();
  }
}
