"""The served engine over a mock core in a thread: what streams get, what ends them, and that nothing is left."""

import asyncio
import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.serve import DeadlineConfig, ServerConfig
from quire.contracts.errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    EngineError,
    EngineStarting,
    InvalidParameter,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    RequestFailed,
)
from quire.contracts.output import RequestOutput
from quire.contracts.prefix import Miss
from quire.contracts.sampling import OutputKind, SamplingParams
from quire.entry import front_end
from quire.entry.core_process import build
from quire.entry.http import engine as module
from quire.entry.http.engine import ServedEngine
from quire.entry.http.life.state import EngineState
from quire.entry.http.readiness import readiness
from quire.entry.http.request_stream import RequestStream
from quire.entry.prompts import Prompt
from quire.observe.metrics import Metrics
from quire.observe.restarts import RestartTally
from quire.procs.core_client import CoreClient
from quire.procs.hang_note import hung_since, note_hang

from ....support.core_thread import CoreThread
from ....support.mock_tokens import mock_tokens

PATIENCE = 60.0
PROMPT = [5, 6, 7]


class Counted(Metrics):
    """Keeps the arguments of every hook."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {}
        self.restarts = RestartTally()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "calls" or not hasattr(Metrics, name):
            return super().__getattribute__(name)
        return lambda *args, **kwargs: self.calls.setdefault(name, []).append((args, kwargs))


def run(work: Awaitable[None]) -> None:
    """Run to the end; what a task or a future would only tell the event loop's log fails, too."""
    untold: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: untold.append(context))
        await asyncio.wait_for(work, PATIENCE)

    asyncio.run(main())
    gc.collect()  # it is told when a future goes
    assert untold == []


