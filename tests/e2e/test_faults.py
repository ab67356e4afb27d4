"""Faults of a caller do not reach the others: interrupts, dead event loops, odd options."""

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM
from quire.contracts.errors import EngineDead, InvalidParameter, PromptTooLong
from quire.contracts.sampling import BeamSearchParams, OutputKind, SamplingParams
from quire.worker.taps import HiddenTap

Engine = Callable[..., LLM]
Greedy = Callable[..., SamplingParams]


@pytest.fixture
def shared_async(oracle: Any) -> Any:
    made: list[AsyncLLM] = []

    def make(**options: Any) -> AsyncLLM:
        made.append(AsyncLLM(oracle().folder, num_threads=1, skip_tokenizer_init=True, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_in_the_middle_of_a_step_leaves_the_engine_whole(
    oracle: Any, engine: Engine, greedy: Greedy, depth: int
) -> None:
    llm = engine(oracle().folder, async_depth=depth)
    worker, run = llm.engine.worker, llm.engine.worker.run
    executor = llm.engine.core.executor
    prompt = [i % 90 for i in range(64)]

    def interrupted(plan: Any, *masks: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # while the step is on its way
        time.sleep(0.01)
        return run(plan, *masks)

    executor._runner._run = interrupted  # type: ignore[attr-defined]
    worker.run = interrupted  # type: ignore[method-assign]
    if depth == 1:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], greedy(8), use_tqdm=False)
        executor._runner._run = run  # type: ignore[attr-defined]
    else:
        submit = executor.submit

        def interrupting(plan: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            submit(plan)

        executor.submit = interrupting  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], greedy(8), use_tqdm=False)
        executor.submit = submit  # type: ignore[method-assign]
    llm.engine.core.check()
    output = llm.generate([prompt], greedy(24), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == oracle().greedy([prompt], 24)[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_torn_step_is_final(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder)
    core, submit = llm.engine.core, llm.engine.core.executor.submit

    def torn(plan: Any) -> None:
        raise KeyboardInterrupt

    core.executor.submit = torn  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, EngineDead)):
        llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
    core.executor.submit = submit  # type: ignore[method-assign]
    with pytest.raises(EngineDead):
        llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
    llm.close()


def test_a_closed_event_loop_leaves_other_callers_alone(oracle: Any, shared_async: Any, greedy: Greedy) -> None:
    llm = shared_async()
    expected = oracle().greedy([[4, 5]], 40)[0]
    results: list[list[int]] = []

    async def leave() -> None:
        async for _ in llm.generate([1, 2, 3], greedy(60)):
            break  # and the loop closes while the engine goes on

    async def stay() -> None:
        last = [output async for output in llm.generate([4, 5], greedy(40))][-1]
        results.append(last.outputs[0].token_ids)

    bystander = threading.Thread(target=lambda: asyncio.run(stay()))
    bystander.start()
    for _ in range(5):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_first(llm, greedy(60)))
        loop.close()  # without closing the generator: nobody aborts
    asyncio.run(leave())
    bystander.join(60)
    assert results == [expected]
    assert not bystander.is_alive()


async def _first(llm: AsyncLLM, params: SamplingParams) -> None:
    stream = llm.generate([1, 2, 3], params)
    await stream.__anext__()
    _KEPT.append(stream)  # kept, so that it is not closed with the loop


_KEPT: list[Any] = []


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"priority": 2**63}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"timeout": math.nan}, "timeout"),
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_an_option_out_of_range_fails_its_request_alone(
    oracle: Any, shared_async: Any, greedy: Greedy, options: dict[str, Any], name: str
) -> None:
    llm = shared_async(scheduling_policy="priority")

    async def run() -> list[int]:
        with pytest.raises(InvalidParameter, match=name):
            async for _ in llm.generate([1, 2, 3], greedy(5), **options):
                pass
        return [o async for o in llm.generate([4, 5], greedy(6), priority=3)][-1].outputs[0].token_ids

    assert asyncio.run(run()) == oracle().greedy([[4, 5]], 6)[0]


