// Colours by theme, and a canvas that stays sharp. PALETTE stands at the top of the bundle.

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

/** "light" or "dark": what the page around us is. */
function pageTheme() {
  const body = document.body;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false" ? "dark" : "light";
  if (body.classList.contains("vscode-dark")) return "dark";
  if (body.classList.contains("vscode-light")) return "light";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Calls back whenever the page changes its theme. Returns how to stop. */
function watchTheme(callback) {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const observer = new MutationObserver(callback);
  observer.observe(document.body, { attributes: true });
  media.addEventListener("change", callback);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", callback);
  };
}

/** Fill and ink of a request. */
function requestColour(number) {
  return PALETTE.requests[number % PALETTE.requests.length];
}

/** A colour as a pixel of image data. */
function pixel(hex, alpha = 1) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return ((Math.round(255 * alpha) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

class Paint {
  constructor(theme) {
    this.theme = theme;
    this.colours = PALETTE.themes[theme];
    this.patterns = new Map();
    this.widths = new Map(); // of letters, so that they are measured once
    this.sized = 0; // counts how often the page has changed its width
  }

  /** {fill, ink, edge, pattern} of a phase. */
  phase(name) {
    const [fill, ink, light, dark, pattern] = PALETTE.phases[name];
    return { fill, ink, edge: this.theme === "dark" ? dark : light, pattern };
  }

  /** A hatch as a canvas pattern, made once. */
  hatch(context, name, ink) {
    const key = name + ink;
    if (!this.patterns.has(key)) {
      const size = name === "dots" ? 5 : 6;
      const tile = new OffscreenCanvas(size, size);
      const pen = tile.getContext("2d");
      pen.globalAlpha = 0.5;
      pen.strokeStyle = pen.fillStyle = ink;
      const lines = {
        slash: [[-1, size + 1, size + 1, -1], [-1, 1, 1, -1], [size - 1, size + 1, size + 1, size - 1]],
        back: [[-1, -1, size + 1, size + 1], [-1, size - 1, 1, size + 1], [size - 1, -1, size + 1, 1]],
      };
      lines.cross = [...lines.slash, ...lines.back];
      if (name === "dots") pen.fillRect(2, 2, 1.6, 1.6);
      else {
        pen.beginPath();
        for (const [x1, y1, x2, y2] of lines[name]) {
          pen.moveTo(x1, y1);
          pen.lineTo(x2, y2);
        }
        pen.stroke();
      }
      this.patterns.set(key, context.createPattern(tile, "repeat"));
    }
    return this.patterns.get(key);
  }

  /** A box of work: fill, hatch and edge as its phase has them. */
  work(context, name, x, y, w, h) {
    const { fill, ink, edge, pattern } = this.phase(name);
    context.fillStyle = fill;
    context.fillRect(x, y, w, h);
    if (pattern && h >= 5) {
      context.fillStyle = this.hatch(context, pattern, ink);
      context.fillRect(x, y, w, h);
    }
    if (h >= 7 && w >= 3) {
      context.strokeStyle = edge;
      context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    }
  }

  /** How wide a request's tag is; sets the font. */
  tagWidth(context, label, h) {
    const size = Math.min(11, h - 2);
    context.font = `600 ${size}px ${FONT}`;
    const key = `${size}/${label}`;
    if (!this.widths.has(key)) this.widths.set(key, context.measureText(label).width);
    return Math.max(h * 0.72, this.widths.get(key) + 6);
  }

  /** A request's letter on its colour. */
  tag(context, label, number, x, y, h, room = Infinity) {
    const [fill, ink] = requestColour(number);
    const width = Math.min(room, this.tagWidth(context, label, h));
    context.fillStyle = fill;
    context.fillRect(x, y, width, h);
    context.strokeStyle = "#1B1F24";
    context.strokeRect(x + 0.5, y + 0.5, width - 1, h - 1);
    context.fillStyle = ink;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(label, x + width / 2, y + h / 2 + 0.5, width - 2);
    context.textAlign = "start";
  }
}

/** A canvas in CSS pixels, as sharp as the screen. What moves with every step (a frame, a cursor)
 * lies above it as an element, so that the canvas is not painted again for it. */
class Sheet {
  constructor(parent, className, height) {
    this.box = element("div", { class: "mb-sheet" });
    this.canvas = document.createElement("canvas");
    this.canvas.className = className;
    this.canvas.setAttribute("role", "img");
    this.height = height;
    this.width = 0;
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.box.append(this.canvas);
    parent.append(this.box);
  }

  /** What it shows, for those who cannot see it. */
  tell(text) {
    if (this.told !== text) this.canvas.setAttribute("aria-label", text);
    this.told = text;
  }

  /** An element above the canvas; `move` puts it where it belongs. */
  mark(className, left = 0) {
    this.over ??= element("div", { class: "mb-over", "aria-hidden": "true" });
    this.over.style.left = `${left}px`;
    const node = element("div", { class: className });
    this.over.append(node);
    this.box.append(this.over);
    return { node, left, x: null, width: null };
  }

  /** Nothing but a shift where the width stays: neither laid out nor painted again. */
  static move(mark, x, width = null) {
    if (mark.x !== x) mark.node.style.transform = `translateX(${x - mark.left}px)`;
    if (mark.width !== width) mark.node.style.width = `${width}px`;
    [mark.x, mark.width] = [x, width];
  }

  /** Take the width that the page gives; asked for only when the page has changed its width, since
   * to ask lays the page out. True: it has changed. */
  fit({ sized }) {
    const scale = window.devicePixelRatio || 1;
    if (sized === this.sized && scale === this.scale) return false;
    this.sized = sized;
    const width = Math.max(40, Math.floor(this.canvas.clientWidth));
    if (width === this.width && scale === this.scale) return false;
    [this.width, this.scale] = [width, scale];
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    return true;
  }

  /** An empty sheet to paint on. */
  clear(colour) {
    const { context, scale } = this;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.fillStyle = colour;
    context.fillRect(0, 0, this.width, this.height);
    context.lineWidth = 1;
    return context;
  }
}

function line(context, x1, y1, x2, y2, colour, width = 1) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
  context.lineWidth = 1;
}

function cross(context, x, y, r, colour) {
  line(context, x - r, y - r, x + r, y + r, colour, 2.2);
  line(context, x - r, y + r, x + r, y - r, colour, 2.2);
}

/** An element with attributes and children. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Change text only where it differs: the page is then laid out only where it must be. */
function setText(node, text) {
  const { firstChild } = node;
  if (firstChild === null) node.append(text);
  else if (firstChild.data !== text) firstChild.data = text;
}

/** The first index of a sorted list whose value is not below `value`. */
function lowerBound(list, value, key = (item) => item) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(list[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
