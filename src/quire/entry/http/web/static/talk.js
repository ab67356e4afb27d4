// The view Talk: settings, one or two conversations, and the field for the next prompt.

import { ask, send } from "./api.js";
import { copy, h, put, say } from "./dom.js";
import { Lane } from "./lane.js";
import { asCurl, asPython } from "./request.js";

const FIELDS = [
  // name, label, type, default, step, words
  ["max_tokens", "Max tokens", "number", "256", "1", ""],
  ["temperature", "Temperature", "number", "", "0.05", "0 takes the most probable token"],
  ["top_p", "Top p", "number", "", "0.05", ""],
  ["top_k", "Top k", "number", "", "1", ""],
  ["min_p", "Min p", "number", "", "0.01", ""],
  ["repetition_penalty", "Repetition penalty", "number", "", "0.05", ""],
  ["presence_penalty", "Presence penalty", "number", "", "0.1", ""],
  ["frequency_penalty", "Frequency penalty", "number", "", "0.1", ""],
  ["seed", "Seed", "number", "", "1", ""],
];
const MOST_SENT = 50; // requests that can be sent again
const WATCHED_MS = 300; // for the server to begin to record the steps of a request
const WATCHED_ON_MS = 2000; // for the last event of a request to come
const EFFORTS = ["", "none", "minimal", "low", "medium", "high"];
const TOOLS = JSON.stringify(
  [{ type: "function", function: { name: "get_weather", description: "Return the weather of a city.", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }],
  null, 2);
const SCHEMA = JSON.stringify(
  { type: "object", properties: { name: { type: "string" }, year: { type: "integer" } }, required: ["name", "year"], additionalProperties: false },
  null, 2);
const FORMATS = [
  ["", "Free text"], ["json_schema", "JSON of a schema"], ["json_object", "Any JSON object"],
  ["regex", "Regular expression"], ["choice", "One of these lines"], ["grammar", "Grammar (Lark or GBNF)"],
];
const EXAMPLES = { json_schema: SCHEMA, regex: "[0-9]{4}-[0-9]{2}-[0-9]{2}", choice: "yes\nno", grammar: 'start: "yes" | "no"' };

const field = (label, control, words) => h("label", { class: "field" }, h("span", {}, label), control, words ? h("small", {}, words) : null);

/** The settings of one conversation. */
class Settings {
  constructor(name) {
    this.model = h("select", {});
    this.inputs = new Map(FIELDS.map(([id, , type, value, step]) => [id, h("input", { type, value, step, min: id.endsWith("_penalty") ? null : 0, placeholder: "default", inputmode: "decimal" })]));
    this.stop = h("textarea", { rows: 1, placeholder: "one text a line" });
    this.effort = h("select", {}, EFFORTS.map((one) => h("option", { value: one }, one || "default")));
    this.alternatives = h("input", { type: "number", min: 0, max: 20, step: 1, value: "5" });
    const simple = FIELDS.slice(0, 2).concat([FIELDS[8]]);
    const more = FIELDS.slice(2, 8);
    const of = ([id, label, , , , words]) => field(label, this.inputs.get(id), words);
    this.legend = h("legend", {}, `Settings ${name}`);
    this.element = h("fieldset", { class: "lane-settings" }, this.legend,
      field("Model", this.model), h("div", { class: "grid" }, simple.map(of), field("Alternatives", this.alternatives, "for each token; 0: none")),
      h("details", {}, h("summary", {}, "More sampling"), h("div", { class: "grid" }, more.map(of), field("Reasoning effort", this.effort)), field("Stop texts", this.stop)));
  }

  read() {
    const found = { model: this.model.value, stop: this.stop.value, reasoning_effort: this.effort.value, alternatives: this.alternatives.value };
    for (const [id, input] of this.inputs) found[id] = input.value;
    return found;
  }

  copy(other) {
    for (const name of ["model", "stop", "effort", "alternatives"]) this[name].value = other[name].value;
    for (const [id, input] of this.inputs) input.value = other.inputs.get(id).value;
  }

  models(names) {
    const before = this.model.value;
    put(this.model, names.map((name) => h("option", { value: name }, name)));
    if (names.includes(before)) this.model.value = before;
  }
}

export class Talk {
  /** openTimeline: shows a request. feed: while it is open, the server records steps. */
  constructor(root, openTimeline, feed) {
    this.root = root;
    this.feed = feed;
    this.loaded = false;
    this.sent = new Map(); // id of a request of this page -> {path, body}
    this.watching = 0;
    this.round = 0; // messages that were sent
    this.live = h("p", { class: "sr", role: "status" });
    this.settings = { A: new Settings("A"), B: new Settings("B") };
    this.settings.B.inputs.get("temperature").value = "0"; // so that the two differ from the start
    const lane = (name) => new Lane(name, {
      read: () => ({ settings: this.settings[name].read(), shared: this.shared() }),
      openTimeline,
      busy: () => this.busy(),
      watched: () => this.watched(),
      sent: (id, request) => this.keep(id, request),
      edit: (item) => this.edit(item),
      announce: (words) => say(this.live, words),
    });
    this.lanes = { A: lane("A"), B: lane("B") };
    this.build();
  }

  build() {
    const radio = (value, label) => h("label", {}, h("input", { type: "radio", name: "mode", value, onchange: () => this.arrange() }), label);
    this.mode = h("div", { class: "choice", role: "radiogroup", "aria-label": "Kind of request" }, radio("chat", "Chat"), radio("completion", "Completion"));
    this.mode.querySelector("input").checked = true;
    this.compare = h("input", { type: "checkbox", onchange: () => this.compared() });
    this.tint = h("input", { type: "checkbox", onchange: () => this.lanesBox.classList.toggle("tint", this.tint.checked) });
    this.system = h("textarea", { rows: 2, placeholder: "none" });
    this.tools = h("textarea", { rows: 4, class: "code", spellcheck: "false", placeholder: "a JSON list of functions" });
    this.toolChoice = h("select", {}, [["auto", "the model decides"], ["required", "a call is required"], ["none", "no calls"]].map(([value, words]) => h("option", { value }, words)));
    this.format = h("select", { onchange: () => this.formatChanged() }, FORMATS.map(([value, words]) => h("option", { value }, words)));
    this.formatText = h("textarea", { rows: 6, class: "code", spellcheck: "false", "aria-label": "Schema, expression, lines or grammar" });
    this.formatTexts = new Map(); // kind of structured output -> its text
    this.formatShown = "";
    this.chatOnly = h("div", {},
      field("System", this.system),
      h("details", {}, h("summary", {}, "Tools"), field("Functions", this.tools),
        h("div", { class: "row" }, h("button", { type: "button", class: "quiet small", onclick: () => { this.tools.value = TOOLS; } }, "Example"), field("Choice", this.toolChoice))));
    const side = h("details", { class: "settings", open: !matchMedia("(max-width: 900px)").matches },
      h("summary", {}, "Settings"),
      h("div", { class: "settings-body tint" },
        this.mode,
        h("label", { class: "check" }, this.compare, "Two settings side by side"),
        h("label", { class: "check" }, this.tint, h("span", {}, "Colour tokens by probability", h("small", {}, "under", ["90 %", "50 %", "10 %"].map((words, at) => [" ", h("span", { class: "t", data: { p: 3 - at } }, `${words}`)])))),
        this.settings.A.element, this.settings.B.element, this.chatOnly,
        h("details", {}, h("summary", {}, "Structured output"), field("Form of the answer", this.format), this.formatText)));
    this.lanesBox = h("div", { class: "lanes", tabindex: 0, role: "region", "aria-label": "Conversations" }, this.lanes.A.element, this.lanes.B.element);
    this.following = true; // answers that grow keep the end of the conversation in view
    this.scrolled = 0;
    this.lanesBox.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.lanesBox;
      const atEnd = scrollHeight - scrollTop - clientHeight < 4;
      this.following = atEnd || (this.following && scrollTop >= this.scrolled);
      this.scrolled = scrollTop;
    });
    const grown = new ResizeObserver(() => this.active.some((lane) => lane.running) && this.follow());
    for (const one of Object.values(this.lanes)) grown.observe(one.list);
    this.empty = h("div", { class: "empty" }, h("p", {}, "Write a prompt below. Answers come token by token: point at a token to see its probability, and choose an alternative to let the answer go on from there."));
    this.lanesBox.prepend(this.empty);
    this.prompt = h("textarea", { rows: 3, id: "prompt", "aria-label": "Prompt", placeholder: "Write to the model. Enter sends, Shift+Enter begins a line.", dir: "auto" });
    this.sendButton = h("button", { class: "primary" }, "Send");
    this.stopButton = h("button", { type: "button", class: "stop", disabled: true, title: "Escape", onclick: () => this.stop() }, "Stop");
    this.error = h("p", { class: "error", role: "alert" });
    const form = h("form", { class: "composer" }, this.prompt,
      h("div", { class: "row" }, this.sendButton, this.stopButton,
        h("button", { type: "button", class: "quiet", onclick: () => this.clear() }, "New conversation"),
        h("button", { type: "button", class: "quiet", onclick: () => this.openExport() }, "Export")),
      this.error);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.root.hidden && !this.export.open) this.stop();
    });
    this.export = h("dialog", { class: "wide", "aria-label": "Export of the request" });
    put(this.root, h("h2", { class: "sr" }, "Talk"), h("div", { class: "talk" }, side, h("div", { class: "talk-main" }, this.lanesBox, form)), this.export, this.live);
    this.formatChanged();
    this.arrange();
  }

  shared() {
    return {
      mode: this.mode.querySelector("input:checked").value,
      system: this.system.value,
      tools: this.tools.value,
      toolChoice: this.toolChoice.value,
      format: this.format.value,
      formatText: this.formatText.value,
    };
  }

  get active() {
    return this.compare.checked ? [this.lanes.A, this.lanes.B] : [this.lanes.A];
  }

  arrange() {
    const two = this.compare.checked;
    this.lanes.B.element.hidden = !two;
    this.settings.B.element.hidden = !two;
    this.settings.A.legend.hidden = !two;
    this.lanesBox.classList.toggle("two", two);
    this.chatOnly.hidden = this.shared().mode !== "chat";
  }

  /** Side by side begins with one conversation: B goes on from where A is. */
  compared() {
    const { A, B } = this.lanes;
    if (this.compare.checked && A.items.length !== B.items.length) {
      B.copy(A);
      this.settings.B.copy(this.settings.A);
    }
    this.arrange();
  }

  formatChanged() {
    const kind = this.format.value;
    this.formatTexts.set(this.formatShown, this.formatText.value);
    this.formatShown = kind;
    this.formatText.hidden = !(kind in EXAMPLES);
    this.formatText.value = this.formatTexts.get(kind) ?? EXAMPLES[kind] ?? "";
  }

  follow() {
    if (this.following) this.lanesBox.scrollTop = this.lanesBox.scrollHeight;
  }

  busy() {
    this.follow();
    const running = this.active.some((lane) => lane.running);
    this.stopButton.disabled = !running;
    this.sendButton.disabled = this.compare.disabled = running;
    clearTimeout(this.watching);
    if (!running) this.watching = setTimeout(() => this.feed.release("talk"), WATCHED_ON_MS);
  }

  /** Let the server record steps while an answer comes, so that the timeline of its request is complete. */
  async watched() {
    clearTimeout(this.watching);
    this.feed.hold("talk");
    await this.feed.recording(WATCHED_MS);
  }

  keep(id, request) {
    this.sent.delete(id);
    this.sent.set(id, request);
    if (this.sent.size > MOST_SENT) this.sent.delete(this.sent.keys().next().value);
  }

  /** Return a function that sends a request of this page again, outside the conversation; null for an unknown one.
   * id: of the request; none: the last one. */
  again(id = [...this.sent.keys()].at(-1)) {
    const request = this.sent.get(id);
    return request ? async (signal) => (await send(request.path, { json: request.body, signal })).text() : null;
  }

  stop() {
    for (const lane of this.active) lane.stop();
  }

  clear() {
    for (const lane of Object.values(this.lanes)) lane.clear();
    this.empty.hidden = false;
    this.prompt.focus();
  }

  /** Put a message back into the field. It leaves the conversation, with all that follows. */
  edit({ round, content }) {
    if (this.active.some((lane) => lane.running)) return;
    const words = this.prompt.value.trim() && this.prompt.value !== content ? "Send or delete the text in the field first." : "";
    say(this.error, words);
    if (words) return;
    for (const lane of this.active) lane.cut(round);
    this.empty.hidden = this.active.some((lane) => lane.items.length);
    this.prompt.value = content;
    this.prompt.focus();
  }

  async send() {
    const text = this.prompt.value;
    if (!text.trim() || this.active.some((lane) => lane.running)) return;
    say(this.error, "");
    try {
      for (const lane of this.active) lane.preview(text); // words about wrong JSON come before anything is sent
    } catch (error) {
      say(this.error, error.message);
      return;
    }
    this.empty.hidden = true;
    this.round += 1;
    if (this.shared().mode === "chat") this.prompt.value = "";
    const sent = Promise.all(this.active.map((lane) => lane.send(text, this.round)));
    this.following = true;
    this.follow();
    if (!(await sent).some(Boolean) && !this.prompt.value) this.prompt.value = text; // nothing came: the text is there to be changed
  }

  openExport() {
    const texts = [];
    const text = this.prompt.value;
    try {
      for (const lane of this.active) {
        const request = lane.preview(text);
        const of = this.active.length > 1 ? `, settings ${lane.name}` : "";
        texts.push([`curl${of}`, asCurl(request)], [`Python${of}`, asPython(request)]);
      }
    } catch (error) {
      say(this.error, error.message);
      return;
    }
    put(this.export, h("h2", {}, text || this.shared().mode !== "chat" || !this.lanes.A.turns().length ? "The next request" : "The request of the last answer"),
      texts.map(([name, text]) => {
        const button = h("button", { type: "button", class: "quiet small" }, "Copy");
        button.addEventListener("click", () => copy(button, text));
        return h("section", {}, h("header", { class: "row" }, h("h3", {}, name), button), h("pre", { class: "code", tabindex: 0 }, text));
      }),
      h("div", { class: "row end" }, h("button", { type: "button", class: "primary", onclick: () => this.export.close() }, "Close")));
    this.export.showModal();
  }

  async show() {
    if (this.loaded) return;
    try {
      const found = await ask("v1/models");
      const names = found.data.map((one) => one.id);
      for (const one of Object.values(this.settings)) one.models(names);
      this.loaded = true;
    } catch (error) {
      if (error.status !== 401) say(this.error, error.message);
    }
  }

  hide() {
    for (const lane of Object.values(this.lanes)) lane.panel.close(false);
  }

  retry() {
    this.loaded = false;
    say(this.error, "");
  }
}
