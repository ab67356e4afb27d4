"""Every refusal of these routes is in Anthropic's form, whichever layer refuses."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.contracts.error_bodies import MESSAGES_PATHS
from quire.entry.http.anthropic.errors import anthropic_error
from quire.entry.http.errors import error_json
from quire.entry.http.life.state import EngineState

from ..conftest import Live, call
from ..openai.conftest import Reply
from .conftest import PATH, Api

COUNT, BATCHES = "/v1/messages/count_tokens", "/v1/messages/batches"
KEY = "sk-secret"


def kind(reply: Reply) -> str:
    """The type of an error, whose form is checked."""
    error, request_id = reply.json["error"], reply.header("x-request-id")
    assert (
        reply.json
        == {"type": "error", "error": {"type": error["type"], "message": error["message"]}, "request_id": request_id}
        and error["message"]
    )
    assert reply.header("request-id") == request_id and reply.header("content-type") == "application/json"
    assert reply.all("content-length") == [str(len(reply.body))]
    return str(error["type"])


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (409, "conflict_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (431, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_types_by_status(status: int, found: str) -> None:
    own, body = anthropic_error(status, error_json(status, 'with "quotes"', "code"), None)
    assert own == status
    error = {"type": found, "message": 'with "quotes"'}
    assert json.loads(body) == {"type": "error", "error": error, "request_id": None}


def test_only_a_full_queue_has_another_status() -> None:
    assert anthropic_error(429, error_json(429, "full", "engine_overloaded"), "r")[0] == 529
    assert anthropic_error(503, error_json(503, "too many connections", "engine_overloaded"), "r")[0] == 503


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_the_handlers(api: Api, path: str) -> None:
    wrong = api.ask(path, model="claude")
    assert (wrong.status, kind(wrong)) == (404, "not_found_error") and "tiny, alias" in wrong.json["error"]["message"]
    bad = api.ask(path, messages=1)
    assert (bad.status, kind(bad)) == (400, "invalid_request_error")
    assert api.ask(path, model="alias", top_k=-1, headers={"x-request-id": "mine"}).json["request_id"] == "mine"


@pytest.mark.parametrize("path", [PATH, COUNT, BATCHES])
def test_keys(make_api: Callable[..., Api], path: str) -> None:
    api = make_api(api_key=(KEY,))
    for headers in ({}, {"x-api-key": "no"}, {"authorization": "Bearer no"}):
        reply = api.ask(path, headers=headers)
        assert (reply.status, kind(reply)) == (401, "authentication_error")
        assert reply.header("www-authenticate") == "Bearer"
    for headers in (
        {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
        {"authorization": f"Bearer {KEY}", "anthropic-version": "2026-10-21", "anthropic-beta": "a,b"},
    ):
        assert api.ask(path, headers=headers, top_k=-1).status == (404 if path == BATCHES else 400)


def test_names_types_and_methods(api: Api) -> None:
    foreign = api.ask(headers={"host": "evil.example"})
    assert (foreign.status, kind(foreign)) == (403, "permission_error")
    for path in (PATH, COUNT):
        plain = api.ask(path, headers={"content-type": "text/plain"})
        assert (plain.status, kind(plain)) == (415, "invalid_request_error")
    batches = api.ask(BATCHES)
    assert (batches.status, kind(batches)) == (404, "not_found_error")
    answer = call(api.client.app, PATH, "GET")
    assert answer.status == 405 and answer.error["type"] == "invalid_request_error" and "allow" in answer.headers


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.DRAINING, EngineState.DEAD])
def test_an_engine_that_is_not_there(api: Api, state: EngineState) -> None:
    class Loading:
        phase, done, total = "weights", 1, 4

    api.engine.state, api.engine.loading, api.engine.failure = state, Loading(), "it was killed."
    reply = api.ask()
    assert (reply.status, kind(reply)) == (503, "overloaded_error") and reply.header("retry-after") == "5"


def test_below_a_proxys_root(make_api: Callable[..., Api]) -> None:
    reply = make_api(root_path="/llm").ask("/llm" + PATH, messages=1)
    assert (reply.status, kind(reply)) == (400, "invalid_request_error")


def test_other_routes_keep_their_form(api: Api) -> None:
    for path in ("/v1/models/none", "/v1/messagesx", "/v2/messages"):
        answer = call(api.client.app, path)
        assert answer.status == 404 and answer.error["code"] and "request-id" not in answer.headers
    assert not MESSAGES_PATHS.search("/v1/messages_of/x")


@pytest.mark.parametrize(
    ("head", "status", "found"),
    [
        (b"content-length: 999999999\r\n", 413, "request_too_large"),
        (b"x: %b\r\n" % (b"y" * 70_000), 431, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("path", [PATH, COUNT + "?beta=true", "/v1/completions"])
def test_what_the_connection_refuses(
    serve_echo: Callable[..., Live], head: bytes, status: int, found: str, path: str
) -> None:
    raw = serve_echo().ask(b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n" % (path.encode(), head))
    start, _, body = raw.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 %d " % status)
    error: dict[str, Any] = json.loads(body)
    assert ("type" in error) == (path != "/v1/completions")
    assert error["error"]["type"] == (found if "type" in error else "invalid_request_error")
    assert b"content-length: %d\r\n" % len(body) in start
