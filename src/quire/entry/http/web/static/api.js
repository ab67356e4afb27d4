// The server: requests with the API key, and server-sent events read by fetch, since EventSource cannot send a key.

export const base = new URL("../../", import.meta.url); // the folder of `/`, also below a proxy's path
const KEY = "quire-api-key";

/** An answer of the server that is an error. */
export class Refusal extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

let askForKey = () => {};

/** Set the function that is called when the server refuses the key. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** Send a request. Raises `Refusal` for an error. `options.json`: a body. */
export async function send(path, options = {}) {
  const own = key();
  const headers = own ? { authorization: `Bearer ${own}` } : {};
  if (options.json !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(new URL(path, base), {
    method: options.json === undefined ? "GET" : "POST",
    body: options.json === undefined ? undefined : JSON.stringify(options.json),
    headers,
    signal: options.signal,
    cache: "no-store",
    referrerPolicy: "no-referrer",
    credentials: "same-origin",
  });
  if (response.ok) return response;
  let found = null;
  try {
    found = (await response.json()).error;
  } catch {
    found = null; // a proxy's answer
  }
  if (response.status === 401 && own === key()) askForKey(Boolean(own)); // not for a key that was replaced meanwhile
  throw new Refusal(response.status, found?.message ?? `The server answered ${response.status}.`, found?.code ?? "");
}

/** Return the JSON answer to a request. */
export const ask = async (path, options) => (await send(path, options)).json();

/** Yield {name, data} for each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = []; // text of the event that is not complete
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      parts.push(value);
      if (!value.includes("\n")) continue;
      const blocks = parts.splice(0).join("").split("\n\n");
      parts.push(blocks.pop());
      for (const block of blocks) {
        let name = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
          else if (line.startsWith("event:")) name = line.slice(6).trim();
        }
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
