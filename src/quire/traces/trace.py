"""Trace of a request from the entry point to the kernels: every call with its file, shapes and time.

The calls of the core and the front end are recorded here, those of the model runner by `worker/call_trace.py`: in this
process, or in the process of each rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from quire.contracts.adapters import LoRARequest
from quire.engine.scheduler import InFlight
from quire.entry.llm import LLM
from quire.entry.prompts import PromptLike
from quire.observe.calls import CallRecorder, Span, Stop, methods_of
from quire.plan.placement import parallel_sizes, ranks
from quire.procs.in_process import InProcessExecutor
from quire.procs.request_trace import core_stops
from quire.reports.ranks import rank_name
from quire.text.sequence import SequenceText
from quire.traces.decisions import decisions_of, with_decisions
from quire.traces.step_mode import Stepper
from quire.worker.call_trace import without_recordings, worker_stops
from quire.worker.step_drafts import Accepted

STEP = "LLM._step"


def trace(
    llm: LLM,
    prompt: PromptLike,
    *,
    max_tokens: int = 4,
    lora_request: LoRARequest | None = None,
    after: str = "",
    stepper: Stepper | None = None,
    **sampling: Any,
) -> Span:
    """Run a request and return its recorded calls. The engine has one step in flight and no CUDA graphs.

    The calls of each rank are in a call "rank N" at the end of the step. A request first runs without a trace, to
    warm up. The prefix cache is emptied before each run; then a request with the text `after` runs, if it is given, and
    the traced one finds what it left. With `after` the warm-up has this text, too: the report on the prefix cache
    would name the same prompt before a reset. Nothing else may run in this process meanwhile. Puts back all
    functions that it has replaced, also after an error.

    stepper    halts at stops of the request; the engine is in this process then
    sampling   other sampling parameters of the request, by name
    """
    engine, params = llm.engine, llm.get_default_sampling_params()
    params = params.clone(max_tokens=max_tokens, ignore_eos=True, **sampling)
    core, cuda = engine.core, engine.device.device == "cuda"
    assert core.facts.depth == core.facts.num_stages, "steps in flight would be mixed up"
    llm.reset_prefix_cache()
    llm.generate(after or prompt, params, use_tqdm=False, lora_request=lora_request)
    llm.reset_prefix_cache()
    if after:
        llm.generate(after, params, use_tqdm=False, lora_request=lora_request)
    many = engine.runner is None
    if many:
        core.executor.control("trace", {"on": True})
    with recording(llm, torch.cuda.synchronize if cuda and not many else lambda: None, stepper) as root:
        made = llm.generate(prompt, params, use_tqdm=False, lora_request=lora_request)[0]
    if many:
        add_ranks(llm, root, core.executor.control("trace", {"on": False}))
    root.begin, root.end = root.inside[0].begin, root.inside[0].end
    way = "which waits for the device after every stop; no graphs" if cuda else "without replay of recorded steps"
    root.name = f"{engine.folder.name}, {engine.dtype.dtype} on {engine.device.device}; the host's time, {way}"
    if after:
        length = len(made.prompt_token_ids or ())
        root.name += f"; {made.num_cached_tokens or 0} of {length} tokens of the prompt were in the prefix cache"
        if made.metrics is not None and made.metrics.prefix is not None:
            root.name += f", which misses {made.metrics.prefix}"
    plan = msgspec.json.decode(str(core.facts.plans["engine"]))
    return with_decisions(root, decisions_of(plan, engine.config))


@contextmanager
def recording(llm: LLM, wait: Callable[[], None] = lambda: None, stepper: Stepper | None = None) -> Iterator[Span]:
    """Context manager: yield a root span, and add the calls of the block to it.

    wait      runs at the end of each call
    stepper   is told of each call
    """
    num_steps = 0

    def name_step(result: Any, open_ones: list[Span]) -> None:
        nonlocal num_steps
        if isinstance(result, InFlight) and (count := int(result.plan.num_tokens.sum())):
            kind = "prefill" if result.num_prefills else "decode"
            step = next(span for span in open_ones if span.name == STEP)
            if step.phase:  # several functions return the plan
                return
            step.phase = f"step {num_steps}: {kind}, {count} token{'s' * (count > 1)}"
            num_steps += 1

    def told(result: Any, open_ones: list[Span]) -> None:
        name_step(result, open_ones)
        if isinstance(result, Accepted):  # shown here, not in a server, whose steps have tokens of other requests
            rows = zip(result.tokens.tolist(), result.num_accepted.tolist(), strict=True)
            open_ones[-1].inside[-1].gives += "".join(f"; tokens {row[:count]}" for row, count in rows)
        if stepper is not None:
            stepper.told(result, open_ones)

    def began(*call: Any) -> None:
        if stepper is not None:
            stepper.began(*call)

    with CallRecorder(engine_stops(llm), wait, told, began) as recorder:
        if llm.engine.runner is not None:
            without_recordings(recorder, llm.engine.runner)
        yield recorder.root


def engine_stops(llm: LLM) -> Iterator[Stop]:
    """Yield (owner, attribute, name) of every function to record in this process."""
    core = llm.engine.core
    yield from core_stops(core)
    yield from methods_of((type(part).__name__, part) for part in (llm, llm._front))
    yield llm, "_step", STEP
    yield SequenceText, "push", "SequenceText.push"
    if isinstance(core.executor, InProcessExecutor):
        yield core.executor._runner, "_run", "StepRunner.run"
    if llm.engine.runner is not None:
        yield from worker_stops(llm.engine.runner, llm.engine.kernels)


def add_ranks(llm: LLM, root: Span, traced: object) -> None:
    """Add the calls of every rank to the steps: each rank runs the steps in their order."""
    steps, parallel = list(_steps(root)), parallel_sizes(llm.engine.config.parallel)
    every = msgspec.convert(traced, list[list[Span]])
    for rank, calls in zip(ranks(llm.engine.args, parallel), every, strict=True):
        ways = [[call for call in calls if call.name == name] for name in ("StepRunner.submit", "StepRunner.collect")]
        for number, step in enumerate(steps):
            if own := [way[number] for way in ways if number < len(way)]:
                step.inside.append(
                    Span(
                        rank_name(rank, parallel),
                        "a process of its own",
                        begin=own[0].begin,
                        end=own[-1].end,
                        inside=own,
                    )
                )


def _steps(span: Span) -> Iterator[Span]:
    if span.phase:
        yield span
    for inner in span.inside:
        yield from _steps(inner)