@contextlib.asynccontextmanager
async def serving(metrics: Metrics | None = None, **options: Any) -> AsyncIterator[tuple[ServedEngine, CoreThread]]:
    """A started engine and its core; in the end nothing may be held, unless it died."""
    config = ServerConfig.from_flat(**({"device": "mock"} | options))
    made: list[CoreThread] = []

    def launch(start: Any) -> CoreThread:
        made.append(CoreThread(start, build))
        return made[-1]

    engine = ServedEngine(config, metrics=metrics or Metrics(), launch=launch)
    try:
        await engine.start(lambda loading: None)
        yield engine, made[0]
        if engine.state is not EngineState.DEAD:
            await engine.wait_idle()
            assert await engine.control("check") is True
            assert engine.front is not None and len(engine.front) == 0 and not any(engine._deadlines._lines.values())
    finally:
        await engine.close()
    assert made[0].ended() == ("ended with code 1" if isinstance(engine.failure, EngineDead) else "ended with code 0")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that goes to a core."""
    messages: list[Any] = []
    original = CoreClient.send
    monkeypatch.setattr(CoreClient, "send", lambda self, message: (messages.append(message), original(self, message)))
    return messages


def params(tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **(
            {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "seed": 0, "output_kind": OutputKind.DELTA}
            | fields
        )
    )


def open_one(engine: ServedEngine, tokens: int = 8, prompt: list[int] | None = None, **fields: Any) -> RequestStream:
    return engine.open([Prompt(token_ids=prompt or PROMPT)], params(tokens, **fields), request_id="r")


async def read(stream: RequestStream) -> list[list[RequestOutput]]:
    """All outputs by prompt; closes the stream."""
    found: list[list[RequestOutput]] = [[] for _ in stream.generations]
    try:
        async for changed in stream:
            assert changed
            for index, output in changed:
                found[index].append(output)
    finally:
        stream.close()
    return found


def token_ids(outputs: list[RequestOutput], completion: int = 0) -> list[int]:
    return [token for output in outputs for token in output.outputs[completion].token_ids]


def expected(engine: ServedEngine, prompt: list[int], count: int, seed: int = 0) -> list[int]:
    assert engine.ready is not None
    return mock_tokens(prompt, seed, count, engine.ready.vocab_size)


# --- what comes out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_get_their_tokens_and_text(depth: int) -> None:
    async def work() -> None:
        async with serving(async_depth=depth) as (engine, _):
            streams = [open_one(engine, 5 + i, [i + 1, 2, 3]) for i in range(20)]
            answers = await asyncio.gather(*map(read, streams))
            assert engine.text is not None and engine.text.tokenizer is not None
            for i, (outputs,) in enumerate(answers):
                ids = expected(engine, [i + 1, 2, 3], 5 + i)
                assert token_ids(outputs) == ids and outputs[-1].finished
                assert outputs[-1].outputs[0].finish_reason == "length"
                text = "".join(o.outputs[0].text for o in outputs)
                assert text == engine.text.tokenizer.decode([3, *ids])[len(engine.text.tokenizer.decode([3])) :]

    run(work())


def test_prompts_and_completions_of_one_request() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            prompts = [Prompt(token_ids=[1, 2]), Prompt(text="hello")]
            asked = params(6, n=3, temperature=1.0, output_kind=OutputKind.FINAL_ONLY)
            stream = engine.open(prompts, asked, request_id="many")
            assert [g.request_id for g in stream.generations] == ["many-0", "many-1"]
            found = await read(stream)
            assert [len(outputs) for outputs in found] == [1, 1]
            for (output,) in found:
                assert output.finished and [len(c.token_ids) for c in output.outputs] == [6, 6, 6]
                assert len({tuple(c.token_ids) for c in output.outputs}) == 3
            assert found[0][0].outputs[0].token_ids == expected(engine, [1, 2], 6)

    run(work())


def test_a_slow_reader_gets_several_tokens_at_once() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            slow, quick = open_one(engine, 30), open_one(engine, 30, [9])
            await read(quick)
            (outputs,) = await read(slow)
            assert token_ids(outputs) == expected(engine, PROMPT, 30) and len(outputs) == 1

    run(work())


def test_logprobs_and_scored_prompts() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            (outputs,) = await read(open_one(engine, 3, logprobs=2, prompt_logprobs=1))
            logprobs = [entry for o in outputs for entry in o.outputs[0].logprobs or ()]
            ids = token_ids(outputs)
            assert [next(iter(entry)) for entry in logprobs] == ids and all(len(e) == 2 for e in logprobs)
            scored = outputs[-1].prompt_logprobs
            assert scored is not None and scored[0] is None and [6 in (scored[1] or ()), 7 in (scored[2] or ())]

    run(work())


def test_a_stop_string_ends_it_in_the_core_too() -> None:
    async def work() -> None:
        async with serving(mock_step_ms=1.0) as (engine, thread):
            (whole,) = await read(open_one(engine, 12))
            text = "".join(o.outputs[0].text for o in whole)
            stop = text[5:8]
            (outputs,) = await read(open_one(engine, 4000, stop=stop))
            shown = "".join(o.outputs[0].text for o in outputs)
            assert shown == text[: text.index(stop)] and outputs[-1].outputs[0].stop_reason == stop
            assert thread.core is not None
            while thread.core.has_work:
                await asyncio.sleep(0.01)

    run(work())


# --- who may come -----------------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_served_is_refused_at_once_and_whole() -> None:
    async def work() -> None:
        counted = Counted()
        async with serving(counted, max_model_len=64) as (engine, _):
            good, long = Prompt(token_ids=[1]), Prompt(token_ids=[1] * 65)
            with pytest.raises(PromptTooLong):
                engine.open([good, long], params(), request_id="r")
            with pytest.raises(InvalidParameter):
                engine.open([good], params(), request_id="r", priority=3)
            assert engine.num_live == 0 and engine.last_step_age is None
            assert "request_started" not in counted.calls

    run(work())


def test_a_fault_of_ours_over_one_request_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            monkeypatch.setattr(front_end, "sampler_spec", lambda *args: 1 / 0)
            with pytest.raises(RequestFailed) as caught:
                open_one(engine)
            assert caught.value.code == "internal" and engine.num_live == 0

    run(work())


def test_before_it_is_ready_and_while_it_drains() -> None:
    async def work() -> None:
        engine = ServedEngine(ServerConfig.from_flat(device="mock"), metrics=Metrics())
        with pytest.raises(EngineStarting):
            open_one(engine)
        async with serving(mock_step_ms=2.0) as (engine, _):
            running = asyncio.create_task(read(open_one(engine, 20)))
            await asyncio.sleep(0)
            engine.drain()
            assert engine.state is EngineState.DRAINING
            with pytest.raises(EngineClosed):
                open_one(engine)
            assert not running.done()
            await engine.wait_idle()
            assert token_ids((await running)[0]) == expected(engine, PROMPT, 20)

    run(work())


def test_what_the_core_refuses_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving(max_num_seqs=1, max_waiting=1, mock_step_ms=5.0) as (engine, _):
            monkeypatch.setattr(engine, "_bound", 100)  # here everything is taken
            first = open_one(engine, 10)
            await first.__anext__()
            second = open_one(engine, 3)
            third = engine.open([Prompt(token_ids=[1]), Prompt(token_ids=[2])], params(3), request_id="t")
            with pytest.raises(QueueFull):
                await read(third)
            assert len(token_ids((await read(second))[0])) == 3
            await read(first)

    run(work())


@pytest.mark.parametrize(("count", "n"), [(3, 1), (2, 2), (1, 3)])
def test_a_request_of_which_only_a_part_fits_is_refused_whole(count: int, n: int, sent: list[Any]) -> None:
    """Nothing of it reaches the core, where a prompt that does fit would run for nothing."""

    async def work() -> None:
        counted = Counted()
        async with serving(counted, max_num_seqs=2, max_waiting=2, mock_step_ms=5.0) as (engine, _):
            first, second = open_one(engine, 10), open_one(engine, 3)  # two more would fit
            prompts, before = [Prompt(token_ids=[i]) for i in range(count)], len(sent)
            with pytest.raises(QueueFull, match=f"{count * n} more do not fit.*try again later"):
                engine.open(prompts, params(3, n=n, temperature=float(n > 1)), request_id="t")
            assert len(sent) == before and engine.num_live == len(engine.front or ()) == 2
            assert len(counted.calls["request_started"]) == 2
            fits = engine.open(prompts[:2], params(3), request_id="f") if n == 1 else open_one(engine, 3)
            assert all(await asyncio.gather(read(first), read(second), read(fits)))

    run(work())


def test_what_is_taken_here_is_not_refused_in_the_core() -> None:
    """Requests of one to four prompts that end, are given up and are refused, as fast as they come."""

    async def come(engine: ServedEngine, i: int) -> bool:
        try:
            stream = engine.open([Prompt(token_ids=[i])] * (i % 4 + 1), params(i % 5 + 1), request_id=f"r{i}")
        except QueueFull:
            return False
        if i % 3 == 0:
            await stream.__anext__()
            stream.close()
        elif i % 3 == 1:
            await read(stream)  # no QueueFull from here
        else:
            stream.close()
        return True

    async def work() -> None:
        async with serving(max_num_seqs=3, max_waiting=4) as (engine, _):
            tasks = []
            for i in range(300):
                tasks.append(asyncio.create_task(come(engine, i)))
                await asyncio.sleep(0.001 * (i % 2))
            assert set(await asyncio.gather(*tasks)) == {True, False}

    run(work())


def test_twenty_times_what_can_run_is_refused_by_default() -> None:
    async def work() -> None:
        async with serving(max_num_seqs=64, mock_step_ms=5.0) as (engine, _):
            taken, refused = [], 0
            for i in range(1280):
                try:
                    taken.append(open_one(engine, 3, prompt=[i]))
                except QueueFull:
                    refused += 1
            assert (len(taken), refused) == (64 + 1024, 1280 - 64 - 1024)
            assert all(await asyncio.gather(*map(read, taken)))

    run(work())


def test_a_burst_that_fits_the_slots_is_taken_whatever_the_bound() -> None:
    async def work() -> None:
        async with serving(max_num_seqs=8, max_waiting=1) as (engine, _):
            prompts = [Prompt(token_ids=[i]) for i in range(9)]
            assert all(await read(engine.open(prompts, params(3), request_id="r")))

    run(work())


@pytest.mark.parametrize(("count", "n", "param"), [(10, 1, "prompt"), (1, 10, "n"), (5, 2, "n")])
def test_what_never_fits_is_the_callers_mistake(count: int, n: int, param: str) -> None:
    async def work() -> None:
        async with serving(max_num_seqs=8, max_waiting=1) as (engine, _):
            prompts = [Prompt(token_ids=[i]) for i in range(count)]
            with pytest.raises(InvalidParameter, match="10 completions .* never fit: at most 9 do") as caught:
                engine.open(prompts, params(3, n=n, temperature=float(n > 1)), request_id="r")
            assert caught.value.param == param and engine.num_live == 0

    run(work())


def test_whose_time_is_up_before_it_began_has_waited_too_long() -> None:
    async def work() -> None:
        async with serving(max_num_seqs=1, mock_step_ms=5.0) as (engine, _):
            first = open_one(engine, 60)
            prompts = [Prompt(token_ids=PROMPT), Prompt(token_ids=PROMPT)]
            with pytest.raises(QueueTimeout, match=r"request w waited \S+ s and did not start"):
                await read(engine.open(prompts, params(3), request_id="w", timeout=0.1))
            await read(first)
            late = engine.open(prompts, params(4000), request_id="late", timeout=0.1)
            with pytest.raises(RequestFailed):  # one of its prompts began
                await read(late)

    run(work())


def test_who_waits_too_long_is_told() -> None:
    async def work() -> None:
        counted = Counted()
        async with serving(counted, max_num_seqs=1, mock_step_ms=5.0, queue_timeout=0.15) as (engine, _):
            first = open_one(engine, 80)
            waiting = [open_one(engine, 3) for _ in range(5)]
            for stream in waiting:
                with pytest.raises(QueueTimeout):
                    await read(stream)
            assert engine._deadlines._timer is None and engine.num_live == 1
            ended = [(one["state"], one["cause"]) for one in engine.requests()]
            assert ended == [("running", "")] + [("abort", "queue_timeout")] * 5 and waiting[0].cause == "queue_timeout"
            (outputs,) = await read(first)
            assert token_ids(outputs) == expected(engine, PROMPT, 80)
            assert [args[0] for args, _ in counted.calls["rejected"]] == ["queue_timeout"] * 5
            assert "aborted" not in counted.calls

    run(work())


def test_time_limits_of_a_request_come_before_those_of_the_server() -> None:
    """The blocks of those that had no first token in time are free again."""

    async def work() -> None:
        counted = Counted()
        async with serving(counted, max_num_seqs=2, mock_step_ms=300.0) as (engine, _):
            prompt, long = [Prompt(token_ids=PROMPT)], DeadlineConfig(first_token_timeout=60.0)
            patient = engine.open(prompt, params(3), request_id="patient", deadlines=long)
            hasty = engine.open(
                prompt, params(3), request_id="hasty", deadlines=DeadlineConfig(first_token_timeout=0.02)
            )
            impatient = engine.open(prompt, params(3), request_id="late", deadlines=DeadlineConfig(queue_timeout=0.01))
            with pytest.raises(RequestFailed) as caught:
                await read(hasty)
            assert caught.value.code == hasty.cause == "first_token_timeout"
            with pytest.raises(QueueTimeout, match=r"waited 0.01 s"):
                await read(impatient)
            (outputs,) = await read(patient)
            assert len(token_ids(outputs)) == 3 and await engine.control("check") is True
            told = {name: [args[0] for args, _ in counted.calls[name]] for name in ("rejected", "aborted")}
            assert told == {"rejected": ["queue_timeout"], "aborted": ["first_token_timeout"]}

    run(work())


def test_what_answers_consist_of_is_told_at_the_start() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            assert engine.ready is not None and "hermes" in engine.ready.notes[-1]
        with pytest.raises(ConfigError, match="hermes"):
            async with serving(tool_call_parser="nonsense"):
                pass

    run(work())


def test_who_takes_too_long_fails_alone() -> None:
    async def work() -> None:
        counted = Counted()
        async with serving(counted, mock_step_ms=5.0, request_timeout=30.0) as (engine, _):
            prompt = [Prompt(token_ids=PROMPT)]
            late = engine.open(prompt, params(4000), request_id="late", timeout=0.1)
            (outputs,) = await read(open_one(engine, 10))
            with pytest.raises(RequestFailed) as caught:
                await read(late)
            assert caught.value.code == "deadline" and len(token_ids(outputs)) == 10
            assert counted.calls["aborted"] == [(("deadline",), {})]
            assert {record["cause"] for record in engine.requests()} == {"", "deadline"}

    run(work())


# --- who goes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "prefill", "decode", "finished"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_reader_that_goes_away_leaves_nothing(when: str, depth: int) -> None:
    async def work() -> None:
        options = {"max_num_seqs": 1} if when == "queued" else {}
        budget = 64 if when == "prefill" else 2048
        async with serving(
            mock_step_ms=2.0, async_depth=depth, max_num_batched_tokens=budget, **({"max_num_seqs": 8} | options)
        ) as (engine, thread):
            other = open_one(engine, 60)
            await other.__anext__()
            length = 2000 if when == "prefill" else 40
            leaving = open_one(engine, 3 if when == "finished" else 500, list(range(1, length)), n=1)
            if when == "finished":
                while leaving.num_open:
                    await asyncio.sleep(0.002)
            elif when == "decode":
                await leaving.__anext__()
            else:
                await asyncio.sleep(0.02)
            leaving.close()
            leaving.close()
            assert engine.num_live == 1
            await read(other)
            assert other.generations[0].completions[0].token_ids == expected(engine, PROMPT, 60)
            assert thread.core is not None
            while thread.core.has_work:
                await asyncio.sleep(0.002)

    run(work())


def test_a_reader_that_is_cancelled_closes() -> None:
    async def work() -> None:
        async with serving(mock_step_ms=50.0) as (engine, _):
            task = asyncio.create_task(read(open_one(engine, 1000)))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.num_live == 0

    run(work())


def test_a_request_that_fails_in_the_core_fails_alone() -> None:
    async def work() -> None:
        async with serving() as (engine, thread):
            assert thread.core is not None
            thread.core.executor.fail["bad"] = 3  # type: ignore[attr-defined]
            bad = engine.open([Prompt(token_ids=PROMPT)], params(20), request_id="bad")
            good = open_one(engine, 20)
            with pytest.raises(RequestFailed) as caught:
                await read(bad)
            assert caught.value.code == "nan_logits"
            assert token_ids((await read(good))[0]) == expected(engine, PROMPT, 20)

    run(work())


@pytest.mark.parametrize("where", ["push", "output"])
def test_a_request_whose_text_fails_fails_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        counted = Counted()
        async with serving(counted, mock_step_ms=1.0) as (engine, _):
            bad, good = open_one(engine, 4000), open_one(engine, 20)
            target: Any = bad.generations[0].completions[0].text if where == "push" else bad.generations[0]
            monkeypatch.setattr(target, where, lambda *args, **kwargs: 1 / 0)
            with pytest.raises(RequestFailed) as caught:
                await read(bad)
            assert caught.value.code == "internal"
            assert counted.calls["aborted"] == [(("internal",), {})]
            assert token_ids((await read(good))[0]) == expected(engine, PROMPT, 20)

    run(work())


# --- the end ----------------------------------------------------------------------------------------------------


def test_a_dead_engine_is_told_to_everybody() -> None:
    async def work() -> None:
        async with serving(mock_step_ms=2.0) as (engine, thread):
            told = asyncio.create_task(engine.closed())
            streams = [open_one(engine, 4000) for _ in range(10)]
            tasks = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.05)
            assert thread.core is not None

            def lost() -> Any:
                raise OSError("device lost")

            thread.core.executor.collect = lost  # type: ignore[method-assign]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(type(result) is EngineDead and "device lost" in str(result) for result in results)
            assert "device lost" in str(await told) and "device lost" in str(await engine.closed())
            assert engine.state is EngineState.DEAD and engine.num_live == 0
            with pytest.raises(EngineDead, match="device lost"):
                open_one(engine)
            with pytest.raises(EngineDead):
                await engine.control("reset_prefix_cache")
            await engine.wait_idle()

    run(work())


def test_a_fault_of_the_front_end_as_a_whole_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        config = ServerConfig.from_flat(device="mock")
        engine = ServedEngine(config, metrics=Metrics(), launch=lambda start: CoreThread(start, build))
        await engine.start(lambda loading: None)
        monkeypatch.setattr(engine.front, "take", lambda outputs: 1 / 0)
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            await read(open_one(engine))
        await engine.close()

    run(work())


def test_closing_ends_streams_and_is_idempotent() -> None:
    async def work() -> None:
        async with serving(mock_step_ms=2.0) as (engine, _):
            stream = open_one(engine, 4000)
            await stream.__anext__()
            await engine.close()
            with pytest.raises(EngineClosed):
                await read(stream)
            assert isinstance(engine.failure, EngineClosed) and engine.state is EngineState.DEAD
            await engine.close()

    run(work())


@pytest.mark.parametrize(
    "options, error",
    [
        ({"model": "/nowhere/at/all"}, ModelNotFound),
        ({"max_model_len": 10**7}, ConfigError),  # found by the core
        ({"chat_template": "/nowhere.jinja"}, ConfigError),  # found by the text side
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(options: dict[str, Any], error: type[Exception]) -> None:
    async def work() -> None:
        with pytest.raises(error):
            async with serving(**options):
                pass

    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc").is_dir() else None
    run(work())
    gc.collect()
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_start_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        held = threading.Event()

        def slow_build(config: Any, send: Any) -> Any:
            held.wait(PATIENCE)
            return build(config, send)

        threads: list[CoreThread] = []

        def launch(start: Any) -> CoreThread:
            threads.append(CoreThread(start, slow_build))
            return threads[0]

        engine = ServedEngine(ServerConfig.from_flat(device="mock"), metrics=Metrics(), launch=launch)
        starting = asyncio.create_task(engine.start(lambda loading: None))
        while not threads:
            await asyncio.sleep(0.01)
        starting.cancel()
        threading.Timer(0.3, held.set).start()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert engine.state is EngineState.DEAD
        await engine.close()

    run(work())


# --- what is told -----------------------------------------------------------------------------------------------


def test_the_age_of_the_last_step_grows_while_a_step_hangs() -> None:
    async def work() -> None:
        async with serving() as (engine, thread):
            assert engine.last_step_age is None and thread.core is not None
            held, collect = threading.Event(), thread.core.executor.collect

            def hang() -> Any:
                held.wait(PATIENCE)
                return collect()

            thread.core.executor.collect = hang  # type: ignore[method-assign]
            reading: Callable[[], float] = lambda: engine.last_step_age or 0.0  # noqa: E731
            stream = open_one(engine, 3)
            before = reading()
            await asyncio.sleep(0.1)
            assert reading() >= before + 0.05
            held.set()
            await read(stream)
            assert engine.last_step_age is None

    run(work())


def test_a_hang_is_known_without_requests_here_until_its_core_goes_on_or_is_another() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            place, timeout = engine.place, 60.0
            note_hang(place, time.monotonic() - 100.0)
            told = readiness(engine, timeout)
            assert told.status == "hung" and told.alive and "for 100 s" in told.reason
            assert await read(open_one(engine, 1)) and readiness(engine, timeout).status == "hung"
            note_hang(place, None)
            assert readiness(engine, timeout).ready
            note_hang(place.of_core(1), time.monotonic() - 100.0)
            assert readiness(engine, timeout).ready

    run(work())


def test_a_core_notes_its_hang_and_the_end() -> None:
    async def work() -> None:
        async with serving(hang_timeout=0.01) as (engine, thread):
            held, collect = threading.Event(), thread.core.executor.collect  # type: ignore[union-attr]

            def hang() -> Any:
                held.wait(PATIENCE)
                return collect()

            thread.core.executor.collect = hang  # type: ignore[union-attr, method-assign]
            asked = open_one(engine, 3)
            while hung_since(engine.place) == math.inf:
                await asyncio.sleep(0.01)
            asked.close()  # its client leaves, and the engine hangs all the same
            assert engine.num_live == 0 and not readiness(engine, 0.01).ready
            held.set()
            while not readiness(engine, 0.01).ready:
                await asyncio.sleep(0.01)

    run(work())


def test_metrics_hear_of_every_request_once() -> None:
    async def work() -> None:
        counted = Counted()
        async with serving(counted, mock_step_ms=3.0) as (engine, _):
            gone = open_one(engine, 1000)
            await gone.__anext__()
            gone.close()
            await read(open_one(engine, 6, n=2, temperature=1.0))
            calls = counted.calls
            assert len(calls["engine_ready"]) == 1 and len(calls["request_started"]) == 2
            assert len(calls["first_token"]) == 2 and [a[0] for a, _ in calls["aborted"]] == ["disconnect"]
            ends = {args[0]: values for args, values in calls["request_finished"]}
            assert ends.keys() == {"abort", "length"}
            whole = ends["length"]
            assert (whole["num_prompt"], whole["num_outputs"]) == (3, [6, 6])
            assert len(whole["token_s"]) == 2
            assert sum(whole["token_s"]) / 2 == pytest.approx(whole["decode_s"] / 5, rel=0.5)  # per completion
            assert whole["queue_s"] + whole["prefill_s"] + whole["decode_s"] == pytest.approx(whole["e2e_s"], abs=1e-6)
            assert min(whole["queue_s"], whole["prefill_s"], whole["decode_s"]) >= 0
            gaps = sum(args[1] for args, _ in calls["inter_token"])
            assert gaps >= 10 and sum(args[0] for args, _ in calls["tokens"]) >= 13
            assert len(calls["step"]) >= 6

    began = time.monotonic()
    run(work())
    assert time.monotonic() - began < PATIENCE


def test_preemptions_are_counted_by_request_and_tokens_by_step() -> None:
    """A step's tokens are those of prompts, or of a past that is computed again, and those that it generates."""

    async def work() -> None:
        metrics = Metrics()
        async with serving(
            metrics, block_size=16, num_gpu_blocks_override=5, max_model_len=64, max_num_seqs=2, mock_step_ms=1.0
        ) as (engine, _):

            def total(name: str) -> float:
                body = metrics.render()[0].decode()
                return next(float(line.split()[-1]) for line in body.splitlines() if line.startswith(f"quire:{name}{{"))

            await read(open_one(engine, 7))
            assert total("iteration_tokens_total_sum") == 3 + 7 and total("request_num_preemptions_sum") == 0
            assert total("request_num_preemptions_count") == 1
            await read(engine.open([Prompt(token_ids=[at, at]) for at in (8, 9)], params(62), request_id="both"))
            assert total("request_num_preemptions_count") == 3
            assert total("request_num_preemptions_sum") == total("num_preemptions_total") > 0
            assert {record["num_preemptions"] for record in engine.requests()} > {0}

    run(work())


