// Buttons of a live run. They ask; the kernel answers with steps and with its state.

class LiveBar {
  constructor(parent, player) {
    this.player = player;
    const { words } = player;
    const button = (name, key) => element("button", {
      type: "button", class: "mb-button mb-wide", "data-live": name, text: words.say(key),
      onclick: () => this.ask(name),
    });
    this.run = button("run", "control.run");
    this.step = button("step", "control.step");
    this.stop = button("stop", "control.stop");
    this.preempt = button("preempt", "control.preempt");
    this.add = button("add", "control.add");
    this.state = element("output", { class: "mb-live-state", "data-number": "live_state" });
    this.error = element("span", { class: "mb-error", role: "alert" });
    parent.append(element("div", { class: "mb-live", role: "group" },
      this.step, this.run, this.stop, this.preempt, this.add, this.state, this.error));
    this.show("paused");
  }

  ask(name) {
    const { player } = this;
    setText(this.error, "");
    if (name === "run" && this.now === "running") name = "pause";
    const followed = player.followed && player.followed.series.trace.requests.get(player.followed.request);
    if (name === "preempt" && !followed) return;
    player.followsEnd = true;
    player.pause();
    player.options.send?.({ kind: name, request: followed?.id });
  }

  show(state, error = "") {
    this.now = state;
    this.player.root.dataset.live = state;
    const { words } = this.player;
    setText(this.state, words.say(`live.${state}`));
    setText(this.run, words.say(state === "running" ? "control.pause" : "control.run"));
    const over = state === "stopped" || state === "no_kernel";
    for (const node of [this.run, this.step, this.stop, this.add]) node.disabled = over;
    if (error) setText(this.error, error);
    this.picked();
  }

  picked() {
    const { followed } = this.player;
    const over = this.now === "stopped" || this.now === "no_kernel";
    this.preempt.disabled = over || !followed;
    const who = followed ? ` ${followed.series.trace.label(followed.request)}` : "";
    setText(this.preempt, this.player.words.say("control.preempt") + who);
  }

  draw() {}
}
