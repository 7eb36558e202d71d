// Throughput: four small charts of the whole run, a number above each, the present step marked.

const CHART_HEIGHT = 58;
const CURSOR_WIDTH = 2;

class Charts {
  constructor(parent, series, words, onSeek) {
    this.series = series;
    this.words = words;
    this.root = element("div", { class: "mb-charts" });
    this.parts = [
      ["tokens_per_s", (p, g) => this.rates(p, g)],
      ["batch", (p, g) => this.batch(p, g)],
      ["free_blocks", (p, g) => this.memory(p, g)],
      ["step_time", (p, g) => this.times(p, g)],
    ].map(([name, paint]) => {
      const value = element("b", { "data-number": name });
      const more = element("span", { class: "mb-chart-more" });
      const head = element("div", { class: "mb-chart-head" }, words.say(`number.${name}`) + " ", value, more);
      const box = element("div", { class: "mb-chart" }, head);
      this.root.append(box);
      const sheet = new Sheet(box, "mb-chart-sheet", CHART_HEIGHT);
      sheet.canvas.addEventListener("click", (event) => {
        const n = series.trace.n;
        onSeek(Math.min(n - 1, Math.floor((event.offsetX / sheet.width) * n)));
      });
      return { name, value, more, sheet, paint, cursor: sheet.mark("mb-cursor") };
    });
    parent.append(this.root);
  }

  draw(t, paint) {
    const { trace } = this.series;
    const numbers = shownNumbers(this.series, t);
    const more = {
      tokens_per_s: "",
      batch: `${this.words.say("number.useful")} ${numbers.useful}`
        + (numbers.padding === "0" ? "" : ` · ${this.words.say("number.padding")} ${numbers.padding}`),
      free_blocks: numbers.cached === "0" ? "" : `${this.words.say("block.cached")} ${numbers.cached}`,
      step_time: numbers.predicted ? `${this.words.say("number.predicted")} ${numbers.predicted}` : "",
    };
    for (const part of this.parts) {
      setText(part.value, numbers[part.name]);
      setText(part.more, more[part.name]);
      const { sheet } = part;
      sheet.fit(paint);
      const key = `${trace.n}/${paint.theme}/${sheet.width}/${sheet.scale}`;
      if (part.key !== key) {
        part.key = key;
        const pen = sheet.clear(paint.colours.panel);
        if (trace.n) part.paint(paint, { pen, w: sheet.width, h: sheet.height, n: trace.n });
      }
      Sheet.move(part.cursor, ((t + 0.5) / Math.max(1, trace.n)) * sheet.width, CURSOR_WIDTH);
    }
  }

  /** A bar a step, on top of what `base` says. */
  bars({ pen, w, h, n }, colour, most, value, base = () => 0) {
    pen.fillStyle = colour;
    pen.beginPath();
    const wide = w / n;
    for (let t = 0; t < n; t++) {
      const from = (base(t) / most) * (h - 4);
      const size = (value(t) / most) * (h - 4);
      if (size > 0) pen.rect(t * wide, h - from - size, Math.max(wide - (wide > 4 ? 1 : 0), 0.7), size);
    }
    pen.fill();
  }

  curve({ pen, w, h, n }, colour, most, value, dashed = false) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1.6;
    pen.setLineDash(dashed ? [4, 3] : []);
    pen.beginPath();
    for (let t = 0; t < n; t++) {
      const y = h - 2 - (value(t) / (most || 1)) * (h - 6);
      if (Number.isNaN(y)) continue;
      pen.lineTo(((t + 0.5) / n) * w, y);
    }
    pen.stroke();
    pen.setLineDash([]);
  }

  rates(paint, g) {
    const { trace } = this.series;
    this.curve(g, paint.colours.accent, trace.peak.rate, (t) => trace.rate(t));
  }

  /** Rows of the batch, stacked: prefill, recompute, decode, padding, sitting out. */
  batch(paint, g) {
    const { trace } = this.series;
    const counts = PHASE_NAMES.map(() => new Int32Array(g.n));
    const phases = trace.columns.lane_phase?.data;
    for (let t = 0; t < g.n; t++) {
      for (let i = trace.starts.lane[t]; i < trace.starts.lane[t + 1]; i++) counts[phases[i]][t]++;
    }
    const below = new Int32Array(g.n);
    for (const code of [2, 0, 1, 3, 4]) {
      const { fill, edge } = paint.phase(PHASE_NAMES[code]);
      const colour = code === 3 ? edge : fill;
      this.bars(g, colour, trace.peak.rows, (t) => counts[code][t], (t) => below[t]);
      for (let t = 0; t < g.n; t++) below[t] += counts[code][t];
    }
  }

  memory(paint, g) {
    const { trace } = this.series;
    const most = Math.max(1, trace.blocks);
    this.bars(g, paint.colours.strong, most, (t) => trace.get("free", t));
    this.bars(g, paint.colours.accent, most, (t) => trace.get("cached", t));
  }

  times(paint, g) {
    const { trace } = this.series;
    this.bars(g, paint.colours.strong, trace.peak.step_s, (t) => trace.get("duration_s", t));
    this.curve(g, paint.colours.alarm, trace.peak.step_s, (t) => trace.get("predicted_s", t), true);
  }
}

/** The numbers of step t, as they are written on the page. */
function shownNumbers(series, t) {
  const { trace } = series;
  const get = (name) => trace.get(name, t);
  const ms = (seconds) => {
    if (Number.isNaN(seconds)) return "";
    return seconds >= 10 ? `${seconds.toFixed(2)} s` : `${(1e3 * seconds).toFixed(1)} ms`;
  };
  const computed = get("total_batched") + get("total_padding");
  return {
    step: String(get("step")),
    time: ms(trace.endOf(t)),
    tokens_per_s: trace.rate(t).toFixed(1),
    batch: String(get("running_count")),
    useful: String(get("tokens")),
    padding: String(get("padding")),
    free_blocks: String(get("free")),
    cached: String(get("cached")),
    waiting: String(get("waiting_count")),
    swapped: String(get("swapped_count")),
    step_time: ms(get("duration_s")),
    predicted: ms(get("predicted_s")),
    ttft: ms(get("ttft_s")) || "–",
    tpot: ms(get("tpot_s")) || "–",
    generated: String(get("total_generated")),
    preemptions: String(get("total_preemptions")),
    finished: String(get("total_finished")),
    idle: String(get("total_idle")),
    recomputed: String(get("total_recomputed")),
    useful_share: `${((100 * get("total_batched")) / (computed || 1)).toFixed(1)} %`,
  };
}
