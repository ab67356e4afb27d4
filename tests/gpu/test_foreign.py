"""Decoders of transformers on a GPU: the tokens of transformers' own model, from captured steps; native ones alike."""

import gc
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.worker.graphs import Graphs

from ..support.engines import core_of
from ..support.foreign_models import make_foreign
from ..support.tiny_models import Tiny, make_oracle, mixed_prompts

NUM_TOKENS = 64
NAMES = ("starcoder2", "gpt_neox", "hunyuan_v1_dense", "opt", "falcon", "vaultgemma", "glm", "dots1")


def tokens(folder: Path, prompts: list[list[int]], **options: object) -> list[list[int]]:
    """Return greedy answers, and check that steps were replayed from CUDA graphs."""
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 128 << 20}
    with LLM(str(folder), **(defaults | options)) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        out = llm.generate(prompts, params, use_tqdm=False)
        recorder = llm.engine.worker.programs.recorder
        if not options.get("enforce_eager"):
            assert isinstance(recorder, Graphs) and recorder.counts["replayed"] > NUM_TOKENS // 2
        assert not core_of(llm).has_work
    gc.collect()
    torch.cuda.empty_cache()
    return [one.outputs[0].token_ids for one in out]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = mixed_prompts()
    truth = make_foreign(name, tmp_path_factory.mktemp, prompts, NUM_TOKENS)
    expected = truth.greedy(prompts, NUM_TOKENS)
    assert tokens(truth.folder, prompts) == expected
    assert tokens(truth.folder, prompts, enforce_eager=True, max_num_batched_tokens=16) == expected


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_own_families_by_transformers(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    prompts = mixed_prompts()
    folder = make_oracle(Tiny(family=family), prompts, tmp_path_factory.mktemp).folder
    assert tokens(folder, prompts, model_impl="transformers") == tokens(folder, prompts)
