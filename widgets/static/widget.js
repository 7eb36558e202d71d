// The door to Jupyter (anywidget), and to a page without a kernel.

function makePlayer(el, model) {
  const root = document.createElement("div");
  el.append(root);
  const player = new Player(root, {
    lang: model.get("lang"),
    mode: model.get("mode"),
    axis: model.get("axis"),
    panels: model.get("panels"),
    series: model.get("series").map((entry) => entry.about),
    send: (message) => model.send(message),
    onRest: (position) => {
      if (model.get("mode") === "live") return;
      model.set("step", position);
      model.save_changes();
    },
  });
  root.player = player; // for tests and for the curious
  return player;
}

/** Load what is packed in the model, then whatever came meanwhile, then the rest as it comes. */
async function load(player, model) {
  const series = model.get("series");
  for (let i = 0; i < series.length; i++) {
    const bytes = await unzip(series[i].data);
    if (player.closed) return;
    if (bytes.length) player.series[i].trace.append(bytes);
  }
}

function render({ model, el }) {
  const player = makePlayer(el, model);
  const { root } = player;
  const waiting = [];
  let have = null; // steps that the kernel has sent us so far; null: still loading
  const take = (message, buffers) => {
    if (message.kind === "append") {
      if (message.from !== have) {
        if (message.from > have) model.send({ kind: "sync", have });
        return; // a gap: what is missing will come; or something we have already
      }
      player.series[0].trace.append(new Uint8Array(buffers[0].buffer ?? buffers[0],
        buffers[0].byteOffset ?? 0, buffers[0].byteLength));
      have = player.series[0].trace.n;
      root.dataset.have = have;
      player.dirty();
    } else if (message.kind === "state") player.liveBar?.show(message.state, message.error);
  };
  const onMessage = (message, buffers) => {
    if (have === null) waiting.push([message, buffers]);
    else take(message, buffers);
  };
  model.on("msg:custom", onMessage);
  const onStep = () => player.seek(model.get("step"));
  model.on("change:step", onStep);
  load(player, model).then(() => {
    if (player.closed) return;
    have = player.series[0].trace.n;
    root.dataset.have = have;
    for (const [message, buffers] of waiting.splice(0)) take(message, buffers);
    player.position = Math.min(model.get("step") ?? 0, Math.max(0, player.length - 1));
    player.draw();
    root.dataset.ready = "1";
    if (player.live) model.send({ kind: "ready", have });
  }).catch((error) => {
    root.dataset.ready = "error";
    root.textContent = String(error);
  });
  return () => {
    model.off("msg:custom", onMessage);
    model.off("change:step", onStep);
    player.close();
    root.remove();
  };
}
