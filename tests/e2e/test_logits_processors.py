"""Logits processors as Python functions: tokens follow the changed logits, with steps in flight and beside others."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from quire import LLM, AsyncLLM, SamplingParams
from quire.contracts.errors import InvalidParameter

PROMPT = list(range(5, 45))
PLAIN = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", async_depth=2, max_num_batched_tokens=16) as one:
        yield one


def counting(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The next token is the last one and 1: a function that misses a token gives another one."""
    logits[:] = -torch.inf
    logits[(output[-1] + 1) if output else 100] = 0
    return logits


def mirrored(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The prompt backwards."""
    return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([prompt[-1 - len(output)]]), 1.0)


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[list[int]]]:
    outs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [[c.token_ids for c in out.outputs] for out in outs]


def test_each_token_follows_the_functions_and_other_requests_are_as_before(llm: LLM) -> None:
    (plain,) = tokens(llm, [PLAIN])
    seen = list[int]()

    def reading(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(len(output))
        return logits

    counted = PLAIN.clone(logits_processors=[counting], n=2, temperature=1.0)
    both = PLAIN.clone(logits_processors=[reading, mirrored])
    found = tokens(llm, [PLAIN, counted, both, PLAIN.clone(logits_processors=[reading])])
    assert found == [plain, [list(range(100, 116))] * 2, [PROMPT[::-1][:16]], plain]
    assert sorted(set(seen)) == list(range(16))
    assert not llm.engine.worker.features.controls["set_processors"].__self__._asked, "functions are kept"


def test_functions_come_back_after_a_preemption(llm: LLM) -> None:
    with LLM(device="cpu", async_depth=2, num_gpu_blocks_override=6) as small:
        found = tokens(small, [PLAIN.clone(logits_processors=[counting], max_tokens=40, seed=i) for i in range(3)])
        assert small.engine.core.scheduler.num_preempted > 0
    assert found == [[list(range(100, 140))]] * 3


def test_a_request_with_functions_has_no_drafts() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(device="cpu", speculative_config=drafts) as llm:
        repeated = [7, 8, 9] * 8
        asked = [PLAIN.clone(logits_processors=[counting]), PLAIN]
        out, plain = llm.generate([repeated, repeated], asked, use_tqdm=False)
        assert out.outputs[0].token_ids == list(range(100, 116)) and len(plain.outputs[0].token_ids) == 16


def test_a_function_that_fails_ends_its_request_alone(llm: LLM, caplog: Any) -> None:
    def shorter(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:-1] if len(output) == 3 else logits

    bad, good = llm.generate([PROMPT] * 2, [PLAIN.clone(logits_processors=[shorter]), PLAIN], use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error" and len(bad.outputs[0].token_ids) == 3
    assert good.outputs[0].finish_reason == "length" and "must return logits of shape" in caplog.text


def test_what_is_no_function_or_has_no_model_beside_it_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="a list of functions"):
        SamplingParams(logits_processors=[3])
    with closing(AsyncLLM(device="cpu")) as other, pytest.raises(InvalidParameter, match="one rank"):
        asyncio.run(anext(other.generate("a", SamplingParams(logits_processors=[counting]))))
