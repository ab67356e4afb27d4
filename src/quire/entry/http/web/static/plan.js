// The plan as a tree to browse: kernels with their reasons first, then everything, built as it is opened.

import { bytes, h, put, say } from "./dom.js";

const ALSO = ["kind", "reason"]; // beside its title, what a search keeps of an entry
const TITLES = ["op", "layer", "group", "function", "name", "number", "feature"]; // the field that names an entry of a list
const MOST_FOUND = 400; // values that a search shows
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

function leaf(name, text) {
  return h("p", { class: "leaf" }, h("span", { class: "name" }, name), h("bdi", {}, text));
}

/** Return an element for a value and what is below it. open: how many levels are open. */
function node(name, value, open) {
  if (!isTree(value)) return leaf(name, words(name, value));
  if (!sizeOf(value)) return leaf(name, "none");
  if (flat(value)) return leaf(name, value.length ? value.map((one) => words(name, one)).join(", ") : "none");
  const [title, more] = titleOf(name, value);
  const body = h("div", { class: "branch" });
  const details = h("details", {}, h("summary", {}, h("span", { class: "name" }, title), " ", more ? h("span", { class: "more-words" }, more) : h("span", { class: "faint" }, `${sizeOf(value)}`)), body);
  const build = () => {
    if (!body.childElementCount) put(body, Object.entries(value).map(([key, one]) => node(key, one, open - 1)));
  };
  details.addEventListener("toggle", () => details.open && build());
  if (open > 0) {
    build();
    details.open = true;
  }
  return details;
}

/** Return the part of a value whose names or texts have the words; undefined if there is none. left: values that may still come. */
function matching(name, value, wanted, left) {
  if (left.number <= 0) return undefined;
  const own = name.toLowerCase().includes(wanted);
  if (!isTree(value) || flat(value)) {
    const text = flat(value) ? value.join(", ") : words(name, value);
    if (!own && !text.toLowerCase().includes(wanted)) return undefined;
    left.number -= 1;
    return value;
  }
  if (own) {
    left.number -= sizeOf(value);
    return value;
  }
  const found = Object.entries(value).map(([key, one]) => [key, matching(key, one, wanted, left)]).filter(([, one]) => one !== undefined);
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
    const wanted = this.search.value.trim().toLowerCase();
    if (!this.plan) {
      put(this.kernels);
      put(this.tree, h("p", { class: "hint" }, "This engine has no plan: the mock device computes nothing."));
      return;
    }
    this.kernels.hidden = wanted !== "";
    if (!wanted) {
      say(this.number, "");
      put(this.kernels, h("h3", {}, "Kernels, and why they were chosen"), this.plan.kernels.map(kernel));
      put(this.tree, h("h3", {}, "The whole plan"), Object.entries(this.plan).map(([name, value]) => node(name, value, 0)));
      return;
    }
    const left = { number: MOST_FOUND };
    const found = matching("", this.plan, wanted, left);
    const number = MOST_FOUND - left.number;
    say(this.number, found ? `${left.number <= 0 ? "more than " : ""}${Math.min(number, MOST_FOUND)} found` : "nothing found");
    put(this.tree, found ? Object.entries(found).map(([name, value]) => node(name, value, 12)) : null);
  }
}

function kernel(one) {
  const rejected = one.rejected.map(([name, why]) => h("li", {}, h("s", {}, name), h("span", {}, ` ${why}`)));
  return h("div", { class: "kernel" }, h("span", { class: "name" }, one.op), h("p", {}, h("strong", {}, one.name), " ", h("span", { class: "faint" }, one.reason)),
    rejected.length ? h("ul", { "aria-label": `Kernels that were not chosen for ${one.op}` }, rejected) : null);
}

