// A column of Talk: a conversation under one set of settings, its streams, and the branches of its answers.

import { events, send } from "./api.js";
import { count, h, put, say, seconds } from "./dom.js";
import { asked, bodyBehind, bodyOf, detokenize } from "./request.js";
import { TokenPanel, TokenText, chatTokens, completionTokens, textOf } from "./tokens.js";

const THOUGHT = "</think>"; // the end of reasoning, as most models write it
const RATE_S = 0.05; // tokens that came within a shorter time came in one piece: their rate says nothing
const REASONS = { stop: "complete", length: "cut at the limit of tokens", tool_calls: "calls tools" };
const LABELS = { user: "You", assistant: "Answer", completion: "Completion", tool: "Result of a tool", prompt: "Prompt" };

/** Return the id under which the server's records have a request. */
const idOf = (id) => id.replace(/^(chatcmpl|cmpl)-/, "");

/** A way an answer went: `tokens` in the order in which they were drawn, and parts {kind, text, view}. */
class Variant {
  constructor() {
    this.tokens = [];
    this.parts = [];
    this.calls = [];
    this.promptIds = null;
    this.foot = h("p", { class: "foot" });
    this.body = h("div", { class: "parts" });
    this.waiting = []; // tokens whose text has not come
    this.thought = false; // the reasoning of a branch has ended
  }

  /** Return the last part if it is of this kind, or a new one. */
  part(kind) {
    const last = this.parts.at(-1);
    if (last?.kind === kind) return last;
    const view = new TokenText({ reasoning: "Reasoning, token by token", content: "Answer, token by token", raw: "The call as the model wrote it" }[kind]);
    const part = { kind, text: "", view };
    this.parts.push(part);
    if (kind === "reasoning") this.body.append(h("details", { class: "reasoning", open: true }, h("summary", {}, "Reasoning"), view.element));
    else if (kind === "raw") this.body.append(h("details", { class: "raw" }, h("summary", {}, "The call, token by token"), view.element));
    else this.body.append(view.element);
    return part;
  }

  /** Take tokens. They wait for their text: `add` shows it. */
  draw(tokens) {
    for (const token of tokens) {
      token.at = this.tokens.length;
      this.tokens.push(token);
    }
    this.waiting.push(...tokens);
  }

  /** Add a text of a kind, which the tokens that wait have made. */
  add(kind, text) {
    const part = this.part(kind);
    part.text += text;
    part.view.add(text, this.waiting);
    this.waiting = [];
  }

  /** Take a piece of a tool call. Arguments come in pieces. */
  call(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      call = this.calls[delta.index] = { id: "", name: "", arguments: "", code: h("pre", { dir: "auto" }), title: h("strong") };
      this.body.append(h("div", { class: "call" }, h("p", {}, "calls ", call.title), call.code));
    }
    call.id ||= delta.id ?? "";
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
    call.title.textContent = call.name;
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
    } catch {
      shown = call.arguments; // not complete
    }
    call.code.textContent = shown;
  }

  /** Show the tokens that no text came for: those of calls. */
  settle() {
    if (!this.waiting.length || !this.calls.length) return;
    const tokens = this.waiting;
    this.waiting = [];
    const part = this.part("raw");
    for (const token of tokens) {
      part.text += token.text ?? "";
      part.view.add(token.text ?? "", [token]);
    }
  }

  text(kind) {
    return this.parts.filter((part) => part.kind === kind).map((part) => part.text).join("");
  }

  /** Return the turn for the next request. */
  turn() {
    const turn = { role: "assistant", content: this.text("content") };
    if (this.calls.length) {
      turn.tool_calls = this.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    const reasoning = this.text("reasoning");
    return reasoning ? { ...turn, reasoning } : turn;
  }

  /** Return a variant of the same texts and tokens. */
  copy(words) {
    const next = new Variant();
    next.promptIds = this.promptIds;
    next.thought = this.thought;
    next.tokens = [...this.tokens];
    this.calls.forEach((call, index) => next.call({ index, id: call.id, function: { name: call.name, arguments: call.arguments } }));
    for (const { kind, text, view } of this.parts) {
      const spans = [...view.element.querySelectorAll(".t")];
      const whole = spans.map((span) => span.textContent).join("") === text;
      for (const [piece, tokens] of whole ? spans.map((span) => [span.textContent, span.tokens]) : [[text, []]]) {
        next.waiting = tokens;
        next.add(kind, piece);
      }
    }
    next.foot.textContent = words;
    return next;
  }

  /** Return a new variant that begins as this one up to `token`, and goes on with `other` in its place. */
  branch(token, other, text) {
    const next = new Variant();
    next.promptIds = this.promptIds;
    next.tokens = this.tokens.slice(0, token.at);
    for (const part of this.parts) {
      const spans = [...part.view.element.querySelectorAll(".t")];
      for (const span of spans) {
        const own = span.tokens.filter((one) => one.at < token.at);
        if (!own.length) break;
        next.waiting = own;
        next.add(part.kind, own.length === span.tokens.length ? span.textContent : textOf(own));
      }
      if (spans.some((span) => span.tokens.includes(token))) {
        next.draw([{ ...other, text, picked: true, top: token.top }]);
        next.add(part.kind, text);
        break;
      }
    }
    for (const part of next.parts) part.view.element.closest("details")?.setAttribute("open", "");
    return next;
  }
}

