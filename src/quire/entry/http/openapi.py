"""The OpenAPI document of the server, made from the types that decode requests. Routes without types appear, too.

Knows types and paths. The descriptions are the docstrings of the types.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.routing import Route

from quire import __version__
from quire.config.serve import ServerConfig
from quire.contracts.error_bodies import MESSAGES_PATHS
from quire.entry.http.access.auth import OPEN_PATHS, WITH_BODY
from quire.entry.http.openai import schema
from quire.entry.http.openai.routes import HANDLERS
from quire.entry.http.ops import ALWAYS

BODIES = {path: (request, answer) for _, paths, _, request, answer in HANDLERS for path in paths.split()}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/debug/live")
TEXT_ONLY = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # take a body, and do not use the engine
REASONS = {
    400: "invalid request",
    401: "no API key, or an invalid one",
    403: "foreign Host header, or a model that the API key may not use",
    404: "unknown path, model or id",
    408: "the request did not start in time",
    409: "a request with this id is running",
    413: "the body is too large",
    415: "the body is not declared as application/json",
    429: "the queue is full, or a limit of the API key is reached",
    500: "internal error",
    503: "the engine is starting, stopping or dead",
    504: "the request exceeded its time limit",
    529: "the queue is full",
}
NEEDED = {"/v1/messages": ["max_tokens"]}  # fields required at this path, and optional elsewhere in the same type
KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
REFERENCE = "#/components/schemas/{name}"


def describe_api(routes: Iterable[Route], config: ServerConfig) -> dict[str, object]:
    """Return the OpenAPI document of these routes, as a JSON object."""
    kinds = [kind for pair in BODIES.values() for kind in (*pair, schema.ErrorResponse) if kind is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": {},
        "components": {"schemas": components},
    }
    if config.http.root_path:
        document["servers"] = [{"url": config.http.root_path}]
    if config.access.keyed:
        document["components"]["securitySchemes"] = KEYS
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        operations = document["paths"].setdefault(path, {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            bodies = BODIES.get(route.path, (None, None))
            limited = config.access.api_key_file is not None
            operations[method.lower()] = _operation(path, method, *bodies, locked=config.access.keyed, limited=limited)
    return document


def _operation(
    path: str, method: str, request: type | None, answer: type | None, *, locked: bool, limited: bool
) -> dict[str, Any]:
    answer = None if method == "DELETE" else answer
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {} if answer is None else {"schema": _reference(answer)}}
    if path in STREAMED:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe events
    error_schema = {} if MESSAGES_PATHS.search(path) else {"schema": _reference(schema.ErrorResponse)}
    error = {"application/json": error_schema}
    statuses = _errors(path, method, locked, limited)
    responses = {str(status): {"description": REASONS[status], "content": error} for status in statuses}
    responses |= {
        "200": {"description": "done", "content": content},
        "default": {"description": "refused before the body is read", "content": error},
    }
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', path)}",
        "responses": responses,
    }
    if request is not None:
        needed: dict[str, Any] = {"required": NEEDED[path]} if path in NEEDED else {}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(request) | needed}},
        }
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if locked and path not in OPEN_PATHS:
        operation["security"] = [{name: []} for name in KEYS]
    return operation


def _errors(path: str, method: str, locked: bool, limited: bool) -> Iterator[int]:
    """Yield the error statuses of an operation. A path without a rule of its own has all statuses of its method.
    limited: keys have limits"""
    shielded = path not in OPEN_PATHS
    if limited and shielded and (method in WITH_BODY or "{model" in path):
        yield from (403, 429)
    if shielded:
        yield 401 if locked else 403
    if shielded and method in WITH_BODY:
        yield from (400, 404, 413, 415)
        if path not in TEXT_ONLY:
            yield from (408, 409, 504, 529 if MESSAGES_PATHS.search(path) else 429)
        elif path != "/detokenize":
            yield 408
    elif "{" in path:
        yield 404
    if path not in ALWAYS - OPEN_PATHS | {"/live"}:
        yield 503
    yield 500


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}
