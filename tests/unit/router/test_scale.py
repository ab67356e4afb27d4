"""Requests through circuit breakers, hedges, the budget of retries and the limits of API keys."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.config.serve import AccessConfig
from quire.entry.http.access.keyring import Caller, Keyring
from quire.entry.http.access.limits import KeyLimits, KeyTable
from quire.entry.http.access.routed import RouterGate, Spent, left_to_engines
from quire.router.attempt import race

from ...support.mock_backends import mock_backends, routed

STREAM: dict[str, Any] = {"prompt": "x", "stream": True, "user": "u"}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def ask(session: ClientSession, url: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
    """The status of an answer, and the backend that has given it."""
    async with session.post(url + path, json={"prompt": "x"} | fields) as answer:
        text = await answer.text()
        last = text.split("\n\n")[0].removeprefix("data: ")
        return answer.status, json.loads(last).get("by", "")


def test_a_backend_that_fails_is_left_alone_and_tried_again() -> None:
    """Its health is good all the time. The other one fails, too, but half of the backends stay in service."""

    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            async with routed(backends, breaker_failures=3, breaker_seconds=0.3) as (router, url):
                backends[0].refuse = 500
                while router.backends[0].breaker.allows:
                    await ask(session, url)
                assert len(backends[0].bodies) == 3
                assert 'backend_circuit{backend="' + backends[0].url + '"} 2.0' in router.metrics.render()[0].decode()
                async with session.get(f"{url}/health") as health:
                    told = await health.json()
                    assert (health.status, told["usable"], told["open_circuits"]) == (200, 1, 1)
                backends[1].refuse = 500
                for _ in range(4):
                    assert await ask(session, url) == (500, "")
                assert router.backends[1].usable
                backends[0].refuse = backends[1].refuse = 0
                while (await ask(session, url))[1] != "b0":
                    await asyncio.sleep(0.01)
                assert router.backends[0].breaker.allows

    run(work())


def test_a_backend_that_begins_nothing_is_left_alone_unless_clients_are_in_a_hurry() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            async with routed(backends, breaker_failures=1, breaker_seconds=60.0) as (router, url):
                backends[0].refuse = 408
                hurried = {"x-request-timeout": "0.001"}
                for _ in range(2):
                    await (await session.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=hurried)).read()
                assert len(backends[0].bodies) == 1 and router.backends[0].usable
                assert [(await ask(session, url))[0] for _ in range(4)] == [408, 200, 200, 200]

    run(work())


def test_503_says_when_to_come_again() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            async with routed(backends, breaker_failures=1, breaker_seconds=7.0) as (router, url):
                backends[0].refuse = 500
                while router.backends[0].usable:
                    await ask(session, url)
                router.backends[1].draining = True
                async with session.post(f"{url}/v1/completions", json={}) as answer:
                    assert answer.status == 503 and int(answer.headers["retry-after"]) in (6, 7)
                    assert "no backend takes requests" in await answer.text()

    run(work())


def test_a_late_first_token_is_hedged_and_the_loser_is_stopped() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, hedge_after=0.02) as (router, url):
            async with ClientSession() as session:
                backends[0].stalls = True
                stall = STREAM | {"user": "stall"}
                assert await ask(session, url, **stall) == (200, "b1")
                while not backends[0].left or router.num_live:
                    await asyncio.sleep(0.005)
                assert all(backend.in_flight == backend.active == 0 for backend in router.backends)
                assert await ask(session, url) == (200, "b0")
                backends[1].first_s = 0.1  # its turn: the hedge goes to the other one, which stalls
                assert await ask(session, url, **stall) == (200, "b1")
                text = router.metrics.render()[0].decode()
                assert 'hedges_total{result="won"} 1.0' in text and 'hedges_total{result="lost"} 1.0' in text
                for fields in ({"stream": False}, STREAM | {"path": "/v1/responses"}):
                    backends[0].first_s = 0.1
                    await ask(session, url, **fields)
                assert sum("hedges_total{" in line for line in router.metrics.render()[0].decode().split("\n")) == 2

    run(work())


def test_a_hedge_that_fails_leaves_the_first_try_alone() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, hedge_after=0.02) as (router, url):
            async with ClientSession() as session:
                backends[0].first_s, backends[1].refuse = 0.2, 503
                assert await ask(session, url, **STREAM) == (200, "b0")
                assert len(backends[1].bodies) == 1
                backends[0].first_s, backends[0].refuse = 0.1, 503
                assert (await ask(session, url, **STREAM))[0] == 503
                assert all(backend.in_flight == 0 for backend in router.backends)

    run(work())


def test_a_client_that_leaves_stops_both_tries() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, hedge_after=0.01) as (router, url):
            async with ClientSession() as session:
                for backend in backends:
                    backend.stalls = True
                waits = asyncio.create_task(ask(session, url, **(STREAM | {"user": "stall"})))
                while not all(backend.live for backend in backends):
                    await asyncio.sleep(0.005)
                waits.cancel()
                while not all(backend.left for backend in backends) or router.num_live:
                    await asyncio.sleep(0.005)
                assert all(backend.in_flight == 0 for backend in router.backends)

    run(work())


def test_two_tries_that_answer_at_once_leave_nothing_open() -> None:
    class Try:
        def __init__(self, wait: asyncio.Event, tell: asyncio.Event) -> None:
            self._wait, self._tell, self.closed = wait, tell, False

        async def begin(self, asked: Any, data: bytes) -> None:
            self._tell.set()
            await self._wait.wait()

        def close(self) -> None:
            self.closed = True

    async def work() -> None:
        one, other = asyncio.Event(), asyncio.Event()
        first, second = Try(one, other), Try(other, one)
        asked: Any = SimpleNamespace(data=b"", body=SimpleNamespace(data=b""))
        attempt, fault = await race(first, lambda: second, 0.0, asked)  # type: ignore[arg-type,return-value]
        assert fault is None and {first.closed, second.closed} == {True, False}
        assert attempt is (second if first.closed else first)

    run(work())


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/responses", {}, 502),  # stored unless told otherwise
        ("/v1/responses", {"store": True}, 502),
        ("/v1/responses", {"store": False}, 200),
        ("/v1/completions", {"store": True}, 200),
    ],
)
def test_a_stored_response_is_not_made_twice(path: str, fields: dict[str, Any], status: int) -> None:
    """A connection that broke off may have done its work; a refused one, or 503, has not."""

    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, health_interval=60.0) as (_, url):

            async def cut(scope: Any, receive: Any, send: Any) -> None:
                backends[0].cut()

            async with ClientSession() as session:
                backends[0].refuse = 503
                assert (await ask(session, url, path, **fields))[0] == 200
                backends[0].replaced_by = cut
                got, _ = await ask(session, url, path, **fields)
                assert got == status and len(backends[1].bodies) == 1 + (status == 200)

    run(work())


def test_the_budget_bounds_retries_of_full_backends() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, retry_budget=0.0) as (router, url):
            async with ClientSession() as session:
                backends[0].refuse = 429
                assert [(await ask(session, url))[0] for _ in range(4)] == [429, 200, 429, 200]
                assert "retries_denied_total 2.0" in router.metrics.render()[0].decode()
                await backends[0].kill()  # what takes no connection costs nothing
                assert [(await ask(session, url))[0] for _ in range(2)] == [200, 200]

    run(work())


def test_a_503_is_a_reason_to_ask_whether_a_backend_drains() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, health_interval=60.0) as (router, url):
            async with ClientSession() as session:
                backends[0].refuse, backends[0].told = 503, b'{"status":"draining"}'
                assert await ask(session, url) == (200, "b1")
                while not router.backends[0].ending:
                    await asyncio.sleep(0.005)

    run(work())


@pytest.mark.parametrize(
    ("pieces", "prompt", "output"),
    [
        ([b'data: {"a": 1}\n\n', b'data: {"b": 1}\n\ndata: [DONE]\n\n'], 5, 2),
        ([b'data: {"a"}\n\n', b'data: {"usage": {"prompt_tokens": 9, "completion_tok', b'ens": 70}}\n\n'], 9, 70),
        ([b'{"usage": {"input_tokens": 7, "output_tokens": 8}}'], 7, 8),
        ([rb'{"text": "\"output_tokens\": 999"}', b""], 5, 0),
        ([b'{"usage": {"prompt_tokens": 2, "completion_tokens": 1}}'], 5, 1),
    ],
)
def test_tokens_of_an_answer(pieces: list[bytes], prompt: int, output: int) -> None:
    spent = Spent(5)
    for piece in pieces:
        spent.take(piece)
    assert (spent.prompt, spent.output) == (prompt, output)


KEYS = {
    "keys": {
        "few": {"key": "sk-few", "requests_per_minute": 2},
        "tokens": {"key": "sk-tokens", "tokens_per_minute": 4},
        "one": {"key": "sk-one", "concurrency": 1, "weight": 2.0, "queue_timeout": 1.0},
        "small": {"key": "sk-small", "models": ["small*"]},
    }
}


def test_limits_of_keys_at_the_router(tmp_path: Path) -> None:
    """The key file of a server. `quire route` puts the check of keys and the requests per minute in front."""
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(KEYS))
    file.chmod(0o600)
    keyring = Keyring(AccessConfig(api_key_file=str(file)), by_priority=True)
    assert left_to_engines(keyring).startswith("the file of keys has weight, queue_timeout: the servers keep these")

    def known(router: Any) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            key = dict(scope["headers"]).get(b"x-api-key", b"")
            scope["state"] = {"caller": keyring.find([key]) or Caller()}
            await router(scope, receive, send)

        return app

    async def work() -> None:
        async with mock_backends(1) as backends, routed(backends, around=known) as (router, url):
            router.gate = RouterGate(KeyLimits(KeyTable, router.metrics))

            async def post(key: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any, Any]:
                body = {"prompt": "x", "max_tokens": 6} | fields
                async with ClientSession() as session:
                    async with session.post(url + path, json=body, headers={"x-api-key": key}) as answer:
                        return answer.status, answer.headers, await answer.text()

            backends[0].event_s = 0.002  # so that events are written where they are parsed
            assert (await post("sk-tokens", stream=True))[0] == 200
            status, headers, text = await post("sk-tokens")
            assert status == 429 and int(headers["retry-after"]) > 30 and '"type":"rate_limit_error"' in text
            assert (await post("sk-small", model="small-1"))[0] == 200
            for path, words in (("/v1/completions", '"model_not_allowed"'), ("/v1/messages", '"permission_error"')):
                status, _, text = await post("sk-small", path, model="large")
                assert status == 403 and words in text
            backends[0].step = asyncio.Semaphore(0)
            first = asyncio.create_task(post("sk-one", stream=True, user="one"))
            while "one" not in backends[0].begun:
                await asyncio.sleep(0.005)
            assert (await post("sk-one"))[0] == 429
            for _ in range(9):
                backends[0].step.release()
            assert (await first)[0] == 200 and (await post("sk-one"))[0] == 200
            text = router.metrics.render()[0].decode()
            for line in ('key_tokens_total{key="tokens",kind="generation"} 6.0', 'limit="concurrency"} 1.0'):
                assert line in text
            assert (
                'refusals_total{status="429"} 2.0' in text
                and 'key_refusals_total{key="small",limit="model"} 2.0' in text
            )

    run(work())
