// The map of KV blocks: a cell for each block, or for several where there are too many. A click chooses the request.

import { colour, keyOf, paper } from "./charts.js";
import { h, put, say } from "./dom.js";

const HIGHEST = 260; // pixels
const LEAST_SHOWN = 1024; // blocks; free ones at the end are left out above that
const RANK = { s: 4, o: 3, m: 2, c: 1, ".": 0 };
const NAMES = { s: "shared by several requests", o: "of one request", m: "held by a copy that moves", c: "cached, held by nobody", ".": "free" };
const SHADES = { s: "--c-shared", o: "--c-own", m: "--c-moving", c: "--c-cached", ".": "--c-free" };

class Cells {
  /** choose: called with the number of a block, from 0. */
  constructor(label, choose) {
    this.canvas = h("canvas", { class: "cells", tabindex: 0, role: "img", "aria-label": `${label}. Arrow keys choose a block, Enter chooses its request.` });
    this.words = h("p", { class: "hint" }, "");
    this.label = label;
    this.rest = h("span", { class: "hint" });
    this.element = h("div", { class: "cells-box" }, h("div", { class: "row" }, h("h3", {}, label), this.rest), this.canvas, this.words);
    this.choose = choose;
    this.cursor = null;
    const at = (event) => this.blockAt(event.offsetX, event.offsetY);
    this.canvas.addEventListener("pointermove", (event) => this.point(at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => this.choose(at(event)));
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (move !== undefined && this.letters) {
        event.preventDefault();
        this.point(Math.max(0, Math.min((this.cursor ?? 0) + move * this.each, this.letters.length - 1)));
      } else if (event.key === "Enter") {
        this.choose(this.cursor);
      }
    });
  }

  blockAt(x, y) {
    if (!this.letters) return null;
    const column = Math.floor(x / this.size);
    const block = (Math.floor(y / this.size) * this.columns + column) * this.each;
    return column < this.columns && block < this.letters.length ? block : null;
  }

  point(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.describe();
    this.draw();
  }

  describe() {
    if (this.cursor === null || !this.letters) return say(this.words, this.summary ?? "");
    const many = this.each > 1 ? ` to ${Math.min(this.cursor + this.each, this.letters.length)}` : "";
    return say(this.words, `Block ${this.cursor + 1}${many}: ${NAMES[this.letterOf(this.cursor)]}${this.more?.(this.cursor, this.each) ?? ""}.`);
  }

  letterOf(block) {
    let best = ".";
    for (let at = block; at < Math.min(block + this.each, this.letters.length); at += 1) {
      const letter = this.letters[at];
      if (RANK[letter] > RANK[best]) best = letter;
    }
    return best;
  }

  /** letters: of all blocks. bright: a Set of blocks that stay bright while others are dim; null: all. */
  set(letters, bright) {
    let used = letters.length;
    while (used > 0 && letters[used - 1] === ".") used -= 1;
    const shown = Math.min(letters.length, Math.max(LEAST_SHOWN, used + Math.ceil(used / 8)));
    say(this.rest, shown < letters.length ? `${(letters.length - shown).toLocaleString("en")} further blocks are free.` : "");
    this.letters = letters.slice(0, shown);
    letters = this.letters;
    this.bright = bright;
    const width = this.canvas.clientWidth;
    if (!width || !letters.length) return;
    this.size = Math.max(3, Math.min(13, Math.floor(Math.sqrt((width * HIGHEST) / letters.length))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const most = this.columns * Math.floor(HIGHEST / this.size);
    this.each = Math.ceil(letters.length / most);
    const rows = Math.ceil(letters.length / this.each / this.columns);
    this.canvas.style.height = `${rows * this.size}px`;
    this.describe();
    this.draw();
  }

  draw() {
    const context = this.letters && paper(this.canvas);
    if (!context) return;
    const { size, columns, each } = this;
    const gap = size > 3 ? 1 : 0;
    for (let cell = 0; cell * each < this.letters.length; cell += 1) {
      const block = cell * each;
      const letter = this.letterOf(block);
      let lit = !this.bright;
      for (let at = block; !lit && at < block + each; at += 1) lit = this.bright.has(at);
      context.fillStyle = colour(lit || letter === "." ? SHADES[letter] : "--c-other");
      context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
    }
    if (this.cursor !== null) {
      const cell = Math.floor(this.cursor / each);
      context.strokeStyle = colour("--text");
      context.strokeRect((cell % columns) * size - 0.5, Math.floor(cell / columns) * size - 0.5, size, size);
    }
  }
}

export class BlockMap {
  /** select: called with the handle of a request, or null. name: returns the name of a handle. */
  constructor(select, name) {
    this.select = select;
    this.name = name;
    this.found = null;
    this.selected = null;
    this.device = new Cells("Device", (block) => this.clicked(block));
    this.host = new Cells("Host memory", () => {});
    this.states = new Cells("Checkpoints of recurrent layers", () => {});
    this.device.more = (block, each) => this.ownersWords(block, each);
    this.group = h("select", { "aria-label": "Group of layers", onchange: () => this.draw() });
    this.groupField = h("label", { class: "inline" }, "Blocks of ", this.group);
    this.size = h("p", { class: "hint" });
    this.clear = h("button", { type: "button", class: "quiet small", hidden: true, onclick: () => this.select(null) }, "Show all requests");
    this.element = h("div", {}, this.size, h("div", { class: "row" }, this.groupField, this.clear), this.device.element, this.host.element, this.states.element,
      keyOf([["--c-own", "of one request"], ["--c-shared", "shared"], ["--c-moving", "moving"], ["--c-cached", "cached"], ["--c-free", "free"]]));
  }

  /** found: the answer of /debug/blocks for an engine. */
  set(found) {
    this.found = found;
    say(this.size, `A block holds the keys and values of ${[...new Set(found.groups.map((group) => group.block_size))].join(" or ")} tokens.`);
    const names = ["all groups", ...found.groups.map((group, at) => (group.window ? `group ${at + 1}: window of ${group.window}` : `group ${at + 1}: all tokens`))];
    if (this.group.length !== names.length) put(this.group, names.map((words, at) => h("option", { value: at - 1 }, words)));
    this.groupField.hidden = found.groups.length < 2;
    // a letter of a block in use without an owner is a block that moves
    const held = new Set(found.owners.flatMap((owner) => owner.tables.flat()));
    this.letters = Array.from(found.device, (letter, at) => ((letter === "o" || letter === "s") && !held.has(at + 1) ? "m" : letter));
    this.draw();
  }

  draw() {
    if (!this.found) return;
    const group = Number(this.group.value || -1);
    const owners = this.selected === null ? this.found.owners : this.found.owners.filter((owner) => owner.handle === this.selected);
    const all = this.selected === null && group < 0;
    const bright = all ? null : new Set(owners.flatMap((owner) => (group < 0 ? owner.tables.flat() : owner.tables[group] ?? [])).map((block) => block - 1));
    const number = bright ? [...bright].filter((block) => block >= 0).length : 0;
    this.device.summary = this.selected === null ? "Point at a block, and click to choose its request." : `${this.name(this.selected)} holds ${number} blocks.`;
    this.clear.hidden = this.selected === null;
    this.device.set(this.letters, bright);
    for (const [cells, letters] of [[this.host, this.found.host], [this.states, this.found.states]]) {
      cells.element.hidden = letters === null;
      if (letters !== null) cells.set(Array.from(letters), null);
    }
  }

  owners(block, each = 1) {
    const within = (number) => number - 1 >= block && number - 1 < block + each;
    return this.found.owners.filter((owner) => owner.tables.some((table) => table.some(within)));
  }

  ownersWords(block, each) {
    const found = this.owners(block, each);
    return found.length ? `, ${found.slice(0, 3).map((owner) => this.name(owner.handle)).join(", ")}${found.length > 3 ? ` and ${found.length - 3} more` : ""}` : "";
  }

  /** Choose the request of a block; of a shared one, the next owner with each click. */
  clicked(block) {
    if (block === null || !this.found) return;
    const handles = this.owners(block, this.device.each).map((owner) => owner.handle);
    this.select(handles.length ? handles[(handles.indexOf(this.selected) + 1) % handles.length] : null);
  }
}
