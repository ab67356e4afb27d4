"""Responses stored in memory for their callers, with limits of number and bytes; the least recently used goes first.

A use of a response is a use of all that it continues, too. Knows nothing of how responses are made.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from quire.contracts.errors import shown
from quire.entry.http.errors import HttpError


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A stored response.

    owner        API key of the request
    body, items  JSON of the response, and JSON of the input items of its request
    previous     id of the response that this response continues
    task, gone   for a response that runs in the background: its task, and an event that cancels the task
    """

    owner: bytes
    body: bytes
    items: bytes = b"[]"
    previous: str | None = None
    background: bool = False
    task: "asyncio.Task[None] | None" = None
    gone: asyncio.Event | None = None


class ResponseStore:
    """Responses by id: those `running` in the background, and the finished ones."""

    def __init__(self, max_kept: int = 10_000, max_bytes: int = 256 * 2**20) -> None:
        self.running: dict[str, Kept] = {}
        self._kept: dict[str, Kept] = {}  # least recently used first
        self._max_kept, self._max_bytes, self._num_bytes = max_kept, max_bytes, 0

    def keep(self, name: str, kept: Kept) -> None:
        """Store a finished response. Drop the least recently used ones beyond the limits."""
        self._kept[name] = kept
        self._num_bytes += len(kept.body) + len(kept.items)
        while len(self._kept) > self._max_kept or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, name: str) -> None:
        """Remove a finished response."""
        if (kept := self._kept.pop(name, None)) is not None:
            self._num_bytes -= len(kept.body) + len(kept.items)

    def find(self, name: str, owner: bytes, param: str | None = None) -> Kept:
        """Return the response `name` of this owner. Raises `HttpError` 404 when this owner has none of this name.
        `param`: request field that holds the name, for the error."""
        found = self.running.get(name) or self._kept.get(name)
        if found is None or found.owner != owner:
            raise HttpError(
                404,
                f"there is no stored response {shown(name)} for this API key. The server stores responses without "
                f"store=false until it stops, the last {self._max_kept} or {self._max_bytes // 2**20} MiB. Send the "
                "conversation in input.",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        if found.task is None:
            self._kept[name] = self._kept.pop(name)
        return found

    def chain(self, name: str | None, owner: bytes) -> Iterator[Kept]:
        """Yield a finished response, then all earlier responses that it continues, newest first. Raises `HttpError`."""
        while name is not None:
            found = self.find(name, owner, "previous_response_id")
            if found.task is not None:
                raise HttpError(400, f"{name} is still in progress: wait until it ends.", param="previous_response_id")
            yield found
            name = found.previous
