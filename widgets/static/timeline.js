// The slot timeline: a lane a slot, whoever waits as thin lines above, whoever is swapped below.

const GUTTER = 84;
const QUEUE_ROW = 9;
const MOST_QUEUE_ROWS = 9;
const MOST_LANES_HEIGHT = 300;
const SMALLEST_FITTING_CELL = 6;
const CELL = 15;
const SMALLEST_EDGED_ROW = 5;
const SMALLEST_LETTERED_ROW = 9;

class Timeline {
  constructor(parent, series, words, options = {}) {
    this.series = series;
    this.words = words;
    const about = series.trace.about;
    const live = options.live ?? false;
    this.lanes = Math.max(1, options.lanes ?? about.lanes);
    this.queueRows = live ? MOST_QUEUE_ROWS : Math.min(MOST_QUEUE_ROWS, about.most_waiting);
    const swaps = live ? (about.swaps ? 4 : 0) : about.most_swapped;
    this.swapRows = Math.min(MOST_QUEUE_ROWS, swaps);
    const most = options.mostHeight ?? MOST_LANES_HEIGHT;
    this.row = Math.max(2, Math.min(26, Math.floor(most / this.lanes)));
    this.queueTop = 16;
    this.lanesTop = this.queueTop + this.queueRows * QUEUE_ROW + 6;
    this.lanesHeight = Math.min(most, this.row * this.lanes);
    this.swapTop = this.lanesTop + this.lanesHeight + 6;
    this.bottom = this.swapTop + this.swapRows * QUEUE_ROW;
    this.sheet = new Sheet(parent, "mb-timeline", this.bottom + 22);
    this.veil = this.sheet.mark("mb-veil", GUTTER - 6); // what is still to come is pale
    this.present = this.sheet.mark("mb-present", GUTTER - 6); // the present step is framed
    this.veil.node.style.height = `${this.bottom + 1}px`;
    this.present.node.style.height = `${this.bottom}px`;
    this.span = [0, 0];
  }

  /** Where steps lie: x(t) is the left edge of step t; `span` the steps in sight. A run that is
   * too long for its cells is shown page by page, so that the picture rests while we step. */
  scale(t, axis) {
    const { trace } = this.series;
    const room = this.sheet.width - GUTTER - 10;
    const n = Math.max(1, trace.n, this.common?.n ?? 0); // compared runs share one scale
    const fits = room / n >= SMALLEST_FITTING_CELL;
    const cell = fits ? Math.min(34, room / n) : CELL;
    const shown = Math.floor(room / cell);
    const stride = Math.max(1, Math.floor(shown * 0.75));
    const page = Math.floor(t / stride) * stride - Math.floor(shown * 0.1);
    const from = fits ? 0 : Math.max(0, Math.min(page, n - shown));
    if (axis === "ms") return this.timeScale(from, room, fits ? n : shown, n);
    this.span = [Math.min(from, trace.n), Math.min(trace.n, from + shown + 1)];
    this.x = (step) => GUTTER + (step - from) * cell;
  }

  /** As many milliseconds in sight as `shown` steps take on average. */
  timeScale(from, room, shown, n) {
    const { trace } = this.series;
    const last = trace.n - 1;
    const total = Math.max(trace.endOf(last), this.common?.time ?? 0);
    const begin = trace.startOf(Math.min(from, last));
    const length = (total * shown) / n || 1;
    const starts = trace.columns.start_s.data.subarray(0, trace.n);
    const end = lowerBound(starts, begin + length + starts[0]);
    this.span = [Math.min(from, last), Math.min(trace.n, end + 1)];
    const edge = (step) => (step <= last ? trace.startOf(step) : trace.endOf(last));
    this.x = (step) => GUTTER + ((edge(step) - begin) / length) * room;
  }

  laneY(slot) {
    return this.lanesTop + (slot * this.lanesHeight) / Math.max(this.lanes, 1);
  }

  draw(t, paint, { axis = "iterations", followed = null, ended = false, common = null } = {}) {
    const { sheet, series } = this;
    const { trace } = series;
    this.common = common;
    if (trace.lanes > this.lanes) this.lanes = trace.lanes;
    this.row = this.lanesHeight / this.lanes;
    sheet.fit(paint);
    sheet.over.hidden = ended || !trace.n;
    if (!trace.n) {
      sheet.clear(paint.colours.bg);
      return;
    }
    this.scale(t, axis);
    const key = [trace.n, ...this.span, axis, followed, paint.theme, sheet.width, sheet.scale,
      common?.n, common?.time].join();
    if (this.key !== key) {
      this.key = key;
      this.drawRun(sheet.clear(paint.colours.bg), paint, axis, followed);
      this.drawGutter(sheet.context, paint);
    }
    const [x, next] = [this.x(t), this.x(t + 1)];
    Sheet.move(this.present, x - 1, Math.max(4, next - x + 2));
    Sheet.move(this.veil, next, sheet.width);
  }

