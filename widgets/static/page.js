// Without a kernel: the same player over data that stands in the page.

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** As much of a Jupyter model as the player asks for. */
function pageModel(state) {
  return { get: (name) => state[name], set() {}, save_changes() {}, send() {}, on() {}, off() {} };
}

/** Bring every picture of the page to life that has not been yet. */
function start() {
  for (const holder of document.querySelectorAll("[data-minibatch]:not([data-started])")) {
    holder.dataset.started = "1";
    const state = JSON.parse(holder.querySelector("script[type='application/json']").textContent);
    for (const entry of state.series) entry.data = bytesOf(entry.data);
    const still = holder.querySelector(".mb-still-picture");
    const el = document.createElement("div");
    holder.append(el);
    render({ model: pageModel(state), el });
    if (still) still.hidden = true;
  }
}

/** The style once a page. */
function addStyle() {
  if (document.getElementById("minibatch-style")) return;
  const style = document.createElement("style");
  style.id = "minibatch-style";
  style.textContent = STYLE;
  document.head.append(style);
}
