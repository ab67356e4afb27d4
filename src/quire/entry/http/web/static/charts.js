// Drawings on canvas: colours of the theme, the strip of steps, lines over time, and the heat of experts.

import { count, h, say, seconds } from "./dom.js";

const cache = new Map();
addEventListener("quire-theme", () => cache.clear());

/** Return a colour of the style sheet, such as "--accent", as the theme has it now. */
export function colour(name) {
  if (!cache.has(name)) {
    const probe = h("span", { hidden: true });
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    cache.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return cache.get(name);
}

/** Return the context of a canvas that fits its box and the screen, cleared; null while it has no size. */
export function paper(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  const [w, hh] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== hh) [canvas.width, canvas.height] = [w, hh];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  return context;
}

/** Return the next round number: the top of a scale. */
function top(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999);
}

export const keyOf = (entries) => h("ul", { class: "keys" }, entries.map(([name, words]) => {
  const box = h("i", { "aria-hidden": "true" });
  box.style.background = `var(${name})`;
  return h("li", {}, box, words);
}));

const PITCH = 5; // pixels of a step
const CUT = 10; // times the median: bars of longer steps are cut
const LANES = [
  { label: "prompt tokens", share: 0.36, unit: count },
  { label: "decodes and drafts", share: 0.3, unit: count },
  { label: "time of a step", share: 0.34, unit: seconds },
];
const TIMES = [["plan_s", "--c-plan", "plan"], ["launch_s", "--c-launch", "launch"], ["collect_s", "--c-wait", "wait for the result"], ["finish_s", "--c-finish", "apply"]];

/** The last steps: chunks of prompts, decodes with drafts, and times, newest at the right. */
export class Strip {
  constructor() {
    this.canvas = h("canvas", { class: "strip", tabindex: 0, role: "img", "aria-label": "The last steps. Arrow keys choose a step, whose numbers stand below." });
    this.words = h("p", { class: "hint", "aria-live": "polite" }, "Point at a step to read its numbers.");
    this.keys = h("div", { class: "row key-groups" },
      keyOf([["--c-prompt", "prompt chunks"], ["--c-decode", "decodes"], ["--c-right", "drafts, right"], ["--c-wrong", "drafts, thrown away"]]),
      keyOf([...TIMES.map(([, name, words]) => [name, words]), ["--text", "device, at most"], ["--faint", "steps were left out"]]));
    this.element = h("div", {}, this.canvas, this.words, this.keys);
    this.at = null; // number of the chosen step
    this.engine = null;
    this.canvas.addEventListener("pointermove", (event) => this.choose(Math.floor((this.canvas.clientWidth - event.offsetX) / PITCH)));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
      if (move === undefined || !this.engine) return;
      event.preventDefault();
      const steps = this.engine.steps;
      const now = steps.findIndex((step) => step.step === this.at);
      this.choose(now < 0 ? 0 : steps.length - 1 - now + move);
    });
  }

  leave() {
    this.at = null;
    say(this.words, "Point at a step to read its numbers.");
    if (this.engine) this.draw(this.engine, this.selected);
  }

  /** Choose the step with `back` steps behind it. */
  choose(back) {
    const step = this.engine?.steps.at(-1 - Math.max(0, back));
    if (!step || step.step === this.at) return;
    this.at = step.step;
    say(this.words, this.told(step));
    this.draw(this.engine, this.selected);
  }

  told(step) {
    const chunks = step.chunks.map(([handle, first, tokens, ends]) => `${tokens} from ${first} of ${this.engine.nameOf(handle)}${ends ? " (its end)" : ""}`);
    const [made, right] = step.drafts;
    return [
      `Step ${step.step}: ${step.tokens} tokens computed, ${step.sampled} sampled`,
      chunks.length ? `prompt chunks: ${chunks.slice(0, 4).join(", ")}${chunks.length > 4 ? ` and ${chunks.length - 4} more` : ""}` : "no prompt chunk",
      `${step.decodes} decodes`,
      ...(made ? [`${right} of ${made} drafts right`] : []),
      `plan ${seconds(step.plan_s)}, launch ${seconds(step.launch_s)}, wait ${seconds(step.collect_s)}, apply ${seconds(step.finish_s)}; device at most ${seconds(step.device_s)}`,
    ].join(" · ");
  }

  draw(engine, selected) {
    this.engine = engine;
    this.selected = selected;
    const context = paper(this.canvas);
    if (!context) return;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const steps = engine.steps.slice(-Math.ceil(width / PITCH));
    const prompt = steps.map((step) => step.chunks.reduce((sum, chunk) => sum + chunk[2], 0));
    const decode = steps.map((step) => step.decodes + step.drafts[0]);
    const time = steps.map((step) => Math.max(step.device_s, TIMES.reduce((sum, [name]) => sum + step[name], 0)));
    const middle = [...time].sort((one, other) => one - other)[Math.floor(time.length / 2)] ?? 0;
    const cut = Math.max(0, ...time) > CUT * middle; // one long step would hide the others
    const tops = [top(Math.max(0, ...prompt)), top(Math.max(0, ...decode)), cut ? top((CUT * middle) / 2) : top(Math.max(0, ...time))];
    let begin = 0;
    LANES.forEach((lane, number) => {
      const full = height * lane.share;
      const [low, room] = [begin + full - 2, full - 18];
      const scale = tops[number] ? room / tops[number] : 0;
      context.fillStyle = colour("--line");
      context.fillRect(0, Math.round(low), width, 1);
      steps.forEach((step, at) => {
        const x = width - (steps.length - at) * PITCH;
        if (step.step === this.at) {
          context.fillStyle = colour("--tint");
          context.fillRect(x - 1, begin + 14, PITCH, full - 16);
        }
        if (step.gap && number === 0) {
          context.fillStyle = colour("--faint");
          context.fillRect(x - 1, begin + 16, 1, height);
        }
        this.bars(step, number, selected).reduce((y, [name, value, edge]) => {
          const size = Math.min(value * scale, room - (low - y));
          context.fillStyle = colour(name);
          context.fillRect(x, y - size, PITCH - 1, Math.max(size - (edge && size > 3 ? 1 : 0), value ? 0.6 : 0));
          return y - size;
        }, low);
        if (number === 2) {
          context.fillStyle = colour("--text");
          context.fillRect(x, low - Math.min(step.device_s * scale, room) - 1, PITCH - 1, 1.4);
          if (time[at] * scale > room + 1) {
            context.fillStyle = colour("--panel");
            context.fillRect(x - 1, low - room + 5, PITCH + 1, 2);
          }
        }
      });
      context.fillStyle = colour("--faint");
      context.fillText(tops[number] === 0 ? `${lane.label}: none` : `${lane.label}, up to ${lane.unit(tops[number])}${number === 2 ? `; line: device, at most${cut ? "; longer bars are cut" : ""}` : ""}`, 2, begin + 1);
      begin += full;
    });
  }

  /** Return [colour, size, edge] for the bars of a step in a lane, lowest first. */
  bars(step, lane, selected) {
    if (lane === 0) return step.chunks.map((chunk) => [chunk[0] === selected ? "--c-shared" : "--c-prompt", chunk[2], true]);
    if (lane === 1) return [["--c-decode", step.decodes], ["--c-right", step.drafts[1]], ["--c-wrong", step.drafts[0] - step.drafts[1]]];
    return TIMES.map(([name, shade]) => [shade, step[name]]);
  }
}

