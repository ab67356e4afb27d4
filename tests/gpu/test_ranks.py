"""Engines of 2, 4 and 8 GPUs: the tokens of one GPU in float32, sums through symmetric memory and NCCL, and faults.

A layout that needs more GPUs than there are is skipped. `tests/gpu/test_shared_gpu.py` has layouts on one GPU."""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.contracts.errors import EngineDead
from quire.contracts.output import Logprob
from quire.engine import balancer
from quire.entry.prompts import PromptLike

from ..support import replay_kinds
from ..support.addresses import free_port
from ..support.engines import rank_pids
from ..support.gpu_hosts import second_host
from ..support.gpu_memory import END_SECONDS, wait_for_end
from ..support.many_ranks import DIVIDED, LARGER
from ..support.many_ranks import SIZES as SIZES_OF_TWO
from ..support.tiny_models import Tiny, random_model

TEXTS = ("To create a new file you", "def main(", "Once upon a time", "1, 2, 3, 5, 8, 13, 21, 34; " * 8)
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.9, top_p=0.9, seed=4, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=48, temperature=0.0, repetition_penalty=1.2, ignore_eos=True),
]
Answers = list[tuple[list[int], Sequence[dict[int, Logprob]] | None]]
SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2}, "tp2-nccl": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
    "tp2-eager": {"tensor_parallel_size": 2, "enforce_eager": True}, "pp2": {"pipeline_parallel_size": 2},
    "tp4": LARGER["tp4"], "tp4-nccl": LARGER["tp4"] | {"disable_custom_all_reduce": True}, "dp4": LARGER["dp4"],
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "tp4-pp2": LARGER["tp4-pp2"],
    "dp8": LARGER["dp8"],
}  # fmt: skip
PROMPTS: list[PromptLike] = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 17, 40)]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 256 << 20,
}
GATHER = {"all2all_backend": "allgather_reducescatter"}  # which is chosen by itself between hosts
EAGER = GATHER | {"enforce_eager": True}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2}, "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2-ep": {"data_parallel_size": 2, "enable_expert_parallel": True}, "tp4": LARGER["tp4"],
    "tp4-ep": LARGER["tp4-ep"], "dp4-ep": LARGER["dp4-ep"], "dp2-ep-gather": SIZES_OF_TWO["dp2-ep"] | GATHER,
    "dp4-ep-gather": LARGER["dp4-ep"] | GATHER, "dp4-ep-gather-eager": LARGER["dp4-ep"] | EAGER,
    "tp8": LARGER["tp8"], "tp8-ep": LARGER["tp8-ep"], "dp8-ep": LARGER["dp8-ep"], "dp4-tp2-ep": LARGER["dp4-tp2-ep"],
    "tp4-pp2": LARGER["tp4-pp2"],
}  # fmt: skip

CONTEXTS = DIVIDED | {
    "tp2-dcp2-eager": DIVIDED["tp2-dcp2"] | {"enforce_eager": True},
    "tp2-dcp2-nccl": DIVIDED["tp2-dcp2"] | {"disable_custom_all_reduce": True},
}


def num_ranks(sizes: dict[str, Any]) -> int:
    """The number of GPUs that an engine of these sizes takes."""
    return math.prod(count for name, count in sizes.items() if name.endswith("_size") and "context" not in name)


def layouts(every: dict[str, dict[str, Any]]) -> list[Any]:
    """Cases of a test, which are skipped where there are too few GPUs."""
    there = torch.cuda.device_count()
    return [
        pytest.param(
            sizes,
            id=name,
            marks=pytest.mark.skipif(
                there < num_ranks(sizes), reason=f"needs {num_ranks(sizes)} GPUs, and PyTorch sees {there}"
            ),
        )
        for name, sizes in every.items()
    ]


