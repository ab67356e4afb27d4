"""The picture of `quire top`: what the events of the live view say (docs/live.md), as lines of text for a terminal.

Knows events and text; nothing of connections. Without colour and in a narrow terminal the words are the same.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from quire.entry.cli.table import format_bytes

WINDOW = 2.0  # seconds over which rates are means
LABEL = 9  # columns of the names of rows
LEAST_BAR, MOST_BAR = 10, 60
MOST_REQUESTS = 200  # rows of requests that can be asked for
MOST_ADAPTERS = 8  # names of a row
BAR = (
    ("own", "█", "#", "cyan"),
    ("shared", "▓", "%", "blue"),
    ("moving", "▒", "+", "magenta"),
    ("cached", "░", "-", "green"),
)  # kind of block, its letter, the letter in ASCII, colour
EMPTY, EMPTY_ASCII = "·", "."
SUMS = ("steps", "prompt_tokens", "sampled", "drafts", "accepted")
PARTS = {"plan": "plan_s", "launch": "launch_s", "wait": "collect_s", "finish": "finish_s"}


class EngineView:
    """An engine core, or a replica: its last frame and rates. source: backend of a router, or ""."""

    def __init__(self, source: str, replica: int) -> None:
        self.source, self.replica = source, replica
        self.now: dict[str, Any] = {}
        self._recent = deque[tuple[float, dict[str, Any], dict[str, Any]]]()  # seconds, sums, and counters since start
        self.step: dict[str, Any] | None = None  # the last one that was told

    def take(self, seconds: float, engine: dict[str, Any]) -> None:
        """Take the engine's part of a frame. seconds: time since the frame before."""
        self.now = engine
        self._recent.append((seconds, engine["sums"], engine))
        while len(self._recent) > 2 and sum(each[0] for each in self._recent) - self._recent[0][0] > WINDOW:
            self._recent.popleft()
        if engine["steps"]:
            self.step = engine["steps"][-1]

    def total(self, name: str) -> float:
        """Return a sum over the last seconds."""
        return float(sum(sums[name] for _, sums, _ in self._recent))

    def rate(self, name: str) -> float:
        """Return a sum over the last seconds, per second."""
        return self.total(name) / self.seconds

    @property
    def seconds(self) -> float:
        """Time that the rates are about."""
        return max(1e-9, sum(seconds for seconds, _, _ in self._recent))

    @property
    def held(self) -> float:
        """Share of the KV blocks that are held."""
        blocks = self.now["blocks"]
        return float(blocks["own"] + blocks["shared"] + blocks["moving"]) / max(1, blocks["total"])

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were reused: of the last seconds, else since the start; None: no prompt yet."""
        first, last = self._recent[0][2]["prefix"], self.now["prefix"]
        since = first if self.prompts_came else {"queries": 0, "hits": 0}
        queries, hits = last["queries"] - since["queries"], last["hits"] - since["hits"]
        return hits / queries if queries else None

    @property
    def prompts_came(self) -> bool:
        """True if prompts came in the last seconds."""
        return bool(self.now["prefix"]["queries"] != self._recent[0][2]["prefix"]["queries"])

    @property
    def step_s(self) -> float | None:
        """Mean time of the core for a step, without the time between steps; None: there was none."""
        steps = self.total("steps")
        return sum(self.total(part) for part in PARTS.values()) / steps if steps else None

    def moved(self, tier: str) -> tuple[float, float]:
        """Return the bytes per second that came from a tier, and went there."""
        last = self.now["tiers"][tier]
        first = self._recent[0][2]["tiers"].get(tier, last)
        loaded, stored = (last[name] - first[name] for name in ("loaded_bytes", "stored_bytes"))
        return loaded / self.seconds, stored / self.seconds


class SourceView:
    """A server: facts, latencies, and why nothing comes from it, if so. name: backend of a router, or ""."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self.frame: dict[str, Any] = {}
        self.down = ""
        self.leaves = False  # the router sends it no new requests
        self.lost = 0
        self.engines: dict[int, EngineView] = {}
        self.exchanged = deque[tuple[float, dict[str, int]]](maxlen=20)
        self.experts: dict[str, Any] | None = None

    def take(self, event: str, data: dict[str, Any]) -> None:
        """Take an event."""
        if event == "engine":
            self.facts, self.down = data, ""
        elif event == "frame":
            self.frame, self.down = data, ""
            told = {engine["replica"]: engine for engine in data["engines"]}
            for replica in [replica for replica in self.engines if replica not in told]:
                del self.engines[replica]  # it died
            for replica, engine in told.items():
                view = self.engines.setdefault(replica, EngineView(self.name, replica))
                view.take(data["seconds"], engine)
            self.exchanged.append((data["seconds"], data["exchanged"]))
            self.experts = data["experts"] or self.experts
        elif event == "lost":
            self.lost += data["frames"]
        elif event in ("down", "end"):
            self.down, self.engines = data["reason"], {}


