"""Every family beside transformers, over a pairwise cover of the ways in which a request can run.

The results stand on docs/models.md: `python tools/models_page.py --run` makes them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams

from ..support.full import FULL, only_full
from ..support.pairwise import Row, label, pairwise
from ..support.tiny_models import FAMILIES
from .test_parity import ATOL, NUM_TOKENS, Greedy, build

CHECKPOINT: dict[str, Sequence[Any]] = {"heads": ((4, 2), (3, 1), (5, 5)), "tied": (False, True), "bias": (False, True)}
RUN: dict[str, Sequence[Any]] = {
    "chunk": (7, 16, 64),
    "block_size": (8, 16),
    "prefix": (True, False),
    "depth": (1, 2),
    "pool": ("normal", "small"),
    "drafts": (0, 3),
}
RANKS: dict[str, dict[str, Any]] = {"tp 2": {"tensor_parallel_size": 2}, "pp 2": {"pipeline_parallel_size": 2}}
PLAIN = {"chunk": 16, "block_size": 8, "prefix": True, "depth": 1, "pool": "normal"}


def cover(family: str) -> list[Row]:
    """Rows with every pair of values that the family can have."""

    def possible(row: Row) -> bool:
        return not row.get("bias") or bool(FAMILIES[family].biases)

    return [{"family": family, **row} for row in pairwise(CHECKPOINT | RUN, possible)]


def check(llm: LLM, oracle: Any, prompts: list[list[int]], greedy: Greedy) -> None:
    """64 greedy tokens, twice, and the log-probabilities of all positions."""
    expected = oracle.greedy(prompts, NUM_TOKENS)
    for _ in range(2):
        answers = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
        assert [one.outputs[0].token_ids for one in answers] == expected
    whole = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    scored = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)
    for ids, out in zip(whole, scored, strict=True):
        assert out.prompt_logprobs is not None
        table = np.array([[row[i].logprob for i in range(len(row))] for row in out.prompt_logprobs[1:] if row])
        np.testing.assert_allclose(table, oracle.logprobs(ids)[:-1], atol=ATOL, rtol=0)


@only_full
@pytest.mark.parametrize("row", [row for family in FAMILIES if FULL for row in cover(family)], ids=label)
def test_every_way_of_running(
    row: Row, oracle: Any, tiny: Any, engine: Callable[..., LLM], prompts: list[list[int]], greedy: Greedy
) -> None:
    checkpoint = oracle(tiny(**{name: row[name] for name in ("family", *CHECKPOINT)}))
    more: Row = {}
    if row["drafts"]:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": row["drafts"]}
    check(build(engine, checkpoint.folder, row, **more), checkpoint, prompts, greedy)


@only_full
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks(
    family: str,
    ranks: str,
    oracle: Any,
    tiny: Any,
    engine: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Greedy,
) -> None:
    if "pp" in ranks and FAMILIES[family].options.get("num_kv_shared_layers"):
        pytest.skip("layers that read the KV of others are on one stage")
    checkpoint = oracle(tiny(family=family, bias=bool(FAMILIES[family].biases)))
    check(build(engine, Path(checkpoint.folder), PLAIN, **RANKS[ranks]), checkpoint, prompts, greedy)
