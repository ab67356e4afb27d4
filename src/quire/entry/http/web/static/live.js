// The view Live: panels fed by the stream of frames, while this tab of the page is seen.

import { ask } from "./api.js";
import { BlockMap } from "./blocks.js";
import { Heat, Lines, Strip, percentOf } from "./charts.js";
import { bytes, count, h, percent, put, say, seconds, table } from "./dom.js";
import { Feed } from "./feed.js";
import { RequestTable } from "./requests.js";
import { STATES, WHY, eventWords } from "./words.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const MAP_MS = 1000;
const TABLE_MS = 1000; // between two changes of a table: people read them
const WAITS_FOR = { slots: "every slot is taken", blocks: "blocks are short", budget: "steps are full", result: "for a result" };
const WINDOWS = [3, 10, 60]; // seconds
const FULL = 0.95; // share of held blocks from which they are short
const sum = (values) => values.reduce((total, one) => total + one, 0);
const requestsLeft = (number) => (number === 1 ? "1 request is left" : `${number} requests are left`);
const end = (name) => ({ name, end: true });

const panel = (title, className, ...children) => h("section", { class: `panel ${className}`, "aria-label": title }, h("h2", {}, title), children);
const MEANINGS = [
  ["KV block", "memory for the keys and values of some tokens; a request holds as many as its tokens need, and gives them back at its end"],
  ["step", "one run of the model: chunks of prompts, and one token more (or a few with drafts) for each request that decodes"],
  ["running", "requests that take part in steps, of those that can at once"], ["waiting", "requests without a place, and why the first one has none"],
  ["blocked", "requests that cannot start yet: a grammar is compiled, or blocks are on their way"],
  ["preemptions", "times that a running request lost its blocks to others; it computes them again"],
  ["hit rate", "share of all prompt tokens whose KV was reused from an earlier request"],
  ["blocks held", "share of the KV blocks that requests hold; cached ones are kept for reuse, and count as free"],
];
const behind = (words, ...children) => h("details", {}, h("summary", {}, words), children);

export class Live {
  constructor(root, openTimeline) {
    this.root = root;
    this.openTimeline = openTimeline;
    this.feed = new Feed(() => this.paused || this.later());
    this.chosen = null; // key of the engine
    this.selected = null; // handle of the request
    this.paused = false;
    this.seen = false;
    this.pending = false;
    this.tablesAt = 0;
    this.spokenAt = 0;
    this.mapTimer = 0;
    this.build();
  }

