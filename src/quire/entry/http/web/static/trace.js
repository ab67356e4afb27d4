// The trace of one request: a button that waits for it, and the calls of its steps as a tree.

import { count, h, put, say, seconds } from "./dom.js";

const OPEN = 2; // levels of the first step's last call that are open at first: those of a model runner
const MOST_SHAPES = 70; // letters of arguments and results; all of them when a pointer rests there
const timeOf = (call) => (call.end - call.begin) / 1e9;

/** Return an element for a call, and for the calls in it, which are made when they are opened. */
function callOf(call, open) {
  const shapes = call.takes || call.gives ? ` (${call.takes})${call.gives ? ` → ${call.gives}` : ""}` : "";
  const words = [
    h("span", { class: "ms" }, seconds(timeOf(call))), " ",
    h("bdi", { class: call.joined ? "more-words" : "name" }, call.name), call.again ? " as before" : "", " ",
    h("span", { class: "more-words", title: shapes.length > MOST_SHAPES ? shapes : null }, call.where, shapes.length > MOST_SHAPES ? `${shapes.slice(0, MOST_SHAPES)} …` : shapes),
    call.way ? h("small", {}, call.way) : null,
  ];
  if (!call.inside.length) return h("p", { class: "call-line" }, words);
  const branch = h("div", { class: "branch" });
  const box = h("details", { open: open > 0 }, h("summary", {}, words), branch);
  const fill = () => box.open && !branch.childElementCount && put(branch, call.inside.map((one) => callOf(one, open - 1)));
  box.addEventListener("toggle", fill);
  fill();
  return box;
}

/** Return an element for a step. */
function stepOf(step, first) {
  const end = step.first + step.count - 1;
  const drafts = step.count > 1 ? ` and ${step.count - 1} draft${step.count === 2 ? "" : "s"}` : "";
  const part = step.kind === "decode" ? `decodes from token ${step.first}${drafts}` : `computes ${step.count === 1 ? `token ${end}` : `tokens ${step.first} to ${end}`}`;
  const beside = step.requests > 1 ? `, beside ${step.requests - 1} other request${step.requests === 2 ? "" : "s"}` : "";
  const [core] = step.calls;
  return h("details", { open: first }, h("summary", {}, h("strong", {}, `Step ${step.step}`), ` ${part} in ${seconds(core ? timeOf(core) : null)}; ${count(step.tokens)} token${step.tokens === 1 ? "" : "s"} in all${beside}`),
    h("div", { class: "branch" }, step.calls.map((call, at) => callOf(call, first && at === step.calls.length - 1 ? OPEN : 0))));
}

export class Trace {
  /** get: waits for the trace of the next request. last: returns a function that sends the last request of Talk again, or null. */
  constructor(get, last) {
    this.get = get;
    this.last = last;
    this.stopper = null;
    this.words = h("p", { class: "hint", role: "status" });
    this.result = h("div", { class: "tree" });
    this.next = h("button", { type: "button", class: "primary", onclick: () => this.run() }, "Trace the next request");
    this.again = h("button", { type: "button", onclick: () => this.run(this.last()) }, "Send the last request of Talk again, traced");
    this.cancel = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.stopper?.abort() }, "Cancel");
    this.element = h("div", { class: "trace" },
      h("p", { class: "hint" }, "The functions that a request runs through, from the engine's core to the kernels, with their files, shapes and times. ",
        "The trace takes the next request of your key: its steps until it has decoded twice. They run one at a time and without CUDA graphs or other recordings, ",
        "so they take longer, also for the requests beside it."),
      h("div", { class: "row" }, this.next, this.again, this.cancel), this.words, this.result);
    this.show();
  }

  /** Show what can be done now. */
  show() {
    const waits = this.stopper !== null;
    this.cancel.hidden = !waits;
    this.next.disabled = this.again.disabled = waits;
    this.again.hidden = !this.last();
  }

  /** Trace the next request. send: sends one, when the server waits for it. */
  async run(send = null) {
    if (this.stopper) return;
    const stopper = (this.stopper = new AbortController());
    this.show();
    put(this.result);
    say(this.words, send ? "The request is sent again." : "The server waits for a request, for a minute at most. Send one now.");
    try {
      const asked = this.get(stopper.signal);
      asked.catch(() => {});
      if (send) {
        await new Promise((resolve) => setTimeout(resolve, 300)); // the server hears of the trace first
        await Promise.race([send(stopper.signal), asked]);
      }
      this.draw(await asked);
    } catch (error) {
      say(this.words, stopper.signal.aborted ? "Cancelled." : error.message);
    } finally {
      stopper.abort(); // the rest of a request that was sent for the trace
      this.stopper = null;
      this.show();
    }
  }

  draw(found) {
    const { steps } = found;
    say(this.words, `Request ${found.request_id}: ${found.num_prompt} prompt tokens, ${steps.length} step${steps.length === 1 ? "" : "s"}${found.ended ? ", until its end" : ""}.`);
    put(this.result, steps.length ? null : h("p", { class: "hint" }, "It took part in no step."),
      h("details", {}, h("summary", {}, h("strong", {}, "Arrival")), h("div", { class: "branch" }, found.calls.map((call) => callOf(call, OPEN)))),
      steps.map((step, at) => stepOf(step, at === 0)));
  }
}
