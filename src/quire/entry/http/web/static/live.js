// The view Live: panels fed by the stream of frames, while this tab of the page is seen.

import { ask } from "./api.js";
import { BlockMap } from "./blocks.js";
import { Heat, Lines, Strip, percentOf } from "./charts.js";
import { bytes, count, h, percent, put, say, seconds, table } from "./dom.js";
import { Feed } from "./feed.js";
import { STATES, WHY, eventWords } from "./words.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");
const MAP_MS = 1000;
const TABLE_MS = 1000; // between two changes of a table: people read them
const MOST_ROWS = 100;
const WAITS_FOR = { slots: "every slot is taken", blocks: "blocks are short", budget: "steps are full", result: "for a result" };
const FULL = 0.95; // share of held blocks from which they are short
const COLUMNS = [
  // name, flush right, value by which a click on the head sorts
  ["request"], ["state"], ["slot", true], ["prompt", true, (requests, at) => requests.prompt[at]],
  ["output", true, (requests, at) => requests.tokens[at] - requests.prompt[at]], ["computed"], ["cached", true, (requests, at) => requests.cached[at]],
  ["blocks", true, (requests, at) => requests.blocks[at]], ["preempted", true, (requests, at) => requests.preemptions[at]],
  ["age", true, (requests, at, engine) => engine.age(requests.handle[at])], ["life"],
];
const sum = (values) => values.reduce((total, one) => total + one, 0);
const end = (name) => ({ name, end: true });

const panel = (title, className, ...children) => h("section", { class: `panel ${className}`, "aria-label": title }, h("h2", {}, title), children);
const behind = (words, ...children) => h("details", {}, h("summary", {}, words), children);

