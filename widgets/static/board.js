// The queue board: a chip a request, in the column where it is; the door between waiting and
// running says who may not pass, and why; arrows show who moved since the step before.

const CHIP_HEIGHT = 24;
const CHIP_GAP = 5;
const HEAD = 22;
const SVG = "http://www.w3.org/2000/svg";

class Board {
  constructor(parent, series, words, onPick, live = false) {
    this.series = series;
    this.words = words;
    this.onPick = onPick;
    this.chips = new Map(); // request -> {node, and what it shows}
    this.stands = new Map(); // step -> where chips go; the last few
    this.root = element("div", { class: "mb-board" });
    const { about } = series.trace;
    const most = Math.max(about.most_waiting, about.lanes, 1.6 * about.most_swapped);
    const rows = live ? 5 : Math.max(2, Math.min(5, Math.ceil(most / 4)));
    this.height = HEAD + 20 + rows * (CHIP_HEIGHT + CHIP_GAP) + 24;
    this.root.style.height = `${this.height}px`;
    this.columns = {};
    const { swaps } = series.trace.about;
    // [place, left, width] in percent; the door stands between waiting and running.
    this.plan = swaps
      ? [["waiting", 0, 23], ["running", 47, 22], ["swapped", 70, 14], ["finished", 85, 14.8]]
      : [["waiting", 0, 26], ["running", 51, 26], ["finished", 79, 20.8]];
    this.door = [swaps ? 24 : 27, swaps ? 22 : 23];
    for (const [place, left, width] of this.plan) {
      const count = element("b", { "data-number": `count_${place}` });
      const name = element("span", { text: words.say(`place.${place}`) });
      const title = element("div", { class: "mb-column-head" }, name, count);
      const more = element("div", { class: "mb-more" });
      const column = element("div", { class: "mb-column", "data-place": place }, title, more);
      column.style.left = `${left}%`;
      column.style.width = `${width}%`;
      this.root.append(column);
      this.columns[place] = { column, count, more };
    }
    this.makeDoor();
    this.arrows = document.createElementNS(SVG, "svg");
    this.arrows.setAttribute("class", "mb-arrows");
    this.arrows.setAttribute("aria-hidden", "true");
    this.root.append(this.arrows);
    parent.append(this.root);
    this.ruler = document.createElement("canvas").getContext("2d");
    this.ruler.font = `600 13px ${FONT}`;
    this.widths = new Map();
  }

  makeDoor() {
    this.doorTitle = element("div", { class: "mb-door-title" });
    this.squares = element("div", { class: "mb-squares", "aria-hidden": "true" });
    this.doorNumbers = element("div", { class: "mb-door-numbers" });
    this.doorText = element("div", { class: "mb-door-text" });
    const parts = [this.doorTitle, this.squares, this.doorNumbers, this.doorText];
    this.doorBox = element("div", { class: "mb-door" }, ...parts);
    this.doorBox.style.left = `${this.door[0]}%`;
    this.doorBox.style.width = `${this.door[1]}%`;
    this.root.append(this.doorBox);
  }

  chipWidth(request) {
    if (!this.widths.has(request)) {
      const label = this.series.trace.label(request);
      this.widths.set(request, Math.max(CHIP_HEIGHT, Math.ceil(this.ruler.measureText(label).width) + 14));
    }
    return this.widths.get(request);
  }

  /** Who stands in which column at step t, in order. */
  queues(t) {
    const { trace } = this.series;
    const ended = lowerBound(trace.ends, t + 1, (end) => end.t);
    const done = []; // the last to finish stands first
    let finishing = 0;
    for (let i = ended - 1; i >= 0 && done.length < 48; i--) {
      const { request, inLane, t: when } = trace.ends[i];
      if (inLane && when === t) finishing++;
      else done.push(request);
    }
    const finished = trace.get("total_finished", t) - finishing;
    return {
      waiting: { list: trace.queue("waiting", t), count: trace.get("waiting_count", t) },
      running: { list: trace.running(t), count: trace.get("running_count", t) },
      swapped: { list: trace.queue("swapped", t), count: trace.get("swapped_count", t) },
      finished: { list: done, count: Math.max(finished, 0) },
    };
  }

  /** Who stands where at step t. */
  stand(t) {
    if (!this.stands.has(t)) {
      if (this.stands.size >= 4) this.stands.clear();
      const queues = this.queues(t);
      this.stands.set(t, { queues, ...this.layout(queues) });
    }
    return this.stands.get(t);
  }

