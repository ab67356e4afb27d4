"""The calls of a model runner: what a trace shows of a step, in the process of the engine or in that of a rank."""

import inspect
import re
import sys
import time
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from quire.distributed.mesh import ALONE, RankGroups
from quire.kernels.native.library import library
from quire.kernels.select import Kernels
from quire.kernels.triton_runtime import INTERPRETED, triton
from quire.observe.calls import WORK, CallRecorder, Shown, Span, Stop, fold, methods_of
from quire.worker.runner import StepRunner
from quire.worker.taps import HiddenTap

LAST_CALLS_SECONDS = 1.0  # for the collector's thread to note its last call


class StepTrace:
    """Records the calls of one rank's steps for `quire trace`, when the engine sends the rank the command "trace"."""

    def __init__(self, worker: StepRunner, groups: RankGroups = ALONE) -> None:
        self._worker, self._groups = worker, groups
        self._recorder: CallRecorder | None = None

    def control(self, on: bool, folded: bool = False) -> list[Span]:
        """End the current trace, if any, and return its calls, else []. Begin a new trace if `on`.
        folded: without the calls inside those that are `alike`, since a model has many layers"""
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
        if not folded:
            return list(found)
        shown: Shown = set()
        return [fold(span, shown) for span in found]


def without_recordings(recorder: CallRecorder, worker: StepRunner) -> None:
    """Make steps run eagerly, layer by layer, until `recorder` ends: a replayed CUDA graph would show no calls."""
    tap = HiddenTap(worker.model, lambda where, hidden: None)
    worker.features.attach(tap)
    recorder.at_end(lambda: worker.features.detach(tap))
    recorder.put(worker.programs.recorder, "run", lambda key, work: work())  # the sampling has a recording of its own


def _complete(calls: list[Span]) -> bool:
    """True when every submitted step was collected."""
    ends = [call.name.rpartition(".")[2] for call in calls if call.end]
    return ends.count("collect") >= ends.count("submit")


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
    every = worker.model.named_modules()  # type: ignore[attr-defined]
    modules_of = [(name or type(module).__name__, module) for name, module in every]
    named = [*((type(part).__name__, part) for part in parts), *modules_of]
    named += [(name, group) for name, group in vars(groups).items() if group is not None]
    yield from (stop for stop in methods_of(named) if stop[1] != "begin_step")  # it exchanges nothing
    kinds = {kind for _, part in named for kind in type(part).__mro__ if kind.__module__.startswith("quire.")}
    modules = {sys.modules[kind.__module__] for kind in kinds} | set(filter(inspect.ismodule, vars(kernels).values()))
    modules |= {worker.programs.operations, sys.modules[HiddenTap.__module__]}  # the tap runs the layers
    owners = [*parts, *(layer for _, layer in modules_of)]  # a drafter has kernels of its own, too
    modules |= {value for owner in owners for value in vars(owner).values() if inspect.ismodule(value)}
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
