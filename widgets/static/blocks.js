// The KV block map: a cell a block. Owner by colour and letter, how full it is, what happens to it.

class BlockMap {
  constructor(parent, series, words, options = {}) {
    this.series = series;
    this.words = words;
    const about = series.trace.about;
    const used = options.live ? 256 : Math.max(about.most_cpu, 64);
    this.cpuCells = Math.min(about.cpu_blocks, used);
    this.showCpu = about.swaps && this.cpuCells > 0;
    this.painted = 0; // cells, since the beginning
    this.sheet = new Sheet(parent, "mb-blocks", options.height ?? 190);
  }

  /** The largest cells that all fit, in rows as even as can be. */
  grid(count, width, height) {
    for (const side of [36, 32, 29, 26, 24, 22, 20, 18, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2]) {
      const columns = Math.max(1, Math.floor(width / side));
      const rows = Math.ceil(count / columns);
      if (rows * side <= height || side === 2) {
        const even = side >= 12 ? Math.ceil(count / rows) : columns;
        return { side, columns: even, fits: Math.min(count, even * Math.floor(height / side)) };
      }
    }
  }

  layout() {
    const { trace } = this.series;
    const key = `${this.sheet.width}/${trace.blocks}`;
    if (this.key === key) return;
    this.key = key;
    const width = this.sheet.width - 2;
    const cpuRows = this.showCpu ? 46 : 0;
    this.device = this.grid(trace.blocks, width, this.sheet.height - 4 - cpuRows);
    this.device.top = 2;
    if (this.showCpu) {
      this.host = this.grid(this.cpuCells, width, 26);
      this.host.top = this.sheet.height - 28;
    }
  }

  draw(t, paint, { followed = null } = {}) {
    const { sheet, series } = this;
    sheet.fit(paint);
    this.layout();
    const { context } = sheet;
    const books = series.replay.at(t);
    const pool = series.replay.pool(t);
    const { fits } = this.device;
    const { blocks } = series.trace;
    const key = [paint.theme, followed, sheet.width, sheet.scale, blocks].join();
    if (this.drawnKey !== key) {
      this.drawnKey = key;
      sheet.clear(paint.colours.bg);
      this.looks = new Float64Array(fits).fill(NaN); // what each cell shows now
    }
    for (let block = 0; block < fits; block++) {
      const look = this.look(pool, books, block);
      if (look === this.looks[block]) continue;
      this.looks[block] = look;
      this.cell(context, paint, block, series.replay.block(t, block), books, followed);
      this.painted++;
    }
    if (blocks > fits) this.note(context, paint, this.words.say("more", { n: blocks - fits }));
    if (this.showCpu) this.drawCpu(context, paint, books, followed);
  }

  /** A number that changes whenever the cell must be painted again; NaN: paint it anyway. */
  look({ owner, sharers, filled, written }, books, block) {
    if (books.lost.has(block)) return NaN; // rare, and has many looks
    if (owner[block] < 0) return books.cached.has(block) ? -2 : -1;
    if (sharers.has(block)) return NaN;
    const { block_size: size } = this.series.trace.about;
    return (owner[block] * (size + 1) + filled[block]) * 2 + written[block];
  }

