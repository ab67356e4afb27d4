"""`quire verify` with Quire on a GPU, in float32 and step by step, and in bfloat16 against a stored reference."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.explain.verify.against import against
from quire.explain.verify.parity import verify

from ..support.tiny_models import Tiny, random_model, write_model

OPTIONS: dict[str, Any] = {"device": "cuda", "use_tqdm_on_load": False, "kv_cache_memory_bytes": 1 << 26}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}), ("qwen3", {"kv_cache_dtype": "fp8"}), ("qwen3", {"speculative_config": NGRAM}),
    ("gpt_oss", {"kv_cache_dtype": "fp8_e5m2"}), ("gemma3_text", {}), ("qwen2_moe", {"quantization": "fp8"}),
    ("qwen3_moe", {"speculative_config": NGRAM}), ("deepseek_v3", {}), ("deepseek_v3", {"kv_cache_dtype": "fp8"}),
    ("deepseek_v2", {"kv_cache_dtype": "fp8_ds_mla"}), ("deepseek_v32", {}), ("qwen3_5_text", {}), ("nemotron_moe", {}),
    ("lfm2", {}), ("qwen3", {"tensor_parallel_size": 2}), ("deepseek_v3", {"tensor_parallel_size": 2}),
    ("qwen2_moe", {"pipeline_parallel_size": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options"), ROWS, ids=str)
def test_random_models(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    write_model(random_model(Tiny(family=family), 0), tmp_path, family)
    report = verify(str(tmp_path), EngineConfig.from_flat(**OPTIONS, **options))
    assert report.ok, report.render()


def test_the_bundled_model_against_the_stored_reference(tmp_path: Path) -> None:
    where = tmp_path / "reference"
    report = verify("", EngineConfig.from_flat(**OPTIONS), dump=where)
    assert report.ok, report.render()
    for more in ({}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"speculative_config": NGRAM}):
        beside = against("", EngineConfig.from_flat(**OPTIONS, dtype="bfloat16", **more), None, where)
        assert beside.ok, beside.render()
