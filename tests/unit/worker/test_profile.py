"""The profile of a runner on a GPU: PyTorch is asked for kernels, and a profile without any says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import ProfilerActivity, ProfilerState, profiler

from quire.worker import profile
from quire.worker.profile import NO_CUPTI, NO_KERNEL, RunnerProfile, profiler_of

CPU, CUDA = ProfilerActivity.CPU, ProfilerActivity.CUDA


def test_kernels_come_from_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profiler, "_supported_activities", lambda: {CPU, CUDA})
    made = profiler_of("cuda")
    assert made.profiler_kind is ProfilerState.KINETO and made.kineto_activities == {CPU, CUDA}
    assert profiler_of("cpu").kineto_activities == {CPU}


class Recorded:
    """A profiler that has recorded events of some devices."""

    use_device = "cuda"

    def __init__(self, devices: str, activities: set[ProfilerActivity]) -> None:
        self.kineto_activities = activities
        self.kineto_results = SimpleNamespace(events=lambda: [event(name) for name in devices.split()])

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing runs."""


class Runner:
    """A runner whose steps do nothing."""

    model = SimpleNamespace(device=torch.device("cuda"), kernels=None)

    def submit(self) -> None:
        """Run a step."""


def event(device: str) -> Any:
    facts: dict[str, Any] = {
        "device_type": SimpleNamespace(name=device),
        "device_index": 0,
        "device_resource_id": 7,
        "start_thread_id": 1,
        "name": "add_kernel",
        "start_ns": 5,
        "duration_ns": 2,
    }
    return SimpleNamespace(**{name: lambda value=value: value for name, value in facts.items()})


@pytest.mark.parametrize(
    ("devices", "activities", "steps", "note"),
    [
        ("CPU CUDA", {CPU, CUDA}, 1, ""),
        ("CPU", {CPU, CUDA}, 1, NO_KERNEL),
        ("CPU", {CPU}, 1, NO_CUPTI),
        ("", {CPU, CUDA}, 0, ""),  # of an idle engine
    ],
)
def test_a_profile_without_kernels_says_so(
    devices: str, activities: set[ProfilerActivity], steps: int, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner()
    monkeypatch.setattr(profile, "profiler_of", lambda device_type: Recorded(devices, activities))
    monkeypatch.setattr(profile, "worker_stops", lambda *given: [(runner, "submit", "StepRunner.submit")])
    made = RunnerProfile(runner)  # type: ignore[arg-type]
    assert made.control(on=True, most=10) == ([], 0, "")
    for _ in range(steps):
        runner.submit()
    slices, lost, said = made.control(on=False, most=10)
    assert (lost, said) == (0, note)
    assert [track for track, *_ in slices if track.startswith("GPU")] == ["GPU 0, stream 7"] * devices.count("CUDA")
