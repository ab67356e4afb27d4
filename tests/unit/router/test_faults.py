"""Streams through a router while backends die, refuse, fall silent or are drained."""

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession

from quire.router.addresses import Address
from quire.router.upstream import Pool, UpstreamError

from ...support.mock_backends import mock_backends, routed

PATIENCE = 60.0
EVENTS = 6


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def body_of(user: str = "u", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Once", "stream": True, "max_tokens": EVENTS, "user": user} | fields


async def stream(session: ClientSession, url: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """The status and the events of a completion; "cut" where the connection broke off."""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        try:
            text = (await answer.read()).decode()
        except aiohttp.ClientPayloadError:
            return answer.status, ["cut"]
        if not answer.content_type.endswith("event-stream"):
            return answer.status, [json.loads(text)]
        lines = [line[6:] for line in text.split("\n\n") if line]
        return answer.status, [line if line == "[DONE]" else json.loads(line) for line in lines]


def is_whole(events: list[Any]) -> bool:
    return [event.get("i") for event in events[:-1]] == list(range(EVENTS)) and events[-1] == "[DONE]"


def broken_off(events: list[Any]) -> tuple[list[int], str]:
    """The numbers of the events before the error that ends a stream, and the code of the error."""
    *pieces, error, done = events
    assert done == "[DONE]"
    return [piece["i"] for piece in pieces], error["error"]["code"]


@pytest.mark.parametrize("count", [2, 4])
def test_500_streams_and_a_backend_that_is_killed(count: int) -> None:
    """Only streams that had begun on the killed backend end early, with an error; every other one is whole."""

    async def work() -> None:
        async with mock_backends(count) as backends, routed(backends) as (router, url):
            victim = backends[0]
            victim.stalls, victim.event_s = True, 0.05
            users = [f"{'stall' if i % 3 else 'go'}{i}" for i in range(500)]
            async with ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                asked = [asyncio.create_task(stream(session, url, body_of(user))) for user in users]
                while len(victim.bodies) < 400 // count or not victim.begun:
                    await asyncio.sleep(0.001)
                assert victim.live > len(victim.begun)
                await victim.kill()
                answers = dict(zip(users, await asyncio.gather(*asked), strict=True))
            broken = {user: broken_off(events) for user, (_, events) in answers.items() if not is_whole(events)}
            assert {status for status, _ in answers.values()} == {200}
            assert broken and set(broken) <= victim.begun
            assert all(
                numbers == list(range(len(numbers))) and code == "backend_failed" for numbers, code in broken.values()
            )
            assert router.num_live == 0 and all(b.in_flight == b.active == b.waiting == 0 for b in router.backends)
            assert not router.backends[0].up

    run(work())


def test_an_event_passes_before_the_next_one_exists() -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (_, url):
            backend.step = asyncio.Semaphore(0)
            async with ClientSession() as session:
                backend.step.release()
                async with session.post(f"{url}/v1/completions", json=body_of()) as answer:
                    for number in range(EVENTS):
                        event = await answer.content.readuntil(b"\n\n")
                        assert json.loads(event[6:])["i"] == number
                        backend.step.release()

    run(work())


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_backend_is_passed_by_and_the_last_refusal_is_passed_on(status: int) -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends) as (router, url), ClientSession() as session:
            backends[0].refuse = status
            assert all([is_whole((await stream(session, url, body_of()))[1]) for _ in range(4)])
            backends[1].refuse = status
            assert await stream(session, url, body_of()) == (status, [{"error": {"message": "full"}}])
            text = router.metrics.render()[0].decode()
            assert f'quire_router:retries_total{{reason="{status}"}} 5.0' in text
            assert f'quire_router:refusals_total{{status="{status}"}} 1.0' in text

    run(work())


def test_retries_are_counted_from_the_first_try() -> None:
    async def work() -> None:
        async with mock_backends(4) as backends, routed(backends, retries=1) as (_, url):
            async with ClientSession() as session:
                for backend in backends[:3]:
                    backend.refuse = 503
                assert (await stream(session, url, body_of()))[0] == 503
                assert [len(backend.bodies) for backend in backends] == [1, 1, 0, 0]

    run(work())


def test_a_client_that_leaves_stops_the_backend() -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url):
            backend.stalls = True
            async with ClientSession() as session:
                waits = asyncio.create_task(stream(session, url, body_of("stall")))
                backend.step = asyncio.Semaphore(1)
                streams = asyncio.create_task(stream(session, url, body_of()))
                while backend.live < 2 or not backend.begun:
                    await asyncio.sleep(0.001)
                waits.cancel()
                streams.cancel()
                await asyncio.gather(waits, streams, return_exceptions=True)
            backend.step.release()
            while backend.left < 2 or router.num_live:
                backend.step.release()
                await asyncio.sleep(0.001)
            assert router.metrics.disconnects == 2 and router.backends[0].in_flight == 0

    run(work())


