// The stream /debug/live: facts, the last steps and the last seconds of each engine. It is open only while somebody looks.

import { events, send } from "./api.js";

export const MOST_STEPS = 512;
const MOST_SAMPLES = 600;
const MOST_EVENTS = 80;
const MOST_ENDED = 1024; // requests of which the end is kept
const RATE_SECONDS = 3;

/** An engine: a replica of a server. `samples`: what each frame told, oldest first. */
class Engine {
  constructor(backend, replica) {
    this.backend = backend;
    this.replica = replica;
    this.facts = null;
    this.last = null; // the entry of the last frame
    this.frame = null;
    this.steps = [];
    this.samples = [];
    this.events = [];
    this.names = new Map(); // handle -> id
    this.begun = new Map(); // handle of a live request -> {at, saw}: when it arrived, or was seen first
    this.ended = new Map(); // handle -> reason
    this.missed = 0; // frames that did not come, and steps that frames left out
  }

  get key() {
    return `${this.backend ?? ""} ${this.replica}`;
  }

  take(entry, frame) {
    this.last = entry;
    this.frame = frame;
    for (const step of entry.steps) this.steps.push(step);
    if (entry.skipped && entry.steps.length) this.steps.at(-entry.steps.length).gap = entry.skipped;
    if (this.steps.length > MOST_STEPS) this.steps.splice(0, this.steps.length - MOST_STEPS);
    this.samples.push({ at: frame.at, seconds: frame.seconds, sums: entry.sums, queue: entry.queue, prefix: entry.prefix, tiers: entry.tiers, exchanged: frame.exchanged });
    if (this.samples.length > MOST_SAMPLES) this.samples.splice(0, this.samples.length - MOST_SAMPLES);
    this.watchLives(entry, frame.at);
    this.events.push(...entry.events);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
    entry.requests.handle.forEach((handle, at) => {
      if (entry.requests.id[at] !== null) this.names.set(handle, entry.requests.id[at]);
    });
    if (this.names.size > 4096) this.names = new Map([...this.names].slice(-2048));
  }

  /** Return the samples of the last seconds. */
  recent(seconds = RATE_SECONDS) {
    const from = (this.samples.at(-1)?.at ?? 0) - seconds;
    return this.samples.filter((one) => one.at > from);
  }

  /** Keep when the live requests came, and why others ended. */
  watchLives({ events: told, requests }, now) {
    const arrived = new Map();
    for (const { what, handle, at, detail } of told) {
      if (what === "arrived") {
        arrived.set(handle, { at, saw: true });
        this.ended.delete(handle);
      } else if (what === "finished") {
        this.ended.set(handle, detail);
      }
    }
    this.begun = new Map(requests.handle.map((handle) => [handle, arrived.get(handle) ?? this.begun.get(handle) ?? { at: now, saw: false }]));
    if (this.ended.size > MOST_ENDED) this.ended = new Map([...this.ended].slice(-MOST_ENDED / 2));
  }

  /** True if a request that lived lives no more. */
  hasEnded(handle) {
    return !this.begun.has(handle) && (this.ended.has(handle) || this.last.requests.more === 0);
  }

  /** Return seconds since a live request arrived, or was seen first. */
  age(handle) {
    return Math.max(0, this.frame.at - (this.begun.get(handle)?.at ?? this.frame.at));
  }

  /** True if the arrival of a live request was seen. */
  sawBegin(handle) {
    return this.begun.get(handle)?.saw ?? false;
  }

  get name() {
    return [this.backend, `replica ${this.replica}`].filter((words) => words !== null).join(", ");
  }

  /** Number of requests that it has. */
  get load() {
    return this.last ? this.last.queue.running + this.last.queue.waiting : -1;
  }

  /** Return a sum of frames for each second, over the last seconds. */
  rate(name, over = RATE_SECONDS) {
    const found = this.recent(over);
    const time = found.reduce((sum, one) => sum + one.seconds, 0);
    return time ? found.reduce((sum, one) => sum + one.sums[name], 0) / time : 0;
  }

