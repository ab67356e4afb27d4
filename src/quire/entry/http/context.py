"""What every route may use: the engine as routes see it, the configuration, and which requests are in flight."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from quire.config.serve import ServerConfig
from quire.contracts.errors import EngineStarting, QueueTimeout, shown
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import HttpError
from quire.entry.http.memory import FreedMemory
from quire.entry.http.openai.responses_store import ResponseStore
from quire.observe.metrics import Metrics
from quire.procs.messages import Ready
from quire.text.load import TextSide

SANDBOXES = 2  # conversations that are rendered apart at once: their threads are a few of those that all share
LOADING = "the model is still loading: try again in a few seconds."


class InFlight:
    """The ids of the requests that are being answered, each with the API key that its request shows."""

    def __init__(self) -> None:
        self._ids: set[tuple[bytes, str]] = set()

    def __len__(self) -> int:
        return len(self._ids)

    @contextmanager
    def hold(self, owner: bytes, request_id: str) -> Iterator[None]:
        """Own an id for a while; 409 when another request of the same key does."""
        if (owner, request_id) in self._ids:
            raise HttpError(
                409, f"request {shown(request_id)} is already running: wait for its answer, or send another "
                "X-Request-Id.", code="duplicate_request_id", param="request_id")
        self._ids.add((owner, request_id))
        try:
            yield
        finally:
            self._ids.discard((owner, request_id))


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """What routes are built from. `model_names`: the names under which the model is served, the main one first;
    `created`: seconds since the epoch at which the server started; `unknown_fields`: names that were logged;
    `huge_text`: held by whoever encodes one; `sandboxes`: how many more may be rendered apart;
    `responses`: those that are kept; `memory`: returns what long texts have used."""

    engine: ServedEngine
    config: ServerConfig
    metrics: Metrics
    model_names: tuple[str, ...]
    created: int
    in_flight: InFlight = field(default_factory=InFlight)
    unknown_fields: set[str] = field(default_factory=set)
    huge_text: asyncio.Lock = field(default_factory=asyncio.Lock)
    memory: FreedMemory = field(default_factory=FreedMemory)
    responses: ResponseStore = field(default_factory=ResponseStore)
    sandboxes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SANDBOXES))

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[None]:
        """The right to render a template apart, for a while. Errors: `QueueTimeout` when others have it for long."""
        try:
            async with asyncio.timeout(self.config.serve.queue_timeout):
                await self.sandboxes.acquire()
        except TimeoutError:
            raise QueueTimeout("the server is busy with costly chat templates: try again later, or send a simpler "
                               "one.") from None
        try:
            yield
        finally:
            self.sandboxes.release()

    def text(self) -> TextSide:
        """Tokenizer and template, or 503 while they load."""
        text = self.engine.text
        if text is None:
            raise EngineStarting(LOADING)
        return text

    def ready(self) -> Ready:
        """The engine's facts, or 503 while it loads."""
        ready = self.engine.ready
        if ready is None:
            raise EngineStarting(LOADING)
        return ready

    def model(self, name: str | None) -> str:
        """The name to answer under; 404 for one that is not served. None and "" mean the main one."""
        if not name:
            return self.model_names[0]
        if name in self.model_names:
            return name
        served = ", ".join(self.model_names)
        raise HttpError(404, f"the model {shown(name)} is not served here; served: {served}.", code="model_not_found",
                        param="model")
