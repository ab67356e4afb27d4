"""Limits of named API keys: requests and tokens per minute, and requests at once; of all HTTP processes together.

A limit per minute is a bucket: full at first, it holds one minute's worth and fills all the time. A row of a table has
the state of a key. With several HTTP processes the table is a file in the folder of their sockets, so that a client
meets the same limits whichever process takes its connection.

Tokens are counted when they are known: those of a prompt when it is sent to the engine, those of the answer once a
second. So a key can overdraw its bucket by what its running requests generate; it is refused until that is paid back.
"""

import asyncio
import fcntl
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from quire.config.serve import DeadlineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.sampling import SamplingParams
from quire.entry.completion import Generation
from quire.entry.http.access.keyring import Caller
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import RATE_LIMIT, HttpError
from quire.entry.http.request_stream import RequestStream
from quire.entry.prompts import Prompt
from quire.observe.series import Tally

MINUTE = 60.0
ROWS = 1 << 14  # names of keys that a server knows in its life; the file of keys has at most 10,000
REQUESTS, TOKENS, RUNNING = 1, 2, 3  # columns of a row, after its name; RUNNING + i: requests in HTTP process i
SETTLE_SECONDS = 1.0  # between two counts of generated tokens
TRIES, TRY_SECONDS = 50, 2e-5  # for the lock: a process that was stopped inside it must hold up no other
CODE = "rate_limit_exceeded"


@dataclass(frozen=True)
class Allowance:
    """State of a limit per minute.

    limit      units per minute
    debt       seconds until the bucket is full again; above MINUTE: until then nothing is allowed
    """

    limit: int
    debt: float

    @property
    def remaining(self) -> int:
        """Units that are allowed now."""
        return max(0, int((MINUTE - self.debt) * self.limit / MINUTE + 1e-6))

    @property
    def wait(self) -> float:
        """Seconds until one unit is allowed; 0: now."""
        return max(0.0, self.debt + MINUTE / self.limit - MINUTE - 1e-9)


class KeyTable:
    """The state of all keys, a row for each: [ROWS, 3 + processes] float64.

    number, count   of this HTTP process among all
    file            file that all processes map; None: there is only this process
    """

    def __init__(self, number: int = 0, count: int = 1, file: Path | None = None) -> None:
        self._place, self._rows = RUNNING + number, dict[str, int]()
        size = ROWS * (RUNNING + count) * 8
        self._file: BinaryIO | None = None
        memory: mmap.mmap | bytearray = bytearray(size)
        if file is not None:
            self._file = file.open("a+b")
            self._file.truncate(size)  # the first process makes it, of zeros
            memory = mmap.mmap(self._file.fileno(), size)
        self._table = np.frombuffer(memory, np.float64).reshape(ROWS, -1)
        self._names = np.frombuffer(memory, np.uint64).reshape(ROWS, -1)[:, 0]
        self.clear()

    def clear(self) -> None:
        """Forget the running requests of this process, or of one that had its number before."""
        self._table[:, self._place] = 0.0

    @contextmanager
    def row(self, name: str) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float64]]"]:
        """Context manager: hold the row of a key, alone among all processes. Raises `ConfigError` without room."""
        self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield self._table[self._find(name)]
        finally:
            self._lock(fcntl.LOCK_UN)

    def running(self, name: str, change: int = 0) -> int:
        """Return how many requests of a key run in all processes, after a change of this process's number."""
        with self.row(name) as row:
            row[self._place] += change
            return int(row[RUNNING:].sum())

    def take(self, name: str, column: int, limit: int, units: int = 0, *, allowed: bool = False) -> Allowance:
        """Take units from a bucket even if it has fewer; with `allowed` only if it has one. Return its state before."""
        with self.row(name) as row:
            now = time.monotonic()  # the clock of all processes
            state = Allowance(limit, max(0.0, float(row[column]) - now))
            if units and not (allowed and state.wait > 0):
                row[column] = now + state.debt + units * MINUTE / limit
        return state

    def _find(self, name: str) -> int:
        if (found := self._rows.get(name)) is not None:
            return found
        digest = np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) | 1)
        order = np.roll(np.arange(ROWS), -int(digest % np.uint64(ROWS)))
        free = order[(self._names[order] == digest) | (self._names[order] == 0)]
        if not len(free):
            raise ConfigError(f"more than {ROWS} names of API keys came since the start: restart the server.")
        self._rows[name] = int(free[0])
        self._names[free[0]] = digest
        return self._rows[name]

    def _lock(self, operation: int) -> None:
        for _ in range(TRIES) if self._file is not None else ():
            assert self._file is not None
            try:
                return fcntl.flock(self._file, operation)
            except BlockingIOError:
                time.sleep(TRY_SECONDS)


