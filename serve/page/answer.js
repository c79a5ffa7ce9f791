// One answer: its tokens in the colours of their sources, and its figures.

const template = document.getElementById("answer-template");
const legend = document.getElementById("legend");
const detail = document.getElementById("detail");
const UNDERLINES = 5; // styles in page.css; used again where there are more drafters

/** An answer that grows. Text of the model becomes text nodes, never markup. */
export class Answer {
  tokens = [];
  text = "";
  reasoning = "";
  complete = false;
  #firstAt = 0;
  #spans = [];
  #pending = []; // spans and the rest of their tokens' texts, until the answer has it
  #current = -1;

  constructor(title) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.#part("h2").textContent = title;
    const text = this.#part(".text");
    for (const part of [text, this.#part(".reasoning p")]) {
      part.addEventListener("pointerover", (event) => this.#show(this.#spans.indexOf(event.target)));
    }
    text.addEventListener("keydown", (event) => this.#walk(event));
    text.addEventListener("focus", () => this.#show(Math.max(0, this.#current)));
    text.addEventListener("blur", () => this.#spans[this.#current]?.classList.remove("current"));
  }

  /** Tokens per second: the server's figure once the answer is complete, as seen from here until then. */
  speed = 0;

  /** Take a chunk of the stream. */
  add(chunk) {
    for (const choice of chunk.choices) {
      const { content = "", reasoning_content: reasoning = "" } = choice.delta;
      this.text += content;
      this.reasoning += reasoning;
      this.#append(choice.tokens ?? []);
      this.#appendRounds(choice.rounds ?? []);
      if (reasoning) this.#part(".reasoning").hidden = false;
      this.#place(reasoning, this.#part(".reasoning p"));
      this.#place(content, this.#part(".text"));
      if (choice.finish_reason === "length") this.#part(".end").textContent = "Ends here: max tokens, or the context is full.";
    }
    if (chunk.speculative) this.#showFinal(chunk.speculative);
  }

  /** Nothing follows. `note` says why, if it is not the answer's own end. */
  end(note = "", isError = false) {
    this.complete = !note;
    const end = this.#part(".end");
    if (note) end.textContent = note;
    end.classList.toggle("error", isError);
  }

  /** Frame the token at `index`, where another answer has a different one. */
  markDifference(index) {
    this.#spans[index]?.classList.add("differs");
  }

  #part(selector) {
    return this.element.querySelector(selector);
  }

  #append(tokens) {
    if (!tokens.length) return;
    this.#firstAt ||= performance.now();
    const spans = tokens.map(span);
    this.tokens.push(...tokens);
    this.#spans.push(...spans);
    this.#pending.push(...tokens.map(({ text }, i) => ({ element: spans[i], text })));
    this.#showLive();
  }

  #appendRounds(rounds) {
    if (!rounds.length) return;
    this.#part(".rounds").hidden = false;
    this.#part(".rounds ol").append(...rounds.map(round));
  }

  /** Show a piece of the answer in its tokens' colours. Marks before it, as those of reasoning, are left out. */
  #place(piece, part) {
    let skip = this.#pending.map(({ text }) => text).join("").indexOf(piece);
    if (skip < 0) return part.append(piece);
    for (let left = piece.length; left; ) {
      const [first] = this.#pending;
      const hidden = Math.min(skip, first.text.length);
      const shown = first.text.slice(hidden, hidden + left);
      skip -= hidden;
      left -= shown.length;
      first.text = first.text.slice(hidden + shown.length);
      first.element.textContent += shown;
      if ((shown || !hidden) && !first.element.parentElement) part.append(first.element);
      if (!first.text) this.#pending.shift();
    }
  }

  #showLive() {
    const seconds = (performance.now() - this.#firstAt) / 1000;
    const decoded = this.tokens.slice(1); // the first one comes from reading the prompt
    const acceptedAt = [];
    let rounds = 0;
    let position = 0;
    for (const { source } of decoded) {
      if (source === "accepted") {
        acceptedAt[position] = (acceptedAt[position] ?? 0) + 1;
        position += 1;
      } else {
        rounds += 1;
        position = 0;
      }
    }
    const speed = seconds > 0 ? decoded.length / seconds : 0;
    this.#showFigures({ speed, tau: rounds ? decoded.length / rounds : 0, rounds, acceptedAt });
  }

  #showFinal({ tau, rounds, accepted_at: acceptedAt, tokens_per_second: speed }) {
    this.#showFigures({ speed, tau, rounds, acceptedAt });
  }

  #showFigures({ speed, tau, rounds, acceptedAt }) {
    this.speed = speed;
    this.#part(".speed").textContent = speed ? speed.toFixed(1) : "–";
    this.#part(".tau").textContent = tau ? tau.toFixed(2) : "–";
    this.#part(".count").textContent = this.tokens.length;
    const shares = rounds ? acceptedAt.map((count) => Math.min(1, count / rounds)) : [];
    const bars = this.#part(".bars");
    while (bars.children.length < shares.length) bars.append(document.createElement("span"));
    shares.forEach((share, position) => (bars.children[position].style.height = `${100 * share}%`));
    bars.setAttribute("aria-label", shares.map((share) => share.toFixed(2)).join(" ") || "no drafts");
    bars.title = bars.ariaLabel;
  }

  #walk(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.#show(Math.min(this.#spans.length - 1, Math.max(0, this.#current + step)));
  }

  #show(index) {
    if (!this.#spans[index]) return;
    this.#spans[this.#current]?.classList.remove("current");
    this.#current = index;
    this.#spans[index].classList.toggle("current", document.activeElement === this.#part(".text"));
    const { text, source, drafter } = this.tokens[index];
    const meaning = legend.querySelector(`[data-source="${source}"]`).textContent;
    detail.textContent = `Token ${index + 1} ${JSON.stringify(text)}: ${meaning}${drafter ? ` from ${drafter}` : ""}`;
  }
}

function span({ source, drafter }) {
  const element = document.createElement("span");
  element.className = "token";
  element.dataset.source = source;
  if (drafter) element.dataset.style = styleOf(drafter);
  return element;
}

/** A round as a list item: its draft tokens, refused ones struck out, and its times. */
function round({ drafter, filler, filled, reasons, texts, probs, accepted, emitted, draft_s, verify_s, overhead_s }) {
  const item = document.createElement("li");
  const by = filled ? `${drafter} and ${filler}` : drafter;
  const head = texts.length ? `${by}: ` : `no draft (${reasons.join(", ").replaceAll("_", " ") || "nothing for this answer"})`;
  item.append(head, ...texts.flatMap((text, node) => [proposed(text, probs?.[node], accepted.includes(node)), " "]));
  const ms = [["draft", draft_s], ["verify", verify_s], ["overhead", overhead_s]].map(([name, s]) => `${name} ${(1000 * s).toFixed(1)} ms`);
  item.append(` → ${emitted.length} token${emitted.length === 1 ? "" : "s"}; ${ms.join(", ")}`);
  return item;
}

function proposed(text, prob, isAccepted) {
  const element = document.createElement(isAccepted ? "ins" : "del");
  element.textContent = JSON.stringify(text);
  if (prob != null) element.title = `probability ${prob.toFixed(2)}`;
  return element;
}

/** The underline of a drafter; the legend has it from its first token on. */
const drafters = [];
function styleOf(drafter) {
  if (!drafters.includes(drafter)) {
    drafters.push(drafter);
    const entry = span({ source: "accepted", drafter });
    entry.textContent = drafter;
    entry.dataset.drafter = drafter;
    legend.append(entry);
  }
  return drafters.indexOf(drafter) % UNDERLINES;
}
