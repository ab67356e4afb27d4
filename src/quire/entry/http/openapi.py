"""The API in the OpenAPI form, from the same types that decode requests. A route that is not described still appears.

Knows types and paths; the text of a field's meaning is its type's docstring.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.routing import Route

from quire import __version__
from quire.config.serve import ServerConfig
from quire.entry.http.auth import OPEN_PATHS
from quire.entry.http.openai import schema

BODIES: dict[str, tuple[type | None, type]] = {  # path -> request body, answer
    "/v1/completions": (schema.CompletionRequest, schema.CompletionResponse),
    "/v1/chat/completions": (schema.ChatRequest, schema.ChatResponse),
    "/v1/models": (None, schema.ModelList),
    "/v1/models/{model}": (None, schema.ModelCard),
    "/tokenize": (schema.TokenizeRequest, schema.TokenizeResponse),
    "/detokenize": (schema.DetokenizeRequest, schema.DetokenizeResponse),
    "/tokenizer_info": (None, schema.TokenizerInfo),
}
STREAMED = ("/v1/completions", "/v1/chat/completions")
REFERENCE = "#/components/schemas/{name}"


def describe_api(routes: Iterable[Route], config: ServerConfig) -> dict[str, object]:
    """The document for these routes."""
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
    if config.http.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        operations = document["paths"].setdefault(path, {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operations[method.lower()] = _operation(path, method, locked=bool(config.http.api_key))
    return document


def _operation(path: str, method: str, *, locked: bool) -> dict[str, Any]:
    request, answer = BODIES.get(path, (None, None))
    content: dict[str, Any] = {} if answer is None else {"application/json": {"schema": _reference(answer)}}
    if path in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"description": "an error", "content": {"application/json": {"schema": _reference(schema.ErrorResponse)}}}
    operation: dict[str, Any] = {"operationId": f"{method.lower()}{re.sub(r'[^a-z]+', '_', path)}",
                                 "responses": {"200": {"description": "done", "content": content}, "default": error}}
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if locked and path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]
    return operation


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=kind.__name__)}
