"""The plan chooses one kernel for heads and attention of decodes where it was measured to be faster."""

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.plan.joined import joined_decodes


@pytest.mark.parametrize(
    ("model", "options", "rows", "why"),
    [
        ("Qwen3-0.6B", {}, range(1, 17), "with 2 query heads of a KV head it was faster"),
        ("Qwen3-0.6B", {"enforce_eager": True}, range(0), "enforce_eager runs each operation by itself"),
        ("Qwen3-0.6B", {"kv_cache_dtype": "fp8"}, range(0), "the KV cache has 8 bits"),
        ("Qwen3-8B", {}, range(2, 17), "with 4 query heads of a KV head it was faster"),
        ("Qwen3-30B-A3B", {}, range(0), "with 8 query heads of a KV head it was slower"),
    ],
)
def test_rows_and_reason(shared: Path, model: str, options: dict[str, Any], rows: range, why: str) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / model), **options), "h200").plan
    found = joined_decodes(plan)
    assert set(found) == set(range(plan.args.num_layers)) and set(found.values()) == {(rows, why)}


@pytest.mark.parametrize(("device", "options"), [("h200", {"batch_invariant": True}), ("", {"device": "cpu"})])
def test_none_with_other_kernels(shared: Path, device: str, options: dict[str, Any]) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / "Qwen3-0.6B"), **options), device).plan
    assert joined_decodes(plan) == {}