/** Lines over the last minute. series: [colour, words, value of a sample]. */
export class Lines {
  constructor(title, series, unit, span = 60) {
    Object.assign(this, { series, unit, span });
    this.canvas = h("canvas", { class: "lines", role: "img", "aria-label": `${title}, the last ${span} seconds` });
    this.values = series.map(() => h("b", {}, "–"));
    const keys = keyOf(series.map(([name, words]) => [name, words]));
    [...keys.children].forEach((item, at) => item.append(" ", this.values[at]));
    this.element = h("figure", {}, h("figcaption", {}, title), this.canvas, keys);
  }

  draw(samples) {
    const context = paper(this.canvas);
    if (!context || !samples.length) return;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const end = samples.at(-1).at;
    const seen = samples.filter((one) => one.at > end - this.span);
    const rows = this.series.map(([, , value]) => seen.map(value));
    const high = this.unit === percentOf ? 1 : top(Math.max(0, ...rows.flat().filter(Number.isFinite))) || 1;
    context.strokeStyle = colour("--line");
    context.strokeRect(0.5, 13.5, width - 1, height - 15);
    context.fillStyle = colour("--faint");
    context.fillText(this.unit(high), 2, 0);
    rows.forEach((row, number) => {
      context.strokeStyle = colour(this.series[number][0]);
      context.lineWidth = 1.5;
      context.beginPath();
      let down = false;
      row.forEach((value, at) => {
        if (!Number.isFinite(value)) {
          down = false;
          return;
        }
        const x = width - ((end - seen[at].at) / this.span) * width;
        const y = height - 2 - (value / high) * (height - 17);
        if (down) context.lineTo(x, y);
        else context.moveTo(x, y);
        down = true;
      });
      context.stroke();
      say(this.values[number], Number.isFinite(row.at(-1)) ? this.unit(row.at(-1)) : "–");
    });
  }
}

export const percentOf = (value) => `${Math.round(100 * value)} %`;

/** Tokens of experts by layer (rows) and rank (columns): a darker cell has more tokens than the layer's mean. */
export class Heat {
  constructor() {
    this.canvas = h("canvas", { class: "heat", role: "img", "aria-label": "Load of experts by layer and rank" });
    this.element = this.canvas;
  }

  draw(loads) {
    const rows = loads.length;
    const columns = Math.max(1, ...loads.map((row) => row.length));
    this.canvas.style.height = `${Math.max(60, Math.min(300, rows * 6))}px`;
    const context = paper(this.canvas);
    if (!context) return;
    const [w, hh] = [this.canvas.clientWidth / columns, this.canvas.clientHeight / rows];
    loads.forEach((row, layer) => {
      const most = Math.max(1, ...row);
      row.forEach((tokens, rank) => {
        context.globalAlpha = 0.12 + 0.88 * (tokens / most);
        context.fillStyle = colour("--c-own");
        context.fillRect(rank * w, layer * hh, w - 1, Math.max(hh - 1, 1));
      });
    });
    context.globalAlpha = 1;
  }
}
