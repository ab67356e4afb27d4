"""`quire verify` of engines of several ranks: steps are joined from the parts that ranks have, and compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.explain.verify.parity import verify
from quire.explain.verify.verdict import Report

from ..support.full import full_rows
from ..support.many_ranks import LARGER, SIZES, SMALL, Left
from ..support.tiny_models import FAMILIES, Tiny, random_model, write_model

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
ROWS = [
    ("qwen2_moe", "tp2", DRAFTS | {"kv_cache_dtype": "fp8", "quantization": "fp8"}),
    ("qwen2_moe", "pp2", {}),
    *full_rows(
        [
            *((family, "tp2", {}) for family in FAMILIES if not family.startswith("falcon")),
            *(
                (family, "tp4", {})
                for family in ("qwen3", "gpt_oss", "gemma4_text", "qwen3_5_text", "granitemoehybrid")
            ),
            *((family, "tp2-ep", {"quantization": "fp8"}) for family in ("qwen3_moe", "deepseek_v3", "llama4_text")),
            *((family, "pp2", DRAFTS) for family in ("deepseek_v32", "lfm2")),
            ("qwen2_moe", "tp2-pp2", DRAFTS | {"kv_cache_dtype": "fp8", "quantization": "fp8"}),
            ("deepseek_v2", "tp2", {"kv_cache_dtype": "fp8_ds_mla"}),
        ]
    ),
]


@pytest.fixture
def verified(left: Left, tmp_path: Path) -> Callable[..., Report]:
    """Verifies a random model of a family with the ranks of a row of `SIZES` or `LARGER`."""

    def run(family: str, sizes: str, options: dict[str, Any]) -> Report:
        write_model(random_model(Tiny(family=family, bias=True), 0), tmp_path, family)
        given = SMALL | {"kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 2} | (LARGER | SIZES)[sizes] | options
        peer = tmp_path / "peer"
        return verify(str(tmp_path), EngineConfig.from_flat(**given), reference=peer if peer.is_dir() else None)

    return run


@pytest.mark.parametrize(("family", "sizes", "options"), ROWS, ids=str)
def test_ranks_are_verified(family: str, sizes: str, options: dict[str, Any], verified: Callable[..., Report]) -> None:
    report = verified(family, sizes, options)
    assert report.ok, report.render()
    assert report.drafts[0] > 0 or "speculative_config" not in options