  /** Where each chip goes: rows that break where the measured width ends; the rest is counted. */
  layout(queues) {
    const { width } = this;
    const spots = new Map();
    const hidden = {};
    for (const [place, left, share] of this.plan) {
      const from = (left / 100) * width + 4;
      const to = ((left + share) / 100) * width - 4;
      const rows = Math.floor((this.height - HEAD - 20) / (CHIP_HEIGHT + CHIP_GAP));
      let [x, row] = [from, 0];
      let shown = 0;
      for (const request of queues[place].list) {
        const chip = this.chipWidth(request);
        if (x + chip > to && x > from) [x, row] = [from, row + 1];
        if (row >= rows) break;
        spots.set(request, { x, y: HEAD + row * (CHIP_HEIGHT + CHIP_GAP), w: chip, place });
        x += chip + CHIP_GAP;
        shown++;
      }
      hidden[place] = Math.max(queues[place].count, queues[place].list.length) - shown;
    }
    return { spots, hidden };
  }

  draw(t, paint, { followed = null, moving = true } = {}) {
    const { trace, replay } = this.series;
    if (this.sized !== paint.sized) {
      this.sized = paint.sized;
      this.width = this.root.clientWidth || 600;
      this.stands.clear();
    }
    const before = t > 0 ? this.stand(t - 1).spots : new Map();
    const { queues, spots, hidden } = this.stand(t);
    const books = replay.at(t);
    this.root.classList.toggle("mb-still", !moving);
    for (const [place] of this.plan) {
      const { count, more } = this.columns[place];
      setText(count, String(queues[place].count));
      const text = hidden[place] > 0 ? `+${this.words.say("more", { n: hidden[place] })}` : "";
      setText(more, text);
    }
    const evicted = new Set(trace.entries("evict", t).map((entry) => entry.request));
    const phases = trace.phases(t);
    const free = []; // chips of requests that are no longer in sight: others take them over
    for (const [request, chip] of this.chips) {
      if (spots.has(request)) continue;
      this.chips.delete(request);
      free.push(chip);
    }
    for (const [request, spot] of spots) {
      const known = this.chips.get(request);
      const chip = known ?? this.makeChip(request, free.pop());
      const phase = phases.get(request);
      let look = known ? "mb-chip" : "mb-chip mb-new"; // a new one stands there at once
      if (evicted.has(request)) look += " mb-evicted";
      if (books.finishing.has(request)) look += " mb-finishing";
      if (books.place.get(request) === "refused") look += " mb-refused";
      if (followed === request) look += " mb-followed";
      this.show(chip, spot, look, phase === undefined ? spot.place : PHASE_NAMES[phase]);
    }
    for (const chip of free) chip.node.remove();
    this.drawArrows(t, before, spots);
    this.drawDoor(t);
  }

  /** Touch only what differs: each change costs the page a look at the chip. */
  show(chip, { x, y }, look, phase) {
    const { node } = chip;
    if (chip.x !== x || chip.y !== y) node.style.transform = `translate(${x}px,${y}px)`;
    if (chip.look !== look) node.className = look;
    if (chip.phase !== phase) node.dataset.phase = phase;
    Object.assign(chip, { x, y, look, phase });
  }

  makeChip(request, chip) {
    if (!chip) {
      const node = element("div", { class: "mb-chip", role: "button", tabindex: "-1" }, "");
      node.addEventListener("click", () => this.onPick(Number(node.dataset.request)));
      this.root.append(node);
      chip = { node, look: "mb-chip" };
    }
    const { node } = chip;
    const [fill, ink] = requestColour(request);
    const width = this.chipWidth(request);
    setText(node, this.series.trace.label(request));
    node.dataset.request = request;
    if (chip.fill !== fill) {
      node.style.background = fill;
      node.style.color = ink;
    }
    if (chip.width !== width) node.style.width = `${width}px`;
    Object.assign(chip, { fill, width });
    this.chips.set(request, chip);
    return chip;
  }