def test_a_priority_without_its_policy_is_refused(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    with pytest.raises(InvalidParameter, match="scheduling_policy"):
        engine(oracle().folder).generate([[1]], greedy(2), priority=[1], use_tqdm=False)


def test_nan_in_a_prompt_that_is_only_scored_fails_it_and_is_not_reused(
    oracle: Any, engine: Engine, greedy: Greedy
) -> None:
    llm = engine(oracle().folder, block_size=8)
    worker = llm.engine.worker
    tap = HiddenTap(worker.model, lambda where, hidden: hidden.fill_(math.nan) if where == 2 else None)
    worker.features.attach(tap)
    prompt = list(range(20))
    scored = llm.generate([prompt], greedy(0, prompt_logprobs=0), use_tqdm=False)[0]
    assert (scored.outputs[0].finish_reason, scored.outputs[0].stop_reason) == ("error", "nan_logits")
    worker.features.detach(tap)
    again = llm.generate([prompt], greedy(4), use_tqdm=False)[0]
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == oracle().greedy([prompt], 4)[0]


def test_beam_search_keeps_the_salt_and_the_context(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder, block_size=8, max_model_len=64)
    prompt = [int(i) for i in np.arange(59) % 50]
    salted = {"prompt_token_ids": prompt, "cache_salt": "a"}
    found = llm.beam_search(salted, BeamSearchParams(beam_width=2, max_tokens=20))
    assert max(len(s.tokens) for s in found[0].sequences) == 64  # to the end of the context, not beyond
    assert llm.generate([prompt], greedy(1), use_tqdm=False)[0].num_cached_tokens == 0
    short = BeamSearchParams(beam_width=2, max_tokens=20)
    together = llm.beam_search([[1, 2, 3], prompt], short)  # a long neighbour cuts nobody's answer
    assert [len(o.sequences[0].tokens) for o in together] == [23, 64]
    assert llm.beam_search([], short) == []
    with pytest.raises(PromptTooLong):
        llm.beam_search([[1], [1] * 64], short)
    with pytest.raises(InvalidParameter, match="beam_width"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=40, max_tokens=2))


