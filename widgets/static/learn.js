// Learning aids: a guess, a quiz, a deck of cards.

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");

function showPredict(root, state, send) {
  const { words } = state;
  const said = node("output", { class: "mb-said", text: words["predict.none"] });
  const input = state.choices.length
    ? node("select", { "aria-label": state.text })
    : node("input", { type: "number", step: "any", "aria-label": state.text });
  for (const choice of state.choices) input.append(node("option", { value: choice, text: choice }));
  const take = () => {
    if (input.value === "") return;
    const value = state.choices.length ? input.value : Number(input.value);
    send({ kind: "guess", value });
    said.textContent = fill(words["predict.taken"], { guess: `${value} ${state.unit}`.trim() });
  };
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") take(); });
  root.append(node("p", { class: "mb-question", text: state.text }),
    node("div", { class: "mb-row" }, input, node("span", { text: state.unit }),
      node("button", { type: "button", text: words["predict.submit"], onclick: take }), said));
}

function showQuiz(root, state, send) {
  state.questions.forEach((question, number) => {
    const verdict = node("output", { class: "mb-verdict" });
    const buttons = question.choices.map((choice, index) => node("button", {
      type: "button", class: "mb-choice", text: `${"ABCDEFGH"[index]}  ${choice}`,
      onclick: () => {
        const right = index === question.answer;
        send({ kind: "answer", number, choice: index });
        buttons.forEach((button, i) => {
          button.dataset.verdict = i === question.answer ? "right" : i === index ? "wrong" : "";
        });
        const mark = right ? state.words["quiz.right"] : state.words["quiz.wrong"];
        verdict.textContent = `${mark} ${question.why}`;
      },
    }));
    root.append(node("div", { class: "mb-item", role: "group", "aria-label": question.text },
      node("p", { class: "mb-question", text: question.text }), ...buttons, verdict));
  });
}

function showCards(root, state) {
  const { words } = state;
  let deck = state.cards.slice();
  const face = node("div", { class: "mb-face", "aria-live": "polite" });
  const left = node("output", { class: "mb-said" });
  const turn = node("button", { type: "button", text: words["cards.turn"], onclick: () => flip() });
  const known = node("button", { type: "button", text: words["cards.known"], onclick: () => next(true) });
  const again = node("button", { type: "button", text: words["cards.again"], onclick: () => next(false) });
  let back = false;
  const draw = () => {
    const over = deck.length === 0;
    face.textContent = over ? words["cards.done"] : back ? deck[0].back : deck[0].front;
    face.dataset.side = back ? "back" : "front";
    left.textContent = fill(words["cards.left"], { n: deck.length });
    known.disabled = again.disabled = over || !back;
  };
  const flip = () => {
    if (!deck.length) deck = state.cards.slice();
    else back = !back;
    draw();
  };
  const next = (wasKnown) => {
    const card = deck.shift();
    if (!wasKnown) deck.push(card);
    back = false;
    draw();
  };
  root.addEventListener("keydown", (event) => {
    if (event.target.tagName === "BUTTON" || event.key !== " ") return;
    event.preventDefault();
    flip();
  });
  face.addEventListener("click", flip);
  root.append(face, node("div", { class: "mb-row" }, turn, again, known, left));
  draw();
}

function theme(root) {
  const flag = document.body.dataset.jpThemeLight;
  const dark = flag ? flag === "false" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "dark" : "light";
}

function render({ model, el }) {
  const root = node("div", { class: "mb-root mb-learn", tabindex: "0", "data-lm-suppress-shortcuts": "true" });
  const observer = new MutationObserver(() => theme(root));
  observer.observe(document.body, { attributes: true });
  theme(root);
  const state = JSON.parse(model.get("state"));
  const show = { predict: showPredict, quiz: showQuiz, cards: showCards }[model.get("kind")];
  show(root, state, (message) => model.send(message));
  el.append(root);
  root.dataset.ready = "1";
  return () => {
    observer.disconnect();
    root.remove();
  };
}

export default { render };