class TopView:
    """Everything that is watched: a server, or the backends of a router.

    where   the address that is watched
    notice  a sentence to show, such as that the connection is lost; ""
    """

    def __init__(self, where: str, *, ascii_only: bool = False) -> None:
        self.where, self.notice = where, ""
        self._ascii, self._width = ascii_only, 0
        self.ending: dict[str, Any] | None = None  # of a router that drains
        self.sources: dict[str, SourceView] = {}

    def take(self, event: str, data: dict[str, Any]) -> None:
        """Take an event of the stream."""
        if event == "router":
            self.sources = {name: self.sources.get(name) or SourceView(name) for name in data["backends"]}
            for name, source in self.sources.items():
                source.leaves = name in data.get("draining", ())
            self.ending = data.get("ending")
            return
        name = data.get("backend", "")
        self.sources.setdefault(name, SourceView(name)).take(event, data)

    def render(self, width: int, height: int) -> Text:
        """Return the picture, in lines of at most `width` columns and at most `height` of them."""
        self._width = width
        lines = [line for text in self._lines(width, height) for line in _wrapped(text, width)]
        return Text("\n").join(lines[: max(1, height)])

    def _lines(self, width: int, height: int) -> Iterator[Text]:
        yield self._title()
        if self.notice:
            yield Text(self.notice, "bold red")
        engines = [engine for source in self.sources.values() for engine in source.engines.values()]
        for source in self.sources.values():
            if source.down:
                yield Text(f"{_short(source.name)} {source.down}".strip(), "bold red")
            elif not source.frame:
                yield Text(f"{_short(source.name)} waiting for the first frame ...".strip())
        if len(engines) > 1 or len(self.sources) > 1:
            if engines:
                yield from self._table(engines)
            return
        for source in self.sources.values():
            for engine in source.engines.values():
                yield from self._detail(source, engine, width)
                yield from _requests(engine.now["requests"], min(MOST_REQUESTS, height))
        if not self.sources:
            yield Text("waiting for the first frame ...")

    def _title(self) -> Text:
        first = next((source.facts for source in self.sources.values() if source.facts), {})
        words = ["quire top", self.where]
        if len(self.sources) == 1 and first:
            words += [_short(name) for name in self.sources if name]
            words += [", ".join(first["models"]), f"{first['device']}, {first['dtype']}"]
        elif len(self.sources) > 1:
            down = sum(bool(source.down) for source in self.sources.values())
            words.append(f"{len(self.sources)} backends" + f", {down} down" * bool(down))
        if self.ending is not None:
            words.append(f"the router ends: {self.ending['requests']} requests are left")
        for source in self.sources.values():
            if source.leaves:
                words.append(f"{_short(source.name)} gets no new requests")
            if draining := source.frame.get("draining"):
                told = f"draining: {draining['requests']} requests, {draining['seconds']:.0f} s left"
                words.append(f"{_short(source.name)} {told}".strip())
        if lost := sum(source.lost for source in self.sources.values()):
            words.append(f"{lost} frames lost")
        return Text(self._plain(" · ".join(words)), "bold")

    def _detail(self, source: SourceView, engine: EngineView, width: int) -> Iterator[Text]:
        now = engine.now
        queue, lacks = now["queue"], now["queue"]["waits_for"]
        blocked = ", ".join(f"{count} blocked ({why})" for why, count in queue["blocked"].items())
        states = [
            f"{queue['running']} running of {queue['slots']}",
            f"{queue['waiting']} waiting{f' for {lacks}' if lacks else ''}",
        ]
        states += [f"{queue['preempted']} of them preempted"] * bool(queue["preempted"]) + [blocked] * bool(blocked)
        yield self._row("requests", *states, f"{queue['num_preemptions']} preemptions")
        if named := queue.get("adapters"):
            yield self._row("adapters", *(f"{count} for {name}" for name, count in [*named.items()][:MOST_ADAPTERS]))
        yield self._row("batch", *_batch(engine.step))
        speed = [f"{engine.rate('prompt_tokens'):,.0f} tokens/s in", f"{engine.rate('sampled'):,.0f} out"]
        if drafts := engine.total("drafts"):
            speed.append(f"drafts: {engine.total('accepted') / drafts:.0%} right")
        yield self._row("speed", *speed, f"{engine.rate('steps'):,.1f} steps/s")
        yield from self._blocks(now, engine.held, width)
        yield self._row("prefix", *_prefix(engine))
        yield self._row("step", *_split(engine))
        yield from (self._row(name, *words) for name, words in _latency(source.frame["latency"]))
        for tier, one in now["tiers"].items():
            size = f"{one['used']:,} of {one['blocks']:,} blocks" if one["blocks"] else f"{one['stored']:,} stored"
            loaded, stored = engine.moved(tier)
            yield self._row(tier, size, f"in {format_bytes(loaded)}/s", f"out {format_bytes(stored)}/s")
        if states_now := now["prefix"]["states"]:
            kept = f"{states_now['used']:,} of {states_now['total']:,} checkpoints"
            yield self._row("states", f"{states_now['rows']} rows", kept)
        yield from self._ranks(source)

    def _ranks(self, source: SourceView) -> Iterator[Text]:
        seconds = max(1e-9, sum(each for each, _ in source.exchanged))
        groups = source.exchanged[-1][1] if source.exchanged else {}
        rates = [
            f"{name} {format_bytes(sum(each[name] for _, each in source.exchanged if name in each) / seconds)}/s"
            for name in groups
        ]
        if rates:
            yield self._row("ranks", *rates)
        if source.experts is not None:
            ranks = [sum(column) for column in zip(*source.experts["loads"], strict=True)]
            shares = " ".join(f"{each / max(1, sum(ranks)):.0%}" for each in ranks)
            yield self._row("experts", f"balancedness {source.experts['balancedness']:.2f}", f"by rank {shares}")

    def _blocks(self, now: Mapping[str, Any], held: float, width: int) -> Iterator[Text]:
        blocks = now["blocks"]
        columns = max(LEAST_BAR, min(MOST_BAR, width - LABEL - 8))
        yield Text.assemble(self._label("KV blocks"), self._bar(blocks, columns), f" {held:.1%}")
        words = [f"{blocks['own']:,} own", f"{blocks['shared']:,} shared"]
        words += [f"{blocks['moving']:,} moving"] * bool(blocks["moving"])
        yield self._row("", *words, f"{blocks['cached']:,} cached", f"{blocks['free']:,} free")
        if len(blocks["groups"]) > 1:
            named = (
                f"{'window ' + str(group['window']) if group['window'] else 'full'}: {group['own'] + group['shared']:,}"
                for group in blocks["groups"]
            )
            yield self._row("", *named)

    def _bar(self, blocks: Mapping[str, Any], columns: int) -> Text:
        bar, done, upto = Text(), 0, 0
        for name, full, plain, style in BAR:
            upto += blocks[name]
            end = round(columns * upto / max(1, blocks["total"]))
            bar.append((plain if self._ascii else full) * (end - done), style)
            done = end
        return bar.append((EMPTY_ASCII if self._ascii else EMPTY) * (columns - done), "dim")

    def _table(self, engines: list[EngineView]) -> Iterator[Text]:
        titles = ("engine", "run", "wait", "KV", "hits", "in/s", "out/s", "step ms", "ttft p50")
        rows = [titles, *(self._cells(engine) for engine in engines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            first, *others = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
            yield Text(" ".join(cells), "bold" if number == 0 else "", no_wrap=True)

    def _cells(self, engine: EngineView) -> tuple[str, ...]:
        source, queue = self.sources[engine.source], engine.now["queue"]
        several = len(source.engines) > 1
        name = f"{_short(engine.source)}{f' replica {engine.replica}' * several}".strip()
        hits, step_s, first = engine.hit_rate, engine.step_s, source.frame["latency"]["ttft_s"]
        return (
            name,
            str(queue["running"]),
            str(queue["waiting"] + sum(queue["blocked"].values())),
            f"{engine.held:.0%}",
            "-" if hits is None else f"{hits:.0%}",
            f"{engine.rate('prompt_tokens'):,.0f}",
            f"{engine.rate('sampled'):,.0f}",
            "-" if step_s is None else f"{1000 * step_s:.1f}",
            "-" if first is None else _seconds(first[0]),
        )

    def _label(self, name: str) -> Text:
        return Text(f"{name:<{LABEL}} ", "bold")

    def _row(self, name: str, *words: str) -> Text:
        """Return a row: words behind a name, on as many lines as they need, each indented."""
        between, lines, room = ", " if self._ascii else " · ", [""], self._width - LABEL - 1
        for word in words:
            if lines[-1] and len(lines[-1]) + len(between) + len(word) > room:
                lines.append("")
            lines[-1] += between * bool(lines[-1]) + word
        return Text.assemble(self._label(name), f"\n{' ' * (LABEL + 1)}".join(lines))

    def _plain(self, text: str) -> str:
        return text.replace(" · ", ", ") if self._ascii else text


def _batch(step: Mapping[str, Any] | None) -> Iterator[str]:
    if step is None:
        yield "no step yet"
        return
    yield f"step {step['step']}"
    if step["chunks"]:
        yield f"{len(step['chunks'])} prompt chunks ({sum(chunk[2] for chunk in step['chunks']):,} tokens)"
    yield f"{step['decodes']} decodes"
    made, right = step["drafts"]
    if made:
        yield f"{right} of {made} drafts right"


def _prefix(engine: EngineView) -> Iterator[str]:
    rate, prefix = engine.hit_rate, engine.now["prefix"]
    when = "in the last seconds" if engine.prompts_came else "since the start"
    yield "no prompt yet" if rate is None else f"{rate:.1%} of prompt tokens reused {when}"
    if prefix["misses"]:
        yield "misses: " + ", ".join(f"{why} {one['requests']}" for why, one in prefix["misses"].items())


def _split(engine: EngineView) -> Iterator[str]:
    """Yield the mean time of a step and its parts."""
    if engine.step_s is None:
        yield "idle"
        return
    yield f"{1000 * engine.step_s:.2f} ms"
    steps = engine.total("steps")
    for name, part in PARTS.items():
        yield f"{name} {1000 * engine.total(part) / steps:.2f}"
    yield f"device {1000 * engine.total('device_s') / steps:.2f} at most"


def _latency(latency: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    words = {"ttft_s": "first token", "tpot_s": "per token", "queue_s": "queue", "e2e_s": "whole"}
    told = [
        f"{word} {_times(latency[name])} of {latency['counts'][name]}"
        for name, word in words.items()
        if latency[name] is not None
    ]
    if told:
        told.append(f"p50 / p90 / p99 of requests, last {latency['window_s']:.0f} s")
        if (oldest := latency["oldest_wait_s"]) is not None:
            told.append(f"the oldest waits {_seconds(oldest)}")
        yield "latency", told


def _requests(columns: Mapping[str, Any], most: int) -> Iterator[Text]:
    if not columns["handle"]:
        return
    titles = ("request", "state", "prompt", "output", "cached", "blocks", "preempted")
    rows: list[tuple[str, ...]] = [titles]
    for i in range(min(most, len(columns["handle"]))):
        prompt, tokens, cached = columns["prompt"][i], columns["tokens"][i], columns["cached"][i]
        name = columns["id"][i] or f"#{columns['handle'][i]}"
        cells = (
            prompt,
            tokens - prompt,
            "-" if cached < 0 else cached,
            columns["blocks"][i],
            columns["preemptions"][i],
        )
        rows.append((_clean(name), columns["state"][i], *map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, one in enumerate(rows):
        aligned = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(one, widths, strict=True))
        ]
        yield Text(" ".join(aligned), "bold" if number == 0 else "", no_wrap=True)


def _wrapped(text: Text, width: int) -> list[Text]:
    """Return the lines of a text; rows of tables are cut at the width."""
    if text.no_wrap:
        cut = text.copy()
        cut.truncate(width)
        return [cut]
    from rich.console import Console

    return list(text.wrap(Console(width=width), width))


def _times(values: Sequence[float]) -> str:
    """Return percentiles in their common unit."""
    if values[-1] < 10:
        return " / ".join(f"{1000 * value:.0f}" for value in values) + " ms"
    return " / ".join(f"{value:.1f}" for value in values) + " s"


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 10 else f"{value:.1f} s"


def _short(url: str) -> str:
    return url.removeprefix("http://").removeprefix("https://")


def _clean(name: str) -> str:
    """Return a request id for a terminal: callers choose it, so it may hold control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:48])
