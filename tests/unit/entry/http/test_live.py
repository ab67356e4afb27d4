"""The live view over HTTP: its stream, who may see what, readers that are slow or go, timelines, and --no-web."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.config.serve import ServerConfig
from quire.contracts.errors import EngineClosed, QueueFull
from quire.contracts.live import (
    LiveBlocks,
    LiveEngine,
    LiveEvent,
    LiveFrame,
    LivePrefix,
    LiveQueue,
    LiveRequests,
    LiveSums,
)
from quire.contracts.live import LiveEventKind as Kind
from quire.entry.http.app import build_app
from quire.entry.http.web import live_hub
from quire.entry.http.web.live_hub import MOST_WAITING, MOST_WATCHERS, LiveHub, latencies
from quire.entry.http.web.timelines import MOST_EVENTS, MOST_REQUESTS, Timelines, timeline
from quire.observe.metrics import Metrics
from quire.procs import live_feed

from .conftest import FakeEngine, call
from .test_engine import open_one, read, run, serving

OFF = ServerConfig.from_flat(web=False)
PATHS = ("/debug/live", "/debug/blocks", "/debug/requests/x", "/debug/trace", "/debug/meetings")


def frame(
    number: int, *events: LiveEvent, tokens: int = 0, lost: int = 0, tenants: dict[int, str] | None = None
) -> LiveFrame:
    requests = LiveRequests(handle=[1, 2], id=["one", "two"], state=["running", "waiting"])
    engine = LiveEngine(
        replica=0,
        steps=[],
        skipped=0,
        sums=LiveSums(tokens=tokens),
        queue=LiveQueue(running=1, waiting=1, preempted=0, blocked={}, num_preemptions=0, slots=1),
        blocks=LiveBlocks(total=1, own=1, shared=0, moving=0, cached=0, free=0, groups=()),
        prefix=LivePrefix(queries=0, hits=0, misses={}),
        tiers={},
        requests=requests,
        events=list(events),
        lost_events=lost,
    )
    return LiveFrame(frame=number, at=1.0, seconds=0.1, cost_s=0.0, engines=[engine], tenants=tenants or {})


def happened(what: Kind, handle: int = 1, at: float = 0.0) -> LiveEvent:
    return LiveEvent(at=at, handle=handle, what=what)


def events_of(data: bytes) -> list[tuple[str, Any]]:
    """The events of a stream: names and data."""
    blocks = [block for block in data.decode().split("\n\n") if block and not block.startswith(":")]
    lines = [block.split("\n") for block in blocks]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_frames_are_asked_for_only_while_somebody_watches() -> None:
    async def work() -> None:
        asked: list[int] = []
        hub = LiveHub(lambda: asked.append(1), lambda: [])
        hub.take(frame(1))
        assert not asked
        reader = hub.open("")
        assert len(asked) == 1
        hub.take(frame(2))
        assert len(asked) == 2
        hub.close(reader)
        hub.take(frame(3))
        assert len(asked) == 2

    asyncio.run(work())


def test_a_slow_reader_loses_frames_and_is_told_so_and_others_lose_none() -> None:
    async def work() -> None:
        hub = LiveHub(lambda: None, lambda: [])
        slow, quick = hub.open(""), hub.open("")
        seen = []
        for number in range(1, 101):
            hub.take(frame(number))
            seen += events_of((await quick.next())[0])
            assert len(slow._frames) <= MOST_WAITING
        assert [data["frame"] for _, data in seen] == list(range(1, 101))
        data, last = await slow.next()
        (name, lost), *rest = events_of(data)
        assert (name, lost) == ("lost", {"frames": 100 - MOST_WAITING}) and not last
        assert [data["frame"] for _, data in rest] == list(range(101 - MOST_WAITING, 101))
        hub.take(frame(101))
        assert [name for name, _ in events_of((await slow.next())[0])] == ["frame"]

    asyncio.run(work())


def test_all_watchers_of_a_tenant_share_the_bytes_of_a_frame() -> None:
    async def work() -> None:
        hub = LiveHub(lambda: None, lambda: [])
        readers = [hub.open("") for _ in range(10)]
        hub.take(frame(1))
        assert len({id(reader._frames[0]) for reader in readers}) == 1

    asyncio.run(work())


def test_a_tenant_sees_the_ids_of_its_own_requests_only() -> None:
    async def work() -> None:
        hub = LiveHub(lambda: None, lambda: [])
        readers = {tenant: hub.open(tenant) for tenant in ("a", "b", "")}
        hub.take(frame(1, tenants={1: "a", 2: "b"}))
        for tenant, ids in {"a": ["one", None], "b": [None, "two"], "": [None, None]}.items():
            data, _ = await readers[tenant].next()
            ((_, told),) = events_of(data)
            assert told["engines"][0]["requests"]["id"] == ids and "tenants" not in told
            assert [name.encode() in data for name in ("one", "two")] == [name in ids for name in ("one", "two")]

    asyncio.run(work())


def test_too_many_watchers_are_refused_and_none_is_taken_after_the_end() -> None:
    async def work() -> None:
        hub = LiveHub(lambda: None, lambda: [])
        readers = [hub.open("") for _ in range(MOST_WATCHERS)]
        with pytest.raises(QueueFull, match="watch already"):
            hub.open("")
        hub.take(frame(1))
        hub.end("it ends.")
        data, last = await readers[0].next()
        assert last and [name for name, _ in events_of(data)] == ["frame", "end"]
        hub.close(readers[0])
        with pytest.raises(EngineClosed, match="it ends"):
            hub.open("")

    asyncio.run(work())


def test_a_server_that_drains_tells_what_is_left_until_its_last_request() -> None:
    async def work() -> None:
        now = [100.0]
        hub = LiveHub(lambda: None, lambda: [], lambda: now[0])
        reader = hub.open("")
        hub.take(frame(1))
        hub.drain(30.0)
        now[0] += 10
        hub.take(frame(2))
        data, last = await reader.next()
        left = [told["draining"] for _, told in events_of(data)]
        assert left == [None, {"requests": 2, "seconds": 20.0}] and not last
        idle = frame(3)
        idle.engines[0].queue = LiveQueue(running=0, waiting=0, preempted=0, blocked={}, num_preemptions=0, slots=1)
        hub.take(idle)
        data, last = await reader.next()
        assert [name for name, _ in events_of(data)] == ["frame", "end"] and last

    asyncio.run(work())


def test_bytes_between_ranks_follow_from_the_tokens() -> None:
    async def work() -> None:
        hub = LiveHub(lambda: None, lambda: [])
        hub.exchanges = {"tp": 512, "pp": 10}
        reader = hub.open("")
        hub.take(frame(1, tokens=7))
        ((_, told),) = events_of((await reader.next())[0])
        assert told["exchanged"] == {"tp": 3584, "pp": 70}

    asyncio.run(work())


def timed(
    state: str, queue: float | None, prefill: float | None, decode: float | None, **more: float
) -> dict[str, Any]:
    times = {"arrived": 1000.0, "queue_s": queue, "prefill_s": prefill, "decode_s": decode, "e2e_s": 9.0}
    return {"state": state, "num_output": 5} | times | more


def test_latencies_of_requests() -> None:
    found = latencies([timed("running", 1.0, 1.0, 4.0), timed("stop", 3.0, 1.0, 8.0)], 1010.0)
    assert found["requests"] == 2 and found["e2e_s"] == [9.0] * 3
    assert (found["ttft_s"][0], found["queue_s"][0], found["tpot_s"][0]) == (3.0, 2.0, 1.5)
    assert found["ttft_s"][2] == pytest.approx(3.98)
    assert found["counts"] == {"ttft_s": 2, "tpot_s": 2, "queue_s": 2, "e2e_s": 1} and found["oldest_wait_s"] is None
    assert latencies([], 0.0)["e2e_s"] is None


def test_requests_that_wait_or_ended_so_count_in_the_time_of_the_queue() -> None:
    never = [timed("waiting", None, None, None, e2e_s=each) for each in (20.0, 40.0)]
    found = latencies([*never, timed("abort", None, None, None, e2e_s=60.0), timed("stop", 0.0, 1.0, 1.0)], 1061.0)
    assert found["queue_s"][0] == 30.0 and found["counts"]["queue_s"] == 4 and found["oldest_wait_s"] == 40.0


def test_requests_that_ended_long_ago_have_no_part_in_latencies() -> None:
    records = [
        timed("stop", 1.0, 1.0, 1.0),
        timed("stop", 2.0, 1.0, 1.0, arrived=2000.0),
        timed("running", 3.0, 1.0, 1.0),
    ]
    found = latencies(records, 2010.0)
    assert found["requests"] == 2 and found["queue_s"][0] == 2.5 and found["counts"]["e2e_s"] == 1


# --- timelines --------------------------------------------------------------------------------------------------------

RECORD = {
    "request_id": "r",
    "state": "stop",
    "handles": [1],
    "arrived": 100.0,
    "cause": "",
    "num_prompt": 9,
    "num_output": 4,
    "num_cached": 4,
    "queue_s": 1.0,
    "prefill_s": 2.0,
    "e2e_s": 7.0,
    "prefix": None,
    "fetched": {},
}


def test_a_timeline_that_was_watched_from_the_beginning() -> None:
    lives = Timelines()
    lives.take(frame(1, happened(Kind.ARRIVED), happened(Kind.ARRIVED, 2)))
    lives.take(frame(2, happened(Kind.ADMITTED), happened(Kind.FINISHED)))
    told = timeline(RECORD, lives)
    assert told["watched"] and [event.what for event in told["events"]] == [Kind.ARRIVED, Kind.ADMITTED, Kind.FINISHED]


@pytest.mark.parametrize("missed", ["watching began later", "watching was interrupted", "events were lost"])
def test_a_life_half_seen_is_told_from_the_record(missed: str) -> None:
    lives = Timelines()
    if missed != "watching began later":
        lives.take(frame(1, happened(Kind.ARRIVED)))
    number, lost = (2, 1) if missed == "events were lost" else (1, 0)
    lives.take(frame(number, happened(Kind.FINISHED), lost=lost))
    told = timeline(RECORD, lives)
    assert not told["watched"]
    assert [(event.what, event.at, event.count) for event in told["events"]] == [
        (Kind.ARRIVED, 100.0, 9),
        (Kind.ADMITTED, 101.0, 4),
        (Kind.CHUNK, 103.0, 5),
        (Kind.FINISHED, 107.0, 4),
    ]


def test_a_timeline_marks_the_stretch_that_nobody_watched() -> None:
    lives = Timelines()
    assert timeline(RECORD, lives)["unknown"] == (101.0, 107.0)
    assert timeline(RECORD | {"state": "running"}, lives)["unknown"] == (101.0, None)
    never = {"state": "waiting", "queue_s": None, "prefill_s": None}
    assert timeline(RECORD | never, lives)["unknown"] is None
    lives.take(frame(1, happened(Kind.ARRIVED)))
    assert timeline(RECORD, lives)["unknown"] is None


def test_a_timeline_has_an_end_before_the_frame_that_tells_it() -> None:
    lives = Timelines()
    lives.take(frame(1, happened(Kind.ARRIVED), happened(Kind.ADMITTED)))
    told = timeline(RECORD, lives)
    assert told["watched"] and [event.what for event in told["events"]][-2:] == [Kind.ADMITTED, Kind.FINISHED]
    assert timeline(RECORD | {"state": "running"}, lives)["events"][-1].what is Kind.ADMITTED
    lives.take(frame(2, happened(Kind.FINISHED)))
    assert [event.what for event in timeline(RECORD, lives)["events"]].count(Kind.FINISHED) == 1


def test_a_timeline_tells_why_its_request_was_aborted() -> None:
    told = timeline(RECORD | {"state": "abort", "cause": "queue_timeout"}, Timelines())
    assert told["events"][-1].detail == "abort: queue_timeout"


def test_timelines_are_bounded_and_keep_their_beginning() -> None:
    lives = Timelines()
    lives.take(frame(1, happened(Kind.ARRIVED), *[happened(Kind.CHUNK)] * (2 * MOST_EVENTS)))
    events = lives.of([1])
    assert events is not None and len(events) == MOST_EVENTS and events[0].what is Kind.ARRIVED
    for handle in range(2, MOST_REQUESTS + 2):
        lives.take(frame(2, happened(Kind.ARRIVED, handle)))
    assert len(lives._events) == MOST_REQUESTS and lives.of([1]) is None


# --- a server ---------------------------------------------------------------------------------------------------------


async def stream(app: Any, until: Callable[[bytes], bool], headers: dict[str, str] | None = None) -> bytes:
    """Read the stream of an application until a condition holds, and leave."""
    sent, gone, came = bytearray(), asyncio.Event(), [{"type": "http.request", "body": b""}]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/debug/live",
        "raw_path": b"/debug/live",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
    }

    async def receive() -> Any:
        if came:
            return came.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.extend(message.get("body", b""))
        if until(bytes(sent)):
            gone.set()

    await asyncio.wait_for(app(scope, receive, send), 30)
    return bytes(sent)


def test_the_stream_tells_a_request_and_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "LEASE", 0.3)

    async def work() -> None:
        async with serving(mock_step_ms=2) as (engine, thread):
            app = build_app(engine, ServerConfig.from_flat(device="mock"), Metrics())
            assert thread.core is not None and thread.core.recorder is None
            reading = asyncio.create_task(stream(app, lambda sent: b'"finished"' in sent))
            while not engine.live._readers:
                await asyncio.sleep(0.01)
            await read(open_one(engine, tokens=20))
            data = await reading
            (first, facts), *frames = events_of(data)
            assert first == "engine" and facts["num_blocks"] == thread.core.facts.num_blocks
            engines = [told["engines"][0] for name, told in frames if name == "frame"]
            assert sum(one["sums"]["sampled"] for one in engines) == 20
            told = [event["what"] for one in engines for event in one["events"]]
            assert told == ["arrived", "admitted", "chunk", "finished"]
            assert not engine.live._readers
            deadline = time.monotonic() + 20
            while thread.core.recorder is not None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert thread.core.recorder is None, "a core goes on recording for a reader that has gone"

    run(work())


def test_a_connection_that_takes_nothing_costs_frames_and_no_memory() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            app = build_app(engine, ServerConfig.from_flat(device="mock"), Metrics())
            sent, gone, taking = bytearray(), asyncio.Event(), asyncio.Event()

            async def receive() -> Any:
                if not sent:
                    return {"type": "http.request", "body": b""}
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.extend(message.get("body", b"") or b" ")
                if b'"frame":1,' in sent:
                    await taking.wait()  # as the server does while the buffer of the connection is full
                if b"event: lost" in sent:
                    gone.set()

            scope = {"type": "http", "method": "GET", "path": "/debug/live", "raw_path": b"", "headers": []}
            reading = asyncio.create_task(app(scope, receive, send))
            while b'"frame":1,' not in sent:
                await asyncio.sleep(0.01)
            size = len(sent)
            for number in range(1000):
                engine.live.take(frame(number))
            (reader,) = engine.live._readers
            assert len(reader._frames) == MOST_WAITING and len(sent) == size
            taking.set()
            await asyncio.wait_for(reading, 30)
            assert b'"frames":992' in sent.replace(b'"frames":993', b'"frames":992')  # the core's next may have come

    run(work())


def test_a_server_that_ends_ends_its_streams() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            app = build_app(engine, ServerConfig.from_flat(device="mock"), Metrics())
            reading = asyncio.create_task(stream(app, lambda sent: False))
            while not engine.live._readers:
                await asyncio.sleep(0.01)
            running = open_one(engine, tokens=5)
            engine.drain()
            await read(running)
            name, told = events_of(await reading)[-1]
            assert name == "end" and "shutting down" in told["reason"]

    run(work())


def test_a_watcher_may_come_while_the_server_drains() -> None:
    async def work() -> None:
        async with serving(mock_step_ms=5) as (engine, _):
            app = build_app(engine, ServerConfig.from_flat(device="mock"), Metrics())
            running = open_one(engine, tokens=50)
            engine.drain()
            told = events_of(await stream(app, lambda sent: False))
            left = [data["draining"]["requests"] for name, data in told if name == "frame"]
            assert left[0] == 1 and told[-1][0] == "end"
            await read(running)

    run(work())


def test_a_timeline_and_the_map_of_a_server() -> None:
    async def work() -> None:
        async with serving(mock_step_ms=5) as (engine, _):
            app = build_app(engine, ServerConfig.from_flat(device="mock"), Metrics())
            open_stream = open_one(engine, tokens=200)
            while not open_stream.generations[0].completions[0].token_ids:
                await asyncio.sleep(0.01)
            told = await asyncio.to_thread(call, _on(app, asyncio.get_running_loop()), "/debug/requests/r")
            assert told.json()["request"]["state"] == "running" and not told.json()["watched"]
            found = await asyncio.to_thread(call, _on(app, asyncio.get_running_loop()), "/debug/blocks")
            (owner,) = found.json()["engines"][0]["owners"]
            assert owner["id"] == "r" and owner["tables"][0] and "tenant" not in owner
            gone = await asyncio.to_thread(call, _on(app, asyncio.get_running_loop()), "/debug/requests/nobody")
            assert (gone.status, gone.error["code"]) == (404, "unknown_request")
            open_stream.close()

    run(work())


def test_a_trace_of_the_next_request_and_a_caller_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving(mock_step_ms=1) as (engine, _):
            app = build_app(engine, ServerConfig.from_flat(device="mock"), Metrics())
            told: list[Any] = []
            original = engine.control

            async def control(name: str, **args: Any) -> Any:
                told.append(args.get("on"))
                return await original(name, **args)

            monkeypatch.setattr(engine, "control", control)
            there = _on(app, asyncio.get_running_loop())
            asking = asyncio.create_task(asyncio.to_thread(call, there, "/debug/trace"))
            while not told:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await read(open_one(engine, tokens=5))
            found = (await asking).json()
            assert found["request_id"] == "r" and [step["kind"] for step in found["steps"]][0] == "prefill"
            messages = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]

            async def receive() -> Any:
                return messages.pop(0)

            scope = {"type": "http", "method": "GET", "path": "/debug/trace", "raw_path": b"", "headers": []}
            await asyncio.wait_for(app(scope, receive, lambda message: pytest.fail("answered")), 30)
            assert told == [True, True, False], "the core waits on for a caller who has left"
            foreign = await asyncio.to_thread(call, there, "/debug/trace", sec_fetch_site="cross-site")
            assert foreign.status == 403 and len(told) == 3

    run(work())


def _on(app: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """The application, run on another thread's event loop."""

    async def there(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(app(scope, receive, send), loop))

    return there


def test_without_the_web_every_route_says_so(engine: FakeEngine) -> None:
    app = build_app(engine, OFF, Metrics())  # type: ignore[arg-type]
    for path in PATHS:
        answer = call(app, path)
        assert (answer.status, answer.error["code"]) == (404, "web_off") and "--no-web" in answer.error["message"]
    assert call(app, "/debug/requests").status == 200


def test_the_table_of_meetings(engine: FakeEngine) -> None:
    table = call(build_app(engine, ServerConfig(), Metrics()), "/debug/meetings").json()  # type: ignore[arg-type]
    assert {row["status"] for row in table["rows"]} <= {"refused", "missing", "no effect"}
    assert all(row["feature"] in table["features"] and row["other"] in table["features"] for row in table["rows"])


def test_latencies_are_renewed_once_a_second() -> None:
    async def work() -> None:
        looked, now = [], [0.0]
        hub = LiveHub(lambda: None, lambda: looked.append(1) or [], lambda: now[0])  # type: ignore[func-returns-value]
        hub.open("")
        for _ in range(30):
            hub.take(frame(1))
            now[0] += live_hub.LATENCY_SECONDS / 10
        assert len(looked) == 3

    asyncio.run(work())
