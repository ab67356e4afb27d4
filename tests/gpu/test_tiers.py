"""Tiers of KV blocks below a GPU: copies between pinned memory, files and the device bring back what was there."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.step import Tier

from ..e2e.test_recurrent_tiers import FAMILIES, TALKS, talk
from ..e2e.test_recurrent_tiers import SMALL as STATES
from ..support.engines import core_of, tier_stats
from ..support.tiny_models import Tiny, make_oracle, mixed_prompts
from .test_engine import DEVICE, TEXTS, make

SMALL = {"num_gpu_blocks_override": 14, "block_size": 16, "max_model_len": 192, "max_num_seqs": 3}
HOST = {"kv_offload_gb": 0.02, "kv_offload_policy": "write_through"}
PROMPTS = [f"{text}. " * 14 for text in TEXTS]
PARAMS = [SamplingParams(max_tokens=12, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 0.8, 0.0) * 3]


def ask(llm: LLM, together: bool = False) -> tuple[list[list[int]], list[int]]:
    """Return the tokens and the number of cached tokens of every prompt; each evicts blocks of others."""
    pairs = [(PROMPTS, PARAMS)] if together else [([text], [one]) for text, one in zip(PROMPTS, PARAMS, strict=True)]
    outputs = [output for pair in pairs for output in llm.generate(*pair, use_tqdm=False)]
    llm.engine.core.check()
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens or 0 for one in outputs]


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    with make(bundled_model(), **SMALL) as llm:
        return ask(llm)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_depth": 1},
        {"kv_offload_policy": "lazy"},
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    ],
    ids=str,
)
def test_tokens_are_those_without_tiers(truth: list[list[int]], options: dict[str, Any]) -> None:
    with make(bundled_model(), **SMALL | HOST | options) as llm:
        assert ask(llm)[0] == truth
        tokens, cached = ask(llm)
        assert tokens == truth and max(cached) >= 48, cached
        assert ask(llm, together=True)[0] == truth
        assert tier_stats(llm, Tier.HOST).num_loaded > 12


def test_files_outlive_the_engine(truth: list[list[int]], tmp_path: Path) -> None:
    options = SMALL | HOST | {"kv_offload_dir": str(tmp_path)}
    with make(bundled_model(), **options) as llm:
        assert ask(llm)[0] == truth
    with make(bundled_model(), **options) as llm:
        tokens, cached = ask(llm)
        assert tokens == truth and max(cached) >= 48, cached


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_states_come_back(family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = make_oracle(Tiny(family=family), mixed_prompts(), tmp_path_factory.mktemp, DEVICE).folder
    sizes = STATES | {"block_size": 16, "num_gpu_blocks_override": 20}
    with make(folder, **sizes, enable_prefix_caching=False) as llm:
        plain, _ = talk(llm)
    for few in (3, 0):
        with make(folder, **sizes, **HOST, kv_offload_dir=str(tmp_path)) as llm:
            found, cached = talk(llm, few)
            assert found == plain and all(cached[TALKS:]), cached
            copies = core_of(llm).state().stats.prefix.states.tiers
            assert copies[Tier.HOST if few else Tier.DISK].num_loaded >= TALKS and copies[Tier.DISK].num_failed == 0
