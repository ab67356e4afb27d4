"""Output of `quire serve`: progress while it loads, a banner of a few lines, and a line of statistics while busy.

Everything goes to standard error. The server calls the methods of `Console`.
"""

import json
import shlex
import sys
import time
from typing import TextIO

from quire import __version__
from quire.config.bundled import NAME
from quire.config.serve import ServerConfig, is_loopback
from quire.entry.cli.table import format_bytes
from quire.observe.log_lines import JSON, json_line, notice
from quire.observe.metrics import StatsLine
from quire.observe.process import age
from quire.observe.progress import Progress
from quire.procs.messages import FEATURES, Loading, Ready

QUIET_SECONDS = 2.0  # between two lines of progress where the output is not a terminal
# Plans with a line of their own.
ELSEWHERE = ("dtype", "device", "weights", "memory", "cache", "states", "ranks", "each rank", *FEATURES)
MAX_KERNELS = 240  # characters of the kernels' line before reasons are left out
ANYWHERE = ("0.0.0.0", "::")


class Console:
    """Printer of a server's messages. It shows loading as a bar on a terminal, elsewhere as lines."""

    def __init__(self, config: ServerConfig, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._format = config.log.log_format
        self._terminal = self._out.isatty() and config.engine.load.use_tqdm_on_load and self._format != JSON
        self._stats = not config.log.disable_log_stats
        self._phase, self._printed = "", 0.0
        self._bar: Progress | None = None

    def note(self, text: str) -> None:
        """Print a note for the user."""
        self.close()
        self._say(notice(text, "note", self._format))

    def fault(self, text: str) -> None:
        """Print an error that ends the server."""
        self.close()
        self._say(notice(text, "error", self._format))

    def loading(self, message: Loading) -> None:
        """Show the progress of loading: the phase (such as "weights") and the part of it that is done."""
        new = message.phase != self._phase
        self._phase = message.phase
        if self._terminal:
            self._draw(message, new)
        elif (
            new
            or time.monotonic() - self._printed >= QUIET_SECONDS
            or (message.total and message.done >= message.total)
        ):
            self._printed = time.monotonic()
            self._print(f"quire: {message.phase}{_share(message)}")

    def banner(self, ready: Ready, config: ServerConfig, url: str) -> None:
        """Print the banner: the engine is loaded and the server answers at `url`."""
        self.close()
        for line in banner_lines(ready, config, url, age()):
            self._print(line)
        for note in ready.notes:
            self._say(notice(note, "note", self._format))

    def stats(self, line: StatsLine) -> None:
        """Print a line of statistics, if the engine was busy since the last one."""
        busy = bool(line.num_running or line.num_waiting or line.generation_tokens_per_s or line.prompt_tokens_per_s)
        if self._stats and busy:
            self._print(stats_text(line))

    def _draw(self, message: Loading, new: bool) -> None:
        if new:
            self.close()
            self._bar = Progress(message.phase, message.total, enabled=True, unit=message.unit).__enter__()
        if self._bar is not None:
            self._bar.update(message.done, message.total)

    def close(self) -> None:
        """Remove the progress bar from the terminal; idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.__exit__(None, None, None)

    def _print(self, text: str) -> None:
        self._say(json_line(text.strip(), "info", "http") if self._format == JSON else text)

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def _share(message: Loading) -> str:
    if not message.total:
        return ""
    total = format_bytes(message.total) if message.unit == "B" else f"{message.total:,} {message.unit}".rstrip()
    return f": {100 * message.done // message.total}% of {total}"


def stats_text(line: StatsLine) -> str:
    """Format numbers of requests, cache use and token rates as one line."""
    hits = "-" if line.hit_rate is None else f"{100 * line.hit_rate:.0f}%"
    places = " ".join(f"{100 * share:.0f}%" for share in line.acceptance)
    drafts = f", drafts accepted {places}, {1 + sum(line.acceptance):.2f} tokens a run" if places else ""
    return (
        f"quire: {line.num_running} running, {line.num_waiting} waiting, KV {100 * line.kv_usage:.1f}%, prefix "
        f"hits {hits}, tokens/s {line.prompt_tokens_per_s:,.0f} in {line.generation_tokens_per_s:,.0f} out{drafts}"
    )


def banner_lines(ready: Ready, config: ServerConfig, url: str, seconds: float | None = None) -> list[str]:
    """Return at most 15 lines: the model, its device and kernels, load times, the address, and a curl command; with
    those about features that options turn on.
    `seconds`: time since the start of the process; None = unknown."""
    model, names = config.engine.model, config.model_names
    source = f"{model.model or 'the bundled quire-tiny'}{f' at {model.revision}' if model.revision else ''}"
    tokens = ready.num_blocks * ready.block_size
    phases = ", ".join(f"{name} {each:.2f} s" for name, each in ready.phases.items())
    since = f"ready {seconds:.2f} s after the start of the process, imports included" if seconds is not None else ""
    blocks = f"{ready.num_blocks:,} blocks x {ready.block_size} = {tokens:,} tokens"
    blocks += f"; {ready.plans['cache']}" if ready.plans.get("cache") else ""
    page = f"; page: {url}/" if config.http.web and config.http.uds is None else ""
    device, each = ready.plans.get("device", ready.device), ready.plans.get("each rank", "")
    rows = {
        "model": source if names == (model.model,) else f"{source}, served as {', '.join(names)}",
        "dtype": ready.plans.get("dtype", ready.dtype),
        "device": f"{device}; {ready.plans.get('ranks') or 'one process, one device'}; "
        f"{ready.depth} step{'s'[: ready.depth != 1]} in flight",
        "kernels": _kernels(ready),
        "weights": ready.plans.get("weights")
        or (format_bytes(ready.weight_bytes) if ready.weight_bytes and not each else ""),
        "memory": ready.plans.get("memory") or each,
        "KV cache": f"{format_bytes(ready.kv_bytes)} = {blocks}" if ready.kv_bytes and not each else blocks,
        "at once": _at_once(ready),
        **{name: ready.plans.get(name, "") for name in FEATURES},
        "loading": "; ".join(filter(None, (phases, since))),
        "address": f"{url}/v1{page}; {access_text(config)}",
        "try": curl_line(config, url, names[0]),
    }
    return [f"Quire {__version__}", *(f"  {name:<9} {text}" for name, text in rows.items() if text)]


def _at_once(ready: Ready) -> str:
    share, slots = ready.num_blocks * ready.block_size / ready.max_model_len, ready.num_slots
    full = f"of the full {ready.max_model_len:,} tokens"
    states = f"; states: {ready.plans['states']}" if ready.plans.get("states") else ""
    if share >= slots:
        return f"{slots} request{'s'[: slots != 1]}, even {full}{states}"
    return f"at most {slots} request{'s'[: slots != 1]}; the KV cache holds {share:.1f} {full}{states}"


def _kernels(ready: Ready) -> str:
    """Name the kernel of each operation with the reason. A long line leaves the reasons out.
    Operations with the same kernel and reason share an entry."""
    ops: dict[str, list[str]] = {}
    for name, text in ready.plans.items():
        if name not in ELSEWHERE:
            ops.setdefault(text, []).append(name)
    whole = "; ".join(f"{', '.join(names)}: {text}" for text, names in ops.items())
    if len(whole) <= MAX_KERNELS:
        return whole
    return "; ".join(f"{', '.join(names)}: {text.split(' (')[0]}" for text, names in ops.items()) + " (see /version)"


def access_text(config: ServerConfig) -> str:
    """Return a text about access to the server: from this or any machine, with or without an API key."""
    http = config.http
    near = http.uds is not None or is_loopback(http.host)
    given = config.access.api_key
    keys = f"one of {len(given)} keys" if len(given) > 1 else "a key"
    needed = f"needs {keys}" if config.access.keyed else "no key needed"
    return f"{'this machine only' if near else 'any machine'}, {needed}"


def curl_line(config: ServerConfig, url: str, served: str) -> str:
    """Return a curl command for a completion. It reads the API key from the environment."""
    bundled = config.engine.model.model in ("", NAME)  # quire-tiny is trained on Python's documentation
    prompt = "The json module" if bundled else "Once upon a time"
    body = json.dumps({"model": served, "prompt": prompt, "max_tokens": 32})
    parts = ["curl"]
    if config.http.uds is not None:
        parts += ["--unix-socket", shlex.quote(config.http.uds)]
        url = f"http{'s' if config.http.ssl_certfile else ''}://localhost"
    for host in ANYWHERE:
        url = url.replace(f"//{host}:", "//127.0.0.1:").replace(f"//[{host}]:", "//[::1]:")
    parts += [f"{url}/v1/completions", "-H 'Content-Type: application/json'"]
    if config.access.keyed:
        parts.append('-H "Authorization: Bearer ${QUIRE_API_KEY:-YOUR_KEY}"')
    return " ".join([*parts, "-d", shlex.quote(body)])
