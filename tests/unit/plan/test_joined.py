"""The plan chooses one kernel for heads and attention of decodes where it was measured to be faster."""

from pathlib import Path
from typing import Any

import pytest

from quire.args.layers import GroupedArgs, ScoreArgs
from quire.args.rope import RopeArgs
from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.kernels.joined.choice import CLUSTERS, JoinedDecodes, choose_decodes
from quire.plan.joined import joined_decodes

HERE = "it needs a Hopper GPU and NVRTC"


@pytest.mark.parametrize(
    ("model", "options", "device", "found"),
    [
        ("Qwen3-0.6B", {}, "h200", (range(1, 17), "with 2 query heads of a KV head it was faster", CLUSTERS)),
        ("Qwen3-30B-A3B", {}, "h200", (range(1, 17), "with 8 query heads of a KV head it was faster", CLUSTERS)),
        ("Qwen3-0.6B", {"enforce_eager": True}, "h200", (range(0), "enforce_eager runs each operation by itself")),
        ("Qwen3-0.6B", {"kv_cache_dtype": "fp8"}, "h200", (range(0), "the KV cache has 8 bits")),
        (
            "Qwen3-0.6B",
            {},
            "a100",
            (range(1, 17), f"with 2 query heads of a KV head it was faster; not {CLUSTERS}: {HERE}"),
        ),
        (
            "Qwen3-8B",
            {},
            "a100",
            (range(2, 17), f"with 4 query heads of a KV head it was faster; not {CLUSTERS}: {HERE}"),
        ),
        (
            "Qwen3-30B-A3B",
            {},
            "a100",
            (range(0), f"with 8 query heads of a KV head it was slower; not {CLUSTERS}: {HERE}"),
        ),
    ],
)
def test_rows_reason_and_kernel(
    shared: Path, model: str, options: dict[str, Any], device: str, found: tuple[Any, ...]
) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / model), **options), device).plan
    every = joined_decodes(plan)
    assert set(every) == set(range(plan.args.num_layers)) and set(every.values()) == {JoinedDecodes(*found)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 256}, "it has no heads of 256 dimensions"),
        ({"scores": ScoreArgs(soft_cap=30.0)}, "it caps no scores"),
        ({"window": -1024}, "it has no chunks"),
    ],
)
def test_what_clusters_cannot_do(changes: dict[str, Any], reason: str) -> None:
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "rotary_dim": 128}
    mixer = GroupedArgs(**sizes | changes, rope=RopeArgs(theta=1e4))
    one = choose_decodes(mixer, 2, eager=False, eight_bits=False, clusters="")
    assert one.kernel == "decode_attention" and one.why.endswith(f"; not {CLUSTERS}: {reason}")


@pytest.mark.parametrize(("device", "options"), [("h200", {"batch_invariant": True}), ("", {"device": "cpu"})])
def test_none_with_other_kernels(shared: Path, device: str, options: dict[str, Any]) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / "Qwen3-0.6B"), **options), device).plan
    assert joined_decodes(plan) == {}
