// The shell of the page: tabs, colours, the API key, and the state of the server in the header.

import { ask, key, onKeyNeeded, setKey } from "./api.js";
import { say, tabs } from "./dom.js";
import { Inside } from "./inside.js";
import { Live } from "./live.js";
import { Talk } from "./talk.js";

const byId = (id) => document.getElementById(id);
const THEME = "quire-theme";

function colours() {
  const select = byId("theme");
  const apply = () => {
    document.documentElement.dataset.theme = select.value;
    dispatchEvent(new Event("quire-theme"));
  };
  select.value = localStorage.getItem(THEME) ?? "";
  select.addEventListener("change", () => {
    localStorage.setItem(THEME, select.value);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

function keys(retry) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  const open = (wrong) => {
    byId("key-button").hidden = false;
    if (dialog.open) return;
    say(byId("key-words"), wrong ? "The server does not know this key. Try another one." : "This tab keeps the key until it is closed.");
    input.value = "";
    dialog.showModal();
  };
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    dialog.close();
    retry();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-button").addEventListener("click", () => open(false));
  byId("key-button").hidden = !key();
  onKeyNeeded(open);
}

/** Show the state of the server. Return true if it takes requests. */
async function watchState() {
  let words = "";
  let state = "";
  try {
    const found = await ask("ready");
    const router = found.backends !== undefined;
    [state, words] = [found.usable < found.backends ? "partly" : "ready", router ? `${found.usable} of ${found.backends} backends` : found.status];
  } catch (error) {
    [state, words] = error.status ? ["busy", error.message] : ["gone", "no connection to the server"];
  }
  byId("state").dataset.state = state;
  say(byId("state-words"), words);
  return state === "ready" || state === "partly";
}

function start() {
  colours();
  const go = (view, detail) => {
    location.hash = detail ? `${view}/${encodeURIComponent(detail)}` : view;
  };
  const live = new Live(byId("view-live"), (id, backend) => go("inside", backend ? `${backend} ${id}` : id));
  const talk = new Talk(byId("view-talk"), (id) => go("inside", id), live.feed);
  const views = { talk, live, inside: new Inside(byId("view-inside"), live.feed, (id) => talk.again(id)) };
  let current = "talk";
  const choose = tabs(document.querySelector("[role=tablist]"), (tab) => {
    const name = tab.id.slice(4);
    if (name !== current) views[current].hide();
    current = name;
    document.title = `${tab.textContent} · Quire`;
    if (!document.hidden) views[name].show();
    if (location.hash.slice(1).split("/")[0] !== name) history.replaceState(null, "", `#${name}`);
  });
  const follow = () => {
    const [name, detail] = location.hash.slice(1).split("/");
    choose(`tab-${views[name] ? name : "talk"}`);
    if (name === "inside" && detail) views.inside.open(decodeURIComponent(detail));
  };
  keys(() => {
    for (const view of Object.values(views)) view.retry();
    views[current].show();
  });
  addEventListener("hashchange", follow);
  document.addEventListener("visibilitychange", () => (document.hidden ? views[current].hide() : views[current].show()));
  follow();
  let last = false;
  const look = async () => {
    if (document.hidden) return;
    const ready = await watchState();
    if (ready && !last) {
      for (const view of Object.values(views)) view.retry();
      views[current].show();
    }
    last = ready;
  };
  look();
  setInterval(look, 3000);
}

start();