  drawArrows(t, before, spots) {
    const { trace } = this.series;
    const parts = [];
    for (const { request, source, target } of trace.entries("move", t)) {
      const [from, to] = [before.get(request), spots.get(request)];
      if (!from || !to || from.place === to.place || parts.length > 11) continue;
      const alarm = PLACES[source] === "running" && PLACES[target] !== "finished";
      // Below the chips, from under where it was to under where it is.
      const [x1, y1] = [from.x + from.w / 2, from.y + CHIP_HEIGHT + 1];
      const [x2, y2] = [to.x + to.w / 2, to.y + CHIP_HEIGHT + 7];
      const low = Math.max(y1, y2) + (alarm ? 34 : 20) + 4 * parts.length;
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", `M${x1} ${y1}C${x1} ${low} ${x2} ${low} ${x2} ${y2}`);
      path.setAttribute("class", alarm ? "mb-arrow mb-alarm" : "mb-arrow");
      const head = document.createElementNS(SVG, "path");
      head.setAttribute("d", `M${x2} ${y2 - 5}l5 7h-10z`);
      head.setAttribute("class", alarm ? "mb-arrow-head mb-alarm" : "mb-arrow-head");
      const origin = document.createElementNS(SVG, "rect");
      const box = { x: from.x, y: from.y, width: from.w, height: CHIP_HEIGHT, rx: 5 };
      for (const [name, value] of Object.entries(box)) origin.setAttribute(name, value);
      origin.setAttribute("class", alarm ? "mb-origin mb-alarm" : "mb-origin");
      parts.push(path, head, origin);
    }
    if (parts.length || this.arrows.firstChild) this.arrows.replaceChildren(...parts);
  }

  /** Shut, and why; open, and for whom; or what an eviction was about. */
  drawDoor(t) {
    const { trace } = this.series;
    const { words } = this;
    const evictions = trace.entries("evict", t);
    const held = trace.get("held_request", t);
    let [state, title, text, numbers] = ["empty", words.say("door.empty"), "", null];
    if (evictions.length) {
      const { culprit, needed, free } = evictions[0];
      state = "evict";
      title = words.say("event.preemption");
      text = evictions.slice(0, 3).map((entry) => this.price(t, entry)).join(words.say("semicolon"));
      if (culprit < 0) text = `${words.say("why.hand")}${words.say("semicolon")}${text}`;
      if (culprit >= 0) numbers = [needed, free, trace.label(culprit)];
    } else if (held >= 0) {
      state = "shut";
      title = words.say("door.shut");
      text = `${trace.label(held)}: ${words.heldReason(trace, t)}`;
      const reason = HELD_REASONS[trace.get("held_reason", t)];
      if (["no_blocks", "watermark", "no_token_budget"].includes(reason)) {
        numbers = [trace.get("held_needed", t), trace.get("held_available", t), trace.label(held)];
        if (reason === "no_blocks") text = ""; // the numbers say it
      }
    } else if (trace.entries("move", t).some(({ target }) => PLACES[target] === "running")) {
      [state, title] = ["open", words.say("door.open")];
    } else if (trace.get("waiting_count", t)) {
      [state, title] = ["shut", words.say("held.unknown")];
    }
    this.doorBox.dataset.state = state;
    setText(this.doorTitle, title);
    setText(this.doorText, text);
    const told = numbers
      ? `${numbers[2]} ${words.say("needs")} ${numbers[0]} · ${words.say("has")} ${numbers[1]}`
      : "";
    setText(this.doorNumbers, told);
    this.drawSquares(numbers);
  }

  /** What an eviction gave back. */
  price(t, { request, mode }) {
    const { trace, replay } = this.series;
    const { tables, taken } = replay.at(t);
    const kept = new Set([...tables.values()].flat().filter((block) => !taken.has(block))); // shared
    const lost = trace.entries("op", t)
      .filter((op) => op.kind === OP.LOST && op.request === request && !kept.has(op.block));
    const values = { who: trace.label(request), blocks: this.words.count("block", lost.length) };
    return this.words.say(`door.${trace.texts[mode]}`, values);
  }

  /** As many squares as are needed; those that are there are filled. */
  drawSquares(numbers) {
    const key = numbers ? `${numbers[0]}/${numbers[1]}` : "";
    if (this.squaresKey === key) return;
    this.squaresKey = key;
    const [needed, free] = numbers ?? [0, 0];
    const shown = Math.min(needed, 24);
    const squares = [];
    for (let i = 0; i < shown; i++) {
      squares.push(element("i", { class: i < free ? "mb-there" : "mb-missing" }));
    }
    this.squares.replaceChildren(...squares);
  }
}
