"""Engines of two GPUs: the tokens of one GPU in float32, sums through symmetric memory and through NCCL, and faults."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.errors import EngineDead

from ..support.tiny_models import Tiny, random_model

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

TEXTS = ("To create a new file you", "def main(", "Once upon a time", "1, 2, 3, 5, 8, 13, 21, 34; " * 8)
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.9, top_p=0.9, seed=4, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
]
SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2}, "tp2-nccl": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "tp2-eager": {"tensor_parallel_size": 2, "enforce_eager": True}, "pp2": {"pipeline_parallel_size": 2},
}  # fmt: skip


def answers(model: str, **options: Any) -> list[tuple[list[int], Any]]:
    settings: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "gpu_memory_utilization": 0.3}
    with LLM(model, device="cuda", **(settings | options)) as llm:
        outputs = llm.generate(list(TEXTS), PARAMS, use_tqdm=False)
        again = llm.generate(list(TEXTS), PARAMS, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs]
        llm.engine.core.check()
    return [(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs]


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], Any]]:
    return answers("")


@pytest.mark.parametrize("sizes", SIZES)
def test_the_tokens_of_one_gpu(alone: Any, sizes: str) -> None:
    found = answers("", **SIZES[sizes])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    for (_, mine), (_, theirs) in zip(found, alone, strict=True):
        for one, other in zip(mine or (), theirs or (), strict=True):
            assert one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-3 for token in one)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("experts", [False, True])
def test_experts_of_two_gpus(tmp_path: Path, family: str, experts: bool) -> None:
    """Random models in float32: whole experts on each GPU, or a slice of each."""
    random_model(Tiny(family=family, heads=(4, 4)), 0).save_pretrained(tmp_path)
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 40)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    found = []
    for sizes in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": experts}):
        with LLM(str(tmp_path), device="cuda", dtype="float32", skip_tokenizer_init=True, max_model_len=256,
                 gpu_memory_utilization=0.3, **sizes) as llm:  # type: ignore[arg-type]  # fmt: skip
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            found.append([list(one.outputs[0].token_ids) for one in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_engine(number: int) -> None:
    """Within seconds, though the other GPU waits in a kernel; and its memory is free again."""
    before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    with LLM("", device="cuda", tensor_parallel_size=2, max_model_len=512, gpu_memory_utilization=0.3) as llm:
        executor: Any = llm.engine.core.executor
        pid, began = executor.pids[number], time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=f"rank {number} .*SIGKILL"):
            llm.generate(list(TEXTS), PARAMS, use_tqdm=False)
        assert time.monotonic() - began < 20
    deadline = time.monotonic() + 20
    while any(torch.cuda.mem_get_info(gpu)[0] < was - (64 << 20) for gpu, was in enumerate(before)):
        assert time.monotonic() < deadline, "memory of a GPU is still held"
        time.sleep(0.1)
