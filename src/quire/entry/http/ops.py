"""Routes for operators: probes, version, metrics and debugging.

/                name, version, models and important paths
/health, /ping   200 while the engine runs (/ping: GET or POST)
/live            200 while the event loop runs
/ready           200 when a load balancer should send requests here
/version         model, device and the engine's choices
/metrics         Prometheus
/openapi.json    the OpenAPI document
/debug/plan      the engine's plan, as `quire explain --json` prints it
/debug/requests  live requests and the last finished ones: times, tokens, and why no more of the prefix was reused
"""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.config.bundled import NAME
from quire.config.serve import ServerConfig
from quire.entry.http.access.auth import OPEN_PATHS
from quire.entry.http.access.keyring import caller_of
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import error_json
from quire.entry.http.readiness import Readiness, readiness
from quire.observe.metrics import Metrics

ENTRIES = ("/v1/models", "/health", "/metrics", "/version", "/openapi.json")  # paths that `/` lists
ALWAYS = OPEN_PATHS | {"/", "/version", "/metrics", "/openapi.json", "/debug/requests"}  # served in every engine state


def ops_routes(
    engine: ServedEngine, config: ServerConfig, metrics: Metrics, describe_api: Callable[[], dict[str, object]]
) -> list[Route]:
    """Return the operators' routes: health, version, metrics, debugging. `describe_api` makes the OpenAPI document."""

    def state(may_ask: Callable[[Readiness], bool]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            now = readiness(engine, config.serve.hang_timeout)
            content: dict[str, object] = {"status": now.status, "reason": now.reason}
            if now.status == "starting":
                content["loading"] = engine.loading
            if may_ask(now):
                return _json(content)
            error = msgspec.json.decode(error_json(503, now.reason, f"engine_{now.status}"))
            return _json(content | error, 503, headers={"retry-after": str(now.retry_after)})

        return answer

    async def root(request: Request) -> Response:
        return _json(
            {
                "name": "Quire",
                "version": __version__,
                "models": config.model_names,
                "paths": [config.http.root_path + path for path in ENTRIES],
            }
        )

    async def live(request: Request) -> Response:
        return _json({"status": "live"})

    async def version(request: Request) -> Response:
        facts, model = engine.ready, config.engine.model
        loaded = (
            {}
            if facts is None
            else {
                "dtype": facts.dtype,
                "device": facts.device,
                "max_model_len": facts.max_model_len,
                "num_blocks": facts.num_blocks,
                "block_size": facts.block_size,
                "plans": facts.plans,
                "notes": facts.notes,
                "start_seconds": facts.phases,
            }
        )
        return _json({"version": __version__, "model": model.model or NAME, "revision": model.revision, **loaded})

    async def scrape(request: Request) -> Response:
        body, content_type = metrics.render()
        return Response(body, headers={"content-type": content_type})

    async def openapi(request: Request) -> Response:
        return _json(describe_api())

    async def plan(request: Request) -> Response:
        return Response(str(await engine.control("plan")), media_type="application/json")

    async def requests(request: Request) -> Response:
        return _json({"requests": engine.requests(caller_of(request.scope).tenant)})

    alive = state(lambda now: now.alive)  # also while the server drains
    return [
        Route("/", root, methods=["GET"]),
        Route("/health", alive, methods=["GET"]),
        Route("/ping", alive, methods=["GET", "POST"]),
        Route("/live", live, methods=["GET"]),
        Route("/ready", state(lambda now: now.ready), methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", scrape, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/debug/plan", plan, methods=["GET"]),
        Route("/debug/requests", requests, methods=["GET"]),
    ]


def _json(content: object, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
