"""Adapters for a checkpoint, the answers of checkpoints into which they are merged, and the comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, LoRARequest, RequestOutput, SamplingParams

from ..support.adapters import merge, named, write_adapter
from ..support.full import FULL

ATOL, NUM_TOKENS = 1e-4, 64 if FULL else 16
RANKS = (3, 1, 16, 8, 2, 5, 7, 4)  # of the adapters
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=-1)
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16, "max_logprobs": -1}


class Merged:
    """A checkpoint, adapters for it, and the answers of the base model (0) and of each adapter (from 1 on)."""

    def __init__(self, folder: Path, tmp: Path, count: int, **adapter: Any) -> None:
        self.folder = folder
        self.adapters = [
            write_adapter(folder, tmp / f"a{seed}", rank=rank, seed=seed, size=0.06, head=True, **adapter)
            for seed, rank in enumerate(RANKS[:count])
        ]
        self.folders = [folder, *(merge(folder, one, tmp / f"merged-{one.name}") for one in self.adapters)]
        self.requests: list[LoRARequest | None] = [None, *map(named, self.adapters)]

    def answers(
        self, engine: Callable[..., LLM], prompts: Sequence[list[int]], params: SamplingParams
    ) -> list[list[RequestOutput]]:
        found = []
        for folder in self.folders:
            llm = engine(folder, max_logprobs=-1)
            found.append(llm.generate(prompts, params, use_tqdm=False))
            llm.close()
        return found


def mixed(count: int, prompts: Sequence[list[int]]) -> list[tuple[int, int]]:
    """Pairs of a prompt and an adapter such that neighbours differ in both."""
    return [(prompt, (prompt + turn) % (count + 1)) for turn in range(count + 1) for prompt in range(len(prompts))]


def scores(output: RequestOutput) -> np.ndarray:
    assert output.prompt_logprobs is not None
    rows = [row for row in output.prompt_logprobs[1:] if row is not None]
    return np.array([[row[i].logprob for i in range(len(row))] for row in rows])


def check(
    case: Merged,
    engine: Callable[..., LLM],
    prompts: Sequence[list[int]],
    greedy: Any,
    llm: LLM,
    atol: float = ATOL,
) -> None:
    """Compare the greedy tokens of mixed batches, twice, then the log-probabilities of all prompt tokens."""
    pairs = mixed(len(case.adapters), prompts)
    given, asked = [prompts[prompt] for prompt, _ in pairs], [case.requests[number] for _, number in pairs]
    expected = case.answers(engine, prompts, greedy(NUM_TOKENS))
    for _ in range(2):
        found = llm.generate(given, greedy(NUM_TOKENS), use_tqdm=False, lora_request=asked)
        for (prompt, number), output in zip(pairs, found, strict=True):
            assert output.outputs[0].token_ids == expected[number][prompt].outputs[0].token_ids, (prompt, number)
    truth = case.answers(engine, prompts, SCORED)
    found = llm.generate(given, SCORED, use_tqdm=False, lora_request=asked)
    for (prompt, number), output in zip(pairs, found, strict=True):
        if len(prompts[prompt]) > 1:
            np.testing.assert_allclose(scores(output), scores(truth[number][prompt]), atol=atol, rtol=0)