  inSight(context, act) {
    context.save();
    context.beginPath();
    context.rect(GUTTER - 6, 0, this.sheet.width - GUTTER + 6, this.sheet.height);
    context.clip();
    act();
    context.restore();
  }

  /** All that does not depend on where we are. */
  drawRun(context, paint, axis, followed) {
    const [from, to] = this.span;
    this.inSight(context, () => {
      const end = Math.min(this.sheet.width, this.x(this.series.trace.n));
      const gap = this.gap;
      context.fillStyle = paint.colours.panel;
      for (let slot = 0; slot < this.lanes; slot++) {
        context.fillRect(GUTTER, this.laneY(slot) + gap, end - GUTTER, this.row - 2 * gap);
      }
      if (this.row < SMALLEST_EDGED_ROW) this.drawThinLanes(context, paint, from, to, axis, followed);
      else {
        this.drawBubbles(context, paint, from, to);
        this.drawStays(context, paint, from, to, followed);
      }
      this.drawQueue(context, paint, "waiting", from, to, followed);
      this.drawQueue(context, paint, "swapped", from, to, followed);
      this.drawEvictions(context, paint, from, to);
      this.drawRuler(context, paint, from, to, axis);
    });
  }

  /** Lanes without edges, hatches and letters: a pixel a lane and step, stretched. */
  drawThinLanes(context, paint, from, to, axis, followed) {
    const { trace } = this.series;
    const { lane_slot: slots, lane_request: requests, lane_phase: phases } = trace.columns;
    const most = Math.min(this.lanes, trace.about.slots || this.lanes);
    const steps = to - from;
    const tile = new OffscreenCanvas(Math.max(1, steps), this.lanes);
    const pen = tile.getContext("2d");
    const image = pen.createImageData(tile.width, tile.height);
    const pixels = new Uint32Array(image.data.buffer);
    const full = PHASE_NAMES.map((name) => pixel(paint.phase(name).fill));
    const pale = PHASE_NAMES.map((name) => pixel(paint.phase(name).fill, 0.3));
    const bubble = pixel(paint.colours.bubble);
    for (let t = from; t < to; t++) {
      if (trace.get("waiting_count", t) || trace.get("swapped_count", t)) {
        for (let slot = 0; slot < most; slot++) pixels[slot * steps + t - from] = bubble;
      }
      for (let i = trace.starts.lane[t]; i < trace.starts.lane[t + 1]; i++) {
        const table = followed === null || followed === requests.data[i] ? full : pale;
        pixels[slots.data[i] * steps + t - from] = table[phases.data[i]];
      }
    }
    pen.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const wide = axis === "ms" ? 1 : steps; // iterations are all of one width
    for (let t = from; t < to; t += wide) {
      // On whole pixels, so that no seam shows between two steps.
      const [left, right] = [Math.round(this.x(t)), Math.round(this.x(t + wide))];
      const source = [t - from, 0, wide, this.lanes];
      if (right > left) context.drawImage(tile, ...source, left, this.lanesTop, right - left, this.lanesHeight);
    }
  }

  /** Between lanes, where there is room for it. */
  get gap() {
    return this.row >= 6 ? 1 : 0;
  }

  drawBubbles(context, paint, from, to) {
    const { trace } = this.series;
    const slots = Math.min(this.lanes, trace.about.slots || this.lanes);
    const { gap } = this;
    for (let t = from; t < to; t++) {
      if (!trace.get("waiting_count", t) && !trace.get("swapped_count", t)) continue;
      const busy = new Uint8Array(this.lanes);
      const [a, b] = [trace.starts.lane[t], trace.starts.lane[t + 1]];
      for (let i = a; i < b; i++) busy[trace.columns.lane_slot.data[i]] = 1;
      const [x, w] = [this.x(t), this.x(t + 1) - this.x(t)];
      for (let slot = 0; slot < slots; slot++) {
        if (busy[slot]) continue;
        const y = this.laneY(slot) + gap;
        context.fillStyle = paint.colours.bubble;
        context.fillRect(x, y, w + 0.5, this.row - 2 * gap);
      }
    }
  }

