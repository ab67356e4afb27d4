"""Stored responses: each is state of the backend that has made it. The router keeps none, and finds that backend.

    learn    the id at the beginning of an answer of /v1/responses --> its backend is remembered
    holder   remembered; else, as after a restart or behind another router, every backend that is up is asked with the
             client's own key for the response: the one that does not answer 404 has it

Nothing but time depends on what is remembered.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence

from quire.router.asked import RESPONSES, Asked
from quire.router.backends import Backend
from quire.router.upstream import UpstreamError

MOST = 2**15  # responses that are remembered, the least recently used go first
BEGINNING = 4_096  # bytes of an answer in which its id stands
ID = "resp_[A-Za-z0-9_-]{1,100}"
MADE = re.compile(rb'"id": ?"(%b)"' % ID.encode())
NAMED = re.compile(rb'"(%b)"' % ID.encode())
BELOW = re.compile(rf"{RESPONSES}/({ID})(/cancel)?")  # paths of a stored response
METHODS = {None: ("GET", "DELETE"), "/cancel": ("POST",)}


def methods(path: str) -> tuple[str, ...]:
    """Return the methods of a path of a stored response; () for other paths."""
    found = BELOW.fullmatch(path)
    return () if found is None else METHODS[found[2]]


def is_read(asked: Asked) -> bool:
    """True for a request about a stored response that generates nothing: drained backends answer it, too."""
    return bool(methods(asked.path))


class StoredResponses:
    """The backends of stored responses. backends: all that answer requests; the list changes"""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._known = OrderedDict[str, Backend]()

    def learn(self, beginning: bytes, backend: Backend) -> None:
        """Remember the backend of the response whose answer begins so."""
        if (made := MADE.search(beginning[:BEGINNING])) is not None:
            self._remember(made[1].decode(), backend)

    async def holder(self, asked: Asked, timeout: float) -> Backend | None:
        """Return the backend that has the response which a request reads or continues.

        None: it names none, or no backend has it; then any backend tells the client. timeout: seconds for each question
        """
        name = _name_in(asked)
        if name is None:
            return None
        if (known := self._known.get(name)) is not None and known in self._backends:
            self._known.move_to_end(name)
            return known
        target = f"{RESPONSES}/{name}".encode()
        for backend in [backend for backend in self._backends if backend.up]:
            try:
                status, _ = await backend.pool.fetch(b"GET", target, asked.headers, b"", timeout)
            except UpstreamError:
                continue
            if status == 200:
                self._remember(name, backend)
                return backend
        return None

    def _remember(self, name: str, backend: Backend) -> None:
        self._known[name] = backend
        self._known.move_to_end(name)
        while len(self._known) > MOST:
            self._known.popitem(last=False)


def _name_in(asked: Asked) -> str | None:
    """Return the id of the response that a request reads, cancels, deletes or continues."""
    if (below := BELOW.fullmatch(asked.path)) is not None:
        return below[1]
    named = NAMED.fullmatch(asked.body.text("previous_response_id")) if asked.path == RESPONSES else None
    return None if named is None else named[1].decode()