  build() {
    this.status = h("p", { class: "hint" }, "");
    this.drains = h("p", { class: "drains", role: "status" });
    this.spoken = h("p", { class: "sr", role: "status" });
    this.pause = h("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => this.togglePause() }, "Pause");
    this.engines = h("div", { class: "panel engines", hidden: true });
    this.tiles = new Map();
    const tile = (id, label) => {
      const value = h("b", {}, "–");
      this.tiles.set(id, value);
      return h("li", {}, h("span", {}, label), value, h("small"));
    };
    this.tileBox = h("ul", { class: "tiles" },
      tile("running", "running"), tile("waiting", "waiting"), tile("blocked", "blocked"), tile("preempted", "preemptions"),
      tile("prompt", "prompt tokens/s"), tile("output", "output tokens/s"), tile("steps", "steps/s"), tile("hit", "hit rate"), tile("drafts", "drafts right"), tile("blocks", "blocks held"));
    this.meanings = behind("What the numbers mean", h("dl", { class: "meanings hint" }, MEANINGS.map(([term, meaning]) => h("div", {}, h("dt", {}, term), h("dd", {}, meaning)))));
    this.strip = new Strip();
    this.map = new BlockMap((handle) => this.select(handle), (handle) => this.engine?.nameOf(handle) ?? `request ${handle}`);
    this.rate = new Lines("Tokens each second", [
      ["--c-prompt", "prompt", (one) => (one.seconds ? one.sums.prompt_tokens / one.seconds : NaN)],
      ["--c-decode", "output", (one) => (one.seconds ? one.sums.sampled / one.seconds : NaN)]], count);
    this.queue = new Lines("Requests", [
      ["--c-own", "running", (one) => one.queue.running],
      ["--c-shared", "waiting", (one) => one.queue.waiting]], count);
    this.hits = new Lines("Hit rate since the start", [["--c-right", "of prompt tokens", (one) => (one.prefix.queries ? one.prefix.hits / one.prefix.queries : NaN)]], percentOf);
    this.heat = new Heat();
    this.heatTable = h("div");
    this.heatWords = h("p", { class: "hint" });
    const box = () => h("div", { class: "scroll", tabindex: 0, role: "group" });
    this.boxes = { misses: box(), latency: box(), bytes: box(), events: box(), steps: box(), blocks: box(), split: box(), rates: box() };
    for (const [name, one] of Object.entries(this.boxes)) one.setAttribute("aria-label", `Table: ${name}`);
    this.requests = new RequestTable({
      select: (handle) => this.select(handle),
      openTimeline: (engine, handle) => this.openTimeline(engine.nameOf(handle), engine.backend),
      sorted: () => {
        this.tablesAt = 0;
        this.later();
      },
    });
    this.chosenName = h("bdi");
    this.chosenFacts = h("span");
    this.chosenLife = h("button", { type: "button", class: "link", onclick: () => {
      if (this.ended) this.openTimeline(this.ended.id, this.ended.backend);
      else this.openTimeline(this.engine.nameOf(this.selected), this.engine.backend);
    } }, "Timeline");
    this.chosenWords = h("p", { class: "chosen", hidden: true }, this.chosenName, this.chosenFacts, this.chosenLife);
    this.grid = h("div", { class: "panels", hidden: true },
      panel("Steps", "wide", this.strip.element, behind("Table of the last steps", this.boxes.steps)),
      panel("KV blocks", "wide", this.map.element, this.chosenWords, behind("Table of blocks", this.boxes.blocks)),
      panel("Requests", "wide", this.requests.words, this.requests.adapters, this.requests.element, behind("What the columns mean", this.requests.meanings)),
      panel("Throughput", "", this.rate.element, this.boxes.rates),
      panel("Queue", "", this.queue.element),
      panel("Time of a step", "", this.boxes.split),
      panel("Prefix cache", "", this.hits.element, this.boxes.misses),
      panel("Latency", "", this.boxes.latency),
      panel("Bytes that move", "", this.boxes.bytes),
      panel("Experts", "", this.heatWords, this.heat.element, this.heatTable),
      panel("Events", "half", this.boxes.events));
    this.tilesOf = h("p", { class: "hint tiles-of" });
    put(this.root, h("div", { class: "row live-head" }, h("h2", {}, "Live"), this.status, this.pause), this.drains, this.engines, this.tilesOf, this.tileBox, this.meanings, this.grid, this.spoken);
    addEventListener("quire-theme", () => this.seen && this.later());
    addEventListener("resize", () => this.seen && this.later(true));
  }

  show() {
    this.seen = true;
    if (!this.paused) this.watch();
  }

  hide() {
    this.seen = false;
    this.unwatch();
  }

  retry() {}

  watch() {
    this.feed.hold("live");
    clearInterval(this.mapTimer);
    this.mapTimer = setInterval(() => this.loadMap(), MAP_MS);
    this.loadMap();
  }

  unwatch() {
    this.feed.release("live");
    clearInterval(this.mapTimer);
  }

  togglePause() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    say(this.pause, this.paused ? "Go on" : "Pause");
    if (this.paused) this.unwatch();
    else this.watch();
    this.later();
  }