def test_a_silent_backend_is_left_after_the_time_limit() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends, first_byte_timeout=0.1) as (_, url):
            backends[0].stalls = True
            async with ClientSession() as session:
                status, events = await stream(session, url, body_of("stall"))
            assert status == 200 and is_whole(events) and events[0]["by"] == "b1"
            assert backends[0].live == 0

    run(work())


def test_an_answer_that_is_no_stream_is_cut_and_not_ended() -> None:
    """A client that gets half of a JSON text must see a broken connection, not a short answer."""

    async def half(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})
        if scope["path"] != "/health":
            raise ConnectionAbortedError
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def work() -> None:
        async with mock_backends(1) as (backend,):
            backend.replaced_by = half
            async with routed([backend]) as (_, url), ClientSession() as session:
                async with session.post(f"{url}/v1/completions", json=body_of()) as answer:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()

    run(work())


def test_a_slow_client_holds_its_backend_up_and_loses_nothing() -> None:
    piece, count = bytes(range(256)) * 256, 600  # 39 MB, more than the buffers of all sockets together
    sent = 0

    async def large(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(count if scope["path"] != "/health" else 0):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def work() -> None:
        async with mock_backends(1) as (backend,):
            backend.replaced_by = large
            async with routed([backend], health_interval=60) as (_, url), ClientSession() as session:
                async with session.post(f"{url}/v1/completions", json=body_of()) as answer:
                    seen = -1
                    while seen != sent or not sent:
                        seen = sent
                        await asyncio.sleep(0.2)
                    assert 0 < sent < count
                    assert await answer.read() == piece * count

    run(work())


@pytest.mark.parametrize(("path", "first"), [("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")])
def test_a_broken_stream_ends_in_the_form_of_its_api(path: str, first: bytes) -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (_, url), ClientSession() as session:
            backend.cut_after = 2
            async with session.post(url + path, json=body_of()) as answer:
                *pieces, last, nothing = (await answer.read()).split(b"\n\n")
            assert len(pieces) == 2 and last.startswith(first) and nothing == b""
            assert json.loads(last.partition(b"data: ")[2])["type"] == "error"

    run(work())


@pytest.mark.parametrize("first_too", [False, True])
def test_a_connection_that_closes_instead_of_a_second_answer(first_too: bool) -> None:
    """A backend that closed an idle connection as the request came is no fault; a new connection that closes is."""

    async def work() -> None:
        num_connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                if not first_too:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    await reader.readuntil(b"\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = Pool(Address(url="", host="127.0.0.1", port=server.sockets[0].getsockname()[1]), 10.0)
        for _ in range(3):
            if first_too:
                with pytest.raises(UpstreamError, match="broke off"):
                    await pool.fetch(b"GET", b"/", [], b"", 10.0)
            else:
                assert await pool.fetch(b"GET", b"/", [], b"", 10.0) == (200, b"ok")
        assert num_connections == 3
        pool.close()
        server.close()

    run(work())


@pytest.mark.parametrize(("health", "told"), [(500, b""), (200, b'{"status":"hung"}')])
def test_health_checks_take_a_backend_out_and_back(health: int, told: bytes) -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends) as (router, url), ClientSession() as session:
            backends[0].health, backends[0].told = health, told
            while router.backends[0].up:
                await asyncio.sleep(0.01)
            for _ in range(3):
                assert is_whole((await stream(session, url, body_of()))[1])
            assert not backends[0].bodies
            backends[0].health, backends[0].told = 200, b'{"status":"ready"}'
            while not router.backends[0].up:
                await asyncio.sleep(0.01)
            for backend in backends:
                await backend.kill()
            status, (error,) = await stream(session, url, body_of())
            assert status == 502 and error["error"]["code"] == "backend_failed"
            status, (error,) = await stream(session, url, body_of())
            assert status == 503 and error["error"]["message"].startswith("no backend takes requests: all are down.")

    run(work())


def test_a_backend_that_hangs_is_down_after_two_checks_at_once() -> None:
    """It takes connections and answers nothing. The second check does not wait for the interval."""

    async def work() -> None:
        slow = {"health_interval": 600.0, "connect_timeout": 0.4, "first_byte_timeout": 0.1}
        async with mock_backends(2) as backends, routed(backends, **slow) as (router, url), ClientSession() as session:
            while not all(one.up for one in router.backends):
                await asyncio.sleep(0.01)

            async def mute(scope: Any, receive: Any, send: Any) -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass

            backends[0].replaced_by = mute
            assert (await stream(session, url, body_of()))[1][0]["by"] == "b1"
            while router.backends[0].up:
                await asyncio.sleep(0.01)
            assert router.backends[0].reason == "no answer within 0.4 s" and router.backends[1].up

    run(work())


def test_a_backend_that_drains_itself_gets_no_new_requests() -> None:
    async def work() -> None:
        async with mock_backends(2) as backends, routed(backends) as (router, url), ClientSession() as session:

            async def drain(number: int, told: bytes) -> None:
                backends[number].told = told
                while router.backends[number].usable == (b"draining" in told):
                    await asyncio.sleep(0.01)

            await drain(0, b'{"status":"draining","reason":"the server is shutting down."}')
            for _ in range(3):
                assert is_whole((await stream(session, url, body_of()))[1])
            assert not backends[0].bodies and router.backends[0].up
            await drain(1, b'{"status":"draining"}')
            status, (error,) = await stream(session, url, body_of())
            assert status == 503 and "all are being drained" in error["error"]["message"]
            async with session.get(f"{url}/ready") as ready, session.get(f"{url}/metrics") as metrics:
                lines = [line for line in (await metrics.text()).split("\n") if "backend_draining{" in line]
                assert ready.status == 503 and [line.rpartition(" ")[2] for line in lines] == ["1.0", "1.0"]
            for told in (b'{"status":"ready"}', b"", b"[]"):  # other servers may answer anything
                await drain(0, b'{"status":"draining"}')
                await drain(0, told)
                assert is_whole((await stream(session, url, body_of()))[1])

    run(work())


def test_a_router_that_ends_finishes_what_runs() -> None:
    async def work() -> None:
        async with mock_backends(1) as (backend,), routed([backend]) as (router, url), ClientSession() as session:
            backend.step = asyncio.Semaphore(1)
            running = asyncio.create_task(stream(session, url, body_of()))
            while not backend.begun:
                await asyncio.sleep(0.001)
            router.drain()
            status, (error,) = await stream(session, url, body_of())
            assert status == 503 and error["error"]["code"] == "router_ending"
            async with session.get(f"{url}/ready") as ready, session.get(f"{url}/health") as health:
                assert (ready.status, health.status) == (503, 200)
            ending = asyncio.create_task(router.idle())
            await asyncio.sleep(0)
            assert not ending.done()
            for _ in range(EVENTS):
                backend.step.release()
            assert is_whole((await running)[1])
            await ending

    run(work())
