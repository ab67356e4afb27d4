// The view Inside: the plan, the table of meetings, the timelines of requests, and the trace of one.

import { ask } from "./api.js";
import { h, put, say, seconds, table, tabs } from "./dom.js";
import { Plan } from "./plan.js";
import { timelineOf } from "./timeline.js";
import { Trace } from "./trace.js";

const AGAIN_MS = 1500; // a live request's timeline is asked for again
const YOUNG_S = 4; // seconds after its end
const MEANINGS = [
  ["missing", "would make sense, and is not implemented yet: the server does not start"],
  ["refused", "the two contradict each other, or the model: the server does not start, or answers the request with 400"],
  ["no effect", "the server starts, and one of the two does nothing"],
  ["{name}", "stands for a value of a launch, for example {tp} for the number behind -tp"],
];
const MOST_LISTED = 300;
const ORDERS = [
  // words, head of the last column, time in it, value that is largest in the first row
  ["newest first", "time", (one) => one.e2e_s, (one) => one.arrived],
  ["longest life first", "time", (one) => one.e2e_s, (one) => one.e2e_s],
  ["longest wait first", "queue", (one) => one.queue_s ?? one.e2e_s, (one) => one.queue_s ?? one.e2e_s],
  ["slowest tokens first", "each token", eachToken, (one) => eachToken(one) ?? -1],
];
const QUIETLY = { preventScroll: true }; // the focus comes back to a row that was made anew

/** Return the mean seconds between two tokens of a request; null before the second one. */
function eachToken(one) {
  return one.decode_s !== null && one.num_output > 1 ? one.decode_s / (one.num_output - 1) : null;
}

/** Return the table of meetings. Each cell has the name of its column: a narrow window stacks the cells of a row. */
function meetingsTable(columns, rows) {
  const found = table("What works with what", columns, rows);
  found.classList.add("stack");
  for (const row of found.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.name = columns[at]; });
  return found;
}

export class Inside {
  /** feed: knows the backends behind a router. again: returns a function that sends a request of Talk again, by its id or the
   * last one; null if there is none. */
  constructor(root, feed, again) {
    this.root = root;
    this.feed = feed;
    this.again = again;
    this.trace = new Trace((signal) => this.traced(signal), () => again());
    this.plan = new Plan();
    this.part = "plan";
    this.shown = null; // id of the request
    this.seen = false;
    this.build();
  }

