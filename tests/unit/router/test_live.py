"""The live view through a router: the streams of all backends as one, with the backend in front of every event."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession

from quire.router import live
from quire.router.app import DRAIN, RESUME
from quire.router.live import MOST_WAITING, BackendEvents

from ...support.mock_backends import MockBackend, mock_backends, operate, routed


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


class Watched:
    """A backend's application: frames until a test ends them, behind an API key."""

    def __init__(self, name: str, key: str = "") -> None:
        self.name, self.key = name, key
        self.watchers, self.asked = 0, list[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        headers = dict(scope["headers"])
        if self.key and headers.get(b"authorization", b"").decode() != f"Bearer {self.key}":
            return await self._answer(send, 401, {"error": {"message": "this server needs an API key."}})
        if scope["path"] != live.LIVE:
            query = scope["query_string"].decode()
            return await self._answer(send, 200, {"by": self.name, "path": scope["path"] + "?" * bool(query) + query})
        await receive()
        gone = asyncio.create_task(receive())
        self.watchers += 1
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        number = 0
        while not gone.done():
            number += 1
            text = f'event: frame\ndata: {{"frame": {number}, "by": "{self.name}"}}\n\n: a comment\n\n'
            for part in (text[:9], text[9:]):  # events come in any pieces
                await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
                await asyncio.sleep(0.002)
        self.watchers -= 1

    async def _answer(self, send: Any, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": data})


def watched(backends: list[MockBackend], key: str = "") -> list[Watched]:
    """Replace what the backends answer."""
    for backend in backends:
        backend.replaced_by = Watched(backend.name, key)
    return [backend.replaced_by for backend in backends]


async def events(answer: ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """The events of a stream."""
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


def test_frames_of_all_backends_come_as_one_stream() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            apps = watched(backends)
            async with routed(backends) as (_, url):
                seen: dict[str, list[int]] = {backend.url: [] for backend in backends}
                async with session.get(url + live.LIVE) as answer:
                    assert answer.content_type == "text/event-stream"
                    stream = events(answer)
                    assert await anext(stream) == ("router", {"backends": list(seen), "draining": [], "ending": None})
                    async for name, told in stream:
                        if name == "lost":
                            continue  # a slow machine reads slowly
                        assert name == "frame" and told["by"] in ("b0", "b1")
                        seen[told["backend"]].append(told["frame"])
                        if min(map(len, seen.values())) > 5:
                            break
                    assert all(numbers == sorted(numbers) for numbers in seen.values())
                    answer.close()
                while any(app.watchers for app in apps):  # the router leaves when its reader does
                    await asyncio.sleep(0.01)

    run(work())


def test_a_backend_that_is_down_is_told_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.05)

    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            watched(backends)
            async with routed(backends) as (_, url), session.get(url + live.LIVE) as answer:
                stream = events(answer)
                port = int(backends[1].url.rpartition(":")[2])
                await backends[1].kill()
                async for name, told in stream:
                    if name == "down":
                        assert told["backend"] == f"http://127.0.0.1:{port}" and told["reason"]
                        break
                await backends[1].start(port)
                async for name, told in stream:
                    if name == "frame" and told["by"] == "b1":
                        break
                answer.close()

    run(work())


def test_keys_are_passed_on_and_nobody_watches_without() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            apps = watched(backends, "k")
            async with routed(backends, health_path="/x", health_interval=60.0) as (router, url):
                for backend in router.backends:
                    backend.checked("")
                async with session.get(url + live.LIVE) as answer:
                    assert answer.status == 401 and "needs an API key" in await answer.text()
                    assert not any(live.LIVE in app.asked for app in apps), "a stranger learns nothing of backends"
                async with session.get(url + live.LIVE, headers={"authorization": "Bearer k"}) as answer:
                    stream = events(answer)
                    assert (await anext(stream))[0] == "router"
                    assert (await anext(stream))[0] in ("frame", "lost")
                    answer.close()

    run(work())


def test_other_routes_are_those_of_one_backend() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            watched(backends)
            async with routed(backends) as (_, url):
                for query, by in (("", "b0"), (f"?backend={backends[1].url}", "b1")):
                    async with session.get(f"{url}/debug/requests/r{query}") as answer:
                        assert await answer.json() == {"by": by, "path": "/debug/requests/r"}
                named = f"/debug/requests/r?request=a%2Fb&backend={backends[1].url}"
                async with session.get(url + named) as answer:
                    assert await answer.json() == {"by": "b1", "path": "/debug/requests/r?request=a%2Fb"}
                async with session.get(f"{url}/debug/plan?backend=http://no") as answer:
                    assert answer.status == 404 and "http://no is no backend" in await answer.text()

    run(work())


def test_answers_have_one_date() -> None:
    async def work() -> None:
        async with mock_backends(1) as backends, ClientSession() as session, routed(backends) as (_, url):
            for path in ("/debug/plan", "/v1/models"):
                async with session.get(url + path) as answer:
                    assert len(answer.headers.getall("date")) == 1, path
            async with session.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}) as answer:
                assert answer.status == 200 and len(answer.headers.getall("date")) == 1

    run(work())


def test_streams_go_on_until_the_router_has_no_other_request() -> None:
    async def work() -> None:
        async with mock_backends(1) as backends, ClientSession() as session:
            watched(backends)
            async with routed(backends) as (router, url), session.get(url + live.LIVE) as answer:
                router.num_live += 1  # a request that is being answered
                idle, left, last, after = None, [], "", 0
                async for name, told in events(answer):
                    last = name
                    if name == "router":
                        left.append(told["ending"])
                    if name != "frame":
                        continue
                    if idle is None:
                        router.drain()
                        idle = asyncio.create_task(router.idle())
                    elif left[-1] == {"requests": 1}:
                        after += 1
                        if after == 5:
                            router.num_live -= 1
                assert last == "end" and after >= 5 and left[:2] == [None, {"requests": 1}]
                assert idle is not None
                await idle

    run(work())


def test_readers_learn_of_a_backend_that_drains() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, ClientSession() as session:
            watched(backends)
            async with routed(backends) as (router, url), session.get(url + live.LIVE) as answer:
                told: list[list[str]] = []
                async for name, data in events(answer):
                    if name == "router":
                        told.append(data["draining"])
                        if len(told) == 3:
                            break
                    elif len(told) == 1 or told[-1]:
                        path = DRAIN if len(told) == 1 else RESUME
                        await operate(router, path, {"backend": backends[1].url})
                assert told == [[], [backends[1].url], []]
                answer.close()

    run(work())


def test_a_slow_reader_loses_frames_and_nothing_else() -> None:
    async def work() -> None:
        async with mock_backends(1) as backends, routed(backends) as (router, _):
            waiting = BackendEvents(router.backends[0], asyncio.Event())
            waiting._put(b"event: engine\ndata: {}\n\n")
            for number in range(100):
                waiting._put(b"event: frame\ndata: %d\n\n" % number)
            lost, first, *rest = waiting.take()
            assert lost.startswith(b"event: lost") and b'"frames":93' in lost and first.startswith(b"event: engine")
            assert len(rest) == MOST_WAITING - 1 and rest[-1] == b"event: frame\ndata: 99\n\n"
            assert waiting.take() == []

    run(work())


def test_a_router_without_the_web() -> None:
    async def work() -> None:
        async with mock_backends(1) as backends, routed(backends) as (router, url), ClientSession() as session:
            router._web = False
            async with session.get(url + live.LIVE) as answer:
                assert answer.status == 404 and "--no-web" in await answer.text()

    run(work())
