"""The profile of a model runner: its calls, PyTorch's operators and the kernels of a GPU, each with its time.

Recordings stay: a replayed CUDA graph shows as its kernels. PyTorch's older profiler is used, because `torch.profiler`
imports its compiler first, which would stop the steps for seconds.
"""

from collections.abc import Callable
from itertools import islice

from torch.autograd import ProfilerActivity
from torch.autograd.profiler import profile

from quire.distributed.mesh import ALONE, RankGroups
from quire.observe.call_times import CallTimes, Slice
from quire.worker.call_trace import StepTrace, worker_stops
from quire.worker.runner import StepRunner

Profiled = tuple[list[Slice], int, str]  # slices, the number of those that were left out, and a note or ""
NO_CUPTI = "no kernel of the GPU is in it: this PyTorch is built without CUPTI."
NO_KERNEL = (
    "no kernel of the GPU is in it, though steps ran: CUPTI, NVIDIA's library for profilers, recorded none. "
    "Another profiler may hold it (nsys, ncu), or the driver may allow it to administrators alone."
)


class RunnerProfile:
    """Profiles the steps of one rank, when the engine sends the rank the command "profile"."""

    def __init__(self, worker: StepRunner, groups: RankGroups = ALONE) -> None:
        self._worker, self._groups = worker, groups
        self._running: tuple[CallTimes, profile] | None = None

    def control(self, on: bool, most: int = 0) -> Profiled:
        """End the profile that runs, if any, and return it. Begin a new one if `on`. most: slices of each kind"""
        found: Profiled = [], 0, ""
        if self._running is not None:
            calls, operators = self._running
            self._running = None
            calls.__exit__(None, None, None)
            operators.__exit__(None, None, None)
            found = _found(calls, operators, most)
        if on:
            operators = profiler_of(self._worker.model.device.type).__enter__()
            calls = CallTimes(worker_stops(self._worker, self._worker.model.kernels, self._groups), most).__enter__()
            self._running = calls, operators
        return found


def controls_of(worker: StepRunner) -> dict[str, Callable[..., object]]:
    """Return the operations of the executor of an engine on one device. "trace" and "profile" return lists by rank."""
    trace, times = StepTrace(worker), RunnerProfile(worker)
    own: dict[str, Callable[..., object]] = {
        "describe": worker.describe,
        "trace": lambda **given: [trace.control(**given)],
        "profile": lambda **given: [times.control(**given)],
    }
    return own | worker.features.controls


def profiler_of(device_type: str) -> profile:
    """Return PyTorch's profiler for the operators of this thread and, on "cuda", the kernels of this process.

    use_kineto   without it a GPU has no kernels: PyTorch times operators by events on their streams instead
    """
    return profile(use_device="cuda" if device_type == "cuda" else None, use_kineto=True)


def _found(calls: CallTimes, operators: profile, most: int) -> Profiled:
    assert operators.kineto_results is not None
    events = operators.kineto_results.events()
    slices = calls.slices()
    ran = bool(slices)
    for event in islice(events, most):
        if event.device_type().name == "CPU":
            track = f"PyTorch, thread {event.start_thread_id()}"
        else:
            track = f"GPU {event.device_index()}, stream {event.device_resource_id()}"
        slices.append((track, event.name(), event.start_ns(), event.duration_ns()))
    note = ""
    if operators.use_device == "cuda" and ran and all(event.device_type().name == "CPU" for event in events):
        note = NO_KERNEL if ProfilerActivity.CUDA in operators.kineto_activities else NO_CUPTI
    return slices, calls.lost + max(0, len(events) - most), note
