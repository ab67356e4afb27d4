"""Ranks that share a GPU, for tests: an environment variable allows it, and what cannot go there is refused."""

from typing import Any

import pytest

from quire.assemble import engine
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.platforms.detect import DevicePlan, DriverProbe

GPU = DriverProbe(capability=(9, 0), memory=80 << 30, count=1)
EAGER: dict[str, Any] = {"tensor_parallel_size": 2, "enforce_eager": True, "gpu_memory_utilization": 0.5}


def plans(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """The plans of all ranks for the bundled model, on a machine with one GPU."""
    monkeypatch.setattr(engine, "probe_driver", lambda: GPU)
    config = EngineConfig.from_flat(model="", device="cpu", dtype="float32", **options)
    found = engine.read_files(config)._replace(device=DevicePlan(device="cuda", reason="there is a GPU"))
    return engine.plan_ranks(config, found)


def test_each_rank_has_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEST_RANKS_SHARE_GPU", "1")
    made = plans(monkeypatch, **EAGER)
    assert [plan.machine.shared for plan in made] == [True, True]
    assert [plan.config.cache.gpu_memory_utilization for plan in made] == [0.25, 0.25]


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("QUIRE_TEST_RANKS_SHARE_GPU", value)
    with pytest.raises(ConfigError, match="needs 2 GPUs, and this process sees 0"):
        plans(monkeypatch, **EAGER)


@pytest.mark.parametrize(
    "changes", [{"enforce_eager": False}, {"nnodes": 2}, {"distributed_executor_backend": "ray"}], ids=str
)
def test_what_needs_a_gpu_for_each_rank_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setenv("QUIRE_TEST_RANKS_SHARE_GPU", "1")
    with pytest.raises(ConfigError, match="^QUIRE_TEST_RANKS_SHARE_GPU: ranks that share a GPU"):
        plans(monkeypatch, **EAGER | changes)
