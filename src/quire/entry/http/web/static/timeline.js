// The timeline of a request: segments of its life as SVG, with the events behind it as a table.

import { WHY, eventWords } from "./words.js";
import { h, percent, seconds, svg, table } from "./dom.js";

const KINDS = {
  front: ["--c-cached", "waits for the step that runs"],
  queued: ["--c-wait", "waits"],
  blocked: ["--c-moving", "blocked"],
  prefill: ["--c-prompt", "computes the prompt"],
  decode: ["--c-decode", "decodes"],
  preempted: ["--c-wrong", "preempted"],
};
const UNKNOWN = "nobody watched: chunks and preemptions are not known";
const LEAST_WIDTH = 320; // pixels
const ROW = 34;

/** Return the segments of a completion: {kind, from, to}. begun: when the request came. now: the end of a life that goes on. */
function segments(events, begun, now) {
  const found = [];
  let open = { kind: "front", from: begun };
  const turn = (kind, at) => {
    if (open) found.push({ ...open, to: at });
    open = kind && { kind, from: at };
  };
  for (const { what, at, detail } of events) {
    if (what === "arrived" || what === "queued") turn("queued", at);
    else if (what === "blocked") turn("blocked", at);
    else if (what === "admitted") turn("prefill", at);
    else if (what === "chunk" && detail === "ends") turn("decode", at);
    else if (what === "preempted") turn("preempted", at);
    else if (what === "finished") turn(null, at);
  }
  if (open) found.push({ ...open, to: now });
  return found.filter((one) => one.to > one.from);
}

const shade = (element, name) => {
  element.style.fill = `var(${name})`;
  return element;
};

/** Return the hatches of the stretch that nobody watched, with a word where there is room. */
function hatches(left, right, y) {
  const lines = [];
  for (let x = left - 18; x < right; x += 7) {
    const [begin, end] = [Math.max(x, left), Math.min(x + 18, right)];
    lines.push(`M${begin} ${y + 18 - (begin - x)}L${end} ${y + 18 - (end - x)}`);
  }
  return [svg("path", { d: lines.join(""), class: "unknown" }, svg("title", {}, UNKNOWN)),
    right - left > 90 ? svg("text", { x: (left + right) / 2, y: y + 14, class: "label unknown-word", "text-anchor": "middle" }, "not watched") : ""];
}

/** Return the drawing of the time between two moments, `width` pixels wide. unknown: a stretch that nobody watched, or null. */
function drawing(title, rows, [from, to], width, unknown) {
  const span = Math.max(to - from, 1e-6);
  const x = (at) => 60 + ((at - from) / span) * (width - 90);
  const height = rows.length * ROW + 26;
  const picture = svg("svg", { width, height, role: "img", "aria-label": `${title}: the events stand in the table below`, class: "timeline" });
  const step = 10 ** Math.floor(Math.log10(span / 20));
  const pitch = [1, 2, 5, 10, 20, 50, 100].map((one) => one * step).find((one) => span / one <= (width - 90) / 80);
  for (let at = 0; at <= span; at += pitch) {
    picture.append(svg("line", { x1: x(from + at), x2: x(from + at), y1: 4, y2: height - 20, class: "tick" }),
      svg("text", { x: x(from + at), y: height - 6, class: "label", "text-anchor": "middle" }, at === 0 ? "0" : seconds(at)));
  }
  rows.forEach(({ handle, parts, events }, number) => {
    const y = number * ROW + 8;
    picture.append(svg("text", { x: 0, y: y + 14, class: "label" }, `no. ${handle}`));
    for (const { kind, from: begin, to: stop } of parts) {
      if (stop < from || begin > to) continue;
      const left = x(Math.max(begin, from));
      const box = svg("rect", { x: left, y, width: Math.max(2, x(Math.min(stop, to)) - left), height: 18, rx: 2 }, svg("title", {}, `${KINDS[kind][1]}: ${seconds(stop - begin)}`));
      picture.append(shade(box, KINDS[kind][0]));
    }
    if (unknown && unknown[0] < to) picture.append(...hatches(x(Math.max(unknown[0], from)), x(Math.min(unknown[1] ?? to, to)), y));
    for (const event of events) {
      if (event.at < from || event.at > to) continue;
      const left = x(event.at);
      const note = svg("title", {}, `${seconds(event.at - rows[0].begun)}: ${eventWords(event)}`);
      if (event.what === "chunk") picture.append(svg("line", { x1: left, x2: left, y1: y, y2: y + 18, class: "chunk" }, note));
      else if (event.what === "fetched" || (event.what === "admitted" && event.count > 0)) picture.append(shade(svg("path", { d: `M${left} ${y - 1}l-5 -7h10z` }, note), "--c-right"));
      else if (event.what === "preempted") picture.append(shade(svg("path", { d: `M${left} ${y + 19}l-5 7h10z` }, note), "--c-wrong"));
    }
  });
  return h("figure", { tabindex: 0 }, h("figcaption", {}, title), picture);
}