/** Add raw text behind a branch: it is of the kind in which the branch began, until the reasoning ends. */
function goOn(variant, text) {
  const last = variant.parts.at(-1).kind;
  if (last !== "reasoning") return variant.add(last, text);
  const end = variant.thought ? 0 : text.indexOf(THOUGHT);
  if (end < 0) return variant.add("reasoning", text);
  if (end > 0) variant.add("reasoning", text.slice(0, end));
  const answer = text.slice(variant.thought ? 0 : end + THOUGHT.length).trimStart();
  variant.thought = true;
  if (answer) variant.add("content", answer);
}

/** A turn of the conversation in the page. */
class Item {
  constructor(role, content) {
    this.role = role;
    this.content = content;
    this.variants = [];
    this.at = 0;
    this.pick = h("span", { class: "variants" });
    this.holder = h("div");
    this.element = h("article", { class: `turn ${role}` }, h("header", {}, h("h3", {}, LABELS[role]), this.pick), this.holder);
    if (content !== undefined) {
      const view = new TokenText("");
      view.element.removeAttribute("tabindex");
      view.element.removeAttribute("role");
      view.element.removeAttribute("aria-label");
      view.add(content, []);
      this.holder.append(view.element);
    }
  }

  get variant() {
    return this.variants[this.at];
  }

  /** Mark the turn as one of a failed request: the next request has no such turn. */
  fail() {
    this.failed = true;
    this.element.classList.add("failed");
    this.element.querySelector("header").append(h("span", { class: "hint" }, "not part of the conversation"));
  }

  show(at) {
    this.at = at;
    put(this.holder, this.variant.body, this.variant.foot);
    if (this.variants.length < 2) return;
    const step = (words, by) => h("button", { type: "button", class: "quiet small", "aria-label": words, disabled: !this.variants[at + by], onclick: () => this.show(at + by) }, by < 0 ? "‹" : "›");
    put(this.pick, step("Answer before", -1), `${at + 1} of ${this.variants.length}`, step("Next answer", 1));
  }
}

export class Lane {
  /** read: returns {settings, shared}. openTimeline: shows a request. busy: called when a stream begins or ends.
   * watched: returns when the server records steps. sent: keeps a request by its id. edit: takes back a message. */
  constructor(name, { read, openTimeline, busy, announce, watched, sent, edit }) {
    Object.assign(this, { name, read, openTimeline, busy, announce, watched, sent, edit });
    this.items = [];
    this.stopper = null;
    this.list = h("div", { class: "turns" });
    this.element = h("section", { class: "lane", "aria-label": `Conversation ${name}` }, h("h2", { class: "lane-name" }, name), this.list);
    this.panel = new TokenPanel(this.element);
    this.element.addEventListener("branch", (event) => this.branch(event.detail));
  }

  get running() {
    return this.stopper !== null;
  }

  clear() {
    this.stop();
    this.items = [];
    this.list.replaceChildren();
  }

  stop() {
    this.stopper?.abort();
  }

  /** Return the turns of the conversation. Turns of a failed request stay in the page, and are left out. */
  turns(items = this.items) {
    const turns = [];
    for (const item of items.filter((one) => !one.failed)) {
      if (item.role === "user") turns.push({ role: "user", content: item.content });
      else if (item.role === "tool") turns.push({ role: "tool", tool_call_id: item.callId, content: item.content });
      else if (item.role === "assistant" && item.variant) turns.push(item.variant.turn());
    }
    return turns;
  }

  push(item) {
    this.items.push(item);
    if (item.role === "user") {
      const title = "Take this message and what follows out of the conversation, and change it";
      item.element.querySelector("header").append(h("button", { type: "button", class: "link", title, onclick: () => this.edit(item) }, "Edit"));
    }
    this.list.append(item.element);
    return item;
  }

