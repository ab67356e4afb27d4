"""Tiers of KV blocks over several ranks: each copies its part, and a block that one rank lacks is computed by all."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.contracts.step import Tier
from quire.engine.replicas import flush

from ..support.full import full_rows
from ..support.many_ranks import SIZES, SMALL

TIERS = {
    "num_gpu_blocks_override": 14,
    "max_model_len": 192,
    "block_size": 16,
    "kv_offload_gb": 0.02,
    "kv_offload_policy": "write_through",
}
PROMPTS = [
    word * 6
    for word in (
        "Tomas drinks tea in the garden. ",
        "The code of Lakral is 6423, Mira says. ",
        "def add(a, b): return a + b\n",
    )
]


def ask(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Return tokens and cached tokens of the prompts, one after the other."""
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in PROMPTS]
    return [one.outputs[0].token_ids for one in found], [one.num_cached_tokens or 0 for one in found]


def disk(llm: LLM) -> Any:
    flush(llm.engine.core)
    llm.engine.core.check()
    return llm.engine.core.state().stats.tiers[Tier.DISK]


@pytest.mark.parametrize("sizes", ["tp2", *full_rows(["pp2"])])
def test_ranks_keep_and_find_their_parts(sizes: str, tmp_path: Path) -> None:
    with LLM(**SMALL, **TIERS) as llm:
        truth = ask(llm)[0]
    options = SMALL | TIERS | SIZES[sizes] | {"kv_offload_dir": str(tmp_path)}
    with LLM(**options) as llm:
        assert ask(llm)[0] == truth
        tokens, cached = ask(llm)
        assert tokens == truth and min(cached) >= 64
        assert disk(llm).num_stored >= 12
    ranks = sorted(tmp_path.glob("*/*"))
    assert len(ranks) == 2
    for path in ranks[1].rglob("*.kv"):  # of one rank alone
        path.write_bytes(path.read_bytes()[:-1])
    with LLM(**options) as llm:
        tokens, cached = ask(llm)
        assert tokens == truth and not any(cached), "a block is whole when all ranks have it"
        assert disk(llm).num_failed >= 3
