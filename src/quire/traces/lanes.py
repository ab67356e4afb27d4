"""Two steps in flight as two lanes: the CPU's calls while each step runs on the device (`quire trace --lanes`).

Nothing is made eager, and nothing waits for the device: the steps are those of an engine that nobody traces, with the
time of the recorder. On a GPU two events around the launches of a step tell when the device ran them. On a CPU the
device is the thread that computes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from quire.contracts.step import StepPlan
from quire.engine.plan_writer import InFlight
from quire.entry.llm import LLM
from quire.entry.prompts import PromptLike
from quire.observe.calls import CallRecorder, Span, Stop, methods_of
from quire.observe.render_calls import CPU, DEVICE
from quire.procs.request_trace import core_stops
from quire.text.sequence import SequenceText

PLANS = "EngineCore.begin_step"
NUMBERED = ("submit", "collect", "apply")  # of the core, its executor, finisher and front end: once for each step
WAITS = "collect"  # the only call in which the CPU waits for the device


def trace_lanes(llm: LLM, prompt: PromptLike, *, max_tokens: int, **sampling: Any) -> Span:
    """Run a request, and return a call with two lanes: `CPU` with the calls of the engine, `device` with its steps.

    It first runs without a recorder, to warm up, over an empty prefix cache. The engine is in this process.

    sampling   other sampling parameters of the request
    """
    engine, params = (
        llm.engine,
        llm.get_default_sampling_params().clone(max_tokens=max_tokens, ignore_eos=True, **sampling),
    )
    assert engine.runner is not None, "the device belongs to another process"
    for _ in range(2):
        llm.reset_prefix_cache()
        llm.generate(prompt, params, use_tqdm=False)
    llm.reset_prefix_cache()
    plans = list[InFlight]()

    def told(result: Any, open_ones: list[Span]) -> None:
        span = open_ones[-1].inside[-1]
        if isinstance(result, InFlight) and span.name == PLANS:
            span.name += f" of step {len(plans)}"
            plans.append(result)

    with CallRecorder(_stops(llm), told=told) as recorder:
        cuda = engine.device.device == "cuda"
        events = _Events(engine.runner, recorder) if cuda else None
        llm.generate(prompt, params, use_tqdm=False)
    own, ran = _by_thread(recorder.root)
    _number(own, {})
    times = ran if events is None else events.times()
    steps = [
        Span(_phase(number, one), "", begin=begin, end=end)
        for number, (one, (begin, end)) in enumerate(zip(plans, times, strict=True))
    ]
    lanes = [Span(CPU, "", begin=own[0].begin, end=own[-1].end, inside=own), Span(DEVICE, "", inside=steps)]
    lanes[1].begin, lanes[1].end = steps[0].begin, steps[-1].end
    name = f"{engine.folder.name}, {engine.dtype.dtype} on {engine.device.device}"
    name += f"; {engine.core.facts.depth} steps in flight"
    return Span(name, "", begin=own[0].begin, end=max(lanes[0].end, lanes[1].end), inside=lanes)


def lane_lines(root: Span) -> Iterator[str]:
    """Yield the lines of a request in two lanes: each step of the device with the calls of the CPU meanwhile.

    A call stands below each step that runs at the same time, else below the next one.
    """
    cpu, device = root.inside
    start, idle_since = device.begin, device.begin
    shown = [one for call in cpu.inside for one in _shown(call)]
    left = [one for one in shown if not any(_overlap(one, step) for step in device.inside)]

    def lines(calls: list[Span]) -> Iterator[str]:
        for one in sorted(calls, key=lambda one: one.begin):
            yield f"{1e3 * one.seconds:9.3f} ms    at {_ms(one.begin - start)}  {one.name}  {one.where}"

    yield f"{1e3 * root.seconds:9.3f} ms  {root.name}; times since the begin of step 0"
    for step in device.inside:
        beside = [one for one in shown if _overlap(one, step)]
        between = [one for one in left if one.begin < step.begin]
        left = [one for one in left if one.begin >= step.begin]
        waited = sum(_overlap(one, step) for one in beside if WAITS in one.name)
        worked = sum(_overlap(one, step) for one in cpu.inside) - waited
        yield ""
        yield (
            f"{1e3 * step.seconds:9.3f} ms  {step.name}  from {_ms(step.begin - start)} to {_ms(step.end - start)} ms; "
            f"device idle before: {_ms(max(0, step.begin - idle_since))} ms; "
            f"CPU works {_ms(worked)} ms, waits {_ms(waited)} ms"
        )
        yield from lines(between + beside)
        idle_since = step.end
    yield from ["", "              after the last step", *lines(left)] if left else ()


def _stops(llm: LLM) -> Iterator[Stop]:
    yield from core_stops(llm.engine.core)
    yield from methods_of([(type(llm._front).__name__, llm._front)])
    yield SequenceText, "push", "SequenceText.push"
    runner = llm.engine.runner
    yield from ((runner, name, f"StepRunner.{name}") for name in ("submit", "release", "collect"))


def _by_thread(root: Span) -> tuple[list[Span], list[tuple[int, int]]]:
    """Return the calls of the engine's thread, and the begin and end of each step that another thread ran."""
    ran = [one for one in root.inside if one.name.startswith("StepRunner.")]
    begins = [one.begin for one in ran if one.name == "StepRunner.submit"]
    ends = [one.end for one in ran if one.name == "StepRunner.collect"]
    return [one for one in root.inside if one not in ran], list(zip(begins, ends, strict=False))