  /** The chosen engine. Until one is chosen: the one with the most requests, for as long as it has some. */
  get engine() {
    const { engines, down } = this.feed;
    const lives = (one) => one?.last && !down.has(one.backend);
    if (engines.has(this.chosen)) return engines.get(this.chosen);
    const before = engines.get(this.busiest);
    if (lives(before) && before.load > 0 && this.known === engines.size) return before;
    const load = (one) => (lives(one) ? one.load : -2);
    const found = [...engines.values()].reduce((best, one) => (!best || load(one) > load(best) ? one : best), lives(before) ? before : null);
    this.busiest = found?.key;
    this.known = engines.size;
    return found;
  }

  select(handle) {
    this.ended = null;
    if (handle !== null) this.chosen ??= this.engine?.key; // its engine stays in view
    this.selected = handle;
    this.map.selected = handle;
    this.map.draw();
    this.tablesAt = 0;
    this.later();
  }

  async loadMap() {
    const engine = this.engine;
    if (!engine?.facts || this.mapAsked) return;
    this.mapAsked = true;
    try {
      const found = await ask(engine.backend ? `debug/blocks?backend=${encodeURIComponent(engine.backend)}` : "debug/blocks");
      const own = found.engines.find((one) => one.replica === engine.replica);
      if (own && engine === this.engine) {
        this.map.set(own);
        this.mapOf = own;
      }
    } catch {
      // the stream tells why the server does not answer
    } finally {
      this.mapAsked = false;
    }
  }