  build() {
    const tab = (id, words, chosen) => h("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `part-${id}`, "aria-selected": String(chosen), tabindex: chosen ? null : -1 }, words);
    this.list = h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of Inside" }, tab("plan", "Plan", true), tab("timeline", "Timeline", false), tab("trace", "Trace", false), tab("meetings", "What works with what", false));
    this.backend = h("select", { "aria-label": "Backend", onchange: () => this.load() });
    this.backendField = h("label", { class: "inline", hidden: true }, "Backend ", this.backend);
    this.error = h("p", { class: "error", role: "alert" });
    const part = (id, ...children) => h("section", { id: `part-${id}`, role: "tabpanel", "aria-labelledby": `tab-${id}`, hidden: id !== "plan", class: "panel" }, children);
    this.filter = h("input", { type: "search", placeholder: "Search features and reasons", "aria-label": "Search the table" });
    this.status = h("select", { "aria-label": "Status" }, ["every status", "refused", "missing", "no effect"].map((one) => h("option", {}, one)));
    this.meetingsBox = h("div");
    this.meetingsNumber = h("span", { class: "hint", role: "status" });
    for (const one of [this.filter, this.status]) one.addEventListener("input", () => this.drawMeetings());
    this.requestFilter = h("input", { type: "search", placeholder: "Search ids and states", "aria-label": "Search requests" });
    this.requestFilter.addEventListener("input", () => this.drawRequests());
    this.order = h("select", { "aria-label": "Order of requests", onchange: () => this.drawRequests() }, ORDERS.map(([words], at) => h("option", { value: at }, words)));
    this.requestsBox = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table: requests" });
    this.timelineBox = h("div", { class: "timeline-box" }, h("p", { class: "hint" }, "Choose a request to see its life."));
    put(this.root, h("h2", { class: "sr" }, "Inside"), h("div", { class: "row inside-head" }, this.list, this.backendField), this.error,
      part("plan", this.plan.element),
      part("timeline", h("div", { class: "two-columns" },
        h("div", {}, h("div", { class: "row search" }, this.requestFilter, this.order, h("button", { type: "button", class: "small", onclick: () => this.loadRequests() }, "Load again")), this.requestsBox), this.timelineBox)),
      part("trace", this.trace.element),
      part("meetings", h("div", { class: "row search" }, this.filter, this.status, this.meetingsNumber), this.meetingsBox));
    this.choose = tabs(this.list, (chosen) => {
      this.part = chosen.id.slice(4);
      if (this.seen) this.load();
    });
  }

  async show() {
    this.seen = true;
    clearInterval(this.timer);
    this.timer = setInterval(() => this.refresh(), AGAIN_MS);
    const names = await this.feed.backends();
    if (names.length && this.backend.length !== names.length) put(this.backend, names.map((name) => h("option", { value: name }, name)));
    this.backendField.hidden = names.length < 1;
    if (this.wanted) this.backend.value = this.wanted;
    await this.load();
  }

  hide() {
    this.seen = false;
    clearInterval(this.timer);
  }

  retry() {
    this.loaded = {};
  }

  /** Show the timeline of a request: "id", or "backend id" behind a router. */
  open(detail) {
    const words = detail.split(" ");
    this.shown = words.at(-1);
    if (words.length > 1) this.wanted = this.backend.value = words[0];
    this.choose("tab-timeline");
  }

  async get(path, options) {
    return ask(this.backend.value ? `${path}?backend=${encodeURIComponent(this.backend.value)}` : path, options);
  }

  /** Return the answer of the chosen backend, or of another one that knows the request. */
  async find(path) {
    try {
      return await this.get(path);
    } catch (error) {
      const others = [...this.backend.options].map((option) => option.value).filter((name) => name !== this.backend.value);
      for (const name of error.status === 404 ? others : []) {
        const found = await ask(`${path}?backend=${encodeURIComponent(name)}`).catch(() => null);
        if (!found) continue;
        this.backend.value = name;
        await this.loadRequests();
        return found;
      }
      throw error;
    }
  }

  async load() {
    say(this.error, "");
    try {
      if (this.part === "plan") this.plan.set(await this.get("debug/plan"));
      else if (this.part === "meetings") await this.loadMeetings();
      else if (this.part === "trace") this.trace.show();
      else await Promise.all([this.loadRequests(), this.loadTimeline()]);
    } catch (error) {
      if (error.status !== 401) say(this.error, error.message);
    }
  }

  async loadMeetings() {
    this.meetings ??= await this.get("debug/meetings");
    this.drawMeetings();
  }

  drawMeetings() {
    const { features, rows } = this.meetings;
    const wanted = this.filter.value.trim().toLowerCase();
    const status = this.status.selectedIndex ? this.status.value : null;
    const name = (id) => {
      const { flag } = features[id] ?? {};
      return h("span", {}, id, flag && !flag.includes("{") && flag !== id ? h("code", { class: "faint" }, ` ${flag}`) : null);
    };
    const found = rows.filter((row) => (!status || row.status === status)
      && [row.feature, row.other, row.status, row.reason, row.remedy, features[row.feature]?.flag, features[row.other]?.flag].some((text) => (text ?? "").toLowerCase().includes(wanted)));
    say(this.meetingsNumber, `${found.length} of ${rows.length}`);
    put(this.meetingsBox, h("p", { class: "hint" }, "Features that do not work together. All other pairs work."),
      h("dl", { class: "meanings hint" }, MEANINGS.map(([term, meaning]) => h("div", {}, h("dt", {}, term), h("dd", {}, meaning)))),
      h("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "Table: what works with what" },
        meetingsTable(["feature", "with", "status", "reason", "what to do"], found.map((row) => [name(row.feature), name(row.other), h("span", { class: `status ${row.status.replace(" ", "-")}` }, row.status), row.reason, row.remedy]))));
  }

  async loadRequests() {
    this.requests = (await this.get("debug/requests")).requests;
    this.drawRequests();
  }

  drawRequests() {
    const wanted = this.requestFilter.value.trim().toLowerCase();
    const all = (this.requests ?? []).filter((one) => `${one.request_id} ${one.state}`.toLowerCase().includes(wanted));
    const focused = document.activeElement?.dataset?.id;
    const [words, head, time, value] = ORDERS[this.order.value];
    const found = [...all].sort((one, other) => value(other) - value(one)).slice(0, MOST_LISTED);
    put(this.requestsBox, found.length ? table(`Requests, ${words}`, ["request", "state", { name: "prompt", end: true }, { name: "output", end: true }, { name: head, end: true }],
      found.map((one) => [h("button", { type: "button", class: "link", data: { id: one.request_id }, "aria-pressed": String(one.request_id === this.shown), onclick: () => this.pick(one.request_id) }, h("bdi", {}, one.request_id)),
        one.state, one.num_prompt, one.num_output, seconds(time(one))])) : h("p", { class: "hint" }, this.requests?.length ? "No request has these letters." : "No request has come yet."));
    if (focused) this.requestsBox.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus(QUIETLY);
  }

  pick(id) {
    history.replaceState(null, "", `#inside/${encodeURIComponent(this.backend.value ? `${this.backend.value} ${id}` : id)}`);
    this.shown = id;
    this.drawRequests();
    this.loadTimeline();
  }

  async loadTimeline() {
    if (!this.shown) return;
    const id = this.shown;
    try {
      const found = await this.find(`debug/requests/${encodeURIComponent(id)}`);
      if (id !== this.shown) return;
      this.life = found;
      const again = this.again(found.request.request_id);
      put(this.timelineBox, timelineOf(found, this.timelineBox.clientWidth),
        again ? h("p", {}, h("button", { type: "button", onclick: () => this.traceAgain(again) }, "Send it again, and trace it")) : null);
    } catch (error) {
      if (error.status !== 401) put(this.timelineBox, h("p", { class: "error" }, error.message));
    }
  }

  /** Wait for the trace of the next request. Behind a router every backend is asked, since any of them may get the request. */
  async traced(signal) {
    const names = await this.feed.backends();
    const paths = names.length ? names.map((name) => `debug/trace?backend=${encodeURIComponent(name)}`) : ["debug/trace"];
    try {
      return await Promise.any(paths.map((path) => ask(path, { signal })));
    } catch (error) {
      throw error.errors[0];
    }
  }

  traceAgain(again) {
    this.choose("tab-trace");
    this.trace.run(again);
  }

  /** Ask again for the timeline of a request that lives, or that has just ended: its last events come with the next frame. */
  refresh() {
    const { request } = this.life ?? {};
    if (this.part !== "timeline" || request?.request_id !== this.shown) return;
    const lives = ["running", "waiting"].includes(request.state) || Date.now() / 1000 - request.arrived - request.e2e_s < YOUNG_S;
    if (lives && !this.timelineBox.contains(document.activeElement)) this.loadTimeline();
  }
}