export class Live {
  constructor(root, openTimeline) {
    this.root = root;
    this.openTimeline = openTimeline;
    this.feed = new Feed(() => this.later());
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
    this.boxes = { requests: box(), misses: box(), latency: box(), bytes: box(), events: box(), steps: box(), blocks: box(), split: box() };
    for (const [name, one] of Object.entries(this.boxes)) one.setAttribute("aria-label", `Table: ${name}`);
    this.requestWords = h("p", { class: "hint" });
    this.adapterWords = h("p", { class: "hint", hidden: true });
    const requestTable = table("Live requests", COLUMNS.map(([name, flush]) => (flush ? end(name) : name)), []);
    this.sorted = null; // {column, down}; null: the order of service
    this.requestHeads = [...requestTable.tHead.rows[0].cells];
    this.requestHeads.forEach((head, column) => COLUMNS[column][2] && put(head, h("button", { type: "button", class: "link sort", onclick: () => this.sort(column) }, COLUMNS[column][0])));
    this.requestRows = requestTable.tBodies[0];
    this.boxes.requests.classList.add("requests");
    put(this.boxes.requests, requestTable);
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
      panel("Requests", "wide", this.requestWords, this.adapterWords, this.boxes.requests),
      panel("Throughput", "", this.rate.element),
      panel("Queue", "", this.queue.element),
      panel("Time of a step", "", this.boxes.split),
      panel("Prefix cache", "", this.hits.element, this.boxes.misses),
      panel("Latency", "", this.boxes.latency),
      panel("Bytes that move", "", this.boxes.bytes),
      panel("Experts", "", this.heatWords, this.heat.element, this.heatTable),
      panel("Events", "half", this.boxes.events));
    this.tilesOf = h("p", { class: "hint tiles-of" });
    put(this.root, h("div", { class: "row live-head" }, h("h2", {}, "Live"), this.status, this.pause), this.engines, this.tilesOf, this.tileBox, this.grid, this.spoken);
    this.boxes.requests.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-handle]");
      if (row && !event.target.closest("button")) this.select(Number(row.dataset.handle) === this.selected ? null : Number(row.dataset.handle));
    });
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
    this.feed.start();
    clearInterval(this.mapTimer);
    this.mapTimer = setInterval(() => this.loadMap(), MAP_MS);
    this.loadMap();
  }

  unwatch() {
    this.feed.stop();
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
    this.engineTable();
    const reason = this.feed.down.get(engine?.backend);
    this.grid.hidden = this.tileBox.hidden = this.tilesOf.hidden = !engine?.last;
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
    if (now - this.spokenAt > 15_000) {
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
    this.requestTable(engine);
    const split = engine.recent(10);
    const total = (name) => sum(split.map((one) => one.sums[name]));
    const steps = total("steps");
    const parts = [["plan", "plan_s"], ["launch", "launch_s"], ["wait for the result", "collect_s"], ["apply the result", "finish_s"], ["device, at most", "device_s"]];
    put(this.boxes.split, steps ? table("Mean times of the steps of the last ten seconds", ["part", end("mean")], parts.map(([words, name]) => [words, seconds(total(name) / steps)])) : h("p", { class: "hint" }, "No step in the last ten seconds."));
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
      words.forEach((text, column) => say(rows[at].cells[column + 1], text));
      rows[at].querySelector("input").checked = one === this.engine;
      const reason = this.feed.down.get(one.backend);
      rows[at].classList.toggle("down", reason !== undefined);
      say(rows[at].querySelector("span"), reason === undefined ? "" : `down: ${reason}`);
    });
  }

  chooseEngine(key) {
    this.chosen = key;
    this.enginesAt = 0;
    this.select(null);
    this.loadMap();
  }

  /** Update the rows of live requests in place: a row that is being clicked or has the focus stays. */
  requestTable(engine) {
    const { requests, queue } = engine.last;
    const adapters = Object.entries(queue.adapters ?? {});
    put(this.adapterWords, "Adapters: ", adapters.map(([name, number], at) => [at ? " · " : "", `${number} for `, h("bdi", {}, name)]));
    this.adapterWords.hidden = !adapters.length;
    const states = new Map();
    for (const state of requests.state) states.set(state, (states.get(state) ?? 0) + 1);
    const shown = Math.min(MOST_ROWS, requests.handle.length);
    const rest = requests.handle.length - shown + requests.more;
    const words = [...states].map(([state, number]) => `${number} ${STATES[state] ?? state}`).join(" · ");
    say(this.requestWords, shown ? `${words}${rest ? ` · ${rest} more are not listed` : ""}` : "No request lives. Talk to the model, or send it requests.");
    this.requestRows.parentElement.hidden = !shown;
    const kept = new Map([...this.requestRows.rows].map((row) => [row.dataset.key, row]));
    const order = requests.handle.map((_, at) => at);
    if (this.sorted) {
      const value = COLUMNS[this.sorted.column][2];
      order.sort((one, other) => (value(requests, other, engine) - value(requests, one, engine)) * (this.sorted.down ? 1 : -1));
    }
    for (let place = 0; place < shown; place += 1) {
      const at = order[place];
      const handle = requests.handle[at];
      const key = `${engine.key} ${handle}`;
      const row = kept.get(key) ?? this.requestRow(key, handle);
      kept.delete(key);
      if (this.requestRows.rows[place] !== row) this.requestRows.insertBefore(row, this.requestRows.rows[place] ?? null);
      const id = requests.id[at];
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
      life.hidden = id === null;
      row.classList.toggle("selected", handle === this.selected);
    }
    for (const row of kept.values()) row.remove();
  }

  /** Sort by a column: largest first, then smallest first, then the order of service again. */
  sort(column) {
    const same = this.sorted?.column === column;
    this.sorted = !same ? { column, down: true } : this.sorted.down ? { column, down: false } : null;
    this.requestHeads.forEach((head, at) => {
      if (this.sorted?.column === at) head.setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.tablesAt = 0;
    this.later();
  }

  requestRow(key, handle) {
    const link = (click, ...children) => h("button", { type: "button", class: "link", onclick: click }, children);
    const cell = (...children) => h("td", {}, children);
    const number = () => h("td", { class: "end" });
    return h("tr", { data: { key, handle } },
      cell(link(() => this.select(handle === this.selected ? null : handle), h("bdi"))), cell(), number(), number(), number(),
      cell(h("progress", { "aria-label": "tokens computed" })), number(), number(), number(), number(),
      cell(link(() => this.openTimeline(this.engine.nameOf(handle), this.engine.backend), "timeline")));
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