  nameOf(handle) {
    return this.names.get(handle) ?? `request ${handle}`;
  }
}

export class Feed {
  /** changed: called after each event. */
  constructor(changed) {
    this.changed = changed;
    this.engines = new Map();
    this.down = new Map(); // backend -> reason
    this.words = "not watching";
    this.lost = 0;
    this.stopper = null;
    this.holders = new Set();
    this.backendNames = null; // of a router, as it told them first
    this.leaving = new Set(); // backends that the router sends no new requests
    this.ending = null; // of a router that drains: the requests that are left
    this.came = new Set(); // backends from which a frame has come since the stream began
    this.waiting = []; // functions to call when frames come from all
  }

  get open() {
    return this.stopper !== null;
  }

  /** Keep the stream open for somebody, until `release`. */
  hold(who) {
    this.holders.add(who);
    this.start();
  }

  release(who) {
    this.holders.delete(who);
    if (!this.holders.size) this.stop();
  }

  start() {
    if (this.open) return;
    this.came.clear();
    this.stopper = new AbortController();
    this.run(this.stopper);
  }

  stop() {
    this.stopper?.abort();
    this.stopper = null;
    this.words = "not watching";
  }

  /** Wait until frames come from every server that is up: from then on all steps are recorded. most: milliseconds to wait. */
  async recording(most) {
    if (this.records()) return;
    await new Promise((resolve) => {
      this.waiting.push(resolve);
      setTimeout(resolve, most);
    });
  }

  records() {
    return this.came.size > 0 && (this.backendNames ?? []).every((name) => this.came.has(name) || this.down.has(name));
  }

  /** Return the addresses of the backends behind a router; none for a server. The stream is opened for a moment if nothing is known. */
  async backends() {
    if (!this.factsOf && !this.backendNames && !this.open) {
      this.hold("backends");
      await new Promise((resolve) => {
        this.waiting.push(resolve);
        setTimeout(resolve, 700);
      });
      this.release("backends");
    }
    return this.backendNames ?? [];
  }

  async run(stopper) {
    const signal = stopper.signal;
    for (let wait = 500; !signal.aborted; wait = Math.min(wait * 2, 8000)) {
      try {
        this.words = "connecting";
        const response = await send("debug/live", { signal });
        this.words = "";
        wait = 500;
        for await (const { name, data } of events(response)) {
          if (signal.aborted) return;
          this.take(name, JSON.parse(data));
          this.changed();
        }
        this.ending = null;
        if (!this.words) this.words = "the stream ended; it is opened again";
      } catch (error) {
        if (signal.aborted) return;
        this.ending = null;
        this.words = error.message;
        if (error.status === 401 || error.code === "web_off") this.stopper = null;
        this.changed();
        if (!this.open) return;
      }
      this.changed();
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  take(name, data) {
    const backend = data.backend ?? null;
    if (name === "router") {
      this.backendNames = data.backends;
      this.leaving = new Set(data.draining);
      this.ending = data.ending ?? null;
    } else if (name === "engine") {
      this.down.delete(backend);
      for (const engine of [...this.engines.values()].filter((one) => one.backend === backend)) this.engines.delete(engine.key);
      this.factsOf = { ...this.factsOf, [backend ?? ""]: data };
    } else if (name === "frame") {
      for (const entry of data.engines) this.engine(backend, entry.replica).take(entry, data);
      this.came.add(backend);
    } else if (name === "lost") {
      this.lost += data.frames;
    } else if (name === "down") {
      this.down.set(backend, data.reason);
    } else if (name === "end") {
      if (backend === null) this.words = data.reason;
      else this.down.set(backend, data.reason);
    }
    if (this.waiting.length && this.records()) for (const resolve of this.waiting.splice(0)) resolve();
  }

  engine(backend, replica) {
    const fresh = new Engine(backend, replica);
    if (!this.engines.has(fresh.key)) {
      fresh.facts = this.factsOf?.[backend ?? ""] ?? null;
      this.engines.set(fresh.key, fresh);
    }
    return this.engines.get(fresh.key);
  }
}
