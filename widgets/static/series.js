// One run on the page: its badge, its sentence, its panels.

class Series {
  constructor(player, about) {
    this.player = player;
    this.trace = new Trace(about);
    this.replay = new Replay(this.trace);
    this.t = 0;
    this.ended = false;
  }

  /** Lay the panels out; sizes come from the run's maxima and never change again. */
  build(parent, { panels, compare, lanes, live }) {
    const { player } = this;
    const { words } = player;
    const { about } = this.trace;
    const simulated = about.source === "simulated";
    const source = simulated ? "badge.simulated" : "badge.measured";
    const { hardware } = about;
    const badge = words.say(hardware ? source : `${source}.plain`, { hardware });
    const head = element("div", { class: "mb-head" },
      element("strong", { class: "mb-policy", text: about.title || about.policy }),
      element("span", { class: "mb-model", text: about.model }),
      element("span", { class: "mb-badge", "data-source": about.source, text: badge }));
    this.headline = element("span", { class: "mb-headline" });
    this.details = element("span", { class: "mb-details" });
    this.story = element("div", { class: "mb-story" }, this.headline, this.details);
    this.root = element("section", { class: "mb-series", "data-policy": about.policy }, head, this.story);
    parent.append(this.root);
    const row = element("div", { class: compare ? "mb-side" : "" });
    this.root.append(row);
    if (panels.includes("timeline")) {
      const box = this.panel(row, "timeline");
      const mostHeight = compare ? 150 : MOST_LANES_HEIGHT;
      this.timeline = new Timeline(box, this, words, { lanes, live, mostHeight });
      this.listen(this.timeline, (hit) => hit && (hit.request ?? null));
      if (!compare) this.phases = new PhaseLegend(box, words);
    }
    const middle = compare ? row : element("div", { class: "mb-middle" });
    if (!compare) this.root.append(middle);
    if (panels.includes("queues") && !compare) {
      this.board = new Board(this.panel(middle, "queues"), this, words, (r) => player.follow(r, this), live);
    }
    if (panels.includes("blocks")) {
      const box = this.panel(middle, "blocks");
      const height = compare ? this.timeline?.sheet.height ?? 150 : this.board?.height ?? 150;
      this.blocks = new BlockMap(box, this, words, { height, live });
      this.listen(this.blocks, (hit) => (hit ? this.replay.block(this.t, hit.block)?.owners[0] ?? null : null));
      if (!compare) this.legend(box);
    }
    if (panels.includes("throughput") && !compare) {
      const box = this.panel(this.root, "charts");
      this.charts = new Charts(box, this, words, (t) => player.seek(player.positionOf(this, t), true));
      this.numbers = this.numberRow(box);
    }
  }

  panel(parent, name) {
    const title = this.player.words.say(`panel.${name}`);
    const box = element("div", { class: `mb-panel mb-panel-${name}`, role: "group", "aria-label": title },
      element("div", { class: "mb-panel-title", text: title }));
    parent.append(box);
    return box;
  }

  legend(parent) {
    const { words } = this.player;
    const entry = (kind) => element("span", { class: "mb-key" },
      element("i", { class: `mb-swatch mb-swatch-${kind}` }), words.say(`block.${kind}`));
    const kinds = ["written", "shared", "reserved", "cached", "lost", "free"];
    parent.append(element("div", { class: "mb-legend" }, ...kinds.map(entry)));
  }

  numberRow(parent) {
    const { words } = this.player;
    const list = element("div", { class: "mb-numbers" });
    const nodes = {};
    for (const name of ["time", "ttft", "tpot", "generated", "finished", "waiting", "preemptions", "idle", "useful_share"]) {
      nodes[name] = element("b", { "data-number": name });
      list.append(element("span", {}, words.say(`number.${name}`) + " ", nodes[name]));
    }
    parent.append(list);
    return nodes;
  }

