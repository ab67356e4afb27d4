"""Drafts over recurrent layers, end to end in float32: texts are those of plain decoding.

Drafts are right by chance, so that steps accept any number of them. Checkpoints of decodes are taken every 16 tokens,
so that drafts pass their lengths often. The model has attention in a layer, too.
"""

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels.native.library import missing

from ..support.drafters import KnownAnswers
from ..support.features import set_drafter
from ..support.full import FULL, full_rows
from ..support.tiny_models import Oracle, Tiny

TURNS, NEW, EVERY, DRAFTS = 3, 21, 16, 3
STATES = {"state_checkpoint": f"prompt,branch,turn,every={EVERY}", "state_memory_fraction": 0.99}
BATCH: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4} | STATES
ROWS = [("random", 1, 2048, None), ("random", 2, 16, 26), ("right", 2, 16, None), ("ngram", 2, 2048, 26)]
FAMILIES = ["kimi_linear", "olmo_hybrid", "lfm2", "granite_mamba", "nemotron_h", "falcon_h1"]
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


@pytest.fixture
def folder(oracle: Callable[..., Oracle], request: pytest.FixtureRequest) -> Any:
    """The checkpoint of the family that the test names: pending rows of Kimi-Linear have a decay for each channel.

    Engines have room for the states of some requests, however few blocks they have.
    """
    return oracle(Tiny(family=getattr(request, "param", "qwen3_5_text"))).folder


def answers(llm: LLM, texts: list[list[int]], **fields: Any) -> list[Any]:
    """Return the answers to prompts, whose seeds are their numbers."""
    given = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False} | fields
    return llm.generate(texts, [SamplingParams(seed=i, **given) for i in range(len(texts))], use_tqdm=False)


def drafting(engine: Callable[..., LLM], folder: Any, guesses: str, known: dict[int, list[int]], **more: Any) -> LLM:
    """Return an engine with drafts: n-grams, or guesses at the texts in `known`, by seed."""
    llm = engine(folder, speculative_config=NGRAM, **BATCH | more)
    runner = llm.engine.worker
    if guesses != "ngram":
        drafter = KnownAnswers(known, runner.sampler.table.rows, guesses, llm.engine.core.facts.vocab_size)
        set_drafter(runner, drafter)
    return llm


@pytest.mark.parametrize(
    ("folder", "guesses", "depth", "budget", "blocks"),
    [
        *((family, *row) for family in ("qwen3_5_text", *full_rows(FAMILIES)) for row in ROWS),
        *([] if FULL else [("kimi_linear", *ROWS[1])]),
    ],
    indirect=["folder"],
)
def test_turns(
    guesses: str, depth: int, budget: int, blocks: int | None, engine: Callable[..., LLM], folder: Any, prompts: Any
) -> None:
    """Turns go on at checkpoints that decodes with drafts made; with few blocks, requests are preempted."""
    plain = engine(folder, enable_prefix_caching=False, **BATCH)
    known = dict[int, list[int]]()
    more = {"num_gpu_blocks_override": blocks, "max_model_len": 104} if blocks else {}
    llm = drafting(engine, folder, guesses, known, async_depth=depth, max_num_batched_tokens=budget, **more)
    texts = [list(prompts[i % len(prompts)][:30]) + [i + 1] for i in range(6)]
    for turn in range(TURNS):
        wanted = [one.outputs[0].token_ids for one in answers(plain, texts)]
        known.update({i: [*text, *new] for i, (text, new) in enumerate(zip(texts, wanted, strict=True))})
        found = answers(llm, texts)
        llm.engine.core.check()
        assert [one.outputs[0].token_ids for one in found] == wanted, f"turn {turn}"
        decoded = [one.num_cached_tokens > len(text) - NEW - 2 for one, text in zip(found, texts, strict=True)]
        assert not turn or blocks or all(decoded), "a turn goes on behind the prompt of the last one"
        texts = [[*known[i], 5 + i, 6 + turn] for i in range(len(texts))]
    scheduler = llm.engine.core.scheduler
    _, drafts, *accepted = scheduler.drafts.totals
    assert guesses != "random" or 0.1 < sum(accepted) / drafts < 0.9
    assert guesses != "right" or sum(accepted) / drafts > 0.8
    assert (scheduler.num_preempted > 0) == (blocks is not None)
    assert scheduler.allocator.states.hits > 0, "a resumed request, or a turn, goes on at a checkpoint"


def test_completions_of_a_prompt(engine: Callable[..., LLM], folder: Any, prompts: Any) -> None:
    """By steps that are replayed, with drafts and without."""
    plain, llm = engine(folder, **BATCH), drafting(engine, folder, "ngram", {})
    texts = [
        [tuple(one.token_ids) for one in answers(one, [prompts[0]], n=3, temperature=1.0)[0].outputs]
        for one in (plain, llm)
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    for one in (plain, llm):
        counts = one.engine.worker.programs.recorder.counts
        assert (counts["replayed"] > counts["recorded"]) == (not missing()), counts
