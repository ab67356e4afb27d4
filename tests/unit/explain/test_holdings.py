"""Sizes of ranks are computed with one expert of each layer, and are those of all parameters."""

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import ParamWriter
from quire.plan.placement import held_of, ranks

from ...support.explained import explained
from .conftest import Models

SIZES = (
    ALONE,
    Parallel(tp=8),
    Parallel(tp=2, dp=4, experts=True),
    Parallel(dp=8, experts=True, round_robin=True),
    Parallel(tp=2, pp=2),
)


@pytest.mark.parametrize("parallel", SIZES, ids=str)
@pytest.mark.parametrize("device", ["h200", "cpu"])
@pytest.mark.parametrize("model", ["DeepSeek-V3", "GLM-4.5-Air", "Qwen3-30B-A3B"])
def test_bytes_of_ranks_are_those_of_their_parameters(
    shallow: Models, model: str, device: str, parallel: Parallel
) -> None:
    options: dict[str, Any] = {"quantization": "fp8"} if model == "GLM-4.5-Air" else {}
    config = EngineConfig.from_flat(model=str(shallow(f"hf/{model}")), **options)
    holdings = explained(config, parallel, device).holdings
    kinds = {held_of(holdings.plan.args, rank): rank for rank in ranks(holdings.plan.args, parallel)}
    sizes = {kind: sum(map(holdings.num_bytes, holdings.params_of(rank))) for kind, rank in kinds.items()}
    assert holdings.held == [
        (rank, sizes[held_of(holdings.plan.args, rank)]) for rank in ranks(holdings.plan.args, parallel)
    ]


@pytest.mark.parametrize("parallel", [ALONE, Parallel(tp=8)], ids=str)
def test_all_experts_are_listed_once_for_a_rank_and_once_for_the_model(
    shallow: Models, monkeypatch: pytest.MonkeyPatch, parallel: Parallel
) -> None:
    """A large model has 45,000 parts. The memory of a GPU that is too small is sized for many numbers of ranks."""
    made, stacked = list[int](), ParamWriter.stacked

    def counted(write: ParamWriter, one: Param) -> Param:
        made.append(len(write.experts))
        return stacked(write, one)

    monkeypatch.setattr(ParamWriter, "stacked", counted)
    folder = shallow("hf/DeepSeek-V3")
    report = explained(EngineConfig.from_flat(model=str(folder), kv_cache_memory_bytes=1 << 40), parallel, "h200")
    assert report.describe()["memory"]["refused"]
    num_stacks = sum(param.shard == "experts" for param in report.holdings.layout)
    assert sum(count == 256 for count in made) == num_stacks * (1 if parallel.size == 1 else 2)
    assert set(made) == {1, 256}