  /** Click to go there or to follow, hover for numbers. */
  listen(panel, pick) {
    const { canvas } = panel.sheet;
    canvas.addEventListener("click", (event) => {
      const hit = panel.hit(event.offsetX, event.offsetY);
      const request = pick(hit);
      if (request !== null && request !== undefined && request !== false) this.player.follow(request, this);
      else if (hit && hit.t !== undefined) this.player.seek(this.player.positionOf(this, hit.t), true);
    });
    canvas.addEventListener("mousemove", (event) => {
      const hit = panel.hit(event.offsetX, event.offsetY);
      this.player.showTip(event, this.tipText(hit));
    });
    canvas.addEventListener("mouseleave", () => this.player.showTip(null));
  }

  tipText(hit) {
    if (!hit || !this.trace.n) return "";
    const { trace } = this;
    const { words } = this.player;
    if (hit.block !== undefined) {
      const cell = this.replay.block(this.t, hit.block);
      const books = this.replay.at(this.t);
      const lost = books.lost.get(hit.block);
      if (!cell) {
        const state = trace.about.null_block && hit.block === 0 ? "null"
          : books.cached.has(hit.block) ? "cached" : "free";
        const was = lost === undefined ? "" : ` (${trace.label(lost)}: ${words.say("block.lost")})`;
        return `#${hit.block}: ${words.say(`block.${state}`)}${was}`;
      }
      const owners = cell.owners.map((request) => trace.requests.get(request)?.id).join(", ");
      const filled = `${cell.filled}/${trace.about.block_size}`;
      return `#${hit.block}: ${owners}, ${filled}${cell.written ? `, ${words.say("block.written")}` : ""}`;
    }
    if (hit.request === null) return `${words.say("step", { step: trace.get("step", hit.t) })}`;
    const request = trace.requests.get(hit.request);
    const lane = trace.entries("lane", hit.t).find((entry) => entry.request === hit.request);
    const parts = [`${request.id} · ${words.say("step", { step: trace.get("step", hit.t) })}`];
    if (lane) {
      parts.push(`${words.say(`phase.${PHASE_NAMES[lane.phase]}`)}: ${words.count("token", lane.new)}`);
      parts.push(`KV ${lane.context}`);
      if (lane.padding) parts.push(`${words.say("phase.padding")} ${lane.padding}`);
    } else {
      const swapped = trace.queue("swapped", hit.t).includes(hit.request);
      parts.push(words.say(swapped ? "place.swapped" : "place.waiting"));
    }
    return parts.join(" · ");
  }

  draw(paint) {
    const { trace, t, player } = this;
    if (!trace.n) return;
    const { words } = player;
    const [headline, ...rest] = trace.clauses[t];
    const alarm = trace.starts.evict[t + 1] > trace.starts.evict[t];
    this.story.classList.toggle("mb-alarm", alarm);
    const step = words.say("step", { step: trace.get("step", t) }) + words.say("colon");
    setText(this.headline, step + headline + (rest.length ? words.say("semicolon") : words.say("stop")));
    setText(this.details, rest.length ? rest.join(words.say("semicolon")) + words.say("stop") : "");
    const followed = player.followed?.series === this ? player.followed.request
      : player.followed ? this.sameRequest(player.followed) : null;
    const options = {
      axis: player.axis, followed, ended: this.ended, moving: player.gliding, common: player.common,
    };
    this.timeline?.draw(t, paint, options);
    this.phases?.draw(paint);
    this.board?.draw(t, paint, options);
    this.blocks?.draw(t, paint, options);
    this.charts?.draw(t, paint);
    if (this.numbers) {
      const shown = shownNumbers(this, t);
      for (const [name, node] of Object.entries(this.numbers)) setText(node, shown[name]);
    }
    this.tell(t);
    this.root.dataset.step = trace.get("step", t);
  }

  /** In words, what the canvases show. */
  tell(t) {
    const { trace, timeline, blocks, charts } = this;
    const { words } = this.player;
    timeline?.sheet.tell(words.sentence(trace, t));
    blocks?.sheet.tell(`${words.say("panel.blocks")}: ${trace.get("free", t)} ${words.say("block.free")}`);
    for (const { name, value, sheet } of charts?.parts ?? []) {
      sheet.tell(`${words.say(`number.${name}`)} ${value.textContent}`);
    }
  }

  /** Numbers are shared by compared traces: the same request has the same one. */
  sameRequest({ request }) {
    return this.trace.requests.has(request) ? request : null;
  }
}