  /** Draw soon: ten times a second at most, once a second for people who asked for less motion. */
  later(size) {
    if (size) this.map.draw();
    if (this.pending || !this.seen) return;
    this.pending = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.pending = false;
      if (this.seen) this.draw();
    }), still.matches ? 1000 : 60);
  }

  draw() {
    const engine = this.engine;
    const lost = this.feed.lost ? ` · ${this.feed.lost} frames lost: this page read too slowly` : "";
    const facts = engine?.facts;
    const words = facts ? [`${facts.models.join(", ")} on ${facts.device}`, facts.dtype === "none" ? "" : facts.dtype, facts.num_drafts ? `${facts.num_drafts} drafts` : ""].filter(Boolean).join(", ") : "";
    say(this.status, this.paused ? "paused: nothing is asked of the server" : this.feed.words || `${words}${lost}`);
    say(this.drains, this.drainWords());
    this.engineTable();
    const reason = this.feed.down.get(engine?.backend);
    this.grid.hidden = this.tileBox.hidden = this.meanings.hidden = this.tilesOf.hidden = !engine?.last;
    if (!engine?.last) return;
    say(this.tilesOf, this.engines.hidden ? "" : `${engine.name}${reason === undefined ? "" : `: down, these are its last numbers (${reason})`}`);
    this.tileBox.classList.toggle("stale", reason !== undefined);
    this.tell(engine);
    this.strip.draw(engine, this.selected);
    this.rate.draw(engine.samples);
    this.queue.draw(engine.samples);
    this.hits.draw(engine.samples);
    if (this.selected !== null && engine.hasEnded(this.selected)) this.tellEnd(engine);
    const now = performance.now();
    if (now - this.tablesAt > TABLE_MS) {
      this.tablesAt = now;
      this.tables(engine);
    }
    if (now - this.spokenAt > 15_000 && engine.samples.length > 10) { // rates of the first frames say nothing
      this.spokenAt = now;
      const { queue } = engine.last;
      say(this.spoken, `${queue.running} requests run, ${queue.waiting} wait, ${count(engine.rate("sampled"))} tokens each second.`);
    }
  }

  /** The chosen request has ended: say how, and show the blocks of all requests again. */
  tellEnd(engine) {
    const handle = this.selected;
    this.select(null);
    this.ended = { id: engine.names.get(handle), backend: engine.backend };
    say(this.chosenName, engine.nameOf(handle));
    say(this.chosenFacts, ` ended: ${engine.ended.get(handle) ?? "the reason was not seen"}. `);
    this.chosenLife.hidden = !this.ended.id;
  }

  /** Return words about a server or a router that drains; "" if none does. */
  drainWords() {
    const { ending, engines } = this.feed;
    if (ending) return `The router ends: it takes no new requests, and ${requestsLeft(ending.requests)}.`;
    if (engines.size !== 1) return ""; // the table of engines tells
    const { draining } = [...engines.values()][0].frame ?? {};
    return draining ? `The server drains: it takes no new requests, and ${requestsLeft(draining.requests)} with ${seconds(draining.seconds)} to end.` : "";
  }

  tell(engine) {
    const { queue, blocks, prefix } = engine.last;
    const tell = (name, words) => say(this.tiles.get(name), words);
    const warn = (name, stands, words) => {
      const tile = this.tiles.get(name).parentElement;
      tile.classList.toggle("warn", stands);
      say(tile.querySelector("small"), stands ? words : "");
    };
    const held = (blocks.own + blocks.shared + blocks.moving) / Math.max(1, blocks.total);
    warn("blocks", held > FULL, "blocks are short");
    warn("waiting", queue.waiting > 0, WAITS_FOR[queue.waits_for] ?? "");
    warn("blocked", sum(Object.values(queue.blocked)) > 0, Object.entries(queue.blocked).filter(([, number]) => number).map(([why]) => STATES[why] ?? why).join(", "));
    tell("running", `${queue.running} of ${queue.slots}`);
    tell("waiting", String(queue.waiting));
    tell("blocked", String(sum(Object.values(queue.blocked))));
    tell("preempted", count(queue.num_preemptions));
    tell("prompt", count(Math.round(engine.rate("prompt_tokens"))));
    tell("output", count(Math.round(engine.rate("sampled"))));
    tell("steps", count(Math.round(engine.rate("steps"))));
    tell("hit", prefix.queries ? percent(prefix.hits / prefix.queries) : "–");
    const drafts = engine.rate("drafts");
    this.tiles.get("drafts").parentElement.hidden = !engine.facts?.num_drafts;
    tell("drafts", drafts ? percent(engine.rate("accepted") / drafts) : "–");
    tell("blocks", percent(held));
  }

  tables(engine) {
    const { last, frame } = engine;
    this.requests.draw(engine, this.selected);
    put(this.boxes.rates, table("Tokens each second, as means of windows", ["tokens each second", ...WINDOWS.map((each) => end(`${each} s`))], [["prompt", "prompt_tokens"], ["output", "sampled"]].map(
      ([words, name]) => [words, ...WINDOWS.map((each) => count(Math.round(engine.rate(name, each))))])));
    const split = engine.recent(10);
    const total = (name) => sum(split.map((one) => one.sums[name]));
    const steps = total("steps");
    const parts = [["plan", "chooses requests and blocks", "plan_s"], ["launch", engine.facts?.depth === 1 ? "hands the step over; with one step in flight it computes here" : "hands the step to the device", "launch_s"],
      ["wait", "for the result", "collect_s"], ["apply", "gives new tokens to their requests", "finish_s"], ["device", "from launch to result, at most", "device_s"]];
    put(this.boxes.split, steps ? table("Mean times of the steps of the last ten seconds", ["part", end("mean")], parts.map(([words, meaning, name]) => [h("span", {}, words, h("small", {}, ` ${meaning}`)), seconds(total(name) / steps)])) : h("p", { class: "hint" }, "No step in the last ten seconds."));
    const misses = Object.entries(last.prefix.misses);
    put(this.boxes.misses, misses.length
      ? table("Why prompts were not reused, since watching began", ["not reused because", end("prompts"), end("blocks")], misses.map(([why, one]) => [WHY[why] ?? why, count(one.requests), count(one.blocks)]))
      : h("p", { class: "hint" }, "No prompt missed blocks since watching began."),
      last.prefix.states ? h("p", { class: "hint" }, `Checkpoints: ${last.prefix.states.used} of ${last.prefix.states.total} used, ${count(last.prefix.states.hits)} prompt tokens resumed, ${count(last.prefix.states.cut)} cut.`) : null);
    const { latency } = frame;
    const line = (words, values, number) => [words, ...(values ?? [null, null, null]).map(seconds), number ?? ""];
    put(this.boxes.latency, latency?.requests
      ? table(`Percentiles of ${latency.requests} requests`, ["time", end("p50"), end("p90"), end("p99"), end("requests")],
        [line("queue", latency.queue_s, latency.counts?.queue_s), line("first token", latency.ttft_s, latency.counts?.ttft_s),
          line("each token", latency.tpot_s, latency.counts?.tpot_s), line("whole request", latency.e2e_s, latency.counts?.e2e_s)])
      : h("p", { class: "hint" }, "No request has come yet."), latency?.requests ? h("p", { class: "hint" }, `Requests that live, and those that ended in the last ${seconds(latency.window_s ?? 300)}.${latency.oldest_wait_s ? ` The oldest has waited for ${seconds(latency.oldest_wait_s)}.` : ""}`) : null);
    this.byteTable(engine);
    this.expertTable(frame.experts);
    const events = engine.events.slice(-40).reverse();
    put(this.boxes.events, events.length
      ? table("Last events of requests", ["time", "request", "event"], events.map((one) => [new Date(one.at * 1000).toLocaleTimeString("en-GB"), h("bdi", {}, engine.nameOf(one.handle)), eventWords(one)]))
      : h("p", { class: "hint" }, "No event since watching began."));
    put(this.boxes.steps, table("The last steps", [end("step"), end("chunks"), end("prompt tokens"), end("decodes"), end("drafts right"), end("device, at most")],
      engine.steps.slice(-20).reverse().map((step) => [step.step, step.chunks.length, sum(step.chunks.map((chunk) => chunk[2])), step.decodes, `${step.drafts[1]} of ${step.drafts[0]}`, seconds(step.device_s)])));
    const { blocks } = last;
    const rows = [["all", blocks.total, blocks.own, blocks.shared, blocks.moving, blocks.cached, blocks.free],
      ...blocks.groups.map((group, at) => [`group ${at + 1}${group.window ? `, window of ${group.window}` : ""}`, "", group.own, group.shared, "", "", ""])];
    put(this.boxes.blocks, table("KV blocks", ["blocks of", end("total"), end("own"), end("shared"), end("moving"), end("cached"), end("free")], rows));
    const chosen = this.mapOf?.owners.find((one) => one.handle === this.selected);
    this.chosenWords.hidden = this.selected === null && !this.ended;
    if (this.selected !== null) {
      say(this.chosenName, engine.nameOf(this.selected));
      say(this.chosenFacts, chosen
        ? `: slot ${chosen.slot}, ${chosen.tokens} tokens, tables of ${chosen.tables.map((one) => one.length).join(" and ")} blocks. `
        : ": holds no blocks now. ");
      this.chosenLife.hidden = !engine.names.has(this.selected);
    }
  }

  /** Tell the engines of a router or of replicas. Rows are made anew only when other engines come. */
  engineTable() {
    const all = [...this.feed.engines.values()].filter((one) => one.last);
    const known = new Set(all.map((one) => one.backend));
    const down = [...this.feed.down].filter(([backend]) => !known.has(backend));
    this.engines.hidden = all.length + this.feed.down.size < 2;
    if (this.engines.hidden) return;
    const keys = JSON.stringify([all.map((one) => one.key), down]);
    const now = performance.now();
    if (this.engineKeys === keys && now - this.enginesAt < TABLE_MS) return;
    this.enginesAt = now;
    if (this.engineKeys !== keys) {
      this.engineKeys = keys;
      const choice = (one) => h("input", { type: "radio", name: "engine", value: one.key, onchange: () => this.chooseEngine(one.key) });
      put(this.engines, h("h2", {}, "Engines"), table("Engines", ["engine", end("running"), end("waiting"), end("output tokens/s"), end("blocks held")], [
        ...all.map((one) => [h("div", {}, h("label", { class: "check" }, choice(one), h("bdi", {}, one.name)), h("span")), "", "", "", ""]),
        ...down.map(([backend, reason]) => [h("bdi", {}, `${backend}: down, ${reason}`), "–", "–", "–", "–"])]));
      for (const row of [...this.engines.querySelector("tbody").rows].slice(all.length)) row.classList.add("down");
    }
    const rows = this.engines.querySelector("tbody").rows;
    all.forEach((one, at) => {
      const { queue, blocks } = one.last;
      const held = (blocks.own + blocks.shared + blocks.moving) / Math.max(1, blocks.total);
      const words = [String(queue.running), String(queue.waiting), count(Math.round(one.rate("sampled"))), percent(held)];
      const reason = this.feed.down.get(one.backend);
      words.forEach((text, column) => say(rows[at].cells[column + 1], reason === undefined ? text : "–"));
      rows[at].querySelector("input").checked = one === this.engine;
      const { draining } = one.frame;
      const drains = draining ? `drains: ${requestsLeft(draining.requests)}, ${seconds(draining.seconds)} to end` : this.feed.leaving.has(one.backend) ? "gets no new requests" : "";
      rows[at].classList.toggle("down", reason !== undefined);
      say(rows[at].querySelector("span"), reason === undefined ? drains : `down: ${reason}`);
    });
  }

  chooseEngine(key) {
    this.chosen = key;
    this.enginesAt = 0;
    this.select(null);
    this.loadMap();
  }

  byteTable(engine) {
    const found = engine.recent(5);
    const time = sum(found.map((one) => one.seconds)) || 1;
    const rows = Object.keys(engine.frame.exchanged ?? {}).map((group) => [`between ranks, ${group}`, `${bytes(sum(found.map((one) => one.exchanged?.[group] ?? 0)) / time)}/s`, ""]);
    for (const [name, tier] of Object.entries(engine.last.tiers)) {
      const before = found[0].tiers[name] ?? tier;
      rows.push([`from ${name} memory`.replace("disk memory", "disk"), `${bytes((tier.loaded_bytes - before.loaded_bytes) / time)}/s`, bytes(tier.loaded_bytes)]);
      rows.push([`to ${name} memory`.replace("disk memory", "disk"), `${bytes((tier.stored_bytes - before.stored_bytes) / time)}/s`, bytes(tier.stored_bytes)]);
    }
    const held = Object.entries(engine.last.tiers).map(([name, tier]) => `${name}: ${count(tier.used)}${tier.blocks ? ` of ${count(tier.blocks)}` : ""} blocks`).join(" · ");
    put(this.boxes.bytes, held ? h("p", { class: "hint" }, held) : null, rows.length
      ? table("Bytes that move", ["way", end("now"), end("in all")], rows)
      : h("p", { class: "hint" }, "One rank and no tier: nothing moves. --kv-offload-gb adds host memory."));
  }

  expertTable(experts) {
    const section = this.heat.element.parentElement;
    section.hidden = !experts && !this.experts;
    if (!experts) return;
    this.experts = true;
    say(this.heatWords, `Rows are layers, columns are ranks; balancedness ${percent(experts.balancedness)}.`);
    this.heat.draw(experts.loads);
    const open = this.heatTable.querySelector("details")?.open;
    const ranks = experts.loads[0]?.map((_, rank) => end(`rank ${rank}`)) ?? [];
    put(this.heatTable, h("details", { open }, h("summary", {}, "Table of loads"), h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table: loads" }, table("Tokens of experts", [end("layer"), ...ranks], experts.loads.map((row, layer) => [layer, ...row.map(count)])))));
  }
}
