"""Responses stored for their callers, with limits of number and bytes; the least recently used goes first.

A use of a response is a use of all that it continues, too. The store is a database of SQLite: in memory, or in a file
that all HTTP processes of a server use. A response that runs in the background has the name of the process that makes
it, its runner. Each runner holds a lock of a file while it lives, so that the others notice its end.
"""

import asyncio
import fcntl
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from quire.contracts.errors import shown
from quire.entry.http.errors import HttpError

LOG = logging.getLogger("quire")
BUSY_SECONDS = 2.0  # to wait for another process that writes
LOOK_SECONDS = 0.1  # between two looks of a runner at what others want to end, and of these at whether it has ended
END_SECONDS = 10.0  # to wait for a runner to end a response
SCHEMA = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=OFF;
CREATE TABLE IF NOT EXISTS responses (
    name TEXT PRIMARY KEY, owner BLOB, body BLOB, items BLOB, previous TEXT, background INTEGER, streamed INTEGER,
    runner TEXT, ending INTEGER DEFAULT 0, used INTEGER, size INTEGER
);
CREATE INDEX IF NOT EXISTS by_use ON responses (runner, used);
CREATE TABLE IF NOT EXISTS events (name TEXT, number INTEGER, event BLOB, PRIMARY KEY (name, number)) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON responses BEGIN DELETE FROM events WHERE name = old.name; END;
CREATE TABLE IF NOT EXISTS finished (number INTEGER, bytes INTEGER);
INSERT INTO finished SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM finished);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses WHEN new.runner = '' BEGIN
    UPDATE finished SET number = number + 1, bytes = bytes + new.size;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF runner, size ON responses BEGIN
    UPDATE finished SET number = number + (new.runner = '') - (old.runner = ''),
        bytes = bytes + (new.runner = '') * new.size - (old.runner = '') * old.size;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses WHEN old.runner = '' BEGIN
    UPDATE finished SET number = number - 1, bytes = bytes - old.size;
END;
"""
ADD = "INSERT INTO responses (name, owner, body, items, previous, background, streamed, runner, used, size) VALUES "
VALUES = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO "
END = "UPDATE SET body = excluded.body, runner = excluded.runner, used = excluded.used, size = excluded.size"
SAY = "INSERT INTO events SELECT ?, ifnull(max(number), -1) + 1, ? FROM events WHERE name = ?"
READ = "SELECT event FROM events WHERE name = ? AND number >= ? ORDER BY number LIMIT 1000"
OLDEST = "DELETE FROM responses WHERE name = (SELECT name FROM responses WHERE runner = '' ORDER BY used LIMIT 1)"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A stored response.

    owner        API key of the request
    body, items  JSON of the response, and JSON of the input items of its request
    previous     id of the response that this response continues
    streamed     the events of its stream are stored, too
    runner       name of the process that makes the response in the background; "": the response has ended
    """

    owner: bytes
    body: bytes
    items: bytes = b"[]"
    previous: str | None = None
    background: bool = False
    streamed: bool = False
    runner: str = ""


@dataclass(frozen=True)
class Running:
    """A response that this process makes in the background: its task, an event that cancels the task, and one that is
    set when there are new events of its stream."""

    task: "asyncio.Future[None]"
    gone: asyncio.Event
    news: asyncio.Event


