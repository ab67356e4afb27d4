"""Layers with sliding windows on a GPU: transformers' tokens and log-probabilities in float32."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire import SamplingParams

from ..support.tiny_models import Oracle, Tiny, make_oracle, mixed_prompts
from ..support.windowed_models import MODELS, windowed
from .test_engine import ATOL, DEVICE, NUM_TOKENS, greedy, make, run, table, tokens

RUNS: dict[str, dict[str, Any]] = {
    "captured": {"block_size": 32},
    "eager": {"block_size": 16, "enforce_eager": True, "max_num_batched_tokens": 16},
    "short of blocks": {"block_size": 16, "max_num_batched_tokens": 32},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny], Oracle]:
    made: dict[Tiny, Oracle] = {}

    def get(spec: Tiny) -> Oracle:
        if spec not in made:
            made[spec] = make_oracle(spec, mixed_prompts(), tmp_path_factory.mktemp, DEVICE)
        return made[spec]

    return get


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("window", [5, 21, 64])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_logprobs(model: str, window: int, how: str, oracle: Callable[[Tiny], Oracle]) -> None:
    """Twice, the second time from the prefix cache; then every position of the whole texts."""
    checkpoint, prompts = oracle(windowed(model, window, head_dim=64)), mixed_prompts()
    expected = checkpoint.greedy(prompts, NUM_TOKENS)
    few = {"num_gpu_blocks_override": 3 * (2 * math.ceil(125 / 16) + 2)} if how == "short of blocks" else {}
    with make(checkpoint.folder, **RUNS[how], **few) as llm:
        for _ in range(2):
            assert tokens(run(llm, prompts, greedy())) == expected
        whole = [p + e for p, e in zip(prompts, expected, strict=True)]
        scored = run(llm, whole, SamplingParams(max_tokens=0, prompt_logprobs=-1))
        for ids, out in zip(whole, scored, strict=True):
            np.testing.assert_allclose(table(out.prompt_logprobs), checkpoint.logprobs(ids)[:-1], atol=ATOL, rtol=0)
        llm.engine.core.check()
