"""Recorded calls: what `quire trace` shows of a model runner, in the process of the engine or in that of a rank.

The engine knows nothing of traces. During a trace, functions of live objects and modules are replaced by wrappers that
also note begin, end and shapes; afterwards all functions are put back.
"""

import inspect
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from quire.contracts.step import CopyJob, FinishedCopy
from quire.distributed.mesh import ALONE, RankGroups
from quire.kernels.native.library import library
from quire.kernels.select import Kernels
from quire.kernels.triton_runtime import INTERPRETED, triton
from quire.worker.runner import StepRunner
from quire.worker.taps import HiddenTap

PACKAGE = Path(__file__).parents[1]
WORK = re.compile(r"quire\.(kernels\.(?!native\.)\w+\.\w+|(layers|worker)\.\w+)")
PRODUCT = re.compile(r"run(_add|_float|(_norm)?(_gated)?)")  # functions of a kernel that multiply weights
LAST_CALLS_SECONDS = 1.0  # for the collector's thread to note its last call

Stop = tuple[Any, str, str]  # owner, attribute, and name of a function to record; see `worker_stops`


@dataclass(eq=False)
class Span:
    """A function call in a trace of a step (`quire trace`).

    where          "file:line" of the function
    takes, gives   dtypes and shapes of the arguments and of the result, as text
    way            of a product of quantized weights: where it dequantizes and quantizes, and where that is decided
    phase          in the call that runs an engine step: its number, kind and tokens, as text; "" in other calls
    begin, end     in nanoseconds of a clock that all processes of a machine share
    inside         calls that this call made
    """

    name: str
    where: str
    takes: str = ""
    gives: str = ""
    way: str = ""
    phase: str = ""
    begin: int = 0
    end: int = 0
    inside: list["Span"] = field(default_factory=list)


@runtime_checkable
class Traced(Protocol):
    """A record that says in words what a trace shows of it."""

    def traced(self) -> str:
        """Return a few words: the numbers that matter."""


