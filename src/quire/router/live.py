"""The live view through a router: the streams of all backends as one, and routes of one backend that a caller names.

Every event gets the backend's URL in front. A slow reader loses events of backends, and a `lost` event says so. Knows
events as lines of bytes, and nothing of what they mean.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from urllib.parse import parse_qs, urlencode

import msgspec

from quire.router.asked import Asked, Send, WholeAnswer, refusal
from quire.router.backends import Backend
from quire.router.upstream import LEFT_OUT, UpstreamError, read_all

LIVE, MODELS = "/debug/live", "/v1/models"
# paths of one backend; also those below the last
OF_ONE = (
    *("/debug/blocks", "/debug/plan", "/debug/meetings", "/debug/trace", "/debug/profile"),
    "/debug/requests",
)
RETRY_SECONDS = 2.0  # between two tries to watch a backend
MOST_WAITING = 8  # events of a backend that wait for a slow reader
MOST_EVENT = 1 << 24  # bytes of an event; a backend that sends more is no server of ours
KEEP_ALIVE = 15.0  # seconds of silence after which a comment is sent


def is_live(path: str) -> bool:
    """True for the paths of this module."""
    return path == LIVE or path in OF_ONE or path.startswith("/debug/requests/")


class BackendEvents:
    """The events of one backend that wait for a reader."""

    def __init__(self, backend: Backend, come: asyncio.Event) -> None:
        self._backend, self._come = backend, come
        self._waiting = deque[bytes]()
        self._lost = 0

    async def follow(self, asked: Asked, timeout: float) -> None:
        """Watch the backend, again and again. timeout: seconds for it to begin an answer."""
        while True:
            reason = await self._watch(asked, timeout)
            self._put(self._event("down", {"reason": reason}))
            await asyncio.sleep(RETRY_SECONDS)

    def take(self) -> list[bytes]:
        """Return the events that wait, and forget them."""
        events, lost = [*self._waiting], self._lost
        self._waiting.clear()
        self._lost = 0
        return [self._event("lost", {"frames": lost}), *events] if lost else events

    async def _watch(self, asked: Asked, timeout: float) -> str:
        """Queue the events of a stream until it ends. Return the reason why it ended."""
        try:
            async with asyncio.timeout(timeout):
                connection = await self._backend.pool.ask(b"GET", asked.target, asked.headers, b"")
        except TimeoutError:
            return f"it has not answered within {timeout:g} s"
        except UpstreamError as error:
            return str(error)
        try:
            if connection.status != 200:
                return f"it answers {connection.status}: {_words(await read_all(connection))}"
            rest = b""
            while piece := await connection.read():
                *whole, rest = (rest + piece).split(b"\n\n")
                if len(rest) > MOST_EVENT:
                    return "its events have no end"
                for event in whole:
                    name, _, data = event.partition(b"\ndata: {")
                    if data:
                        self._put(name + b"\ndata: " + self._name + b"," + data + b"\n\n")
            return "its stream ended"
        except UpstreamError as error:
            return str(error)
        finally:
            connection.abort()

    @property
    def _name(self) -> bytes:
        return msgspec.json.encode({"backend": self._backend.name})[:-1]

    def _event(self, name: str, fields: dict[str, object]) -> bytes:
        return b"event: " + name.encode() + b"\ndata: " + self._name + b"," + msgspec.json.encode(fields)[1:] + b"\n\n"

    def _put(self, event: bytes) -> None:
        """Queue an event. When too many wait, the oldest frame goes; other events are few, and stay."""
        if len(self._waiting) >= MOST_WAITING:
            at = next((i for i, one in enumerate(self._waiting) if one.startswith(b"event: frame")), 0)
            del self._waiting[at]
            self._lost += 1
        self._waiting.append(event)
        self._come.set()


class LiveStreams:
    """The readers of the merged stream. `end` ends all of them.

    timeout   seconds for a backend to begin an answer
    """

    def __init__(self, backends: Sequence[Backend], timeout: float) -> None:
        self._backends, self._timeout = backends, timeout
        self._readers = set[asyncio.Event]()
        self._ended, self._version = False, 0
        self._left: int | None = None  # requests of a router that drains

    @property
    def num_readers(self) -> int:
        """The streams that are open."""
        return len(self._readers)

    def drain(self, requests: int) -> None:
        """Tell readers that the router drains, and how many requests are left."""
        if requests != self._left:
            self._left = requests
            self.tell()

    def tell(self) -> None:
        """Send the event `router` again: backends came, went or drain, or the router does."""
        self._version += 1
        for come in self._readers:
            come.set()

    def end(self) -> None:
        """End all streams, and those that begin later."""
        self._ended = True
        for come in self._readers:
            come.set()

    async def answer(self, asked: Asked, send: Send) -> None:
        """Answer `GET /debug/live`. A caller whom the backends do not know gets their refusal."""
        models = replace(asked, path=MODELS, target=MODELS.encode())
        known = await ask_one(self._backends, models, self._timeout)
        if known.status in (401, 403):
            return await known.send(send)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pieces = self._merged(asked)
        try:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await pieces.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _merged(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        """Yield the backends, then their events as they come, in pieces of whole events."""
        come = asyncio.Event()
        following: dict[Backend, tuple[BackendEvents, asyncio.Task[None]]] = {}
        self._readers.add(come)
        try:
            version = self._version
            self._follow_all(following, asked, come)
            yield self._router()
            while not self._ended:
                try:
                    async with asyncio.timeout(KEEP_ALIVE):
                        await come.wait()
                except TimeoutError:
                    yield b": keep-alive\n\n"
                    continue
                come.clear()
                news = [] if version == self._version else [self._router()]
                if news:
                    version = self._version
                    self._follow_all(following, asked, come)
                yield b"".join([*news, *(event for one, _ in following.values() for event in one.take())])
            yield b'event: end\ndata: {"reason":"the router ends."}\n\n'
        finally:
            self._readers.discard(come)
            tasks = [task for _, task in following.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow_all(
        self,
        following: dict[Backend, tuple[BackendEvents, "asyncio.Task[None]"]],
        asked: Asked,
        come: asyncio.Event,
    ) -> None:
        """Follow the backends of now, and no others."""
        for backend in self._backends:
            if backend not in following:
                events = BackendEvents(backend, come)
                following[backend] = events, asyncio.create_task(events.follow(asked, self._timeout))
        for backend in following.keys() - set(self._backends):
            following.pop(backend)[1].cancel()

    def _router(self) -> bytes:
        """Return the event `router`."""
        told = {
            "backends": [backend.name for backend in self._backends],
            "draining": [backend.name for backend in self._backends if backend.draining],
            "ending": None if self._left is None else {"requests": self._left},
        }
        return b"event: router\ndata: " + msgspec.json.encode(told) + b"\n\n"


def _target(asked: Asked, query: dict[str, list[str]]) -> bytes:
    """Return the path and the query for a backend: without its name."""
    rest = urlencode([(name, value) for name, values in query.items() if name != "backend" for value in values])
    return asked.target.partition(b"?")[0] + (b"?" + rest.encode() if rest else b"")


async def ask_one(backends: Sequence[Backend], asked: Asked, timeout: float) -> WholeAnswer:
    """Return the answer of the backend that the query names, or of the first one that is up."""
    query = parse_qs(asked.target.partition(b"?")[2].decode("latin-1"))
    name = query.get("backend", [""])[0].rstrip("/")
    chosen = next((one for one in backends if (one.name == name if name else one.up)), None)
    if chosen is None:
        words = "is no backend of this router" if name else "no backend is up: try again in a moment"
        status, code = (404, "unknown_backend") if name else (503, "no_backend")
        return refusal(status, f"{name} {words}.".strip(), code, asked.path, asked.request_id)
    try:
        async with asyncio.timeout(timeout):
            connection = await chosen.pool.ask(b"GET", _target(asked, query), asked.headers, b"")
            try:
                headers = [header for header in connection.headers if header[0] not in LEFT_OUT]
                return WholeAnswer(status=connection.status, headers=headers, body=await read_all(connection))
            finally:
                chosen.pool.give_back(connection)
    except TimeoutError:
        words = f"{chosen.name} has not answered within {timeout:g} s"
    except UpstreamError as error:
        words = f"{chosen.name}: {error}"
    return refusal(502, f"{words}.", "backend_failed", asked.path, asked.request_id)


def _words(body: bytes) -> str:
    """Return the message of an error of a backend."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "no reason given"
