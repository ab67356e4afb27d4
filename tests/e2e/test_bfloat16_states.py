"""States of recurrent layers in bfloat16: texts do not depend on chunks, checkpoints, preemption, drafts or tiers.

A matrix is rounded behind each token, and a checkpoint holds the rounded matrix, so that requests that resume compute
the same numbers as those that never stopped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.contracts.errors import ConfigError
from quire.contracts.step import Tier

from ..support.full import full_rows
from ..support.tiny_models import Oracle, Tiny
from .test_recurrent_drafts import BATCH, NGRAM, answers
from .test_recurrent_tiers import SMALL, TIERS, talk, tier

FAMILIES = ["qwen3_5_text", "granite_mamba", *full_rows(["kimi_linear", "olmo_hybrid", "nemotron_h", "falcon_h1"])]
HALF = {"mamba_ssm_cache_dtype": "bfloat16"}
FEW: dict[str, Any] = {"num_gpu_blocks_override": 26, "max_model_len": 104}  # requests are preempted


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, oracle: Callable[..., Oracle]) -> Any:
    return oracle(Tiny(family=request.param)).folder


@pytest.mark.parametrize("drafts", [False, True])
def test_turns(drafts: bool, folder: Any, engine: Callable[..., LLM], prompts: Any) -> None:
    plain = engine(folder, enable_prefix_caching=False, **BATCH | HALF)
    more = {"speculative_config": NGRAM} if drafts else {}
    llm = engine(folder, async_depth=2, max_num_batched_tokens=16, **BATCH | HALF | FEW | more)
    texts = [[*prompts[i % len(prompts)][:30], i + 1] for i in range(6)]
    for turn in range(3):
        wanted = [list(one.outputs[0].token_ids) for one in answers(plain, texts)]
        assert [list(one.outputs[0].token_ids) for one in answers(llm, texts)] == wanted, f"turn {turn}"
        texts = [[*text, *new, 5 + i, 6 + turn] for i, (text, new) in enumerate(zip(texts, wanted, strict=True))]
    scheduler = llm.engine.core.scheduler
    assert scheduler.num_preempted > 0 and scheduler.allocator.states.hits > 0
    whole = engine(folder, enable_prefix_caching=False, **BATCH)
    found, true = (
        [one.outputs[0].logprobs[0] for one in answers(run, texts, logprobs=20, max_tokens=1)] for run in (plain, whole)
    )
    apart = [
        abs(one[k].logprob - other[k].logprob)
        for one, other in zip(found, true, strict=True)
        for k in {*one} & {*other}
    ]
    assert 0 < max(apart) < 0.3, "numbers are rounded, and near those of float32"


def test_checkpoints_in_tiers(folder: Any, engine: Callable[..., LLM], tmp_path: Path) -> None:
    """Checkpoints of float32 engines are not found."""
    plain, _ = talk(engine(folder, **SMALL | HALF, enable_prefix_caching=False))
    options = SMALL | TIERS | {"kv_offload_dir": str(tmp_path)}
    talk(engine(folder, **options), few=3)
    llm = engine(folder, **options | HALF)
    found, cached = talk(llm, few=3)
    assert found == plain and not cached[0] and tier(llm, Tier.HOST).num_loaded > 0
    found, cached = talk(engine(folder, **options | HALF))
    assert found == plain and all(cached)


def test_another_type_is_refused(engine: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="must be one of auto, float32, bfloat16"):
        engine("quire-tiny", mamba_ssm_cache_dtype="float16")
