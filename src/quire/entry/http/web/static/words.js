// Words for states, reasons and events of requests.

/** What a request waits for, by its state. */
export const STATES = { running: "running", waiting: "waiting", preempted: "preempted", grammar: "grammar is compiled", parent: "waits for its first completion", remote_kv: "blocks are on their way", adapter: "its adapter is on its way" };

/** Why no more of a prompt was reused (docs/server.md, "Why a prompt was not reused"). */
export const WHY = {
  tokens: "other tokens follow", extras: "another salt", namespace: "another model or cache", dropped: "the blocks were dropped",
  pending: "not computed yet", new: "nothing like it came before", state: "no checkpoint of states", limit: "the end is always computed", off: "reuse is off",
};

const blocks = (number) => `${number} block${number === 1 ? "" : "s"}`;

/** A line of words about an event of a request. */
export function eventWords(event) {
  const { what, count: number, detail, first } = event;
  if (what === "arrived") return `arrived with ${number} tokens`;
  if (what === "blocked") return `blocked: ${STATES[detail] ?? detail}`;
  if (what === "queued") return "waits for a slot";
  if (what === "admitted") return `admitted, ${number} tokens reused${first > 0 ? `, ${blocks(first)} not` : ""}${detail ? ` (${WHY[detail] ?? detail})` : ""}`;
  if (what === "fetched") return `${blocks(number)} came from ${detail}`;
  if (what === "chunk") return `computed ${number} tokens from ${first}${detail === "ends" ? ", the end of its prompt" : ""}`;
  if (what === "preempted") return `preempted after ${number} tokens: ${detail}`;
  if (what === "finished") return `finished with ${number} tokens: ${detail}`;
  return `${what} ${number} ${detail}`;
}
