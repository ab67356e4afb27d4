"""Engines of models with recurrent layers: lengths around chunks, conversations, and replayed recordings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams

from ..support.full import full_rows
from ..support.tiny_models import VOCAB, Oracle, Tiny, make_oracle

FAMILIES = ("lfm2", "granite_mamba", "nemotron_moe", "falcon_h1", "kimi_linear", *full_rows(["olmo_hybrid"]))
LENGTHS = (1, 63, 64, 65, 127, 128, 129)
OPTIONS: dict[str, Any] = {
    "block_size": 8, "max_num_seqs": 8, "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1,
    "use_tqdm_on_load": False, "kv_cache_memory_bytes": 1 << 24,
}  # fmt: skip


def prompt(length: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(length).integers(1, VOCAB, length)]


def texts(llm: LLM, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[int]]:
    """The greedy tokens of prompts, and how many tokens of each were cached."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs], [one.num_cached_tokens for one in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    def folder(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    return make_oracle(Tiny(family=request.param), [prompt(length) for length in LENGTHS], folder)


def test_lengths_around_chunks_and_conversations(checkpoint: Oracle) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    expected = checkpoint.greedy(prompts, 64)
    with LLM(str(checkpoint.folder), **OPTIONS, max_num_batched_tokens=48) as llm:
        assert texts(llm, prompts, 64)[0] == expected
        longer = [one + answer[:40] for one, answer in zip(prompts, expected, strict=True)]
        found, cached = texts(llm, longer, 24)
    assert found == [answer[40:] for answer in expected]
    assert all(cached[1:]), cached  # each turn but the shortest one goes on from a checkpoint


def test_a_recording_is_of_as_many_sequences(checkpoint: Oracle) -> None:
    """Four rows of two sequences, then of four: what was recorded of the first is not replayed for the second."""
    prompts = [prompt(length) for length in (64, 65, 127, 128)]
    expected = checkpoint.greedy(prompts, 64)
    with LLM(str(checkpoint.folder), **OPTIONS, enable_prefix_caching=False) as llm:
        for _ in range(2):
            texts(llm, [prompt(2), prompt(2)], 1)
        assert texts(llm, prompts, 32)[0] == [one[:32] for one in expected]
        for _ in range(2):
            texts(llm, [prompt(2), prompt(2)], 1)
        assert texts(llm, prompts, 32)[0] == [one[:32] for one in expected]
