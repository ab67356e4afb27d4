"""The asynchronous class: many callers, one engine thread; what one caller does or meets touches no other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import AsyncLLM, OutputKind, RequestOutput, SamplingParams
from quire.contracts.errors import (
    EngineClosed,
    EngineDead,
    InvalidParameter,
    PromptTooLong,
    QueueFull,
    RequestError,
    RequestFailed,
)

from ..support.logits_tap import LogitsTap

Greedy = Callable[..., SamplingParams]
Make = Callable[..., AsyncLLM]


@pytest.fixture
def make_engine() -> Iterator[Callable[..., AsyncLLM]]:
    """Makes float32 engines without a tokenizer; they are closed at the end."""
    made: list[AsyncLLM] = []

    def build(folder: Path, **options: Any) -> AsyncLLM:
        defaults = dict(
            dtype="float32",
            num_threads=1,
            skip_tokenizer_init=True,
            max_num_seqs=7,
            use_tqdm_on_load=False,
            kv_cache_memory_bytes=1 << 22,
        )
        made.append(AsyncLLM(str(folder), **(defaults | options)))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def watch_aborts(llm: AsyncLLM) -> list[int]:
    """Handles of the live requests that are aborted from now on."""
    core, aborted = llm.engine.core, []
    abort = core.abort

    def watched(handle: int) -> None:
        if handle in core._requests:
            aborted.append(handle)
        abort(handle)

    core.abort = watched  # type: ignore[method-assign]
    return aborted


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine has nothing to do; then nothing may be held."""
    core = llm.engine.core
    for _ in range(6000):
        if not core.has_work:
            break
        await asyncio.sleep(0.01)
    assert not core.has_work
    core.check()
    assert not llm._served.inboxes and not len(llm._served.front)


@pytest.mark.parametrize("depth", [1, 2])
def test_concurrent_callers_get_their_own_tokens(
    oracle: Any, make_engine: Make, greedy: Greedy, prompts: list[list[int]], depth: int
) -> None:
    llm = make_engine(oracle().folder, async_depth=depth, max_num_seqs=4)

    async def run() -> list[list[int]]:
        outputs = await asyncio.gather(*[last(llm.generate(p, greedy(24))) for p in prompts * 2])
        await idle(llm)
        return [o.outputs[0].token_ids for o in outputs]

    expected = [t[:24] for t in oracle().greedy(prompts, 64)]
    assert asyncio.run(run()) == expected * 2


def test_deltas_joined_are_the_whole(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder)

    async def run() -> list[list[int]]:
        stream = llm.generate([1, 2, 3], greedy(10, output_kind=OutputKind.DELTA))
        return [output.outputs[0].token_ids async for output in stream]

    pieces = asyncio.run(run())
    assert [len(p) for p in pieces] == [1] * 10
    assert sum(pieces, []) == oracle().greedy([[1, 2, 3]], 10)[0]


def test_a_caller_that_stops_listening_aborts_its_request(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder)

    aborted = watch_aborts(llm)

    async def run() -> None:
        other = asyncio.create_task(last(llm.generate([4, 5], greedy(60))))
        async with aclosing(llm.generate([1, 2], greedy(250))) as stream:  # type: ignore[type-var]
            async for output in stream:
                if len(output.outputs[0].token_ids) == 3:
                    break
        assert (await other).outputs[0].token_ids == oracle().greedy([[4, 5]], 60)[0]
        await idle(llm)
        assert len(aborted) == 1

    asyncio.run(run())


def test_a_cancelled_task_frees_its_request_and_those_of_n(oracle: Any, make_engine: Make) -> None:
    llm = make_engine(oracle().folder)

    aborted = watch_aborts(llm)

    async def run() -> None:
        params = SamplingParams(n=3, max_tokens=250, ignore_eos=True, seed=1)
        task = asyncio.create_task(last(llm.generate(list(range(1, 40)), params)))
        while not llm.engine.core.has_work:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        assert len(aborted) == 3

    asyncio.run(run())


def test_a_bad_request_fails_alone(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder)
    bad: list[tuple[Any, Any, type[Exception]]] = [
        ([96], greedy(1), InvalidParameter),
        ([], greedy(1), InvalidParameter),
        ([1] * 256, greedy(1), PromptTooLong),
        ("text", greedy(1), InvalidParameter),
        ([1], {"temperature": 0.0}, InvalidParameter),
    ]

    async def run() -> None:
        good = asyncio.create_task(last(llm.generate([4, 5], greedy(30))))
        for prompt, params, kind in bad:
            with pytest.raises(kind):
                await last(llm.generate(prompt, params))
        assert (await good).outputs[0].token_ids == oracle().greedy([[4, 5]], 30)[0]
        await idle(llm)

    asyncio.run(run())


