"""Routes for those who run the server: is it alive, is it ready, what is it, what does it count.

    /health  200 while the engine runs         /live     200 while the event loop turns
    /ping    the same, GET or POST             /ready    200 when requests should come here
    /version what serves, and every choice     /metrics  Prometheus        /openapi.json  what the API takes
"""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.config.serve import ServerConfig
from quire.entry.http.answers import error_json, json_answer
from quire.entry.http.auth import OPEN_PATHS
from quire.entry.http.engine import ServedEngine
from quire.entry.http.readiness import RETRY_AFTER, LoadingBoard, Readiness, readiness
from quire.observe.metrics import Metrics

ALWAYS = OPEN_PATHS | {"/version", "/metrics", "/openapi.json"}  # answered in every state of the engine
RETRY_HEADERS = {"retry-after": str(RETRY_AFTER)}


class Ops:
    """The routes and what they look at."""

    def __init__(
        self,
        engine: ServedEngine,
        config: ServerConfig,
        metrics: Metrics,
        board: LoadingBoard,
        describe_api: Callable[[], dict[str, object]],
    ) -> None:
        self._engine, self._config, self._metrics, self._board = engine, config, metrics, board
        self._describe_api = describe_api

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        """200 while the engine runs, also while it drains; 503 while it starts or when it is dead."""
        now = self._now()
        return self._answer(now, ok=now.alive)

    async def live(self, request: Request) -> Response:
        """Whoever gets this answer knows that the event loop turns."""
        return json_answer({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """200 when requests should come here; else 503 and why not."""
        now = self._now()
        return self._answer(now, ok=now.ready)

    async def version(self, request: Request) -> Response:
        """What serves: version, model, types, sizes and every choice with its reason."""
        facts, model = self._engine.ready, self._config.engine.model
        loaded = {} if facts is None else {
            "dtype": facts.dtype,
            "device": facts.device,
            "max_model_len": facts.max_model_len,
            "num_blocks": facts.num_blocks,
            "block_size": facts.block_size,
            "plans": facts.plans,
            "notes": facts.notes,
            "start_seconds": facts.phases,
        }
        return json_answer({"version": __version__, "model": model.model or "quire-tiny",
                            "revision": model.revision, **loaded})

    async def metrics(self, request: Request) -> Response:
        """A scrape."""
        body, content_type = self._metrics.render()
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        """The API in the OpenAPI form."""
        return json_answer(self._describe_api())

    def _now(self) -> Readiness:
        return readiness(self._engine, self._board, self._config.serve.hang_timeout)

    def _answer(self, now: Readiness, *, ok: bool) -> Response:
        content: dict[str, object] = {"status": now.status, "reason": now.reason}
        if now.status == "starting" and self._board.last is not None:
            content["loading"] = self._board.last
        if ok:
            return json_answer(content)
        error = msgspec.json.decode(error_json(503, now.reason, f"engine_{now.status}"))
        return json_answer(content | error, 503, headers=RETRY_HEADERS)
