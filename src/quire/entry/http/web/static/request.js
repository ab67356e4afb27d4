// Requests for text: bodies of /v1/chat/completions and /v1/completions from settings, and their export.

import { ask, base, key } from "./api.js";

const OWN = ["stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "logprobs", "top_logprobs"]; // of this page
const OPENAI = new Set(["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty",
  "presence_penalty", "tools", "tool_choice", "response_format", "reasoning_effort", "n", "stream"]);
const texts = new Map();

/** Return the text of a token. The server is asked once for each token. */
export function detokenize(id) {
  if (!texts.has(id)) {
    const asked = ask("detokenize", { json: { tokens: [id] } }).then((found) => found.prompt);
    asked.catch(() => texts.delete(id));
    texts.set(id, asked);
  }
  return texts.get(id);
}

const parsed = (text, name) => {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`, { cause: error });
  }
};

/** Return the part of a body that asks for structured output. */
function form(kind, text) {
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (kind === "json_schema") return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed(text, "The schema") } } };
  if (kind === "regex") return { structured_outputs: { regex: text } };
  if (kind === "choice") return { structured_outputs: { choice: text.split("\n").filter(Boolean) } };
  if (kind === "grammar") return { structured_outputs: { grammar: text } };
  return {};
}

/** Return the body of a request. settings: of a column. shared: mode, system, tools, format. Raises `Error` with words. */
export function bodyOf(settings, shared, turns) {
  const chat = shared.mode === "chat";
  const body = { model: settings.model, ...sampling(settings), ...form(shared.format, shared.formatText) };
  if (!chat) return { path: "v1/completions", body: { ...body, prompt: turns.at(-1).content } };
  body.messages = [...(shared.system ? [{ role: "system", content: shared.system }] : []), ...turns];
  if (shared.tools.trim()) {
    body.tools = parsed(shared.tools, "The list of tools");
    if (shared.toolChoice !== "auto") body.tool_choice = shared.toolChoice;
  }
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  return { path: "v1/chat/completions", body };
}

/** Return the body that lets an answer go on behind token ids. */
export const bodyBehind = (settings, ids) => ({ path: "v1/completions", body: { model: settings.model, ...sampling(settings), prompt: ids } });

function sampling(settings) {
  const found = {};
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"]) {
    if (settings[name] !== "") found[name] = Number(settings[name]);
  }
  if (settings.stop) found.stop = settings.stop.split("\n").map((text) => text.replaceAll("\\n", "\n"));
  return found;
}

/** Return the body as this page sends it: a stream, with ids and alternatives. */
export function asked(path, body, alternatives) {
  const chat = path.endsWith("chat/completions");
  return {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    ...(alternatives > 0 ? { return_tokens_as_token_ids: true, ...(chat ? { logprobs: true, top_logprobs: alternatives } : { logprobs: alternatives }) } : {}),
  };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** Return a command that sends the request with curl. The key stays out of it. */
export function asCurl({ path, body }) {
  const lines = [`curl ${new URL(path, base)}`, "-H 'Content-Type: application/json'"];
  if (key()) lines.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  return [...lines, `-d ${quoted(JSON.stringify(body, null, 2))}`].join(" \\\n  ");
}

const NAMES = new Map([[null, "None"], [true, "True"], [false, "False"]]);

function literal(value, indent) {
  if (NAMES.has(value)) return NAMES.get(value);
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`).replace(/\\u(d[89ab]..)\\u(d[c-f]..)/gi, (all, high, low) =>
    `\\U${((parseInt(high, 16) - 0xd800) * 0x400 + parseInt(low, 16) - 0xdc00 + 0x10000).toString(16).padStart(8, "0")}`);
  const inner = `${indent}    `;
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${inner}${literal(one, inner)},\n`).join("")}${indent}]` : "[]";
  const entries = Object.entries(value);
  return entries.length ? `{\n${entries.map(([name, one]) => `${inner}${literal(name, inner)}: ${literal(one, inner)},\n`).join("")}${indent}}` : "{}";
}

/** Return a Python program that sends the request with the `openai` package. */
export function asPython({ path, body }) {
  const chat = path.endsWith("chat/completions");
  const more = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name) && !OWN.includes(name)));
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name) && !OWN.includes(name));
  const lines = [...known.map(([name, value]) => `    ${name}=${literal(value, "    ")},`), "    stream=True,"];
  if (Object.keys(more).length) lines.push(`    extra_body=${literal(more, "    ")},`);
  const answer = chat ? `        delta = chunk.choices[0].delta
        print(delta.content or "", end="", flush=True)
${body.tools ? `        for call in delta.tool_calls or []:  # the name comes first, then the arguments in pieces
            if call.function.name:
                print(f"\\ncalls {call.function.name} ", end="")
            print(call.function.arguments or "", end="", flush=True)
` : ""}` : `        print(chunk.choices[0].text, end="", flush=True)
`;
  return `# pip install openai
import os

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(String(new URL("v1", base)))}, api_key=os.environ.get("QUIRE_API_KEY", "none"))
stream = client.${chat ? "chat.completions" : "completions"}.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
${answer}print()
`;
}
