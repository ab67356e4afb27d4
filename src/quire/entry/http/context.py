"""The state that all routes share: the engine, the configuration, and the requests in flight."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from starlette.types import Scope

from quire.config.serve import ServerConfig
from quire.contracts.errors import EngineStarting, QueueTimeout, shown
from quire.entry.http.access.keyring import Keyring, caller_of
from quire.entry.http.access.limits import KeyLimits, KeyTable, Ticket
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import PERMISSION, HttpError
from quire.entry.http.freed_memory import FreedMemory
from quire.entry.http.kept.store import ResponseStore
from quire.entry.http.observed.spans import note_model
from quire.entry.http.text_work import TextWork
from quire.entry.prompts import Prompt
from quire.observe.metrics import Metrics
from quire.procs.messages import Ready
from quire.text.load import TextSide

LOG = logging.getLogger("quire")
SANDBOXES = 2  # chat templates rendered in child processes at once; each occupies a thread of the shared pool
LOADING = "the model is still loading: try again in a few seconds."


class RequestIds:
    """The ids of the requests that are being answered, each with the API key of its request."""

    def __init__(self) -> None:
        self._ids: set[tuple[bytes, str]] = set()

    def __len__(self) -> int:
        return len(self._ids)

    @contextmanager
    def hold(self, owner: bytes, request_id: str) -> Iterator[None]:
        """Context manager: reserve a request id. Raises 409 when a running request of the API key `owner` has it."""
        if (owner, request_id) in self._ids:
            raise HttpError(
                409,
                f"request {shown(request_id)} is already running: wait for its answer, or send another X-Request-Id.",
                code="duplicate_request_id",
                param="request_id",
            )
        self._ids.add((owner, request_id))
        try:
            yield
        finally:
            self._ids.discard((owner, request_id))


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """Objects that all routes of a server use.

    model_names      names of the served model, the main one first
    created          start of the server, in seconds since the epoch
    unknown_fields   unknown request fields that were logged already
    text_work        threads for the texts of long requests
    memory           counter of long texts, which returns their memory to the operating system
    sandboxes        semaphore of chat templates rendered in child processes
    """

    engine: ServedEngine
    config: ServerConfig
    metrics: Metrics
    model_names: tuple[str, ...]
    created: int
    in_flight: RequestIds = field(default_factory=RequestIds)
    unknown_fields: set[str] = field(default_factory=set)
    text_work: TextWork = field(default_factory=TextWork)
    memory: FreedMemory = field(default_factory=FreedMemory)
    sandboxes: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SANDBOXES))

    @cached_property
    def responses(self) -> ResponseStore:
        """Stored responses of /v1/responses. The first request opens the store, when the sockets' folder exists."""
        several = self.config.serve.api_server_count > 1
        return ResponseStore(Path(self.engine.place.folder) if several else None)

    @cached_property
    def keyring(self) -> Keyring:
        """The valid API keys. Raises `ConfigError` for a file of keys that cannot be used."""
        by_priority = self.config.engine.scheduler.scheduling_policy == "priority"
        return Keyring(self.config.access, by_priority=by_priority)

    @cached_property
    def limits(self) -> KeyLimits:
        """The limits of named API keys."""
        return KeyLimits(self._key_table, self.metrics)

    @property
    def logs_requests(self) -> bool:
        """True when a line is logged for each generation."""
        return self.config.log.enable_log_requests or LOG.isEnabledFor(logging.DEBUG)

    @contextmanager
    def hold(self, scope: Scope, request_id: str) -> Iterator[Ticket]:
        """Context manager: a request that runs. Raises 409 for an id that is taken, 429 at a limit of its key."""
        caller = caller_of(scope)
        with self.in_flight.hold(caller.owner, request_id), self.limits.hold(Ticket(caller)) as ticket:
            ticket.deadlines = caller.rules.deadlines(self.config.deadlines)
            scope.setdefault("state", {})["ticket"] = ticket
            yield ticket

    def _key_table(self) -> KeyTable:
        if (count := self.config.serve.api_server_count) == 1:
            return KeyTable()
        place = self.engine.place
        return KeyTable(place.number, count, Path(place.folder) / "limits")

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[None]:
        """Context manager: hold one of the `SANDBOXES` permits to render a chat template in a child process.
        Raises `QueueTimeout` when no permit is free within `queue_timeout` seconds."""
        try:
            async with asyncio.timeout(self.config.deadlines.queue_timeout):
                await self.sandboxes.acquire()
        except TimeoutError:
            raise QueueTimeout(
                "the server is busy with slow chat templates: try again later, or send a simpler template."
            ) from None
        try:
            yield
        finally:
            self.sandboxes.release()

    def text(self) -> TextSide:
        """Return the model's tokenizer, chat template and defaults. Raises `EngineStarting` (503) while they load."""
        text = self.engine.text
        if text is None:
            raise EngineStarting(LOADING)
        return text

    def ready(self) -> Ready:
        """Return the core's `Ready` message. Raises `EngineStarting` (503) while the engine loads."""
        ready = self.engine.ready
        if ready is None:
            raise EngineStarting(LOADING)
        return ready

    async def find(self, name: str | None, scope: Scope) -> str:
        """Return the model name for the answer, as `model`, after a look for an adapter of this name in its folder.
        Raises 403 when the key of the request may not use it."""
        await self.engine.adapters.find(name)
        model, caller = self.model(name), caller_of(scope)
        note_model(scope, model)
        if not caller.rules.may_use(model):
            self.limits.refuse(caller, "model")
            words = f"the key {caller.name!r} may not use the model {shown(model)}: /v1/models lists those that it may."
            raise HttpError(403, words, kind=PERMISSION, code="model_not_allowed", param="model")
        return model

    def adapted(self, prompts: list[Prompt], name: str | None) -> list[Prompt]:
        """Return the prompts with the adapter of a model name, if it is an adapter's."""
        adapter = self.engine.adapters.get(name)
        return prompts if adapter is None else [replace(prompt, adapter=adapter) for prompt in prompts]

    def model(self, name: str | None) -> str:
        """Return the model name for the answer. None and "" mean the main name. Raises 404 for an unknown name."""
        if not name:
            return self.model_names[0]
        if name in self.model_names or self.engine.adapters.get(name) is not None:
            return name
        served = ", ".join((*self.model_names, *self.engine.adapters.names))
        raise HttpError(
            404, f"the model {shown(name)} is not served here: use {served}.", code="model_not_found", param="model"
        )