def test_numbers_beyond_every_float_harm_nobody(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder)
    params = [SamplingParams(temperature=1.0, seed=1, max_tokens=4, top_k=k) for k in (10**400, 0)]
    first, second = llm.generate([[1, 2], [1, 2]], params, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    with pytest.raises(InvalidParameter, match="logit_bias"):
        SamplingParams(logit_bias={5: 10**400})


def test_an_output_kind_given_as_its_number_means_the_same(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder)
    pieces = list(llm.stream([1, 2, 3], greedy(4, output_kind=1)))
    assert [len(p.outputs[0].token_ids) for p in pieces] == [1, 1, 1, 1]


def test_ctrl_c_in_one_stream_takes_nothing_from_another(oracle: Any, engine: Engine, greedy: Greedy) -> None:
    llm = engine(oracle().folder)
    delta = greedy(5, output_kind=OutputKind.DELTA)
    other, broken = llm.stream([4, 5], delta), llm.stream([1, 2, 3], greedy(40))
    got = list(next(other).outputs[0].token_ids)
    next(broken)
    submit = llm.engine.core.executor.submit

    def interrupting(plan: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        submit(plan)

    llm.engine.core.executor.submit = interrupting  # type: ignore[method-assign]
    for _ in range(4):  # to the step in which the other stream ends
        try:
            next(broken)
        except KeyboardInterrupt:
            break
    llm.engine.core.executor.submit = submit  # type: ignore[method-assign]
    for piece in other:
        got += piece.outputs[0].token_ids
    assert got == oracle().greedy([[4, 5]], 5)[0]


def test_a_second_ctrl_c_in_a_step_is_an_interrupt_and_ends_the_engine(
    oracle: Any, engine: Engine, greedy: Greedy
) -> None:
    llm = engine(oracle().folder)

    def twice(plan: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    llm.engine.core.executor.submit = twice  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
    with pytest.raises(EngineDead):
        llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
    llm.close()


def test_a_reset_nobody_waits_for_any_more_harms_nobody(oracle: Any, shared_async: Any, greedy: Greedy) -> None:
    llm = shared_async()
    expected = oracle().greedy([[4, 5]], 40)[0]
    results: list[list[int]] = []

    async def stay() -> None:
        results.append([o async for o in llm.generate([4, 5], greedy(40))][-1].outputs[0].token_ids)

    bystander = threading.Thread(target=lambda: asyncio.run(stay()))
    bystander.start()
    for _ in range(20):
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(llm.reset_prefix_cache())
        loop.run_until_complete(asyncio.sleep(0))  # the command is sent, and nobody waits for the answer
        waiting.cancel()
        loop.close()
    bystander.join(60)
    assert results == [expected]


def test_ctrl_c_before_the_first_step_leaves_no_orphan(
    oracle: Any, engine: Engine, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(oracle().folder)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quire.observe.progress.Progress.__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3]], greedy(4), use_tqdm=False)
    start = llm._start

    def starting(*args: Any, **options: Any) -> None:
        start(*args, **options)
        signal.raise_signal(signal.SIGINT)

    llm._start = starting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 2, greedy(4), use_tqdm=False)
    llm._start = start  # type: ignore[method-assign]
    assert not len(llm._front) and not llm.engine.core.has_work and not llm._mail
    output = llm.generate([[1, 2, 3]], greedy(30), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == oracle().greedy([[1, 2, 3]], 30)[0]


def test_a_close_that_was_interrupted_can_be_repeated(oracle: Any, shared_async: Any) -> None:
    llm = shared_async()
    thread = llm._served._thread

    class Interrupted:
        def join(self) -> None:
            raise KeyboardInterrupt

    llm._served._thread = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    llm._served._thread = thread
    llm.close()
    assert llm._served._engine is None and not thread.is_alive()
    llm.close()


def test_a_second_ctrl_c_in_the_clean_up_of_the_first_leaves_no_orphan(
    oracle: Any, engine: Engine, greedy: Greedy
) -> None:
    llm = engine(oracle().folder)
    core, submit, abort = llm.engine.core, llm.engine.core.executor.submit, llm.engine.core.abort
    aborted: list[int] = []

    def interrupting(plan: Any) -> None:
        if not aborted:
            signal.raise_signal(signal.SIGINT)
        submit(plan)

    def interrupted(handle: int) -> None:
        aborted.append(handle)
        if len(aborted) == 5:
            signal.raise_signal(signal.SIGINT)
        abort(handle)

    core.executor.submit, core.abort = interrupting, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 30, greedy(40), use_tqdm=False)
    core.executor.submit, core.abort = submit, abort  # type: ignore[method-assign]
    assert len(aborted) == 30
    assert not len(llm._front) and not core.has_work and not llm._mail
    core.check()


@pytest.mark.parametrize("where", ["abort", "drop"])
def test_what_an_interrupted_clean_up_left_is_found_by_the_next_run(
    oracle: Any, engine: Engine, greedy: Greedy, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(oracle().folder)
    other = llm.stream([4, 5], greedy(6))
    stream = llm.stream([1, 2, 3], SamplingParams(n=3, max_tokens=100, seed=1, ignore_eos=True))
    next(other), next(stream)
    with monkeypatch.context() as patch:

        def interrupted(_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(llm.engine.core if where == "abort" else llm._front, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert len(llm.engine.core.handles) == 4
    assert llm.generate([7], greedy(1), use_tqdm=False)[0].finished
    assert len(llm.engine.core.handles) == len(llm._front) == len(llm._mail) == 1
    assert list(other)[-1].outputs[0].token_ids == oracle().greedy([[4, 5]], 6)[0]  # what somebody waits for goes on


def test_a_stream_that_is_collected_in_the_middle_of_a_step_harms_nobody(
    oracle: Any, engine: Engine, greedy: Greedy
) -> None:
    llm = engine(oracle().folder)
    stream = llm.stream([1, 2, 3], greedy(100))
    next(stream)
    submit = llm.engine.core.executor.submit

    def closing(plan: Any) -> None:
        stream.close()  # as the garbage collector does
        submit(plan)

    llm.engine.core.executor.submit = closing  # type: ignore[method-assign]
    assert llm.generate([[4, 5]], greedy(6), use_tqdm=False)[0].outputs[0].token_ids == oracle().greedy([[4, 5]], 6)[0]
    llm.engine.core.executor.submit = submit  # type: ignore[method-assign]
    assert not len(llm._front) and not llm.engine.core.has_work and not llm._mail