/** Return the elements that tell the life of a request. found: the answer of /debug/requests/{id}. room: pixels for the drawings. */
export function timelineOf(found, room) {
  const width = Math.max(LEAST_WIDTH, room);
  const { request, events } = found;
  const live = !events.some((event) => event.what === "finished");
  const begun = request.arrived;
  const now = live ? Math.max(Date.now() / 1000, ...events.map((event) => event.at)) : Math.max(...events.map((event) => event.at));
  const handles = [...new Set(events.map((event) => event.handle))];
  const rows = handles.map((handle) => {
    const own = events.filter((event) => event.handle === handle);
    return { handle, begun, events: own, parts: segments(own, begun, now) };
  });
  const first = events.find((event) => event.what === "chunk" && event.detail === "ends")?.at;
  const { prefix } = request;
  const facts = [
    ["State", request.state], ["Prompt", `${request.num_prompt} tokens, ${request.num_cached ?? 0} reused${request.num_cached > 0 ? ` (${percent(request.num_cached / request.num_prompt)})` : ""}`],
    ["Output", `${request.num_output} tokens`], ["Queue", seconds(request.queue_s)], ["Prompt computed in", seconds(request.prefill_s)], ["Decoding", seconds(request.decode_s)],
    ...(request.decode_s && request.num_output > 1 ? [["Each token", seconds(request.decode_s / (request.num_output - 1))]] : []),
    ["Whole life", seconds(request.e2e_s)], ["Preemptions", request.num_preemptions],
    ...(!prefix && request.queue_s !== null && request.num_cached < request.num_prompt ? [["Not more reused because", "only whole blocks are reused, and the rest fills none"]] : []),
    ...(prefix && prefix.why ? [["Not more reused because", `${WHY[prefix.why] ?? prefix.why}${prefix.detail ? `: ${prefix.detail}` : ""}${prefix.differs_at !== null ? `, token ${prefix.differs_at} differs` : ""}${prefix.nearest ? ` from request ${prefix.nearest}` : ""}`]] : []),
  ];
  const kinds = [...new Set(rows.flatMap((row) => row.parts.map((part) => part.kind)))];
  return [
    h("h3", {}, h("bdi", {}, request.request_id)),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    found.watched ? null : h("p", { class: "hint" }, "Nobody watched when this request came: the times are those of the HTTP process, and chunks and preemptions are not known. Requests that Talk sends are watched; keep Live or `quire top` open to have those of others."),
    first !== undefined && first - begun < 0.7 * (now - begun) ? drawing("Until the first token", rows, [begun, first + (first - begun) * 0.05], width, found.unknown) : null,
    drawing("Whole life", rows, [begun, now], width, found.unknown),
    h("ul", { class: "keys" }, kinds.map((kind) => {
      const box = h("i", { "aria-hidden": "true" });
      box.style.background = `var(${KINDS[kind][0]})`;
      return h("li", {}, box, KINDS[kind][1]);
    }), h("li", {}, "▾ reused or fetched blocks"), h("li", {}, "│ a chunk"), found.unknown ? h("li", {}, `╱╱ ${UNKNOWN}`) : null),
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table: events" }, table("Events of the request", [{ name: "after", end: true }, { name: "step", end: true }, "event"],
      events.map((event) => [seconds(event.at - begun), event.step < 0 ? "" : event.step, handles.length > 1 ? `no. ${event.handle}: ${eventWords(event)}` : eventWords(event)]))),
  ];
}