def answers(model: str, **options: Any) -> Answers:
    settings: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    with LLM(model, device="cuda", **(settings | options)) as llm:
        outputs = llm.generate(list(TEXTS), PARAMS, use_tqdm=False)
        again = llm.generate(list(TEXTS), PARAMS, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs]
        llm.engine.core.check()
    return [(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs]


@pytest.fixture(scope="module")
def alone() -> Answers:
    return answers("")


@pytest.mark.parametrize("sizes", layouts(SIZES))
def test_the_tokens_of_one_gpu(alone: Answers, sizes: dict[str, Any]) -> None:
    found = answers("", **sizes)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
    for (_, mine), (_, theirs) in zip(found, alone, strict=True):
        for one, other in zip(mine or (), theirs or (), strict=True):
            assert one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-3 for token in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a random model of a family; 2 KV heads, or latents, are copied to ranks."""

    @cache
    def made(family: str) -> str:
        where, widths = tmp_path_factory.mktemp(family), (("moe_intermediate_size", 128), ("intermediate_size", 256))
        random_model(Tiny(family=family, heads=(8, 2), changes=widths), 0).save_pretrained(where)
        return str(where)

    return made


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("sizes", layouts(OF_EXPERTS))
def test_experts_of_many_gpus(folder: Callable[[str], str], family: str, sizes: dict[str, Any]) -> None:
    """Whole experts on each GPU, or a slice of each."""
    found = []
    for given in ({}, sizes):
        with LLM(folder(family), **OPTIONS | given) as llm:
            params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([list(one.outputs[0].token_ids) for one in outputs])
    assert found[0] == found[1]


def check_replays(llm: LLM, least: int, *, idle: bool) -> None:
    """Assert that every rank has replayed graphs of so many decode steps. The module `replay_kinds` is in the ranks.

    idle   some of them were steps without tokens of that rank
    """
    found: Any = llm.engine.core.executor.control("replays", {})
    print("replayed graphs of ranks", found)
    assert found and all(one.get("decode", 0) + one.get("join", 0) >= least and one.get("decode") for one in found)
    assert not idle or any(one.get("join") for one in found)


HOSTED = {
    "dp2-ep": SIZES_OF_TWO["dp2-ep"], "dp2-tp2-ep": SIZES_OF_TWO["dp2-tp2-ep"],
    "dp2-pp2-ep": LARGER["dp2-pp2-ep"], "dp4-ep": LARGER["dp4-ep"],
}  # fmt: skip
BALANCED = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 4, "step_interval": 8, "window_size": 4}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3_moe", {}), ("deepseek_v3", {}), ("qwen3_moe", BALANCED), ("qwen3_moe", {"speculative_config": NGRAM})],
    ids=["grouped", "latent", "balanced", "drafts"],
)
@pytest.mark.parametrize("sizes", layouts(HOSTED))
def test_experts_of_two_hosts_in_graphs(
    folder: Callable[[str], str], family: str, more: dict[str, Any], sizes: dict[str, Any], monkeypatch: Any
) -> None:
    """Between hosts NCCL gathers rows in CUDA graphs: replicas with fewer decodes, and without, bring padding."""
    params = [SamplingParams(max_tokens=24 * (1 + n % 3), temperature=0.0, ignore_eos=True) for n in range(7)]
    prompts: list[PromptLike] = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 17, 40, 9, 30, 5, 22)]

    def answered(llm: LLM) -> list[list[list[int]]]:
        """Many requests, then one: the other replica has none."""
        return [
            [list(one.outputs[0].token_ids) for one in llm.generate(prompts[:n], params[-n:], use_tqdm=False)]
            for n in (7, 7, 1)
        ]

    options = OPTIONS | {"max_num_seqs": 16}
    with LLM(folder(family), **options) as llm:
        expected = answered(llm)
    port = free_port()
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)  # experts move, if they are balanced
    with second_host(monkeypatch, port, folder(family), num_ranks(sizes)):
        with LLM(folder(family), **options | sizes | more, nnodes=2, master_port=port) as llm:
            assert "dispatcher all-gather" in str(llm.engine.core.facts.plans["experts"])
            llm.engine.core.executor.control("attach", {"module": replay_kinds.__name__})
            assert answered(llm) == expected
            check_replays(llm, 40, idle=True)
            llm.engine.core.check()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}},
    ],
    ids=["plain", "fp8", "drafts"],
)
@pytest.mark.parametrize("sizes", layouts(CONTEXTS))
def test_contexts_on_several_gpus(folder: Callable[[str], str], sizes: dict[str, Any], more: dict[str, Any]) -> None:
    """Chunks of prompts read what other GPUs hold, decodes in CUDA graphs add up parts, prefixes are found again."""
    prompts: list[PromptLike] = [{"prompt_token_ids": [5 + i % 60 for i in range(n)]} for n in (3, 17, 40, 150, 220)]
    params, found = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), []
    for given in ({}, sizes | {"block_size": 16}):
        with LLM(folder("deepseek_v3"), **OPTIONS | more | given, max_num_batched_tokens=64) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([list(one.outputs[0].token_ids) for one in outputs])
            assert sum(one.num_cached_tokens or 0 for one in outputs) > 0
            llm.engine.core.check()
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize(
    "sizes", layouts({name: OF_EXPERTS[name] for name in ("tp2", "tp4", "dp4-ep", "tp8", "dp8-ep")})
)
def test_a_killed_rank_ends_the_engine(folder: Callable[[str], str], sizes: dict[str, Any], number: int) -> None:
    """Soon, though the other GPUs wait in a kernel. No rank runs after that, or holds memory of its GPU."""
    number %= num_ranks(sizes)
    with LLM(folder("qwen3_moe"), **OPTIONS | sizes) as llm:
        pids, began = rank_pids(llm), time.monotonic()
        os.kill(pids[number], signal.SIGKILL)
        with pytest.raises(EngineDead, match=f"rank {number} .*SIGKILL"):
            llm.generate(PROMPTS * 4, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - began < END_SECONDS
    wait_for_end(pids)
