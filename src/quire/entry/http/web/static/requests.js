// The table of live requests: rows stay where they are while their numbers change.

import { count, h, put, say, table } from "./dom.js";
import { STATES } from "./words.js";

const MOST_ROWS = 100;
const COLUMNS = [
  // name, flush right, value by which a click on the head sorts
  ["request"], ["state"], ["slot", true], ["prompt", true, (requests, at) => requests.prompt[at]],
  ["output", true, (requests, at) => requests.tokens[at] - requests.prompt[at]], ["computed"], ["cached", true, (requests, at) => requests.cached[at]],
  ["blocks", true, (requests, at) => requests.blocks[at]], ["preempted", true, (requests, at) => requests.preemptions[at]],
  ["age", true, (requests, at, engine) => engine.age(requests.handle[at])], ["life"],
];
const MEANINGS = [
  ["slot", "the place in the batch that a running request has until it ends or is preempted"], ["prompt", "tokens of the prompt"], ["output", "tokens that the model has written"],
  ["computed", "how much of prompt and output has its KV"], ["cached", "tokens of the prompt that were reused"], ["blocks", "KV blocks that the request holds"],
  ["preempted", "times that its blocks were taken for other requests; it computes them again"], ["age", "seconds since the request came"],
];

export class RequestTable {
  /** select: chooses a request by its handle; null: none. openTimeline: shows the life of one. sorted: called after a click on a head. */
  constructor({ select, openTimeline, sorted }) {
    Object.assign(this, { select, openTimeline, sorted });
    this.order = null; // {column, down}; null: the order of service
    this.selected = null;
    this.words = h("p", { class: "hint" });
    this.adapters = h("p", { class: "hint", hidden: true });
    this.table = table("Live requests", COLUMNS.map(([name, flush]) => (flush ? { name, end: true } : name)), []);
    this.heads = [...this.table.tHead.rows[0].cells];
    this.heads.forEach((head, column) => COLUMNS[column][2] && put(head, h("button", { type: "button", class: "link sort", onclick: () => this.sort(column) }, COLUMNS[column][0])));
    this.rows = this.table.tBodies[0];
    this.element = h("div", { class: "scroll requests", tabindex: 0, role: "group", "aria-label": "Table: requests" }, this.table);
    this.meanings = h("dl", { class: "meanings hint" }, MEANINGS.map(([term, meaning]) => h("div", {}, h("dt", {}, term), h("dd", {}, meaning))));
    this.element.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-handle]");
      if (row && !event.target.closest("button")) this.turn(Number(row.dataset.handle));
    });
  }

  /** Choose a request, or none if it is the chosen one. */
  turn(handle) {
    this.select(handle === this.selected ? null : handle);
  }

  /** Update the rows in place: a row that is being clicked or has the focus stays. */
  draw(engine, selected) {
    const { requests, queue } = engine.last;
    const adapters = Object.entries(queue.adapters ?? {});
    put(this.adapters, "Adapters: ", adapters.map(([name, number], at) => [at ? " · " : "", `${number} for `, h("bdi", {}, name)]));
    this.adapters.hidden = !adapters.length;
    this.selected = selected;
    const states = new Map();
    for (const state of requests.state) states.set(state, (states.get(state) ?? 0) + 1);
    const shown = Math.min(MOST_ROWS, requests.handle.length);
    const rest = requests.handle.length - shown + requests.more;
    const words = [...states].map(([state, number]) => `${number} ${STATES[state] ?? state}`).join(" · ");
    say(this.words, shown ? `${words}${rest ? ` · ${rest} more are not listed` : ""}` : "No request lives. Talk to the model, or send it requests.");
    this.table.hidden = !shown;
    const kept = new Map([...this.rows.rows].map((row) => [row.dataset.key, row]));
    const order = requests.handle.map((_, at) => at);
    if (this.order) {
      const value = COLUMNS[this.order.column][2];
      order.sort((one, other) => (value(requests, other, engine) - value(requests, one, engine)) * (this.order.down ? 1 : -1));
    }
    for (let place = 0; place < shown; place += 1) {
      const at = order[place];
      const key = `${engine.key} ${requests.handle[at]}`;
      const row = kept.get(key) ?? this.row(engine, key, requests.handle[at]);
      kept.delete(key);
      if (this.rows.rows[place] !== row) this.rows.insertBefore(row, this.rows.rows[place] ?? null);
      this.fill(row, engine, at);
    }
    for (const row of kept.values()) row.remove();
  }

  fill(row, engine, at) {
    const { requests } = engine.last;
    const handle = requests.handle[at];
    const [name, state, slot, prompt, output, progress, cached, blocks, preempted, age, life] = [...row.cells].map((cell) => cell.firstElementChild ?? cell);
    say(name.firstElementChild, engine.nameOf(handle));
    say(state, STATES[requests.state[at]] ?? requests.state[at]);
    say(slot, requests.slot[at] < 0 ? "" : String(requests.slot[at]));
    say(prompt, count(requests.prompt[at]));
    say(output, count(requests.tokens[at] - requests.prompt[at]));
    progress.max = Math.max(1, requests.tokens[at]);
    progress.value = requests.computed[at];
    say(cached, requests.cached[at] < 0 ? "" : count(requests.cached[at]));
    say(blocks, count(requests.blocks[at]));
    say(preempted, String(requests.preemptions[at] || ""));
    say(age, `${engine.sawBegin(handle) ? "" : "> "}${Math.floor(engine.age(handle))} s`);
    life.hidden = requests.id[at] === null;
    row.classList.toggle("selected", handle === this.selected);
  }

  /** Sort by a column: largest first, then smallest first, then the order of service again. */
  sort(column) {
    const same = this.order?.column === column;
    this.order = !same ? { column, down: true } : this.order.down ? { column, down: false } : null;
    this.heads.forEach((head, at) => {
      if (this.order?.column === at) head.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.sorted();
  }

  row(engine, key, handle) {
    const link = (click, ...children) => h("button", { type: "button", class: "link", onclick: click }, children);
    const cell = (...children) => h("td", {}, children);
    const number = () => h("td", { class: "end" });
    return h("tr", { data: { key, handle } },
      cell(link(() => this.turn(handle), h("bdi"))), cell(), number(), number(), number(),
      cell(h("progress", { "aria-label": "tokens computed" })), number(), number(), number(), number(),
      cell(link(() => this.openTimeline(engine, handle), "timeline")));
  }
}