  drawStays(context, paint, from, to, followed) {
    const { trace } = this.series;
    const { gap } = this;
    const height = this.row - 2 * gap;
    for (let slot = 0; slot < trace.stays.length; slot++) {
      const lane = trace.stays[slot] ?? [];
      const first = lowerBound(lane, from + 1, (stay) => stay.end);
      for (let i = first; i < lane.length && lane[i].begin < to; i++) {
        const stay = lane[i];
        const x = Math.max(GUTTER - 4, this.x(stay.begin));
        const width = this.x(stay.end) - x;
        const y = this.laneY(slot) + gap;
        context.globalAlpha = followed === null || followed === stay.request ? 1 : 0.3;
        paint.work(context, PHASE_NAMES[stay.phase], x, y, width, height);
        if (this.row >= 9) {
          context.fillStyle = requestColour(stay.request)[0];
          context.fillRect(x + 1, y + height - 5, width - 2, 4);
        }
      }
      if (this.row < SMALLEST_LETTERED_ROW) continue;
      // Letters last, so that no neighbour paints over them.
      for (let i = first; i < lane.length && lane[i].begin < to;) {
        let next = i + 1;
        while (next < lane.length && lane[next].begin < to && !lane[next].enters) next++;
        context.globalAlpha = followed === null || followed === lane[i].request ? 1 : 0.3;
        this.drawLetter(context, paint, lane.slice(i, next), this.laneY(slot) + gap, height);
        i = next;
      }
    }
    context.globalAlpha = 1;
  }

  /** Where the first part of the visit has room for it, or across narrow parts; else not at all. */
  drawLetter(context, paint, visit, y, height) {
    const { request } = visit[0];
    const label = this.series.trace.label(request);
    const width = paint.tagWidth(context, label, height);
    const whole = { begin: visit[0].begin, end: visit[visit.length - 1].end };
    for (const { begin, end } of [...visit, whole]) {
      const x = Math.max(GUTTER, this.x(begin));
      if (this.x(end) - x < width) continue;
      paint.tag(context, label, request, x, y, height);
      return;
    }
  }

  /** A thin line a request; the head of the queue lies next to the lanes. */
  drawQueue(context, paint, name, from, to, followed) {
    const { trace } = this.series;
    const rows = name === "waiting" ? this.queueRows : this.swapRows;
    const y = name === "waiting"
      ? (row) => this.queueTop + (rows - 1 - row) * QUEUE_ROW
      : (row) => this.swapTop + row * QUEUE_ROW;
    const open = new Array(rows).fill(null);
    const seen = new Map();
    for (let t = from; t <= to; t++) {
      const queue = t < to ? trace.queue(name, t) : [];
      for (let row = 0; row < rows; row++) {
        const request = row < queue.length ? queue[row] : null;
        const line = open[row];
        if (line && line.request !== request) {
          const isNew = !(seen.get(line.request) >= line.begin - 1);
          context.globalAlpha = followed === null || followed === line.request ? 1 : 0.3;
          this.queueLine(context, paint, line, t, y(row), isNew);
          seen.set(line.request, t - 1);
          open[row] = null;
        }
        if (request !== null && !open[row]) open[row] = { request, begin: t };
      }
    }
    context.globalAlpha = 1;
  }

  queueLine(context, paint, { request, begin }, end, y, isNew) {
    const [x, width] = [this.x(begin), this.x(end) - this.x(begin)];
    context.fillStyle = requestColour(request)[0];
    context.fillRect(x, y + 2, width, 5);
    context.strokeStyle = paint.colours.strong;
    context.strokeRect(x + 0.5, y + 2.5, width - 1, 4);
    if (isNew) {
      const left = Math.max(x, GUTTER);
      paint.tag(context, this.series.trace.label(request), request, left, y, QUEUE_ROW);
    }
  }

  /** A cross where a lane was lost, a line to where its request went. */
  drawEvictions(context, paint, from, to) {
    const { trace } = this.series;
    const list = trace.events.preemption;
    for (let i = lowerBound(list, from); i < list.length && list[i] < to; i++) {
      const t = list[i];
      for (const { request, mode } of trace.entries("evict", t)) {
        const slot = this.slotBefore(request, t);
        if (slot < 0) continue;
        const swap = trace.texts[mode] === "swap";
        const queue = Array.from(trace.queue(swap ? "swapped" : "waiting", t));
        const rows = swap ? this.swapRows : this.queueRows;
        const row = Math.max(0, Math.min(queue.indexOf(request), rows - 1));
        const target = swap
          ? this.swapTop + row * QUEUE_ROW + 4
          : this.queueTop + (rows - 1 - row) * QUEUE_ROW + 4;
        const y = this.laneY(slot) + this.row / 2;
        const x = (this.x(t) + this.x(t + 1)) / 2; // in the step that evicted
        line(context, x, y, x, target, paint.colours.alarm, 1.6);
        cross(context, x, y, Math.max(2.5, Math.min(5, this.row / 3)), paint.colours.alarm);
      }
    }
  }