def _number(calls: list[Span], counts: dict[str, int]) -> None:
    """Name the step of each call that comes once for each step, in the order of the steps."""
    for call in calls:
        name = call.name
        empty = name == "FrontEnd.apply" and counts.get(name, 0) == counts.get("Finisher.apply", 0)  # of no step
        if name.rpartition(".")[2] in NUMBERED and not name.startswith("StepRunner.") and not empty:
            call.name += f" of step {counts.get(name, 0)}"
            counts[name] = counts.get(name, 0) + 1
        _number(call.inside, counts)


def _shown(call: Span) -> Iterator[Span]:
    """Yield the outermost calls that are about one step."""
    if " of step " in call.name:
        yield call
        return
    for inner in call.inside:
        yield from _shown(inner)


def _overlap(one: Span, other: Span) -> int:
    return max(0, min(one.end, other.end) - max(one.begin, other.begin))


def _phase(number: int, planned: InFlight) -> str:
    count = int(planned.plan.num_tokens.sum())
    return f"step {number}: {'prefill' if planned.num_prefills else 'decode'}, {count} token{'s' * (count != 1)}"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f}"


class _Events:
    """Events of a GPU before and after the launches of each step."""

    def __init__(self, runner: Any, recorder: CallRecorder) -> None:
        self._pairs = list[list[torch.cuda.Event]]()
        self._origin = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._origin.record()
        torch.cuda.synchronize()
        self._at = perf_counter_ns()
        recorder.put(runner, "submit", partial(self._submitted, runner.submit))
        recorder.put(runner, "release", partial(self._released, runner.release))

    def times(self) -> list[tuple[int, int]]:
        """Return the begin and end of each step on the device, in nanoseconds of the host's clock."""
        torch.cuda.synchronize()
        return [(self._time(begin), self._time(end)) for begin, end in self._pairs]

    def _time(self, event: torch.cuda.Event) -> int:
        return self._at + int(1e6 * self._origin.elapsed_time(event))

    def _submitted(self, submit: Callable[[StepPlan], None], plan: StepPlan) -> None:
        self._pairs.append([_recorded()])
        submit(plan)
        self._pairs[-1].append(_recorded())

    def _released(self, release: Callable[..., None], *given: Any) -> None:
        """The sampling of a step with grammar masks is launched later."""
        release(*given)
        self._pairs[-1][1] = _recorded()


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