  /** Take over the conversation of another column. */
  copy(other) {
    this.clear();
    for (const one of other.items.filter((item) => !item.failed)) {
      const item = this.push(Object.assign(new Item(one.role, one.content), { round: one.round, callId: one.callId }));
      item.variants = one.variants.map((variant) => variant.copy(`copied from ${other.name}`));
      if (item.variants.length) item.show(one.at);
    }
    if (this.items.length) this.offerResults(this.items.at(-1));
  }

  /** Take items out of the page. */
  drop(items) {
    this.items = this.items.filter((one) => !items.includes(one));
    for (const one of items) one.element.remove();
  }

  /** Take the message of a round, and all behind it, out of the conversation. */
  cut(round) {
    const at = this.items.findIndex((one) => one.round === round);
    if (at >= 0) this.drop(this.items.slice(at));
  }

  /** Ask for an answer to a text. round: of all columns. Return false if nothing of an answer came. */
  async send(text, round) {
    this.drop(this.items.filter((one) => one.failed));
    const { settings, shared } = this.read();
    const item = this.push(Object.assign(new Item(shared.mode === "chat" ? "user" : "prompt", text), { round }));
    const turns = shared.mode === "chat" ? this.turns() : [{ content: text }];
    const came = await this.answer(() => bodyOf(settings, shared, turns), settings, shared.mode === "chat" ? "assistant" : "completion");
    if (!came) item.fail();
    return came || !this.items.includes(item); // a new conversation may have begun
  }

  /** Return the request that a text would make, for the export. Without a text: the one of the last answer. */
  preview(text) {
    const { settings, shared } = this.read();
    const turns = shared.mode === "chat" ? this.turns() : [];
    if (!text && turns.at(-1)?.role === "assistant") turns.pop();
    if (text || !turns.length) turns.push({ role: "user", content: text });
    return bodyOf(settings, shared, turns);
  }

  /** Ask for an answer in an item of its own. Return false if nothing of an answer came. */
  async answer(make, settings, role) {
    const item = this.push(new Item(role));
    item.variants.push(new Variant());
    item.show(0);
    const came = await this.stream(item, make, settings);
    if (!came) item.fail();
    return came;
  }

  /** Ask for the last answer once more: it becomes another variant. */
  async regenerate(item) {
    if (this.running) return;
    const before = this.items.slice(0, this.items.indexOf(item));
    const { settings, shared } = this.read();
    const chat = item.role === "assistant";
    const turns = chat ? this.turns(before) : [{ content: before.at(-1).content }];
    for (const old of item.element.querySelectorAll(".error")) old.remove();
    const variant = new Variant();
    item.variants.push(variant);
    const focused = item.element.contains(document.activeElement); // on the button, which goes
    item.show(item.variants.length - 1);
    const came = await this.stream(item, () => bodyOf(settings, { ...shared, mode: chat ? "chat" : "completion" }, turns), settings);
    if (!came) {
      item.variants.pop();
      item.show(item.variants.length - 1);
      item.variant.body.append(...variant.body.querySelectorAll(".error"));
    }
    if (focused && document.activeElement === document.body) item.variant.foot.querySelector(".again")?.focus({ preventScroll: true });
  }

  /** Let an answer go on from another token. Turns behind the answer are dropped: they belong to the other text. */
  async branch({ span, token, other }) {
    if (this.running) return;
    const item = this.items.find((one) => one.element.contains(span));
    const variant = item.variant;
    if (!variant.promptIds) return;
    const { settings, shared } = this.read();
    const next = variant.branch(token, other, other.text ?? (await detokenize(other.id)));
    const behind = this.items.slice(this.items.indexOf(item) + 1);
    this.drop(behind);
    item.variants.push(next);
    item.show(item.variants.length - 1);
    next.parts.at(-1).view.element.focus({ preventScroll: true }); // the alternative that had the focus is gone
    const ids = [...variant.promptIds, ...next.tokens.map((one) => one.id)];
    await this.stream(item, () => bodyBehind(settings, ids), settings, true);
    if (behind.length) next.foot.prepend(`${behind.length} later turn${behind.length === 1 ? "" : "s"} dropped · `);
    if (shared.format || variant.calls.length) next.foot.prepend("goes on as plain tokens, without a grammar · ");
  }

