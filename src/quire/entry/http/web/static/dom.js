// Elements and words: makes elements without HTML text, and writes numbers for people.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an HTML element. Strings among the children become text, never HTML. */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** Return an SVG element. */
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Replace the children of an element. */
export const put = (element, ...children) =>
  element.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));

/** Set an element's text, if it is another one: unchanged text is not announced again. */
export function say(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

export const count = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 10 && !Number.isInteger(value)) return value.toFixed(1);
  if (size < 10_000) return String(Math.round(value));
  if (size < 1e6) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0)}k`;
  if (size < 1e9) return `${(value / 1e6).toFixed(1)}M`;
  return `${(value / 1e9).toFixed(1)}G`;
};

export const bytes = (value) => {
  if (value === null || value === undefined) return "–";
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return `${size < 10 && unit !== "B" ? size.toFixed(1) : Math.round(size)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
};

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
};

export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %` : "–");

/** Return a text in which spaces, line ends and characters without a shape can be seen. */
export const visible = (text) =>
  text === ""
    ? "(no text)"
    : text.replace(/\n/g, "⏎").replace(/ /g, "␣").replace(/\t/g, "⇥")
        .replace(/[\p{Cc}\p{Cf}\p{Co}]/gu, (one) => `U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);

/** Return a table: names of columns, rows of cells. A cell is a text or an element. `{end: true}` sets numbers flush right. */
export function table(caption, columns, rows) {
  const heads = columns.map((column) => h("th", { scope: "col", class: column.end ? "end" : null }, column.name ?? column));
  const lines = rows.map((row) =>
    h("tr", {}, row.map((cell, at) => h("td", { class: columns[at].end ? "end" : null }, cell instanceof Node ? cell : String(cell)))));
  return h("table", {}, h("caption", { class: "sr" }, caption), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, lines));
}

/** Make arrow keys move among the tabs of a list, and call `choose(tab)` for the chosen one. Return the function that chooses. */
export function tabs(list, choose) {
  const all = [...list.querySelectorAll("[role=tab]")];
  const select = (tab, focus) => {
    for (const one of all) {
      const chosen = one === tab;
      one.setAttribute("aria-selected", String(chosen));
      one.tabIndex = chosen ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (focus) tab.focus();
    choose(tab);
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) select(tab, false);
  });
  list.addEventListener("keydown", (event) => {
    const at = all.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    select(all[(next + all.length) % all.length], true);
  });
  return (id) => select(all.find((tab) => tab.id === id) ?? all[0], false);
}

/** Copy a text to the clipboard, and say so on the button for a moment. */
export async function copy(button, text) {
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select the text and copy it";
  }
  setTimeout(() => { button.textContent = words; }, 1500);
}
