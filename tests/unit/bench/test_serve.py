"""The load generator against a server made of fixed answers, and its summary on made-up records."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.bench.serve import LoadRun, Pace, drive, parse_goodput, percentile, remarks, summarize
from quire.bench.serve_client import Client, Record, Target
from quire.bench.serve_load import Ask
from quire.contracts.errors import ConfigError

pytest.importorskip("aiohttp")
Answer = Callable[[asyncio.StreamWriter, dict[str, Any]], Any]


def event(data: Any) -> bytes:
    body = b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = event(b"[DONE]") + b"0\r\n\r\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


class Server:
    """Answers every POST with `answer`; keeps the bodies and the most requests it had at once."""

    def __init__(self, answer: bytes, pause: float = 0.0) -> None:
        self.answer, self.pause = answer, pause
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.most = self.now = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                self.headers.append(head)
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.split("\r\n")
                        if line.lower().startswith("content-length")
                    ),
                    0,
                )
                if head.startswith("GET"):
                    body = b'{"data": [{"id": "listed"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    continue
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.now += 1
                self.most = max(self.most, self.now)
                await asyncio.sleep(self.pause)
                self.now -= 1
                writer.write(self.answer)
                if not self.answer.endswith(b"0\r\n\r\n"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def target(url: str, *, chat: bool = False, **more: Any) -> Target:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Target(base_url=url, endpoint=path, model="m", chat=chat, headers={}, extra={}, **more)


def run(server: Server, asks: list[Ask], pace: Pace | None = None, *, chat: bool = False, **more: Any) -> LoadRun:
    async def go() -> LoadRun:
        async with running(server) as url, Client(target(url, chat=chat, **more)) as client:
            return await drive(client, asks, pace or Pace())

    return asyncio.run(go())


ASK = Ask(prompt=[1, 2, 3], max_tokens=6)


def test_a_completion_is_timed_and_counted() -> None:
    server = Server(HEAD + b"9\r\n: alive\n\n\r\n" + event(text("a")) + event(text("")) + event(USAGE) + END)
    (record,) = run(server, [ASK]).records
    assert record.error is None and record.counted
    assert (record.num_input, record.num_output, record.num_events, len(record.gaps)) == (7, 6, 2, 1)
    assert record.first is not None and record.started < record.first <= record.ended
    assert server.bodies == [
        {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "prompt": [1, 2, 3], "max_tokens": 6}
    ]


def test_chat_counts_content_and_reasoning_but_not_the_role() -> None:
    pieces = [delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), delta()]
    server = Server(HEAD + b"".join(map(event, pieces)) + END)
    (record,) = run(server, [Ask(prompt="hi", max_tokens=6)], chat=True).records
    assert (record.num_events, record.num_output, record.counted) == (2, 2, False)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n", "HTTP 429"),
        (HEAD + event(text("a")) + b"0\r\n\r\n", "the stream broke off"),
        (HEAD + event({"error": {"type": "internal_error", "message": "x"}}) + END, "error event internal_error"),
        (HEAD + event(b"{nonsense") + END, "invalid event"),
        (HEAD + event(text("a")), "ClientPayloadError"),
    ],
)
def test_errors_are_told_by_kind(answer: bytes, kind: str) -> None:
    result = summarize(run(Server(answer), [ASK]), [99], {})
    assert result["errors"] == {kind: 1} and (result["completed"], result["failed"]) == (0, 1)
    assert result["mean_ttft_ms"] is None


def test_nobody_listening_is_an_error_of_each_request() -> None:
    async def go() -> LoadRun:
        async with Client(target("http://127.0.0.1:1")) as client:
            return await drive(client, [ASK] * 3, Pace())

    assert summarize(asyncio.run(go()), [], {})["errors"] == {"ClientConnectorError": 3}


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    assert run(Server(HEAD + END, pause=5.0), [ASK], timeout=0.1).records[0].error == "timeout"


def test_concurrency_is_bounded() -> None:
    server = Server(HEAD + event(text("a")) + END, pause=0.01)
    done = run(server, [ASK] * 12, Pace(max_concurrency=3))
    assert len(done.records) == 12 and server.most == 3 and not done.interrupted


def test_all_at_once_without_a_bound() -> None:
    server = Server(HEAD + event(text("a")) + END, pause=0.2)
    run(server, [ASK] * 12)
    assert server.most == 12


def test_the_server_names_its_model() -> None:
    async def go() -> str:
        async with running(Server(b"")) as url, Client(target(url)) as client:
            return await client.first_model()

    assert asyncio.run(go()) == "listed"


def test_no_server_is_told_in_one_line() -> None:
    async def go() -> None:
        async with Client(target("http://127.0.0.1:1")) as client:
            await client.first_model()

    with pytest.raises(ConfigError, match="no server listens at http://127.0.0.1:1: start"):
        asyncio.run(go())


def record(first: float = 0.1, ended: float = 1.1, num_output: int = 11, **more: Any) -> Record:
    fields = {"gaps": [0.1] * 10, "num_events": 11, "num_input": 5, "counted": True} | more
    return Record(started=0.0, first=first, ended=ended, num_output=num_output, **fields)


def test_the_summary_adds_up() -> None:
    done = LoadRun(
        records=[record(), record(first=0.3, ended=2.3), record(error="HTTP 500")], seconds=2.0, cpu_seconds=0.033
    )
    result = summarize(done, [50, 100], {"ttft": 200.0, "e2el": 5000.0})
    assert (result["completed"], result["failed"], result["errors"]) == (2, 1, {"HTTP 500": 1})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 22)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (1, 11, 16)
    assert (result["mean_ttft_ms"], result["median_ttft_ms"], result["p100_ttft_ms"]) == (200, 200, 300)
    assert result["mean_tpot_ms"] == 150 and result["mean_e2el_ms"] == 1700 and result["median_itl_ms"] == 100
    assert result["request_goodput"] == 0.5
    assert result["client_cpu_us_per_event"] == 1000 and result["tokens_counted_by"] == "server"


def test_one_token_answers_have_no_time_per_output_token() -> None:
    result = summarize(LoadRun(records=[record(num_output=1, gaps=[])], seconds=1.0), [99], {"tpot": 1.0})
    assert result["mean_tpot_ms"] is result["p99_itl_ms"] is None
    assert result["request_goodput"] == 1


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([0.0, 10.0, 20.0], p) for p in (0, 25, 50, 99, 100)] == [0, 5, 10, 19.8, 20]
    assert percentile([3.0], 99) == 3 and percentile([], 50) is None


def test_goodput_is_read() -> None:
    assert parse_goodput(["ttft:200", "e2e:1500.5"]) == {"ttft": 200.0, "e2el": 1500.5}
    for wrong in ("ttft", "itl:3", "tpot:-1", "tpot:"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([wrong])


def test_remarks_say_what_to_doubt() -> None:
    asks = [Ask(prompt="x", max_tokens=100)]
    short = summarize(LoadRun(records=[record()], seconds=1.0, cpu_seconds=0.9), [], {})
    said = " ".join(remarks(short, asks))
    assert "--ignore-eos" in said and "bottleneck" in said and "usage" not in said
    events = summarize(LoadRun(records=[record(counted=False)], seconds=1.0), [], {})
    assert any("no usage" in line for line in remarks(events, asks))
    coalesced = summarize(LoadRun(records=[record(num_output=88)], seconds=1.0), [], {})
    assert any("8.0 tokens" in line for line in remarks(coalesced, asks))


def test_an_interrupt_keeps_what_is_there() -> None:
    import os
    import signal

    async def go() -> LoadRun:
        server = Server(HEAD + event(text("a")) + END, pause=0.02)
        async with running(server) as url, Client(target(url)) as client:
            ended = []

            def on_end() -> None:
                ended.append(1)
                if len(ended) == 3:
                    os.kill(os.getpid(), signal.SIGINT)

            return await drive(client, [ASK] * 500, Pace(max_concurrency=1), on_end)

    done = asyncio.run(go())
    assert done.interrupted and 3 <= len(done.records) < 500
    assert summarize(done, [99], {})["interrupted"] is True


def test_a_rate_spreads_the_requests() -> None:
    server = Server(HEAD + event(text("a")) + END)
    done = run(server, [ASK] * 5, Pace(rate=50.0, seed=1))
    assert len(done.records) == 5
    begun = sorted(each.started for each in done.records)
    assert begun[-1] - begun[0] > 0.02 and math.isfinite(done.records[0].late)