class KeyCounts(Protocol):
    """Counters by name of the API key; `key_tokens` also by "prompt" or "generation", `key_refusals` by limit."""

    key_requests: Tally
    key_tokens: Tally
    key_refusals: Tally


class Ticket:
    """A running request: its streams, its time limits, and the tokens that are counted of it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.streams: list[RequestStream] = []
        self.deadlines = DeadlineConfig()
        self._prompt = self._output = 0

    def open(
        self,
        engine: ServedEngine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int | None,
        **more: Any,
    ) -> RequestStream:
        """Send prompts to the engine, as its caller's: see `ServedEngine.open`."""
        stream = engine.open(
            prompts,
            params,
            priority=self.caller.rules.priority_of(priority),
            account=self.caller.account,
            deadlines=self.deadlines,
            **more,
        )
        self.streams.append(stream)
        return stream

    @property
    def generations(self) -> list[Generation]:
        """Its prompts."""
        return [generation for stream in self.streams for generation in stream.generations]

    def new_tokens(self) -> tuple[int, int]:
        """Return the prompt and output tokens since the last call."""
        generations = self.generations
        prompt = sum(len(generation.prompt_token_ids) for generation in generations)
        output = sum(len(each.token_ids) for generation in generations for each in generation.completions)
        new = prompt - self._prompt, output - self._output
        self._prompt, self._output = prompt, output
        return new


One = TypeVar("One", bound=Ticket)


class KeyLimits:
    """The limits of named keys in one HTTP process. `table`: makes their table when it is needed first."""

    def __init__(self, table: Callable[[], KeyTable], metrics: KeyCounts) -> None:
        self._make, self._metrics = table, metrics
        self._live: dict[Ticket, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @cached_property
    def table(self) -> KeyTable:
        """Their state. Made with the first use; then requests of a process that ended no longer count."""
        return self._make()

    def take_request(self, caller: Caller) -> HttpError | None:
        """Count a request against the limit of requests per minute. Return its refusal, or None."""
        name, rules = caller.name, caller.rules
        if (limit := rules.requests_per_minute) is not None:
            state = self.table.take(name, REQUESTS, limit, 1, allowed=True)
            if state.wait:
                return self._refusal(caller, "requests", f"{limit:,} requests per minute", state.wait)
        if name:
            self._metrics.key_requests.add(name)
        return None

    @contextmanager
    def hold(self, ticket: One) -> Iterator[One]:
        """Context manager: a request that runs. Raises 429 when its key's tokens are used up, or too many run."""
        caller, name, rules = ticket.caller, ticket.caller.name, ticket.caller.rules
        if not name:
            yield ticket
            return
        if (limit := rules.tokens_per_minute) is not None:
            state = self.table.take(name, TOKENS, limit)
            if state.wait:
                raise self._refusal(caller, "tokens", f"{limit:,} tokens per minute", state.wait)
        if (most := rules.concurrency) is not None and self.table.running(name, 1) > most:
            self.table.running(name, -1)
            raise self._refusal(caller, "concurrency", f"{most:,} requests at once", 1.0)
        self._live[ticket] = None
        self._set_timer()
        try:
            yield ticket
        finally:
            del self._live[ticket]
            self.count(ticket)
            if most is not None:
                self.table.running(name, -1)

    def count(self, ticket: Ticket) -> None:
        """Count the new tokens of a request."""
        caller, (prompt, output) = ticket.caller, ticket.new_tokens()
        if caller.name and prompt + output:
            self._metrics.key_tokens.add(caller.name, "prompt", count=prompt)
            self._metrics.key_tokens.add(caller.name, "generation", count=output)
            if (limit := caller.rules.tokens_per_minute) is not None:
                self.table.take(caller.name, TOKENS, limit, prompt + output)

    def states(self, caller: Caller) -> dict[str, Allowance]:
        """Return the state of a key's limits per minute: "requests" and "tokens", those that it has."""
        requests, tokens = caller.rules.requests_per_minute, caller.rules.tokens_per_minute
        buckets = ("requests", REQUESTS, requests), ("tokens", TOKENS, tokens)
        return {
            kind: self.table.take(caller.name, column, limit) for kind, column, limit in buckets if limit is not None
        }

    def refuse(self, caller: Caller, limit: str) -> None:
        """Count a refusal for the metrics. limit: the word for what was reached"""
        self._metrics.key_refusals.add(caller.name, limit)

    def _refusal(self, caller: Caller, limit: str, words: str, wait: float) -> HttpError:
        self.refuse(caller, limit)
        seconds = max(1, math.ceil(wait))
        return HttpError(
            429,
            f"the key {caller.name!r} has reached its limit of {words}: try again in {seconds} s.",
            kind=RATE_LIMIT,
            code=CODE,
            headers=(("retry-after", str(seconds)),),
        )

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self._timer = None
        for ticket in self._live:
            self.count(ticket)
        if self._live:
            self._set_timer()
