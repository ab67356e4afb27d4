"""Engines whose ranks share one GPU (QUIRE_TEST_RANKS_SHARE_GPU): the tokens of one rank in float32, and faults.

Tensors go through host memory from rank to rank. Everything else is the code of many GPUs: slices of weights, kernels
on them, copied KV heads, the divided vocabulary, stages, experts of other ranks, moves of experts. An engine takes long
to start, so each layout has one test, which ends with the death of a rank.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.contracts.errors import ConfigError, EngineDead
from quire.contracts.output import CompletionOutput
from quire.engine import balancer
from quire.engine.replicas import Replicas
from quire.entry.prompts import PromptLike

from ..support.engines import cores_of, rank_pids
from ..support.gpu_memory import END_SECONDS, wait_for_end
from ..support.many_ranks import DIVIDED, SIZES
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from ..support.tiny_models import Tiny, random_model

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
TEXTS = ["To create a new file you", "def main(", "Once upon a time", "1, 2, 3, 5, 8, 13, 21, 34; " * 4, "The json"]
IDS = [list(range(5, 5 + count)) for count in (3, 17, 40, 33, 8)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
]  # fmt: skip
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": 16,
    "max_num_batched_tokens": 64, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20,
}  # fmt: skip
NO_TEXT = OPTIONS | {"skip_tokenizer_init": True}
PROMPTS: list[PromptLike] = [{"prompt_token_ids": ids} for ids in IDS]
Answers = list[CompletionOutput]
Completions = tuple[Answers, Answers]
GATHER = {"all2all_backend": "allgather_reducescatter"}
SMALL_POOL = 18  # blocks: the texts need 27, so a request is preempted
ROUNDS = 30  # of requests, in which every layer of experts must have moved


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this test share the GPU, though there may be others."""
    monkeypatch.setenv("QUIRE_TEST_RANKS_SHARE_GPU", "1")


def params(with_text: bool, count: int = 64) -> list[SamplingParams]:
    """Parameters of the five requests; the last one has a grammar where the model has a tokenizer."""
    grammar = {"structured_outputs": StructuredOutputsParams(json=SCHEMA)} if with_text else {"ignore_eos": True}
    kinds = [*({"ignore_eos": True} | kind for kind in KINDS), {"temperature": 1.0} | grammar]
    return [SamplingParams(**({"max_tokens": count, "seed": seed} | kind)) for seed, kind in enumerate(kinds)]


def ask(llm: LLM, prompts: Sequence[PromptLike], given: list[SamplingParams]) -> Answers:
    """Return the completion of each request."""
    return [one.outputs[0] for one in llm.generate(prompts, given, use_tqdm=False)]


def compare(found: Answers, expected: Answers) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 1e-3 for token in one)


def check_death(llm: LLM, number: int, prompts: Sequence[PromptLike]) -> None:
    """A rank that is killed ends the engine soon, by its name. No rank runs after that, or holds memory of the GPU."""
    pids = rank_pids(llm)
    number %= len(pids)
    began = time.monotonic()
    os.kill(pids[number], signal.SIGKILL)
    with pytest.raises(EngineDead, match=f"rank {number} .*(SIGKILL|closed its connection)"):
        ask(llm, [*prompts] * 4, [SamplingParams(max_tokens=128, ignore_eos=True)] * 4 * len(prompts))
    assert time.monotonic() - began < END_SECONDS
    llm.close()
    wait_for_end(pids)


@pytest.fixture(scope="module")
def alone() -> Completions:
    """The completions of one rank: of all texts, and of a text that it has completed before."""
    with LLM("", **OPTIONS) as llm:
        return ask(llm, TEXTS, params(True)), ask(llm, TEXTS[3:4], params(True, 8)[:1])


