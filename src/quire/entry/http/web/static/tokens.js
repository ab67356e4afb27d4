// Tokens of an answer: their texts in the page, and the panel with probabilities and alternatives.

import { detokenize } from "./request.js";
import { h, percent, put, visible } from "./dom.js";

const MOST_SPANS = 8000; // tokens with an element of their own, for each answer
export const MOST_SHOWN = 200_000; // characters in the page for each answer, at first
const PIECE = 4000; // characters of an element: the browser lays out only elements that changed
const decoder = new TextDecoder();

const idOf = (name) => Number(/^token_id:(\d+)$/.exec(name)?.[1] ?? NaN);

/** Return the tokens of a chat event: {id, bytes, text, logprob, top}. `text` is null where bytes are no whole characters. */
export function chatTokens(logprobs) {
  return (logprobs?.content ?? []).map((one) => ({ ...chatToken(one), top: one.top_logprobs.map(chatToken) }));
}

function chatToken({ token, logprob, bytes }) {
  return { id: idOf(token), bytes, text: bytes ? decoder.decode(new Uint8Array(bytes)) : null, logprob };
}

/** Return the tokens of a completion event. Alternatives have no texts yet: the panel asks the server for them. */
export function completionTokens(logprobs, text) {
  if (!logprobs) return [];
  const characters = Array.from(text);
  const first = logprobs.text_offset[0];
  return logprobs.tokens.map((token, at) => ({
    id: idOf(token),
    bytes: null,
    text: characters.slice(logprobs.text_offset[at] - first, (logprobs.text_offset[at + 1] ?? Infinity) - first).join(""),
    logprob: logprobs.token_logprobs[at],
    top: Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([name, logprob]) => ({ id: idOf(name), bytes: null, text: null, logprob })),
  }));
}

/** Return the text that tokens make together. */
export const textOf = (tokens) =>
  tokens.every((token) => token.bytes)
    ? decoder.decode(new Uint8Array(tokens.flatMap((token) => token.bytes)))
    : tokens.map((token) => token.text ?? "").join("");

/** An element that grows by texts and their tokens. All text goes in as text nodes. */
export class TokenText {
  constructor(label) {
    this.element = h("div", { class: "tokens", dir: "auto", role: "group", "aria-label": label, tabindex: 0 });
    this.spans = 0;
    this.length = 0;
    this.shown = 0;
    this.limit = MOST_SHOWN;
    this.rest = []; // texts that are not in the page
  }

  /** Add a text that these tokens make. */
  add(text, tokens) {
    this.length += text.length;
    if (this.shown >= this.limit) {
      this.rest.push(text);
      this.note();
      return;
    }
    if (this.shown + text.length > this.limit) {
      const room = this.limit - this.shown;
      this.rest.push(text.slice(room));
      text = text.slice(0, room);
      this.note();
    }
    this.shown += text.length;
    const whole = tokens.length > 1 && tokens.every((token) => token.text !== null) && tokens.map((token) => token.text).join("") === text;
    const parts = whole ? tokens.map((token) => [token.text, [token]]) : [[text, tokens]];
    for (const [part, own] of parts) {
      if (own.length && this.spans < MOST_SPANS) {
        this.spans += 1;
        const span = h("span", { class: "t" }, part);
        span.tokens = own;
        if (own[0].picked) span.classList.add("picked");
        const surprise = Math.min(...own.map((token) => token.logprob));
        span.dataset.p = surprise > -0.11 ? 4 : surprise > -0.7 ? 3 : surprise > -2.3 ? 2 : 1; // 90 %, 50 %, 10 %
        this.place().append(span);
      } else {
        for (let begin = 0; begin < part.length; begin += PIECE) this.place().append(part.slice(begin, begin + PIECE));
      }
    }
  }

  /** Return the element for the next piece of text: a new one after a line end, so that old ones stay as they are. */
  place() {
    const last = this.element.lastElementChild;
    if (last?.classList.contains("piece") && last.textContent.length < PIECE) return last;
    const piece = h("span", { class: "piece" });
    if (this.more) this.more.before(piece);
    else this.element.append(piece);
    return piece;
  }

  note() {
    if (!this.more) {
      this.more = h("button", { type: "button", class: "quiet more", onclick: () => this.showMore() });
      this.element.append(this.more);
    }
    this.more.textContent = `Show more: ${(this.length - this.shown).toLocaleString("en")} further characters`;
  }

  showMore() {
    const text = this.rest.join("");
    this.rest = [];
    this.length -= text.length;
    this.limit += MOST_SHOWN;
    this.more.remove();
    this.more = null;
    this.add(text, []);
  }
}