  cell(context, paint, block, cell, books, followed) {
    const { side, columns, top } = this.device;
    const x = (block % columns) * side + 1;
    const y = Math.floor(block / columns) * side + top;
    const w = side > 4 ? side - 2 : side - (side > 2 ? 1 : 0);
    const { colours } = paint;
    const { about } = this.series.trace;
    const request = cell?.owners[0];
    const pale = cell !== null && followed !== null && !cell.owners.includes(followed);
    const full = cell ? cell.filled / about.block_size : 0;
    if (full < 1 || pale || w >= 8) { // a small full one covers what was there
      const margin = side > 4 ? 1 : 0;
      context.fillStyle = colours.bg;
      context.fillRect(x - margin, y - margin, side, side);
    }
    if (!cell) {
      if (w < 3) return;
      const lost = books.lost.get(block);
      context.strokeStyle = lost === undefined ? colours.line : colours.alarm;
      context.lineWidth = lost === undefined || w < 8 ? 1 : 2;
      if (lost !== undefined) context.setLineDash([3, 2]);
      context.strokeRect(x + 0.5, y + 0.5, w - 1, w - 1);
      context.setLineDash([]);
      context.lineWidth = 1;
      if (lost !== undefined && w >= 12) this.letter(context, lost, x, y, w, colours.alarm);
      if (books.cached.has(block)) {
        context.fillStyle = colours.strong;
        const r = Math.max(1, w / 4);
        const at = lost === undefined || w < 12 ? w / 2 - r / 2 : w - r - 3;
        context.fillRect(x + at, y + at, r, r);
      }
      if (about.null_block && block === 0 && w >= 6) cross(context, x + w / 2, y + w / 2, w / 5, colours.strong);
      return;
    }
    const [fill, ink] = requestColour(request);
    context.globalAlpha = pale ? 0.25 : 1;
    if (full < 1) {
      context.globalAlpha *= 0.28;
      context.fillStyle = fill;
      context.fillRect(x, y, w, w);
      context.globalAlpha = pale ? 0.25 : 1;
    }
    context.fillStyle = fill;
    context.fillRect(x, y + w * (1 - full), w, w * full);
    if (w >= 5) {
      if (cell.owners.length > 1) {
        context.fillStyle = paint.hatch(context, "slash", ink);
        context.fillRect(x, y, w, w);
      }
      context.strokeStyle = colours.strong;
      context.strokeRect(x + 0.5, y + 0.5, w - 1, w - 1);
    }
    if (cell.written && w >= 3) {
      context.strokeStyle = colours.cursor;
      context.lineWidth = w >= 9 ? 2 : 1;
      context.strokeRect(x + context.lineWidth / 2, y + context.lineWidth / 2, w - context.lineWidth, w - context.lineWidth);
      context.lineWidth = 1;
    }
    if (books.lost.has(block) && books.taken.has(block) && w >= 8) {
      // It was another's until this step: a corner keeps the former owner's colour.
      context.fillStyle = requestColour(books.lost.get(block))[0];
      context.strokeStyle = colours.alarm;
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x + w, y);
      context.lineTo(x + w, y + w * 0.45);
      context.lineTo(x + w * 0.55, y);
      context.closePath();
      context.fill();
      context.stroke();
      context.lineWidth = 1;
    }
    if (w >= 12) {
      const letterInk = full > 0.6 ? ink : colours.text;
      this.letter(context, request, x, y, w, letterInk, cell.owners.length);
    }
    context.globalAlpha = 1;
  }

  letter(context, request, x, y, w, ink, owners = 1) {
    context.font = `600 ${Math.min(12, w - 4)}px ${FONT}`;
    context.fillStyle = ink;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const text = owners > 1 ? `${this.series.trace.label(request)}${w >= 18 ? `×${owners}` : ""}`
      : this.series.trace.label(request);
    context.fillText(text, x + w / 2, y + w / 2 + 0.5, w - 2);
    context.textAlign = "start";
  }

  drawCpu(context, paint, books, followed) {
    const { side, columns, top, fits } = this.host;
    context.fillStyle = paint.colours.bg;
    context.fillRect(0, top - 18, this.sheet.width, this.sheet.height - top + 18);
    context.font = `11px ${FONT}`;
    context.fillStyle = paint.colours.muted;
    context.textBaseline = "alphabetic";
    const more = this.series.trace.about.cpu_blocks - fits;
    const note = more > 0 ? ` (${this.words.say("more", { n: more })})` : "";
    context.fillText(this.words.say("panel.cpu") + note, 1, top - 5);
    const owners = new Map();
    for (const [request, table] of books.cpu) for (const block of table) owners.set(block, request);
    const w = side > 4 ? side - 2 : side;
    for (let block = 0; block < fits; block++) {
      const x = (block % columns) * side + 1;
      const y = Math.floor(block / columns) * side + top;
      const request = owners.get(block);
      if (request === undefined) {
        context.strokeStyle = paint.colours.line;
        if (w >= 3) context.strokeRect(x + 0.5, y + 0.5, w - 1, w - 1);
        continue;
      }
      const [fill, ink] = requestColour(request);
      context.globalAlpha = followed !== null && followed !== request ? 0.25 : 1;
      context.fillStyle = fill;
      context.fillRect(x, y, w, w);
      context.strokeStyle = paint.phase("swapped").edge;
      if (w >= 4) context.strokeRect(x + 0.5, y + 0.5, w - 1, w - 1);
      if (w >= 12) this.letter(context, request, x, y, w, ink);
      context.globalAlpha = 1;
    }
  }

  note(context, paint, text) {
    context.font = `11px ${FONT}`;
    const width = context.measureText(text).width + 10;
    context.fillStyle = paint.colours.bg;
    context.fillRect(this.sheet.width - width, this.sheet.height - 18, width, 18);
    context.fillStyle = paint.colours.text;
    context.textBaseline = "middle";
    context.fillText(text, this.sheet.width - width + 5, this.sheet.height - 9);
  }

  /** {block, owners} under a point of the device pool. */
  hit(x, y) {
    if (!this.device) return null;
    const { side, columns, top, fits } = this.device;
    const column = Math.floor((x - 1) / side);
    const block = Math.floor((y - top) / side) * columns + column;
    if (column < 0 || column >= columns || block < 0 || block >= fits) return null;
    return { block };
  }
}
