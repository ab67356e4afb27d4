"""Responses that are kept for their callers, in memory, bounded in number and in bytes: the one that was not used for
longest goes first. A use is one of all that it continues, so those go later. Knows nothing of how they are made."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from quire.contracts.errors import shown
from quire.entry.http.errors import HttpError


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A response of the API key `owner`: itself and the items of its input as JSON, and what it continues.

    task, gone   of one that still runs in the background; setting `gone` ends it, as if a client had hung up
    """

    owner: bytes
    body: bytes
    items: bytes = b"[]"
    previous: str | None = None
    background: bool = False
    task: "asyncio.Task[None] | None" = None
    gone: asyncio.Event | None = None


class ResponseStore:
    """Responses by id: those that are `running`, and those that have ended."""

    def __init__(self, max_kept: int = 10_000, max_bytes: int = 256 * 2**20) -> None:
        self.running: dict[str, Kept] = {}
        self._kept: dict[str, Kept] = {}  # the one to go first is the first
        self._max_kept, self._max_bytes, self._num_bytes = max_kept, max_bytes, 0

    def keep(self, name: str, kept: Kept) -> None:
        """One that has ended."""
        self._kept[name] = kept
        self._num_bytes += len(kept.body) + len(kept.items)
        while len(self._kept) > self._max_kept or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, name: str) -> None:
        """Forget one that has ended."""
        if (kept := self._kept.pop(name, None)) is not None:
            self._num_bytes -= len(kept.body) + len(kept.items)

    def find(self, name: str, owner: bytes, param: str | None = None) -> Kept:
        """One of its owner's, named in the field `param`. Errors: `HttpError` 404, for another's, too."""
        found = self.running.get(name) or self._kept.get(name)
        if found is None or found.owner != owner:
            raise HttpError(
                404, f"there is no response {shown(name)} here: kept are those without store=false, for the API key "
                f"that made them, the last {self._max_kept} or {self._max_bytes // 2**20} MiB of them, until the "
                "server ends. Send the conversation in input.", param=param,
                code="previous_response_not_found" if param else "response_not_found")
        if found.task is None:
            self._kept[name] = self._kept.pop(name)
        return found

    def chain(self, name: str | None, owner: bytes) -> Iterator[Kept]:
        """One that has ended and all that it continues, the newest first. Errors: `HttpError`."""
        while name is not None:
            found = self.find(name, owner, "previous_response_id")
            if found.task is not None:
                raise HttpError(400, f"{name} is still in progress: wait for its end.", param="previous_response_id")
            yield found
            name = found.previous