/** The panel under a token: its probability, the alternatives, and buttons that let the answer go on from one. */
export class TokenPanel {
  constructor(host) {
    this.element = h("div", { class: "token-panel", role: "dialog", "aria-label": "Token and alternatives", hidden: true });
    this.host = host;
    this.span = null;
    this.pinned = false;
    this.timer = 0;
    host.append(this.element);
    host.addEventListener("pointerover", (event) => this.hover(event));
    document.addEventListener("pointerdown", (event) => {
      const own = this.element.contains(event.target) || (host.contains(event.target) && event.target.closest(".t"));
      if (!own) this.close(false);
    });
    host.addEventListener("click", (event) => {
      const span = event.target.closest(".t");
      if (!span || !getSelection().isCollapsed) return;
      if (this.pinned && span === this.span) this.close(false);
      else this.open(span, true);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.span) return;
      event.stopPropagation(); // Escape has another meaning where no panel is open
      this.close(host.contains(document.activeElement));
    }, true);
    host.addEventListener("keydown", (event) => this.press(event));
    host.addEventListener("focusin", (event) => {
      if (event.target.classList.contains("tokens") && event.target.matches(":focus-visible") && !event.target.querySelector(".t.here")) {
        event.target.querySelector(".t")?.classList.add("here");
      }
    });
    addEventListener("scroll", (event) => {
      if (!this.span || this.element.contains(event.target)) return;
      if (this.pinned) this.place();
      else this.close(false);
    }, true);
  }

  hover(event) {
    if (event.pointerType === "touch") return;
    const span = event.target.closest(".t");
    clearTimeout(this.timer);
    if (this.element.contains(event.target)) return;
    if (span && !this.pinned) this.timer = setTimeout(() => this.open(span, false), 80);
    else if (!this.pinned) this.timer = setTimeout(() => this.close(false), 250);
  }

  press(event) {
    if (!event.target.classList.contains("tokens")) return;
    const spans = [...event.target.querySelectorAll(".t")];
    const here = event.target.querySelector(".t.here");
    const at = spans.indexOf(here);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (next !== undefined && spans.length) {
      event.preventDefault();
      here?.classList.remove("here");
      const span = spans[Math.max(0, Math.min(next, spans.length - 1))];
      span.classList.add("here");
      this.open(span, false);
    } else if ((event.key === "Enter" || event.key === " ") && here) {
      event.preventDefault();
      this.open(here, true);
      this.element.querySelector("button")?.focus();
    }
  }

  open(span, pinned) {
    clearTimeout(this.timer);
    this.pinned = pinned;
    this.span?.classList.remove("open");
    this.span = span;
    span.classList.add("open");
    const token = span.tokens[0];
    const parts = span.tokens.map((one) => this.part(span, one));
    put(this.element, parts, h("p", { class: "hint" },
      token.top.length ? "Choose an alternative: the answer goes on from there. Later turns are dropped." : "This request asked for no alternatives."));
    this.element.hidden = false;
    this.place();
  }

  /** Put the panel beside its token; close it if the token is not to be seen. */
  place() {
    const box = this.span.getClientRects()[0];
    const view = this.host.parentElement.getBoundingClientRect();
    if (!box || box.bottom < view.top || box.top > view.bottom) {
      this.close(false);
      return;
    }
    const width = this.element.offsetWidth;
    const height = this.element.offsetHeight;
    const below = box.bottom + height + 8 < innerHeight || box.top < height + 8;
    this.element.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.element.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - height - 4)}px`;
  }

  part(span, token) {
    const probability = Math.exp(token.logprob);
    const rows = token.top.map((one) => {
      const same = one.id === token.id;
      const words = h("bdi", { class: "piece-text" }, one.text === null ? "…" : visible(one.text));
      if (one.text === null) detokenize(one.id).then((text) => { one.text = text; words.textContent = visible(text); }, () => { words.textContent = `token ${one.id}`; });
      const share = Math.exp(one.logprob);
      return h("li", {},
        h("button", { type: "button", class: same ? "same" : null, "aria-current": same ? "true" : null,
          onclick: () => {
            this.close(false);
            this.host.dispatchEvent(new CustomEvent("branch", { detail: { span, token, other: one } }));
          } },
          words, h("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" }), h("span", { class: "share" }, percent(share))));
    });
    return [
      h("p", { class: "token-head" }, h("bdi", { class: "piece-text" }, visible(token.text ?? "")), ` ${percent(probability)} `,
        h("span", { class: "faint" }, `logprob ${token.logprob.toFixed(2)} · id ${token.id}`)),
      h("ul", {}, rows),
    ];
  }

  close(back) {
    clearTimeout(this.timer);
    this.element.hidden = true;
    this.pinned = false;
    this.span?.classList.remove("open");
    if (back) this.span?.closest(".tokens")?.focus();
    this.span = null;
  }
}