  /** Ask for the variant of an item that is shown. Return false if the request failed, or was stopped, before a token came. */
  async stream(item, make, settings, goesOn = false) {
    const variant = item.variant;
    const stopper = (this.stopper = new AbortController());
    this.busy();
    this.element.setAttribute("aria-busy", "true");
    variant.foot.textContent = "waiting for the first token";
    let begun = performance.now();
    const told = { first: 0, usage: null, reason: "", id: "" };
    const queue = [];
    let frame = 0;
    let failed = false;
    const draw = () => {
      frame = 0;
      for (const change of queue.splice(0)) change();
    };
    const later = (change) => {
      queue.push(change);
      frame ||= setTimeout(draw, 30);
    };
    try {
      const { path, body } = make();
      const json = asked(path, body, Number(settings.alternatives));
      await this.watched();
      begun = performance.now();
      const response = await send(path, { json, signal: stopper.signal });
      for await (const { data } of events(response)) {
        if (data === "[DONE]") continue; // the response is read to its end, else it counts as given up
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        if (!told.id && event.id) this.sent(idOf(event.id), { path, body: { ...json, stream: false, stream_options: undefined } });
        this.take(variant, event, told, later, goesOn, begun);
      }
      draw();
      variant.settle();
      this.foot(item, variant, told, begun);
      this.announce(`${this.name}: the answer is complete.`);
    } catch (error) {
      draw();
      variant.settle();
      failed = !variant.tokens.length && !variant.parts.length && !variant.calls.length;
      told.reason = stopper.signal.aborted ? "stopped by you" : "failed";
      if (!stopper.signal.aborted) variant.body.append(h("p", { class: "error", role: "alert" }, error.message));
      this.foot(item, variant, told, begun);
    } finally {
      clearTimeout(frame);
      if (this.stopper === stopper) this.stopper = null;
      this.element.removeAttribute("aria-busy");
      if (!failed) this.offerResults(item);
      this.busy();
    }
    return !failed;
  }

  /** Take an event of a stream. */
  take(variant, event, told, later, goesOn, begun) {
    told.id ||= event.id ?? "";
    if (event.usage) told.usage = event.usage;
    const choice = event.choices?.[0];
    const ids = event.prompt_token_ids ?? choice?.prompt_token_ids;
    if (ids && !goesOn) variant.promptIds = ids;
    if (!choice) return;
    if (choice.finish_reason) told.reason = choice.finish_reason;
    const delta = choice.delta;
    const text = delta ? delta.content ?? "" : choice.text;
    const thought = delta ? delta.reasoning ?? delta.reasoning_content ?? "" : "";
    const tokens = delta ? chatTokens(choice.logprobs) : completionTokens(choice.logprobs, choice.text);
    if (!told.first && (text || thought || tokens.length || delta?.tool_calls)) told.first = performance.now() - begun;
    if (!text && !thought && !tokens.length && !delta?.tool_calls) return;
    later(() => {
      say(variant.foot, "writing");
      variant.draw(tokens);
      if (thought) variant.add("reasoning", thought);
      if (text && goesOn) goOn(variant, text);
      else if (text) variant.add("content", text);
      for (const call of delta?.tool_calls ?? []) variant.call(call);
    });
  }

  foot(item, variant, told, begun) {
    const all = (performance.now() - begun) / 1000;
    const words = [REASONS[told.reason] ?? (told.reason || "no end was told")];
    if (told.usage) {
      words.push(`${count(told.usage.completion_tokens)} tokens`);
      const rest = all - told.first / 1000;
      if (told.usage.completion_tokens > 1 && rest > RATE_S) words.push(`${count((told.usage.completion_tokens - 1) / rest)} tokens/s`);
      words.push(`${told.usage.prompt_tokens_details?.cached_tokens ?? 0} of ${told.usage.prompt_tokens} prompt tokens cached`);
    }
    if (told.first) words.push(`first token after ${seconds(told.first / 1000)}`);
    const id = idOf(told.id);
    put(variant.foot, words.join(" · "), " ",
      id ? h("button", { type: "button", class: "link", onclick: () => this.openTimeline(id) }, "timeline") : null, " ",
      h("button", { type: "button", class: "link again", onclick: () => this.regenerate(item) }, "Regenerate"));
  }

  /** Under calls of tools: a field for each result, and a button that sends them. */
  offerResults(item) {
    const calls = item.variant?.calls ?? [];
    if (!calls.length || this.items.at(-1) !== item) return;
    const fields = calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}, for example {"ok": true}` }));
    const box = h("form", { class: "results" }, fields, h("button", { class: "primary" }, "Send results"));
    box.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (this.running) return;
      this.drop(this.items.filter((one) => one.failed));
      box.remove();
      const results = calls.map((call, at) => Object.assign(this.push(new Item("tool", fields[at].value)), { callId: call.id }));
      const { settings, shared } = this.read();
      const turns = this.turns();
      if (await this.answer(() => bodyOf(settings, shared, turns), settings, "assistant")) return;
      for (const one of results) one.fail();
      item.variant.body.append(box); // with the texts of its fields
    });
    item.variant.body.append(box);
  }
}
