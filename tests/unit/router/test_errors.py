"""Errors of a router have the fields of a server's; /health tells when no backend can answer."""

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.entry.http.access.auth import OwnNames

from ...support.mock_backends import mock_backends, routed

OPENAI = {"error": {"message", "type", "param", "code"}}
MESSAGES = {"type": "error", "error": {"type", "message"}, "request_id": "r-1"}


def form(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"error": set(body["error"])}


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "wanted"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, OPENAI),
        ("POST", "/v1/messages", b"{", 400, MESSAGES),
        ("GET", "/v1/messages", b"", 405, MESSAGES),
        ("GET", "/nowhere", b"", 404, OPENAI),
        ("POST", "/v1/completions", b"{}", 503, OPENAI),
        ("POST", "/v1/messages", b"{}", 503, MESSAGES),
    ],
)
def test_errors_have_the_fields_of_the_servers(
    method: str, path: str, data: bytes, status: int, wanted: dict[str, Any]
) -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url), ClientSession() as session:
            router.backends[0].draining = status == 503
            async with session.request(method, url + path, data=data, headers={"x-request-id": "r-1"}) as answer:
                body = await answer.json()
                assert answer.status == status and form(body) == wanted and answer.headers["x-request-id"] == "r-1"
            kinds = {404: "not_found_error", 503: "overloaded_error"}
            assert wanted is OPENAI or body["error"]["type"] == kinds.get(status, "invalid_request_error")

    asyncio.run(asyncio.wait_for(work(), 60))


def test_health_is_503_without_a_backend_that_can_answer() -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url), ClientSession() as session:
            for draining, status in ((False, 200), (True, 503)):
                router.backends[0].draining = draining
                async with session.get(f"{url}/health") as health, session.get(f"{url}/live") as live:
                    assert (health.status, live.status) == (status, 200)

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("keyed", [True, False])
def test_a_foreign_host_is_told_of_options_that_exist(keyed: bool) -> None:
    answer = OwnNames("localhost", keyed=keyed)({"headers": [(b"host", b"evil.example")], "path": "/v1/models"})
    assert answer is not None and answer.status_code == 403
    words = bytes(answer.body).decode()
    assert ("--api-key" in words) == ("API key" in words) == keyed and "--allowed-hosts" in words
