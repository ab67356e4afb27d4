"""Every route of the application, whichever there are: what a stranger, a wrong method, a wrong type and a wrong body
get, in the form of errors that the route has, and that the API's description knows each of these answers."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.config.serve import AccessConfig, HttpConfig, ServerConfig
from quire.contracts import errors
from quire.contracts.error_bodies import MESSAGES_PATHS
from quire.entry.http.access.auth import OPEN_PATHS
from quire.entry.http.app import build_app
from quire.entry.http.errors import ANSWERS, HttpError, http_error
from quire.entry.http.life.state import EngineState
from quire.entry.http.protocol import ConnectionLimits
from quire.observe.metrics import Metrics
from quire.text.load import TextSide, load_text

from .conftest import Answer, FakeEngine, call, listening

KEY = "sk-secret"
OPEN, LOCKED = ServerConfig(), ServerConfig(access=AccessConfig(api_key=(KEY,)))
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
SENT = ("POST", "PUT", "PATCH")
NO_JSON = [
    b"",
    b"{",
    b"nul",
    b'{"a": 1',
    b"\xff\xfe",
    b'{"model": "\xff"}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"{} {}",
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"{}" * 2,
    b'{"a": NaN}',
    b"\x00",
    b"\xef\xbb\xbf{}",
]


class Walker:
    """An application, its routes, and an answer of it that must be one that its description knows."""

    def __init__(self, engine: Any, config: ServerConfig = OPEN) -> None:
        self.app = build_app(engine, config, Metrics())
        key = {"x_api_key": KEY} if config.access.api_key else {}
        self.document = call(self.app, "/openapi.json", **key).json()
        self.routes = [(method, route.path) for route in self.app.routes for method in sorted(route.methods - {"HEAD"})]
        assert len(self.routes) > 25

    def described(self, path: str) -> dict[str, Any]:
        operations: dict[str, Any] = self.document["paths"][re.sub(r"\{(\w+):\w+\}", r"{\1}", path)]
        return operations

    def with_body(self) -> Iterator[str]:
        """Paths of the routes that read a body."""
        for method, path in self.routes:
            if "requestBody" in self.described(path).get(method.lower(), {}):
                yield path

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        answer = call(self.app, re.sub(r"\{.*?\}", "x", path), method, body, **headers)
        operation = self.described(path).get(method.lower())
        assert operation is None or str(answer.status) in operation["responses"], (method, path, answer.status)
        return answer


def error_of(path: str, answer: Answer) -> dict[str, Any]:
    """The error of an answer, which must have the form of its route, and a message."""
    content = answer.json()
    assert answer.headers["content-type"] == "application/json", path
    if MESSAGES_PATHS.search(path):
        assert set(content) == {"type", "error", "request_id"} and content["type"] == "error", path
        assert set(content["error"]) == {"type", "message"}, path
    else:
        assert set(content["error"]) == {"message", "type", "param", "code"}, path
    assert 10 < len(content["error"]["message"]) < 1000 and KEY not in answer.body.decode(), path
    error: dict[str, Any] = content["error"]
    return error


def test_nobody_gets_in_without_a_key(engine: FakeEngine) -> None:
    walker = Walker(engine, LOCKED)
    for method, path in walker.routes:
        for headers in (
            {},
            {"authorization": "Bearer no"},
            {"host": "x/health?"},
            {"content_type": "application/json"},
        ):
            answer = walker.ask(method, path, b"{}", **headers)
            assert (answer.status == 401) == (path not in OPEN_PATHS), (method, path)
            if answer.status == 401:
                assert error_of(path, answer)["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for other in METHODS:  # nor hears which methods or paths there are
            assert path in OPEN_PATHS or call(walker.app, path + "/no", other).status == 401


def test_nobody_is_led_here_by_a_foreign_name(engine: FakeEngine) -> None:
    walker = Walker(engine)
    for method, path in walker.routes:
        answer = walker.ask(method, path, b"{}", host="evil.example", content_type="application/json")
        assert (answer.status == 403) == (path not in OPEN_PATHS), (method, path)
        assert path in OPEN_PATHS or error_of(path, answer)


def test_other_methods_and_paths(engine: FakeEngine) -> None:
    walker = Walker(engine)
    taken: dict[str, set[str]] = {}
    for method, path in walker.routes:
        taken.setdefault(re.sub(r"\{.*?\}", "x", path), set()).add(method)
    for path, methods in taken.items():
        for method in set(METHODS) - methods:
            answer = call(walker.app, path, method, content_type="application/json")
            assert answer.status == 405 and error_of(path, answer), (method, path)
            assert methods <= set(answer.headers["allow"].split(", ")), (method, path)
        if "/v1/models/" not in path:  # names of models may hold anything
            for near in (path + "/", path + "x" * 300, "/" + path):
                assert call(walker.app, near).status in (404, 405), near
                answer = call(walker.app, near, "POST", content_type="application/json")
                assert answer.status in (404, 405) and error_of(near, answer), near


def test_a_body_is_declared_as_json(engine: FakeEngine) -> None:
    walker = Walker(engine)
    for method, path in walker.routes:
        if method in SENT and path not in OPEN_PATHS:
            for kind in ("", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
                answer = walker.ask(method, path, b"{}", content_type=kind)
                assert answer.status == 415 and error_of(path, answer), (path, kind)


@pytest.mark.parametrize("body", NO_JSON, ids=lambda body: repr(body[:8]))
def test_one_decoder_reads_every_body(engine: FakeEngine, body: bytes) -> None:
    walker = Walker(engine)
    asked = list(walker.with_body())
    assert set(asked) == {
        path for method, path in walker.routes if method in SENT and path != "/ping" and not path.endswith("/cancel")
    }
    for path in asked:
        answer = walker.ask("POST", path, body, content_type="application/json")
        message = error_of(path, answer)["message"]
        assert answer.status == 400 and ("body" in message or "missing" in message), (path, message)


def test_one_limit_holds_for_every_body(engine: FakeEngine) -> None:
    walker = Walker(engine)
    with listening(walker.app, ConnectionLimits.of(HttpConfig(max_body_bytes=1000))) as server:
        for method, path in walker.routes:
            head = (
                f"{method} {path.partition('{')[0]} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                "content-type: application/json\r\n"
            )
            chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
            for rest in (b"content-length: 1001\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n" + chunk * 2):
                answer = server.ask(head.encode() + rest)
                status, content = answer.partition(b"\r\n")[0], answer.partition(b"\r\n\r\n")[2]
                if b"chunked" not in rest or method in SENT:
                    assert b" 413 " in status, (path, answer)
                    headers = {"content-type": "application/json"}
                    assert "--max-body-bytes" in error_of(path, Answer(413, headers, content))["message"], path


def test_while_it_cannot_answer_every_route_says_so(engine: FakeEngine) -> None:
    walker = Walker(engine)
    for state in (EngineState.STARTING, EngineState.DRAINING, EngineState.DEAD):
        engine.state, engine.failure = state, errors.EngineDead("gone")
        told = [
            path
            for method, path in walker.routes
            if walker.ask(method, path, b"{}", content_type="application/json").status == 503
        ]
        others = {"/", "/version", "/metrics", "/openapi.json", "/debug/requests"}  # tell how things are
        if state is EngineState.DRAINING:  # what runs in the background can still be fetched and cancelled
            kept = ("/v1/responses/", "/debug/requests/", "/debug/live", "/debug/blocks")  # what is left can be watched
            others = others | {path for _, path in walker.routes if path.startswith(kept)}
        assert set(told) - OPEN_PATHS == {path for _, path in walker.routes} - OPEN_PATHS - others


class Refusing(FakeEngine):
    """Takes every request, and then says no."""

    error: Exception

    def open(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error


@pytest.fixture(scope="module")
def text() -> TextSide:
    return load_text(EngineConfig.from_flat(pooler_config={"pooling_type": "MEAN"}), bundled_model())


NOT_ASKED = (  # of the engine
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
TALK = [{"role": "user", "content": "a"}]
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": TALK},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "quire-tiny", "messages": TALK, "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a", "task": "embed"},
    "rerank": {"query": "a", "documents": ["b"]},
    "score": {"text_1": "a", "text_2": "b"},
}


@pytest.mark.parametrize(
    "error",
    [
        errors.QueueFull("the queue is full: try again"),
        errors.QueueTimeout("it waited for too long"),
        HttpError(409, "a request of this name is running", code="duplicate"),
        errors.EngineDead("the engine is gone"),
        errors.RequestFailed("its time is up now", code="deadline"),
        errors.RequestFailed("it went wrong", code="nan"),
        RuntimeError("a bug"),
        *(kind("some kind of a problem") for kind, _ in ANSWERS if kind is not errors.RequestFailed),
    ],
    ids=lambda error: f"{type(error).__name__} {http_error(error).status}",
)
def test_what_the_engine_says_is_described(engine: FakeEngine, text: TextSide, error: Exception) -> None:
    refusing = Refusing(ready=engine.ready, text=text)
    refusing.error, walker, asked = error, Walker(refusing), 0
    for path in walker.with_body():
        body = next((body for name, body in MINIMAL.items() if path == name or path.endswith("/" + name)), None)
        if body is None:
            assert path in NOT_ASKED, f"{path}: how is it asked?"
            continue
        answer = walker.ask("POST", path, json.dumps(body).encode(), content_type="application/json")
        status = http_error(error).status
        assert answer.status == (529 if status == 429 and MESSAGES_PATHS.search(path) else status), (path, answer.body)
        assert error_of(path, answer)
        asked += 1
    assert asked > 8


def test_the_description_holds_together(engine: FakeEngine) -> None:
    walker = Walker(engine, LOCKED)
    document, text = walker.document, json.dumps(walker.document)
    assert {(method.upper(), path) for path, found in document["paths"].items() for method in found} == {
        (method, re.sub(r"\{(\w+):\w+\}", r"{\1}", path)) for method, path in walker.routes
    }
    names = [operation["operationId"] for found in document["paths"].values() for operation in found.values()]
    assert len(names) == len(set(names))
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in document["components"]["schemas"]
    for path, found in document["paths"].items():
        for method, operation in found.items():
            assert all(answer["description"] and answer["content"] for answer in operation["responses"].values())
            assert ("401" in operation["responses"]) == ("security" in operation) == (path not in OPEN_PATHS)
            declared = {entry["name"] for entry in operation.get("parameters", ())}
            assert declared == set(re.findall(r"\{(\w+)\}", path)), (method, path)