def test_the_records_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live ones first; an ended one says what was reused, and why no more; numbers only, and not for ever."""
    monkeypatch.setattr(module, "RECENT", 4)
    prompt = list(range(100))

    async def work() -> None:
        async with serving(block_size=16, mock_step_ms=2) as (engine, _):
            first = open_one(engine, 2, prompt)
            (waiting,) = engine.requests()
            assert (waiting["request_id"], waiting["state"], waiting["prefix"]) == ("r", "waiting", None)
            await read(first)
            salted = engine.open([Prompt(token_ids=prompt, cache_salt="secret")], params(2), request_id="salted")
            await read(salted)
            await read(open_one(engine, 2, [*prompt[:40], 7, *prompt[41:]]))
            gone = open_one(engine, 900, prompt)
            await anext(gone)
            assert engine.requests()[0]["state"] == "running"
            gone.close()
            records = engine.requests()
            assert [record["state"] for record in records] == ["abort", "length", "length", "length"]
            reports = [record["prefix"] for record in records]
            assert reports[0] is None and reports[1].why is Miss.TOKENS and reports[2].why is Miss.EXTRAS
            assert (reports[1].block, reports[1].position, reports[1].differs_at) == (2, 32, 40)
            assert reports[2].detail == "salt" and reports[3].why is Miss.NEW
            ended = msgspec.json.decode(msgspec.json.encode(records[1]))
            assert (ended["num_prompt"], ended["num_cached"], ended["num_output"]) == (100, 32, 2)
            assert ended["prefix"]["why"] == "tokens" and ended["e2e_s"] >= ended["decode_s"] >= 0
            assert "secret" not in repr(records)
            await read(open_one(engine, 1))
            assert len(engine.requests()) == 4

    run(work())


def test_unknown_controls_are_errors() -> None:
    async def work() -> None:
        async with serving() as (engine, _):
            assert await engine.control("reset_prefix_cache") is True
            with pytest.raises(EngineError, match="explode"):
                await engine.control("explode")

    run(work())
