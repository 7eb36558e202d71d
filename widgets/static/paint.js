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

class Paint {
  constructor(theme) {
    this.theme = theme;
    this.colours = PALETTE.themes[theme];
    this.patterns = new Map();
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

  /** A request's letter on its colour. Returns the width. */
  tag(context, label, number, x, y, h, room = Infinity) {
    const [fill, ink] = requestColour(number);
    const size = Math.min(11, h - 2);
    context.font = `600 ${size}px ${FONT}`;
    const width = Math.min(room, Math.max(h * 0.72, context.measureText(label).width + 6));
    context.fillStyle = fill;
    context.fillRect(x, y, width, h);
    context.strokeStyle = "#1B1F24";
    context.strokeRect(x + 0.5, y + 0.5, width - 1, h - 1);
    context.fillStyle = ink;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(label, x + width / 2, y + h / 2 + 0.5, width - 2);
    context.textAlign = "start";
    return width;
  }
}

/** A canvas in CSS pixels, as sharp as the screen. */
class Sheet {
  constructor(parent, className, height) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = className;
    this.canvas.setAttribute("role", "img");
    this.height = height;
    this.width = 0;
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    parent.append(this.canvas);
  }

  /** Take the width that the page gives. True: it has changed. */
  fit() {
    const width = Math.max(40, Math.floor(this.canvas.clientWidth));
    const scale = window.devicePixelRatio || 1;
    if (width === this.width && scale === this.scale) return false;
    [this.width, this.scale] = [width, scale];
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    return true;
  }

  /** Remember what is painted now... */
  keep() {
    this.kept ??= document.createElement("canvas");
    this.kept.width = this.canvas.width;
    this.kept.height = this.canvas.height;
    this.kept.getContext("2d").drawImage(this.canvas, 0, 0);
  }

  /** ...and bring it back. */
  restore() {
    const { context, scale } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.kept, 0, 0);
    context.setTransform(scale, 0, 0, scale, 0, 0);
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
  if (node.textContent !== text) node.textContent = text;
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
