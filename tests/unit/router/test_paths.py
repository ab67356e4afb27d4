"""Paths, headers and refusals of a router, and its operators' side."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from aiohttp import ClientSession
from yarl import URL

from quire.contracts.errors import ConfigError
from quire.router.metrics import RouterMetrics
from quire.router.settings import router_config

from ...support.mock_backends import mock_backends, operate, routed


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/completions", b"{", 400, "not a JSON object"),
        ("POST", "/v1/completions", b"[1]", 400, "not a JSON object"),
        ("GET", "/v1/responses/resp_1/../resp_2", b"", 404, "passes on no path"),
        ("POST", "/v1/responses/resp_1", b"{}", 405, "use GET or DELETE"),
        ("GET", "/v1/responses/resp_1/cancel", b"", 405, "use POST"),
        ("GET", "/debug/kernels", b"", 404, "passes on no path '/debug/kernels'"),
        ("GET", "/debug/requests/../../metrics", b"", 404, "passes on no path"),
        ("POST", "/debug/live", b"", 405, "use GET"),
        ("POST", "/v1/load_lora_adapter", b"{}", 404, "passes on no path"),
        ("GET", "/v1/models/%2e%2e/%2e%2e/metrics", b"", 404, "passes on no path"),
        ("GET", "/v1/completions", b"", 405, "use POST"),
    ],
)
def test_requests_that_no_backend_sees(method: str, path: str, body: bytes, status: int, words: str) -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url), ClientSession() as session:
            async with session.request(method, URL(url + path, encoded=True), data=body or None) as answer:
                error = (await answer.json())["error"]
                assert answer.status == status and words in error["message"] and "\n" not in error["message"]
            assert not backend.bodies
            assert f'refusals_total{{status="{status}"}} 1.0' in router.metrics.render()[0].decode()

    run(work())


def test_headers_pass_in_both_directions() -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (_, url), ClientSession() as session:
            sent = {"authorization": "Bearer k", "x-api-key": "k2", "x-request-id": "r-1", "te": "trailers"}
            body = {"prompt": "x", "stream": True}
            async with session.post(f"{url}/v1/completions?a=b", json=body, headers=sent) as answer:
                await answer.read()
                assert answer.content_type == "text/event-stream" and "connection" not in answer.headers
            got = backend.headers[0]
            assert {name: got[name] for name in ("authorization", "x-api-key", "x-request-id")} == {
                name: sent[name] for name in ("authorization", "x-api-key", "x-request-id")
            }
            assert "te" not in got and got["host"] == backend.url.removeprefix("http://")
            async with session.get(f"{url}/v1/models") as answer:
                assert answer.status == 200
            assert len(backend.headers[1]["x-request-id"]) == 32

    run(work())


def test_the_end_of_a_certificate_is_a_metric_where_there_is_one() -> None:
    metrics = RouterMetrics([], lambda: {"retries_denied": 0, "overflows": 0, "discovery_failures": {}})
    for end, sample in ((None, False), (5e9, True)):
        metrics.certificate_end = lambda end=end: end
        assert (b"\nquire_router:certificate_end_time_seconds 5e+09" in metrics.render()[0]) == sample


def test_a_body_that_is_too_large() -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url), ClientSession() as session:
            async with session.post(f"{url}/v1/completions", data=b"x" * (8 * 2**20 + 1)) as answer:
                assert answer.status == 413
            assert not backend.bodies and 'refusals_total{status="413"} 1.0' in router.metrics.render()[0].decode()

    run(work())


def test_an_operator_drains_a_backend() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends) as (router, url), ClientSession() as session:

            async def operate(method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
                sent: list[Any] = []

                async def receive() -> Any:
                    return {"type": "http.request", "body": body, "more_body": False}

                async def send(message: Any) -> None:
                    sent.append(message)

                await router.operate({"type": "http", "method": method, "path": path}, receive, send)
                return sent[0]["status"], json.loads(sent[1]["body"])

            name = json.dumps({"backend": backends[0].url}).encode()
            assert await operate("POST", "/backends/drain", name) == (
                200,
                {"backend": backends[0].url, "weight": 1.0, "up": True, "draining": True, "gone": False}
                | {"circuit": "closed", "in_flight": 0, "reason": ""},
            )
            for _ in range(3):
                async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
                    assert (await answer.json())["by"] == "b1"
            assert [each["draining"] for each in (await operate("GET", "/backends"))[1]["backends"]] == [True, False]
            await operate("POST", "/backends/drain", json.dumps({"backend": backends[1].url}).encode())
            async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
                assert answer.status == 503 and "all are being drained" in await answer.text()
            await operate("POST", "/backends/resume", name)
            async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
                assert (await answer.json())["by"] == "b0"
            for body, status in ((b"{", 400), (b'{"backend": 1}', 400), (b'{"backend": "http://other"}', 404)):
                assert (await operate("POST", "/backends/drain", body))[0] == status
            assert (await operate("DELETE", "/backends"))[0] == 404

    run(work())


def test_an_operator_sees_the_health_of_now() -> None:
    """A drained backend restarts between two checks: who waits for `up` does not resume it too early."""

    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend], health_interval=600) as (router, _):

            async def is_up(path: str = "/backends") -> bool:
                told = await operate(router, path, None if path == "/backends" else {"backend": backend.url})
                return bool(told.get("backends", [told])[0]["up"])

            assert await is_up("/backends/drain")
            backend.health = 503  # it loads
            assert not await is_up() and not await is_up("/backends/resume")
            assert await is_up("/backends/drain") is False
            backend.health = 200
            assert await is_up() and await is_up("/backends/resume")

    run(work())


def test_exact_asks_a_backend_for_the_tokens() -> None:
    """The chat is tokenized by a backend with the client's key; without an answer the request still goes on."""

    async def work() -> None:
        async with mock_backends(1) as (backend,):
            settings: dict[str, Any] = {"policy": "exact", "kv_events": ["tcp://127.0.0.1:1"]}
            async with routed([backend], **settings) as (router, url), ClientSession() as session:
                for body in (
                    {"messages": [{"role": "user", "content": "hi"}]},
                    {"prompt": "hi"},
                    {"prompt": "x", "cache_salt": "s"},
                ):
                    path = "chat/completions" if "messages" in body else "completions"
                    async with session.post(f"{url}/v1/{path}", json=body) as answer:
                        assert answer.status == 200
                assert router.metrics.prompt_tokens == len("<user>hi") + len("hi") + 0

    run(work())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": []}, "no backend is named: give --backend URL"),
        ({"backend": ["localhost:8000"]}, "--backend localhost:8000: not the URL of a server"),
        ({"backend": ["http://h:99999"]}, "--backend http://h:99999: Port out of range"),
        ({"backend": ["ftp://h"]}, "not the URL of a server"),
        ({"backend": ["http://u:secret@h"]}, "--backend h: no user, query"),
        ({"backend": ["http://h", "http://h:80/v1"]}, "this server is named twice"),
        ({"backend": ["http://h"], "prefill_backend": ["http://h:80"]}, "http://h:80 is in --backend and in"),
        ({"backend": ["http://h"], "policy": "exact"}, "--policy exact and --kv-events go together"),
        ({"backend": ["http://h"], "kv_events": ["tcp://h:1"]}, "--policy exact and --kv-events go together"),
        (
            {"backend": ["http://h"], "policy": "exact", "kv_events": ["tcp://h:1", "tcp://h:2"]},
            "2 addresses for 1 backend",
        ),
        ({"backend": ["http://h"], "policy": "exact", "kv_events": ["tcp://*:1"]}, "is no ZMQ address to connect to"),
        (
            {"backend": ["http://h"], "load_bound": 2.0},
            "--load-bound changes nothing without --policy consistent-hash: add that, or leave --load-bound out",
        ),
        (
            {"backend": ["http://h"], "policy": "round-robin", "affinity_entries": 5},
            "without --policy prefix-affinity or",
        ),
        ({"backend": ["http://h"], "session_header": "x"}, "--session-header changes nothing"),
        ({"backend": ["http://h"], "prefill_threshold": 5}, "changes nothing without --prefill-backend"),
        ({"backend": ["http://h"], "breaker_failures": 0, "breaker_seconds": 5}, "without --breaker-failures above 0"),
        ({"backend": ["http://h"], "discovery_interval": 1}, "without --backend-file or --backend-dns"),
        ({"backend": ["http://h"], "retries": -1}, "--retries -1: must be a number of at least 0"),
        ({"backend": ["http://h"], "health_interval": float("nan")}, "--health-interval nan: must be a number"),
        ({"backend": ["http://h"], "admin_port": 70000}, "--admin-port 70000: "),
        ({"backend": ["http://h"], "health_path": "health"}, "a path begins with a slash and has no spaces"),
        ({"backend": ["http://h"], "health_path": "/a b\r\nx: y"}, "--health-path"),
    ],
)
def test_wrong_flags_are_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router_config(given)
    assert message in str(caught.value) and "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_addresses_of_backends() -> None:
    urls = ["http://h", "https://h/", "http://[::1]:81/base/v1"]
    found = [member.address for member in router_config({"backend": urls}).backend]
    assert [(a.url, a.host, a.port, a.tls, a.base, a.authority) for a in found] == [
        ("http://h:80", "h", 80, False, "", "h:80"),
        ("https://h:443", "h", 443, True, "", "h:443"),
        ("http://[::1]:81/base", "::1", 81, False, "/base", "[::1]:81"),
    ]