class ResponseStore:
    """Responses by id: those that this process has `running` in the background, and all that are stored.

    folder   folder of the server's HTTP processes; None: there is one process, and the store is in memory
    """

    def __init__(self, folder: Path | None = None, max_kept: int = 10_000, max_bytes: int = 256 * 2**20) -> None:
        self.running: dict[str, Running] = {}
        self._max_kept, self._max_bytes = max_kept, max_bytes
        self._folder, self._lock = folder, threading.Lock()
        self._watching: asyncio.Task[None] | None = None
        self.runner = f"runner{secrets.token_hex(8)}"
        if folder is None:
            self._base = _opened(":memory:")
            return
        with (folder / "opening").open("wb") as alone:  # SQLite does not wait for others where it sets the journal
            fcntl.flock(alone, fcntl.LOCK_EX)
            self._base = _opened(folder / "responses.sqlite")
            for runner in folder.glob("runner*"):
                if not self._lives(runner.name):
                    runner.unlink()
            self._alive = (folder / self.runner).open("wb")
            fcntl.flock(self._alive, fcntl.LOCK_EX)

    def keep(self, name: str, kept: Kept, events: Sequence[bytes] = ()) -> None:
        """Store a finished response, and the last events of its stream if these are kept. Drop the least recently used
        responses beyond the limits. A fault is logged."""
        try:
            with self._change() as base:
                base.executemany(SAY, [(name, event, name) for event in events])
                (more,) = base.execute("SELECT sum(length(event)) FROM events WHERE name = ?", (name,)).fetchone()
                base.execute(ADD + VALUES + END, self._row(name, kept, more or 0))
                while self._beyond(base):
                    base.execute(OLDEST)
        except sqlite3.Error as fault:
            LOG.warning("response %s was not stored: %s.", name, fault)

    def begin(self, name: str, kept: Kept, running: Running) -> None:
        """Store a response that this process makes in the background, unless it has ended meanwhile."""
        self.running[name] = running
        with self._change() as base:
            base.execute(ADD + VALUES + "NOTHING", self._row(name, kept))
        if self._folder is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    def say(self, name: str, events: Sequence[bytes]) -> None:
        """Store further events of the stream of a response that this process makes in the background."""
        with self._change() as base:
            base.executemany(SAY, [(name, event, name) for event in events])
        if (running := self.running.get(name)) is not None:
            running.news.set()

    async def events(self, name: str, owner: bytes, number: int) -> AsyncIterator[bytes]:
        """Yield the events of a response's stream from `number` on, many at a time, until it has ended, whichever
        process makes it. Raises `HttpError` 404 if it is deleted meanwhile."""
        while True:
            running = self.running.get(name)
            if running is not None:
                running.news.clear()
            ended = not self.find(name, owner).runner  # before the events: the last ones come with the end
            with self._lock:
                found = [event for (event,) in self._base.execute(READ, (name, number))]
            number += len(found)
            if found:
                yield b"".join(found)
            elif ended:
                return
            elif running is not None:
                await running.news.wait()
            else:
                await asyncio.sleep(LOOK_SECONDS)

    def drop(self, name: str) -> None:
        """Remove a response."""
        with self._change() as base:
            base.execute("DELETE FROM responses WHERE name = ?", (name,))

    def find(self, name: str, owner: bytes, param: str | None = None) -> Kept:
        """Return the response `name` of this owner. Raises `HttpError` 404 when this owner has none of this name.
        `param`: request field that holds the name, for the error."""
        with self._change() as base:
            columns = "owner, body, items, previous, background, streamed, runner"
            row = base.execute(f"SELECT {columns} FROM responses WHERE name = ?", (name,)).fetchone()
            if row is not None and row[0] == owner:
                base.execute("UPDATE responses SET used = ? WHERE name = ?", (time.monotonic_ns(), name))
        if row is None or row[0] != owner:
            raise HttpError(
                404,
                f"there is no stored response {shown(name)} for this API key. The server stores responses without "
                f"store=false until it stops, the last {self._max_kept} or {self._max_bytes // 2**20} MiB. Send the "
                "conversation in input.",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        owner, body, items, previous, background, streamed, runner = row
        kept = Kept(
            owner=owner,
            body=body,
            items=items,
            previous=previous,
            background=bool(background),
            streamed=bool(streamed),
            runner=runner,
        )
        return kept if self._lives(kept.runner) else self._lost(name, kept)

    def chain(self, name: str | None, owner: bytes) -> Iterator[Kept]:
        """Yield a finished response, then all earlier responses that it continues, newest first. Raises `HttpError`."""
        while name is not None:
            found = self.find(name, owner, "previous_response_id")
            if found.runner:
                raise HttpError(400, f"{name} is still in progress: wait until it ends.", param="previous_response_id")
            yield found
            name = found.previous

    async def end(self, name: str, owner: bytes) -> None:
        """Cancel a background response, whichever process makes it, and wait until it has ended."""
        if (running := self.running.get(name)) is not None:
            running.gone.set()
            await asyncio.wait({running.task})
            return
        with self._change() as base:
            base.execute("UPDATE responses SET ending = 1 WHERE name = ? AND runner <> ''", (name,))
        with suppress(HttpError, TimeoutError):  # deleted meanwhile; its end could not be stored
            async with asyncio.timeout(END_SECONDS):
                while self.find(name, owner).runner:
                    await asyncio.sleep(LOOK_SECONDS)

    # --- inside -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Cancel the responses of this process that another one wants to end, while there are any."""
        while self.running:
            with suppress(sqlite3.Error), self._lock:
                asked = "SELECT name FROM responses WHERE runner = ? AND ending"
                for (name,) in self._base.execute(asked, (self.runner,)).fetchall():
                    if (running := self.running.get(name)) is not None:
                        running.gone.set()
            await asyncio.sleep(LOOK_SECONDS)

    def _lives(self, runner: str) -> bool:
        """Return False if a runner has ended: it holds the lock of its file as long as it lives."""
        if self._folder is None or runner in ("", self.runner):
            return True
        try:
            with (self._folder / runner).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:  # a later process has removed it
            pass
        return False

    def _lost(self, name: str, kept: Kept) -> Kept:
        """Store a response as failed whose runner has ended, and return it."""
        words = "the HTTP process that made this response has ended: send the request again."
        answer = msgspec.json.decode(kept.body)
        answer |= {"status": "failed", "error": {"code": "server_error", "message": words}}
        kept = replace(kept, body=msgspec.json.encode(answer), runner="")
        with self._lock:
            (number,) = self._base.execute("SELECT count(*) FROM events WHERE name = ?", (name,)).fetchone()
        self.keep(name, kept, [numbered("response.failed", number, response=answer)] if kept.streamed else ())
        return kept

    def _beyond(self, base: sqlite3.Connection) -> bool:
        number, size = base.execute("SELECT number, bytes FROM finished").fetchone()
        return bool(number > self._max_kept or size > self._max_bytes)

    @staticmethod
    def _row(name: str, kept: Kept, more: int = 0) -> tuple[object, ...]:
        size = len(kept.body) + len(kept.items) + more
        fixed = kept.owner, kept.body, kept.items, kept.previous, kept.background, kept.streamed, kept.runner
        return name, *fixed, time.monotonic_ns(), size

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Context manager: a transaction. Several threads end responses."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")


def numbered(kind: str, number: int, **fields: Any) -> bytes:
    """Return an event of a response's stream, with its number there."""
    data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _opened(path: Path | str) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
    base.executescript(SCHEMA)
    return base