class CallRecorder:
    """Context manager that records all calls of given functions, by any thread, in the `Span` `root`.

    stops   functions to record, as (owner, attribute, name)
    wait    called after each recorded call, before its end is noted; such as torch.cuda.synchronize
    told    called after each recorded call, with its result and the calls that have not ended yet, outermost first
    """

    def __init__(
        self,
        stops: Iterable[Stop],
        wait: Callable[[], None] = lambda: None,
        told: Callable[[Any, list[Span]], None] = lambda result, open_ones: None,
    ) -> None:
        self.root, self._stops, self._wait, self._told = Span("", ""), stops, wait, told
        self._stacks: dict[int, list[Span]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> "CallRecorder":
        try:
            for owner, attribute, name in {stop[:2]: stop for stop in self._stops}.values():
                self.put(owner, attribute, self._recorded(getattr(owner, attribute), name))
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def put(self, owner: Any, name: str, value: object) -> None:
        """Set the attribute `name` of `owner`; the end of the recording restores it."""
        had = vars(owner)
        self._undo.callback(*((setattr, owner, name, had[name]) if name in had else (delattr, owner, name)))
        setattr(owner, name, value)

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the recording ends."""
        self._undo.callback(undo)

    def _recorded(self, function: Any, name: str) -> Any:
        place, told_way = _where(function) if name else "", _way(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            span = Span(
                name or args[0].fn.__name__,
                place or _where(args[0].fn),
                ", ".join(_shapes((args, kwargs))),
                way=told_way(*args, **kwargs),
            )
            stack = self._stacks.setdefault(threading.get_ident(), [self.root])
            stack[-1].inside.append(span)
            stack.append(span)
            span.begin = time.perf_counter_ns()
            try:
                result = function(*args, **kwargs)
                self._wait()
            finally:
                span.end = time.perf_counter_ns()
                stack.pop()
            span.gives = ", ".join(_shapes(result))
            self._told(result, stack)
            return result

        return call


class StepTrace:
    """Records the calls of one rank's steps for `quire trace`, when the engine sends the rank the command "trace"."""

    def __init__(self, worker: StepRunner, groups: RankGroups) -> None:
        self._worker, self._groups = worker, groups
        self._recorder: CallRecorder | None = None

    def control(self, on: bool) -> list[Span]:
        """End the current trace, if any, and return its calls, else []. Begin a new trace if `on`."""
        found: list[Span] = []
        if self._recorder is not None:
            found = self._recorder.root.inside
            until = time.monotonic() + LAST_CALLS_SECONDS
            while time.monotonic() < until and not _complete(found):
                time.sleep(0.001)
            self._recorder.__exit__(None, None, None)
            self._recorder = None
        if on:
            cuda = self._worker.model.device.type == "cuda"
            stops = worker_stops(self._worker, self._worker.model.kernels, self._groups)
            self._recorder = CallRecorder(stops, torch.cuda.synchronize if cuda else lambda: None).__enter__()
            without_recordings(self._recorder, self._worker)
        return list(found)


def without_recordings(recorder: CallRecorder, worker: StepRunner) -> None:
    """Make steps run eagerly, layer by layer, until `recorder` ends: a replayed CUDA graph would show no calls."""
    tap = HiddenTap(worker.model, lambda where, hidden: None)
    worker.features.attach(tap)
    recorder.at_end(lambda: worker.features.detach(tap))


def _complete(calls: list[Span]) -> bool:
    """True when every submitted step was collected."""
    ends = [call.name.rpartition(".")[2] for call in calls if call.end]
    return ends.count("collect") >= ends.count("submit")


def methods_of(named: Iterable[tuple[str, Any]]) -> Iterator[Stop]:
    """Yield (object, method, label) for each public method of the `named` objects, for `CallRecorder`.

    The label is "name.method", or "name" for the method `forward`. Methods from outside Quire are left out.
    """
    for name, part in named:
        for kind in () if is_dataclass(part) else type(part).__mro__:
            for method, value in vars(kind).items() if kind.__module__.startswith("quire.") else ():
                if isinstance(value, FunctionType) and not method.startswith("_"):
                    yield part, method, name if method == "forward" else f"{name}.{method}"


def worker_stops(worker: StepRunner, kernels: Kernels, groups: RankGroups = ALONE) -> Iterator[Stop]:
    """Yield (owner, attribute, label) for each function that a step calls, down to kernels and groups of ranks.

    They are for `CallRecorder`. The label of Triton's launch function is "": each launch takes its kernel's name.
    """
    parts: list[Any] = [
        worker,
        worker.state,
        worker.programs,
        worker.sampler,
        worker.sampler.operations,
        worker.model.rotary,
    ]
    parts += [part for feature in worker.features.all for part in (feature, *feature.parts)]
    modules_of = list(worker.model.named_modules())  # type: ignore[attr-defined]
    named = [*((type(part).__name__, part) for part in parts), *modules_of]
    named += [(name, group) for name, group in vars(groups).items() if group is not None]
    yield from (stop for stop in methods_of(named) if stop[1] != "begin_step")  # it exchanges nothing
    kinds = {kind for _, part in named for kind in type(part).__mro__ if kind.__module__.startswith("quire.")}
    modules = {sys.modules[kind.__module__] for kind in kinds} | set(filter(inspect.ismodule, vars(kernels).values()))
    modules |= {worker.programs.operations, sys.modules[HiddenTap.__module__]}  # the tap runs the layers
    modules |= {value for _, layer in modules_of for value in vars(layer).values() if inspect.ismodule(value)}
    modules |= {
        value
        for module in modules
        for value in vars(module).values()
        if inspect.ismodule(value) and WORK.fullmatch(value.__name__)
    }
    for module in modules:
        for name, value in vars(module).items():
            if not isinstance(value, FunctionType) or name.startswith(("_", "way")):
                continue
            if WORK.fullmatch(value.__module__):
                yield module, name, f"{re.sub(r'^quire.(kernels.)?', '', value.__module__)}.{name}"
    if any(choice.name == "native" for choice in kernels.choices):
        yield from ((library(), name, name) for name in vars(library()) if name.startswith("quire_"))
    if triton is not None:
        run = triton.runtime
        yield run.interpreter.InterpretedFunction if INTERPRETED else run.jit.JITFunction, "run", ""


def _way(function: Any) -> Callable[..., str]:
    """Return a function of the same arguments: the way of a product, see `Span`. "" for any other function.

    The module of a kernel that runs quantized weights has a function `way`, see `quire.kernels.linear`.
    """
    module = sys.modules[function.__module__] if isinstance(function, FunctionType) else None
    way = vars(module).get("way") if module and WORK.fullmatch(module.__name__) else None
    if way is None or not PRODUCT.fullmatch(function.__name__):
        return lambda *args, **kwargs: ""
    signature, place = inspect.signature(function), _where(way)

    def told(*args: Any, **kwargs: Any) -> str:
        given = signature.bind(*args, **kwargs).arguments
        text = way(given["x"], given["packed"])
        return text and f"{text} ({place})"

    return told


def _where(function: Any) -> str:
    """Return "file:line" of a Python function or of a C function of the package; "" when it is not found."""
    function = inspect.unwrap(function)
    if inspect.isroutine(function):
        path, line = Path(function.__code__.co_filename), function.__code__.co_firstlineno  # type: ignore[union-attr]
        return f"{path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name}:{line}"
    for path in PACKAGE.glob("kernels/*/*.c"):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if re.match(rf"\w+ {function.__name__}\(", text):
                return f"{path.relative_to(PACKAGE)}:{line}"
    return ""


def _shapes(value: Any, deep: bool = True) -> Iterator[str]:
    """Yield types and shapes of the arrays in a value, with the field names of records that hold arrays."""
    if isinstance(value, torch.Tensor | np.ndarray):
        short = re.sub(r"(float|u?int)(?=\d)", lambda kind: kind[0][0], str(value.dtype).removeprefix("torch."))
        yield f"{short}{list(value.shape)}".replace(" ", "")
    elif isinstance(value, Traced):
        yield value.traced()
    elif isinstance(value, CopyJob):
        yield f"{len(value.keys)} blocks {value.source} to {value.target}"
    elif isinstance(value, FinishedCopy):
        yield f"job of {value.num_bytes} bytes done, {len(value.failed)} blocks failed"
    elif isinstance(value, list) and value and isinstance(value[0], int):
        yield f"ints[{len(value)}]"
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _shapes(item, deep)
    elif deep and (is_dataclass(value) or isinstance(value, msgspec.Struct)):
        names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else type(value).__dataclass_fields__
        inside = [f"{name} {shape}" for name in names for shape in _shapes(getattr(value, name), False)]
        if inside:
            yield f"{type(value).__name__}({', '.join(inside)})"