def test_a_full_queue_refuses_one_caller(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder, max_waiting=1, max_num_seqs=1)

    async def run() -> list[Any]:
        calls = [last(llm.generate([i + 1], greedy(20))) for i in range(6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(run())
    refused = [o for o in outcomes if isinstance(o, QueueFull)]
    served = [o for o in outcomes if isinstance(o, RequestOutput)]
    assert refused and served and len(refused) + len(served) == 6


def test_a_timeout_fails_the_request_alone(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder)

    async def run() -> None:
        await last(llm.generate([1], greedy(1)))  # warm
        good = asyncio.create_task(last(llm.generate([4, 5], greedy(30))))
        with pytest.raises(RequestFailed, match="deadline") as failed:
            await last(llm.generate([1, 2], greedy(250), timeout=0.02))
        assert failed.value.code == "deadline"
        assert (await good).outputs[0].token_ids == oracle().greedy([[4, 5]], 30)[0]
        await last(llm.generate([1, 2], greedy(3), timeout=60.0))
        await idle(llm)

    asyncio.run(run())


@pytest.mark.parametrize("depth", [1, 2])
def test_broken_logits_fail_their_request_alone(oracle: Any, make_engine: Make, greedy: Greedy, depth: int) -> None:
    llm = make_engine(oracle().folder, async_depth=depth, block_size=8)
    poisoned = list(range(1, 21))

    def poison(slots: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        history = llm.engine.worker.state.tables.history
        for row, slot in enumerate(slots.tolist()):
            if positions[row] == 25 and history[slot, :20].tolist() == poisoned:
                logits[row, 3] = torch.nan

    poisoning = LogitsTap(poison)

    async def run() -> None:
        good = asyncio.create_task(last(llm.generate([4, 5], greedy(60))))
        llm.engine.worker.features.attach(poisoning)
        with pytest.raises(RequestFailed, match="nan_logits") as failed:
            await last(llm.generate(poisoned, greedy(60)))
        assert failed.value.code == "nan_logits"
        assert (await good).outputs[0].token_ids == oracle().greedy([[4, 5]], 60)[0]
        llm.engine.worker.features.detach(poisoning)
        again = await last(llm.generate(poisoned, greedy(60)))  # what it computed is not trusted
        assert again.num_cached_tokens == 0
        assert again.outputs[0].token_ids == oracle().greedy([poisoned], 60)[0]
        await idle(llm)

    asyncio.run(run())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fault_reaches_every_caller_and_close_still_works(
    oracle: Any, make_engine: Make, greedy: Greedy, depth: int
) -> None:
    llm = make_engine(oracle().folder, async_depth=depth)

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    async def run() -> None:
        calls = [asyncio.create_task(last(llm.generate([i + 1], greedy(200)))) for i in range(9)]  # two of them wait
        while not llm.engine.core.has_work:
            await asyncio.sleep(0.001)
        llm.engine.worker.programs.compute = broken  # type: ignore[assignment, method-assign]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(o) for o in outcomes] == [EngineDead] * 9
        assert all("device lost" in str(o) for o in outcomes)
        with pytest.raises(EngineDead, match="device lost"):
            await last(llm.generate([1], greedy(1)))
        llm.close()
        with pytest.raises(EngineClosed):
            await last(llm.generate([1], greedy(1)))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_closing_ends_running_requests(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder)

    async def run() -> None:
        call = asyncio.create_task(last(llm.generate([1], greedy(250))))
        while not llm.engine.core.has_work:
            await asyncio.sleep(0.001)
        await asyncio.get_running_loop().run_in_executor(None, llm.close)
        with pytest.raises(EngineClosed):
            await call
        with pytest.raises(EngineClosed):
            _ = llm.engine

    asyncio.run(run())
    llm.close()


def test_chat_in_a_context_manager(talker_options: dict[str, Any]) -> None:
    async def run() -> str:
        async with AsyncLLM(**talker_options) as llm:
            messages = [{"role": "user", "content": "Tomas likes tea.\n\nWhat does Tomas like?"}]
            out = await last(llm.chat(messages, SamplingParams(temperature=0.0)))
            with pytest.raises(RequestError):
                await last(llm.generate("", SamplingParams()))
            await idle(llm)
            return out.outputs[0].text

    assert asyncio.run(run()) == "Tomas likes tea."


def test_two_event_loops_can_share_one_engine(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder)
    outputs = [asyncio.run(last(llm.generate([1, 2], greedy(5)))) for _ in range(2)]
    assert [o.outputs[0].token_ids for o in outputs] == oracle().greedy([[1, 2]], 5) * 2


def test_reset_prefix_cache_and_the_models_own(oracle: Any, make_engine: Make, greedy: Greedy) -> None:
    llm = make_engine(oracle().folder, block_size=8)
    prompt = list(range(20))

    async def run() -> list[int | None]:
        cached = [(await last(llm.generate(prompt, greedy(2)))).num_cached_tokens for _ in range(2)]
        assert await llm.reset_prefix_cache()
        return [*cached, (await last(llm.generate(prompt, greedy(2)))).num_cached_tokens]

    assert asyncio.run(run()) == [0, 16, 0]
    assert llm.get_default_sampling_params() == llm.engine.default_params
    with pytest.raises(InvalidParameter, match="skip_tokenizer_init"):
        llm.get_tokenizer()
