// The plan as a tree to browse: kernels with their reasons first, then everything, built as it is opened.

import { bytes, h, put, say } from "./dom.js";

const ALSO = ["kind", "reason"]; // beside its title, what a search keeps of an entry
const TITLES = ["op", "layer", "group", "function", "name", "number", "feature"]; // the field that names an entry of a list
const MOST_FOUND = 400; // values that a search shows
const NO_SEARCH = { wanted: "", whole: new Set() };
const HEADINGS = { kernels: "Kernels, and why they were chosen" };
const isTree = (value) => value !== null && typeof value === "object";
const sizeOf = (value) => (Array.isArray(value) ? value.length : Object.keys(value).length);

/** Return the words of a value: numbers of bytes with their unit. */
function words(name, value) {
  if (value === null) return "none";
  if (value === "") return "(empty)";
  if (typeof value === "number" && /bytes$|^kv_bytes$|^weights$|^scratch$|^buffers$/.test(name) && value > 1023) return `${value.toLocaleString("en")} (${bytes(value)})`;
  if (typeof value === "number" && Number.isInteger(value) && Math.abs(value) > 9999) return value.toLocaleString("en");
  if (typeof value === "boolean") return value ? "yes" : "no";
  return String(value);
}

const flat = (value) => Array.isArray(value) && value.every((one) => !isTree(one)) && value.length <= 12;

function titleOf(name, value) {
  if (Array.isArray(value) || !isTree(value)) return [name, ""];
  const key = TITLES.find((one) => typeof value[one] === "string" || typeof value[one] === "number");
  const more = value.op !== undefined ? [value.name, value.reason].filter(Boolean).join(": ") : value.kind ?? value.reason ?? "";
  return [key === undefined || Number.isNaN(Number(name)) ? name : String(value[key]), typeof more === "string" ? more : ""];
}

/** Return a text as a search compares it. */
const plain = (text) => text.toLowerCase().replaceAll("_", " ");

/** Return the pieces of a text, with the words of the search marked. */
function marked(text, wanted) {
  const lower = plain(text);
  if (!wanted || lower.length !== text.length) return [text];
  const pieces = [];
  let begin = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, begin)) {
    pieces.push(text.slice(begin, at), h("mark", {}, text.slice(at, at + wanted.length)));
    begin = at + wanted.length;
  }
  return [...pieces, text.slice(begin)];
}

function leaf(name, text, wanted) {
  return h("p", { class: "leaf" }, h("span", { class: "name" }, marked(name, wanted)), h("bdi", {}, marked(text, wanted)));
}

/** Return a text that is equal for layers that differ in their number, and in their file of the checkpoint, alone. */
const withoutNumber = (value) => JSON.stringify({ ...value, layer: "" }).replaceAll(`.${value.layer}.`, ".").replace(/-\d+-of-\d+\./g, ".");

/** Return the elements of the entries of a value. Neighbours that are equal layers become one element. */
function nodes(value, open, search) {
  const entries = Object.entries(value);
  const found = [];
  for (let at = 0; at < entries.length;) {
    const [key, one] = entries[at];
    let next = at + 1;
    if (isTree(one) && !Array.isArray(one) && one.layer !== undefined) {
      const own = withoutNumber(one);
      while (next < entries.length && isTree(entries[next][1]) && withoutNumber(entries[next][1]) === own) next += 1;
    }
    found.push(node(key, one, open, search, next - at > 1 ? entries[next - 1][1].layer : null));
    at = next;
  }
  return found;
}

/** Return an element for a value and what is below it.
 * open: how many levels are open. search: {wanted, whole}. until: the last of the equal layers that begin with this one. */
