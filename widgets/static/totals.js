// Compared runs, number by number; the best of each row is marked.

const TOTAL_ROWS = [
  ["steps", "low"], ["time", "low"], ["tokens_per_s", "high"], ["useful_share", "high"],
  ["padding", "low"], ["idle", "low"], ["ttft", "low"], ["tpot", "low"],
  ["preemptions", "low"], ["recomputed", "low"], ["finished", "high"],
];

class Totals {
  constructor(parent, player) {
    this.player = player;
    const { words } = player;
    const table = element("table", { class: "mb-totals" }, element("caption", { text: words.say("panel.totals") }));
    const heads = player.series.map(({ trace }) => element("th", { scope: "col", text: trace.about.title || trace.about.policy }));
    table.append(element("tr", {}, element("td"), ...heads));
    this.cells = TOTAL_ROWS.map(([name]) => {
      const cells = player.series.map((_, i) => element("td", { "data-total": name, "data-series": i }));
      table.append(element("tr", {}, element("th", { scope: "row", text: words.say(`number.${name}`) }), ...cells));
      return cells;
    });
    parent.append(table);
  }

  /** The numbers of a run so far; those of `value` compare, those of `text` are shown. */
  numbers(series) {
    const { trace, t } = series;
    const shown = shownNumbers(series, t);
    const get = (name) => trace.get(name, t);
    return {
      steps: [t + 1, String(t + 1)],
      time: [trace.endOf(t), shown.time],
      tokens_per_s: [trace.rate(t), shown.tokens_per_s],
      useful_share: [parseFloat(shown.useful_share), shown.useful_share],
      padding: [get("total_padding"), String(get("total_padding"))],
      idle: [get("total_idle"), shown.idle],
      ttft: [get("ttft_s"), shown.ttft],
      tpot: [get("tpot_s"), shown.tpot],
      preemptions: [get("total_preemptions"), shown.preemptions],
      recomputed: [get("total_recomputed"), shown.recomputed],
      finished: [get("total_finished"), shown.finished],
    };
  }

  draw() {
    const { series } = this.player;
    const all = series.map((one) => (one.trace.n ? this.numbers(one) : null));
    const over = series.every((one) => one.t === one.trace.n - 1);
    TOTAL_ROWS.forEach(([name, better], row) => {
      const values = all.map((numbers) => numbers?.[name][0] ?? NaN);
      const best = better === "low" ? Math.min(...values) : Math.max(...values);
      this.cells[row].forEach((cell, i) => {
        setText(cell, all[i]?.[name][1] ?? "");
        // Only whole runs are compared: a run that is ahead has used more by now.
        const wins = over && values[i] === best && values.some((value) => value !== best);
        cell.classList.toggle("mb-best", wins);
      });
    });
  }
}
