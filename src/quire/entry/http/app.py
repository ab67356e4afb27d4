"""The ASGI application: routes, and the middleware that every request passes, from the outside to the inside.

RequestScope    request id, counts, access log, 500 for unexpected exceptions
TracedRequests  spans for OpenTelemetry; only with --otlp-traces-endpoint
own_errors      Anthropic's error format on Anthropic's routes
OwnNames        403 for a foreign Host header; only without API keys and on a loopback address; not for probes
ServesPage      the page of the live view, without a key: it holds no facts of the engine
CORS            only with allowed_origins
ApiKeys         401; only with API keys; every path except /health, /ping, /live, /ready
Gate            503 while the engine starts, drains or is dead
RateLimits      429 beyond a named key's requests per minute, and the headers of limits; only with a file of keys
routes          ops.py, openai/, anthropic/, web/, life/
json_only       415 for bodies that are not JSON, when the path and the method are right
"""

import difflib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.config.serve import ServerConfig, is_loopback
from quire.contracts.errors import QuireError, shown
from quire.contracts.text_table import read_rows
from quire.entry.http.access.auth import ApiKeys, Guard, OwnNames, json_only
from quire.entry.http.access.rate_limits import LIMIT_HEADERS, RateLimits
from quire.entry.http.anthropic.errors import own_errors
from quire.entry.http.context import ServerContext
from quire.entry.http.engine import ServedEngine
from quire.entry.http.errors import error_answer, http_error
from quire.entry.http.life.routes import OFF, life_routes
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.observed.spans import TracedRequests
from quire.entry.http.openai.routes import routes as openai_routes
from quire.entry.http.openapi import describe_api
from quire.entry.http.ops import ALWAYS, ops_routes
from quire.entry.http.readiness import Gate, readiness
from quire.entry.http.request_scope import RequestScope
from quire.entry.http.web.page import ServesPage
from quire.entry.http.web.routes import live_routes
from quire.observe.metrics import Metrics
from quire.observe.tracing import Tracer

UNSERVED = {path: why for paths, why in read_rows(Path(__file__).with_name("unserved.txt")) for path in paths.split()}
CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST", "DELETE"],
    "allow_headers": ["*"],
    "max_age": 3600,
    "expose_headers": ["x-request-id", "retry-after", *LIMIT_HEADERS],
}


def make_context(engine: ServedEngine, config: ServerConfig, metrics: Metrics) -> ServerContext:
    """Return the state of all routes of a server that starts now. `metrics` tells its readiness from here on."""
    metrics.is_ready = lambda: readiness(engine, config.serve.hang_timeout).ready
    return ServerContext(
        engine=engine, config=config, metrics=metrics, model_names=config.model_names, created=int(time.time())
    )


def build_app(
    engine: ServedEngine,
    config: ServerConfig,
    metrics: Metrics,
    context: ServerContext | None = None,
    tracer: Tracer | None = None,
) -> Starlette:
    """Return the ASGI application of an engine: routes and middleware. The engine may still be starting.
    Raises `ConfigError` for a file of API keys that cannot be used."""
    context = context or make_context(engine, config, metrics)
    routes: list[Route] = openai_routes(context)
    routes += ops_routes(engine, config, metrics, lambda: describe_api(routes, config))
    routes += live_routes(engine, config)
    routes += life_routes(engine, config)
    http, paths = config.http, sorted({route.path for route in routes})
    origins = list(http.allowed_origins)
    # True when every program on this machine may call the server, and nothing but the address protects it.
    private = http.uds is None and not config.access.keyed and is_loopback(http.host) and "*" not in http.allowed_hosts
    layers = [
        Middleware(
            RequestScope,
            metrics=metrics,
            root_path=http.root_path,
            paths=paths,
            access_log=AccessLog(config.log),
        ),
        *([] if tracer is None else [Middleware(TracedRequests, tracer=tracer)]),
        Middleware(own_errors),
        *([Middleware(Guard, refusal=OwnNames(http.host, http.allowed_hosts))] if private else []),
        Middleware(Guard, refusal=ServesPage(on=http.web)),
        *([Middleware(CORSMiddleware, **CORS, allow_origins=origins)] if origins else []),
        *([Middleware(Guard, refusal=ApiKeys(context.keyring))] if config.access.keyed else []),
        Middleware(Guard, refusal=Gate(engine, ALWAYS, metrics)),
        *([Middleware(RateLimits, limits=context.limits)] if config.access.api_key_file is not None else []),
    ]
    for route in routes:
        route.app = Guard(route.app, json_only)
    app = Starlette(
        routes=routes,
        middleware=layers,
        exception_handlers={HTTPException: _Refusals(paths).answer, QuireError: _quire_error},
    )
    app.router.redirect_slashes = False  # a redirect would be built from the Host header
    return app


class _Refusals:
    """Answers for requests without a route: unknown paths (404, with the nearest path) and wrong methods (405)."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = [path for path in paths if "{" not in path]

    async def answer(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.scope["path"], request.method
        for known, why in UNSERVED.items() if error.status_code == 404 else ():
            if path == known or path.startswith(known + "/"):
                return error_answer(404, f"{shown(path)} is not implemented yet: {why}.", "not_implemented")
        if error.status_code == 404 and path in OFF:
            return error_answer(404, f"this server has no path {path}: {OFF[path]}.", "not_allowed")
        if error.status_code == 404:
            near = [known for known in self._paths if known.endswith(path) and len(path) > 1]
            near = near or difflib.get_close_matches(path[:200], self._paths, n=1, cutoff=0.75)
            hint = f" Did you mean {near[0]}?" if near else ""
            return error_answer(404, f"this server has no path {shown(path)}.{hint}", "unknown_path")
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{shown(path)} does not accept the method {shown(method)}: use {allowed}."
            return error_answer(405, message, "method_not_allowed", headers=error.headers)
        return error_answer(error.status_code, str(error.detail), headers=error.headers)


async def _quire_error(request: Request, error: Exception) -> Response:
    answer = http_error(error)
    return Response(answer.body(), answer.status, dict(answer.headers), "application/json")
