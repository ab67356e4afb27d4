"""A recorded request for a tour: its calls, and values of the calls that the tour stops at.

Calls are recorded by `quire.traces.trace`. The functions of the stops are wrapped before, so that a stop sees the
arguments and the result while they are there.
"""

import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.contracts.errors import ConfigError
from quire.contracts.output import RequestOutput
from quire.contracts.sampling import SamplingParams
from quire.engine.scheduler import Scheduler
from quire.entry.llm import LLM
from quire.observe.calls import CallRecorder, Span
from quire.tour.ran_lines import Place, RanLines
from quire.traces.trace import add_ranks, engine_stops, recording

SMALL = 1 << 16  # numbers of a tensor that is copied before its function may write over it
BEFORE = -1  # step of calls before the first step
Values = list[tuple[str, str]]  # names and what is shown of them


class SeenCall(NamedTuple):
    """A call of a stop's function: its object, arguments by name, and result. Small tensors are as they were before."""

    owner: Any
    given: dict[str, Any]
    result: Any


class TourStop(NamedTuple):
    """A place where a tour stops.

    call      name of the call in the trace, a regular expression
    step      engine step of the call; BEFORE: before the first
    marks     pieces of source: the lines with them matter, and are marked if they ran
    values    function that returns what is shown of the call; None: nothing of its arguments
    later     function that returns what is shown when the request has ended; None: nothing
    formula   "module:function" whose source is shown instead of that of the call; "": the call's own
    tie       what a formula outside `quire.kernels` has to do with the call, a key of `WORDS`; "": it computes the same
    rank      rank in whose process the call is searched; None: the engine's own
    drawing   drawing of the plan beside this stop, a key of `DRAWINGS`; "": none
    """

    call: str
    step: int
    marks: tuple[str, ...]
    values: Callable[["Live", SeenCall], Values] | None = None
    later: Callable[["Live"], Values] | None = None
    formula: str = ""
    tie: str = ""
    rank: int | None = None
    drawing: str = ""


class Live:
    """A request that ran.

    root      its calls
    prompt    its text
    output    its answer
    values    of each stop
    notes     what values of one stop tell those of another
    lines     lines that ran, of the functions of this process whose source is shown
    """

    prompt: str
    output: RequestOutput

    def __init__(self, llm: LLM, stops: Sequence[TourStop]) -> None:
        self.llm, self.stops = llm, stops
        self.root = Span("", "")
        self.values: dict[TourStop, Values] = {}
        self.notes: dict[str, Any] = {}
        self.lines: dict[Place, set[int]] = {}
        self._step = BEFORE

    def run(self, prompt: str, max_tokens: int) -> None:
        """Run a greedy request over an empty prefix cache: once for the lines that run, then recorded."""
        self.prompt = prompt
        llm, params = self.llm, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        with RanLines(self._codes()) as ran:
            llm.generate(prompt, params, use_tqdm=False)
        self.lines = ran.seen
        llm.reset_prefix_cache()
        many = llm.engine.runner is None
        with CallRecorder(()) as wrapped:
            self._watch(wrapped)
            if many:
                llm.engine.core.executor.control("trace", {"on": True})
            with recording(llm) as self.root:
                (self.output,) = llm.generate(prompt, params, use_tqdm=False)
        if many:
            add_ranks(llm, self.root, llm.engine.core.executor.control("trace", {"on": False}))
        for stop in self.stops:
            if stop.later is not None:
                self.values.setdefault(stop, []).extend(stop.later(self))

    def span(self, stop: TourStop) -> Span:
        """Return the first call of a stop. Raises ConfigError if the request did not pass it."""
        for step, rank, span in _steps(self.root, BEFORE, None):
            if (step, rank) == (stop.step, stop.rank) and re.fullmatch(stop.call, span.name):
                return span
        raise ConfigError(
            f"step {stop.step} of this request calls no {stop.call}: give a longer prompt, or another --stop."
        )

    def calls(self, name: str, step: int, rank: int) -> list[Span]:
        """Return the calls of a name in a step of a rank."""
        return [one for at, of, one in _steps(self.root, BEFORE, None) if (at, of, one.name) == (step, rank, name)]

    def _codes(self) -> Iterator[CodeType]:
        """Yield the code of all functions whose source the stops show."""
        functions = [formula_of(stop) for stop in self.stops if stop.formula]
        for owner, attribute, name in engine_stops(self.llm):
            if any(re.fullmatch(stop.call, name) for stop in self.stops):
                functions.append(inspect.unwrap(getattr(owner, attribute)))
        yield from (one.__code__ for one in functions if hasattr(one, "__code__"))

    def _watch(self, wrapped: CallRecorder) -> None:
        """Wrap the functions of all stops; `Scheduler.plan` tells the number of the step."""
        for owner, attribute, name in {stop[:2]: stop for stop in engine_stops(self.llm)}.values():
            found = [stop for stop in self.stops if stop.values and re.fullmatch(stop.call, name)]
            if found or name == "Scheduler.plan":
                wrapped.put(owner, attribute, self._watched(owner, getattr(owner, attribute), found))

    def _watched(self, owner: Any, function: Any, stops: list[TourStop]) -> Any:
        signature, plans = inspect.signature(function), isinstance(owner, Scheduler)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {name: _kept(one) for name, one in signature.bind(*args, **kwargs).arguments.items()}
            self._step += plans
            result = function(*args, **kwargs)
            self._step -= plans and result is None
            for stop in stops:
                if stop.values is not None and stop.step == self._step and stop not in self.values:
                    self.values[stop] = stop.values(self, SeenCall(owner, given, result))
            return result

        return call


def formula_of(stop: TourStop) -> Any:
    """Return the function of a stop's formula."""
    module, _, name = stop.formula.partition(":")
    return inspect.unwrap(operator.attrgetter(name)(importlib.import_module(module)))


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.numel() < SMALL else value


def _steps(span: Span, step: int, rank: int | None) -> Iterator[tuple[int, int | None, Span]]:
    """Yield every call with its step and rank, in the order of their begins."""
    if found := re.match(r"step (\d+)", span.phase):
        step = int(found[1])
    if found := re.match(r"rank (\d+)\b", span.name):
        rank = int(found[1])
    yield step, rank, span
    for inner in span.inside:
        yield from _steps(inner, step, rank)


def numbers(row: Tensor, count: int = 4) -> str:
    """Return the first numbers of a row, and its length."""
    first = ", ".join(f"{one:.3f}" for one in row.flatten()[:count].tolist())
    return f"[{first}, ...]  length {float(torch.linalg.vector_norm(row.float())):.2f}"


def shape(tensor: Tensor) -> str:
    """Return the shape of a tensor: "3 x 256"."""
    return " x ".join(map(str, tensor.shape))
