// Buttons, slider, event strip. Every control has a name for screen readers.

const SPEEDS = [1, 2, 5, 10, 30, 60];
const EVENT_KINDS = ["admission", "preemption", "swap", "finish"];
const STRIP_HEIGHT = 16;
const ICONS = {
  first: "M3 3h2v10H3zM13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  play: "M4 2l10 6-10 6z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M5 3v10l7-5z",
  last: "M11 3h2v10h-2zM3 3v10l7-5z",
  jump_back: "M8 3v10L2 8zM14 3v10L8 8z",
  jump_next: "M2 3v10l6-5zM8 3v10l6-5z",
  table: "M2 3h12v2H2zM2 7h12v2H2zM2 11h12v2H2z",
};

/** A small drawing, in the colour of the text. */
function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "mb-icon");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

class Controls {
  constructor(parent, player) {
    this.player = player;
    const { words } = player;
    const button = (name, act) => element("button", {
      type: "button", class: "mb-button", "data-control": name, onclick: act,
      "aria-label": words.say(`control.${name}`), title: words.say(`control.${name}`),
    }, icon(name));
    this.play = button("play", () => player.togglePlay());
    this.slider = element("input", {
      type: "range", min: 0, max: 0, value: 0, step: 1, class: "mb-slider",
      "aria-label": words.say("control.slider"),
      oninput: () => player.seek(Number(this.slider.value)),
      onchange: () => player.announce(),
    });
    this.speed = this.select("control.speed", SPEEDS.map((speed) => [speed, `${speed}/s`]),
      (value) => { player.speed = Number(value); });
    this.speed.value = String(player.speed);
    this.kind = this.select("control.jump", EVENT_KINDS.map((kind) => [kind, words.say(`event.${kind}`)]),
      () => {});
    this.kind.value = "preemption";
    this.axis = this.select("control.axis",
      [["iterations", words.say("control.iterations")], ["ms", words.say("control.ms")]],
      (value) => player.setAxis(value));
    this.position = element("output", { class: "mb-position", "data-number": "position" });
    this.table = button("table", () => player.toggleTable());
    this.table.setAttribute("aria-expanded", "false");
    const bar = element("div", { class: "mb-controls", role: "group" },
      button("first", () => player.seek(0, true)),
      button("back", () => player.go(-1)),
      this.play,
      button("next", () => player.go(1)),
      button("last", () => player.seek(player.length - 1, true)),
      this.speed,
      element("span", { class: "mb-jump" },
        button("jump_back", () => player.jump(this.kind.value, -1)),
        this.kind,
        button("jump_next", () => player.jump(this.kind.value, 1))),
      this.axis, this.table, this.position);
    const track = element("div", { class: "mb-track" }, this.slider);
    parent.append(bar, track);
    this.strip = new Sheet(track, "mb-strip", STRIP_HEIGHT);
    this.strip.canvas.setAttribute("aria-hidden", "true");
    this.strip.canvas.addEventListener("click", (event) => {
      const room = this.strip.width - 16;
      player.seek(Math.round(((event.offsetX - 8) / room) * (player.length - 1)), true);
    });
  }

  select(key, options, act) {
    const name = this.player.words.say(key);
    const node = element("select", {
      class: "mb-select", "aria-label": name, title: name, "data-control": key.split(".")[1],
      onchange: () => act(node.value),
    });
    for (const [value, text] of options) node.append(element("option", { value, text }));
    return node;
  }

  draw(paint) {
    const { player, slider } = this;
    const last = Math.max(0, player.length - 1);
    if (Number(slider.max) !== last) slider.max = last;
    if (Number(slider.value) !== player.position) slider.value = player.position;
    const digits = 2 * String(last).length + 3; // room for the largest number: nothing moves
    if (this.digits !== digits) this.position.style.width = `${digits + 1}ch`;
    this.digits = digits;
    setText(this.position, `${player.position} / ${last}`);
    this.drawStrip(paint);
  }

  /** Ticks where something happened, under the slider. */
  drawStrip(paint) {
    const { strip, player } = this;
    const resized = strip.fit(paint);
    const key = `${player.length}/${player.axis}/${paint.theme}/${strip.width}`;
    if (!resized && key === this.key) return;
    this.key = key;
    const context = strip.clear(paint.colours.bg);
    const room = strip.width - 16;
    const x = (position) => 8 + (position / Math.max(1, player.length - 1)) * room;
    const { colours } = paint;
    const marks = [
      ["admission", colours.accent, 0, 4],
      ["finish", colours.good, 12, 4],
      ["swap", paint.phase("swapped").edge, 4, 8],
      ["preemption", colours.alarm, 0, 16],
    ];
    for (const [kind, colour, y, height] of marks) {
      context.fillStyle = colour;
      for (const position of player.eventPositions(kind)) {
        context.fillRect(x(position) - 0.75, y, kind === "preemption" ? 2.2 : 1.5, height);
      }
    }
  }

  playing(on) {
    const key = on ? "control.pause" : "control.play";
    this.play.replaceChildren(icon(on ? "pause" : "play"));
    this.play.setAttribute("aria-label", this.player.words.say(key));
    this.play.title = this.player.words.say(key);
  }
}