  /** The lane that a request held until step t. */
  slotBefore(request, t) {
    return this.series.trace.stays.findIndex((lane = []) => {
      const stay = lane[lowerBound(lane, t, (entry) => entry.end)];
      return stay !== undefined && stay.end === t && stay.request === request;
    });
  }

  drawRuler(context, paint, from, to, axis) {
    const { trace } = this.series;
    context.font = `11px ${FONT}`;
    context.fillStyle = paint.colours.muted;
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    let free = -Infinity;
    for (let t = from; t < to; t++) {
      const x = this.x(t);
      if (x < free || x < GUTTER - 1 || x > this.sheet.width - 12) continue;
      const text = axis === "ms" ? (1e3 * trace.startOf(t)).toFixed(0) : String(trace.get("step", t));
      context.fillText(text, x, this.bottom + 16);
      line(context, x, this.bottom + 2, x, this.bottom + 5, paint.colours.strong);
      free = x + context.measureText(text).width + 16;
    }
    context.textAlign = "start";
  }

  drawGutter(context, paint) {
    const { words } = this;
    context.font = `11px ${FONT}`;
    context.fillStyle = paint.colours.muted;
    context.textAlign = "end";
    context.textBaseline = "middle";
    const x = GUTTER - 8;
    if (this.queueRows) {
      context.fillText(words.say("place.waiting"), x, this.queueTop + (this.queueRows * QUEUE_ROW) / 2);
    }
    if (this.swapRows) {
      context.fillText(words.say("place.swapped"), x, this.swapTop + (this.swapRows * QUEUE_ROW) / 2);
    }
    const every = Math.max(1, Math.ceil(13 / this.row));
    for (let slot = 0; slot < this.lanes; slot += every) {
      context.fillText(String(slot), x, this.laneY(slot) + Math.min(this.row, 13) / 2);
    }
    context.textAlign = "start";
  }

  /** {t, request} under a point. */
  hit(x, y) {
    const { trace } = this.series;
    if (x < GUTTER || !trace.n || !this.x) return null;
    const [from, to] = this.span;
    let t = from;
    while (t < to - 1 && this.x(t + 1) <= x) t++;
    let request = null;
    if (y >= this.lanesTop && y < this.lanesTop + this.lanesHeight) {
      const slot = Math.floor((y - this.lanesTop) / this.row);
      request = trace.entries("lane", t).find((entry) => entry.slot === slot)?.request ?? null;
    } else if (y < this.lanesTop) {
      const row = this.queueRows - 1 - Math.floor((y - this.queueTop) / QUEUE_ROW);
      request = trace.queue("waiting", t)[row] ?? null;
    } else {
      request = trace.queue("swapped", t)[Math.floor((y - this.swapTop) / QUEUE_ROW)] ?? null;
    }
    return { t, request };
  }
}

/** What colours and hatches of the lanes mean. */
class PhaseLegend {
  constructor(parent, words) {
    this.words = words;
    this.sheet = new Sheet(parent, "mb-phase-legend", 18);
    const names = PHASE_NAMES.map((name) => words.say(`phase.${name}`));
    const texts = [...names, words.say("phase.bubble"), words.say("event.preemption")];
    this.sheet.canvas.setAttribute("aria-label", texts.join(", "));
  }

  draw(paint) {
    const { sheet, words } = this;
    sheet.fit(paint);
    const key = `${paint.theme}/${sheet.width}/${sheet.scale}`;
    if (this.key === key) return;
    this.key = key;
    const context = sheet.clear(paint.colours.bg);
    context.font = `12px ${FONT}`;
    context.textBaseline = "middle";
    let x = GUTTER;
    const entry = (paintBox, text) => {
      paintBox();
      context.fillStyle = paint.colours.muted;
      context.fillText(text, x + 23, 9);
      x += 23 + context.measureText(text).width + 16;
    };
    for (const name of PHASE_NAMES) {
      entry(() => paint.work(context, name, x, 3, 18, 12), words.say(`phase.${name}`));
    }
    entry(() => {
      context.fillStyle = paint.colours.bubble;
      context.fillRect(x, 3, 18, 12);
      context.strokeStyle = paint.colours.bubble_mark;
      context.strokeRect(x + 0.5, 3.5, 17, 11);
    }, words.say("phase.bubble"));
    entry(() => cross(context, x + 9, 9, 4.5, paint.colours.alarm), words.say("event.preemption"));
  }
}