@pytest.mark.parametrize(("sizes", "killed"), [("tp2", 1), ("tp4", 0), ("pp2", 0), ("tp2-pp2", -1)])
def test_the_tokens_of_one_rank(alone: Completions, sizes: str, killed: int) -> None:
    """With a preempted request, a grammar, log-probabilities and a cached prefix; the 2 KV heads of tp4 are copied."""
    with LLM("", **OPTIONS, **SIZES[sizes], num_gpu_blocks_override=SMALL_POOL) as llm:
        found = ask(llm, TEXTS, params(True))
        compare(found, alone[0])
        assert '"age"' in found[4].text
        assert sum(core.scheduler.num_preempted for core in cores_of(llm)) > 0
        compare(ask(llm, TEXTS[3:4], params(True, 8)[:1]), alone[1])
        again = llm.generate(TEXTS[3:4], params(True, 8)[:1], use_tqdm=False)
        assert (again[0].num_cached_tokens or 0) > 0
        compare([again[0].outputs[0]], alone[1])
        llm.engine.core.check()
        check_death(llm, killed, TEXTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a family. Slices for two ranks have a KV head and whole groups of 128."""

    @cache
    def made(family: str) -> Path:
        spec = Tiny(
            family=family,
            heads=(8, 2),
            head_dim=64,
            changes=(("moe_intermediate_size", 128), ("intermediate_size", 512)),
        )
        where = tmp_path_factory.mktemp(family)
        random_model(spec, 0).save_pretrained(where)
        return where

    return made


@pytest.fixture(scope="module")
def one_rank(folder: Callable[[str], Path]) -> Callable[[str], Answers]:
    """The completions of one rank with a model of a family."""

    @cache
    def made(family: str) -> Answers:
        with LLM(str(folder(family)), **NO_TEXT) as llm:
            return ask(llm, PROMPTS, params(False))

    return made


@pytest.mark.parametrize(
    ("family", "sizes", "killed"),
    [("deepseek_v3", "tp2-ep", 0), ("qwen3_moe", "dp2-ep", 1), ("deepseek_v3", "tp2-dcp2", 1)],
)
def test_a_division_of_experts_or_contexts(
    folder: Callable[[str], Path],
    one_rank: Callable[[str], Answers],
    family: str,
    sizes: str,
    killed: int,
) -> None:
    expected = one_rank(family)
    with LLM(str(folder(family)), **NO_TEXT, **GATHER, **(SIZES | DIVIDED)[sizes]) as llm:
        for _ in range(2):
            compare(ask(llm, PROMPTS, params(False)), expected)
        llm.engine.core.check()
        check_death(llm, killed, PROMPTS)


def test_experts_move_while_requests_are_served(
    folder: Callable[[str], Path], one_rank: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer switches to another map, with copies of two experts, and no token changes."""
    monkeypatch.setattr(balancer, "LEAST_GAIN", -1.0)
    settings = {"num_redundant_experts": 2, "step_interval": 8, "window_size": 4}
    with LLM(
        str(folder("qwen3_moe")), **NO_TEXT, **GATHER, **SIZES["dp2-ep"], enable_eplb=True, eplb_config=settings
    ) as llm:
        core = llm.engine.core
        assert isinstance(core, Replicas) and core.balancer is not None
        for _ in range(ROUNDS):
            compare(ask(llm, PROMPTS, params(False)), one_rank("qwen3_moe"))
            if core.balancer._total:
                break
        assert core.balancer._total, "not every layer was switched to another map"
        compare(ask(llm, PROMPTS, params(False)), one_rank("qwen3_moe"))


@pytest.mark.parametrize(
    ("form", "dtype", "sizes", "bound"),
    [
        ("fp8-block", "bfloat16", "pp2", 1e-6),
        ("awq", "float16", "tp2", 0.2),
    ],
)
def test_quantized_weights(
    folder: Callable[[str], Path], tmp_path: Path, form: str, dtype: str, sizes: str, bound: float
) -> None:
    """The mean difference of log-probabilities is within a bound; other slices give more than 1.

    A stage computes what one rank does. Two parts of a sum are rounded to float16, one sum is not. Prompts come one by
    one, so that every step has the same sizes.
    """
    quantize_checkpoint(folder("qwen3"), tmp_path / "quantized", FORMS[form])
    found: list[list[float]] = []
    for given in ({}, SIZES[sizes]):
        with LLM(str(tmp_path / "quantized"), **NO_TEXT | {"dtype": dtype}, **given) as llm:
            outputs = [
                llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
                for prompt in PROMPTS
            ]
        found.append(
            [
                entry[token].logprob
                for one in outputs
                for token, entry in zip(one.prompt_token_ids[1:], (one.prompt_logprobs or [])[1:], strict=True)
                if entry is not None
            ]
        )
    assert len(found[0]) == sum(len(ids) - 1 for ids in IDS)
    assert np.abs(np.subtract(found[0], found[1])).mean() < bound


def test_what_needs_a_gpu_for_each_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="^QUIRE_TEST_RANKS_SHARE_GPU: .* add --enforce-eager"):
        LLM("", **OPTIONS | {"enforce_eager": False, "tensor_parallel_size": 2})