function node(name, value, open, search = NO_SEARCH, until = null) {
  const { wanted, whole } = search;
  if (!isTree(value)) return leaf(name, words(name, value), wanted);
  if (!sizeOf(value)) return leaf(name, "none", wanted);
  if (flat(value)) return leaf(name, value.map((one) => words(name, one)).join(", "), wanted);
  if (whole.has(value)) open = Math.min(open, 0);
  const [title, more] = titleOf(name, value);
  const body = h("div", { class: "branch" });
  const label = until === null ? title : `${title} to ${until}`;
  const details = h("details", {}, h("summary", {}, h("span", { class: "name" }, marked(label, wanted)), " ",
    more ? h("span", { class: "more-words" }, marked(more, wanted)) : h("span", { class: "faint" }, `${sizeOf(value)}`)), body);
  const build = () => {
    if (body.childElementCount) return;
    put(body, until === null ? null : h("p", { class: "hint" }, `This is layer ${title}. The others differ in their number and file alone.`), nodes(value, open - 1, search));
  };
  details.addEventListener("toggle", () => details.open && build());
  if (open > 0) {
    build();
    details.open = true;
  }
  return details;
}

/** Return the part of a value whose headings or texts have the words; undefined if there is none.
 * left: values that may still come. whole: gets the values whose heading has the words, which are kept as they are. */
function matching(name, value, wanted, left, whole) {
  if (left.number <= 0) return undefined;
  const own = plain([...titleOf(name, value), name, HEADINGS[name] ?? ""].join(" ")).includes(wanted);
  if (!isTree(value) || flat(value)) {
    const text = flat(value) ? value.join(", ") : words(name, value);
    if (!own && !plain(text).includes(wanted)) return undefined;
    left.number -= 1;
    return value;
  }
  if (own) {
    left.number -= 1;
    whole.add(value);
    return value;
  }
  const found = Object.entries(value).map(([key, one]) => [key, matching(key, one, wanted, left, whole)]).filter(([, one]) => one !== undefined);
  if (!found.length) return undefined;
  const head = [...TITLES, ...ALSO].filter((key) => !Array.isArray(value) && !isTree(value[key]) && value[key] !== undefined).map((key) => [key, value[key]]);
  return Object.fromEntries([...head, ...found]);
}

export class Plan {
  constructor() {
    this.search = h("input", { type: "search", placeholder: "Search names and values", "aria-label": "Search the plan" });
    this.number = h("span", { class: "hint", role: "status" });
    this.kernels = h("div", { class: "kernels" });
    this.tree = h("div", { class: "tree" });
    this.element = h("div", {}, h("div", { class: "row search" }, this.search, this.number), this.kernels, this.tree);
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.draw(), 200);
    });
  }

  set(plan) {
    this.plan = plan;
    this.draw();
  }

  draw() {
    const wanted = plain(this.search.value.trim());
    if (!this.plan) {
      put(this.kernels);
      put(this.tree, h("p", { class: "hint" }, "This engine has no plan: the mock device computes nothing."));
      return;
    }
    this.kernels.hidden = wanted !== "";
    if (!wanted) {
      say(this.number, "");
      put(this.kernels, h("h3", {}, HEADINGS.kernels), this.plan.kernels.map(kernel));
      put(this.tree, h("h3", {}, "The whole plan"), nodes(this.plan, 0, NO_SEARCH));
      return;
    }
    const left = { number: MOST_FOUND };
    const whole = new Set();
    const found = matching("", this.plan, wanted, left, whole);
    const number = MOST_FOUND - left.number;
    say(this.number, found ? `${left.number <= 0 ? "more than " : ""}${Math.min(number, MOST_FOUND)} found` : "nothing found");
    put(this.tree, found ? nodes(found, 12, { wanted, whole }) : null);
  }
}

function kernel(one) {
  const rejected = one.rejected.map(([name, why]) => h("li", {}, h("s", {}, name), h("span", {}, ` ${why}`)));
  return h("div", { class: "kernel" }, h("span", { class: "name" }, one.op), h("p", {}, h("strong", {}, one.name), " ", h("span", { class: "faint" }, one.reason)),
    rejected.length ? h("ul", { "aria-label": `Kernels that were not chosen for ${one.op}` }, rejected) : null);
}

