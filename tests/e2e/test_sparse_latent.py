"""Sparse latent attention in engines: texts whose blocks leave the device and come back, and drafts of its layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.contracts.errors import ConfigError
from quire.contracts.step import Tier
from quire.engine.replicas import flush

from ..support.prediction_layers import predicting
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from ..support.tiny_models import Tiny

# A cache that holds one conversation: each turn drives the blocks of the others out.
SMALL: dict[str, Any] = {"block_size": 8, "max_num_seqs": 2, "max_model_len": 160, "num_gpu_blocks_override": 24}
TALKS, TURNS, NEW = 3, 3, 19
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, detokenize=False)


def talk(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of the turns of some conversations in turn, and how many tokens of each were cached."""
    texts, tokens, cached = [[(7 * i + 3 + j * j) % 90 + 1 for j in range(30)] for i in range(TALKS)], [], []
    for turn in range(TURNS):
        for number in range(TALKS):
            (output,) = llm.generate([texts[number]], GREEDY, use_tqdm=False)
            tokens.append(list(output.outputs[0].token_ids))
            cached.append(output.num_cached_tokens or 0)
            texts[number] = [*texts[number], *tokens[-1], 5 + number, 6 + turn]
    flush(llm.engine.core)
    llm.engine.core.check()
    return tokens, cached


def test_texts_through_tiers_are_plain_texts(
    oracle: Callable[..., Any], engine: Callable[..., LLM], tmp_path: Path
) -> None:
    """The keys of the indexer come back from host memory and files with the latents."""
    folder = oracle(Tiny(family="glm_moe_dsa")).folder
    plain, cached = talk(engine(folder, **SMALL, enable_prefix_caching=False))
    assert not any(cached)
    tiers = {"kv_offload_gb": 0.01, "kv_offload_policy": "write_through", "kv_offload_dir": str(tmp_path)}
    found, cached = talk(engine(folder, **SMALL, **tiers, async_depth=2))
    assert found == plain and all(cached[TALKS:]), cached
    again = engine(folder, **SMALL, **tiers)  # another engine finds the files
    found, cached = talk(again)
    assert found == plain and all(cached), cached
    disk = again.engine.core.state().stats.tiers[Tier.DISK]
    assert disk.num_loaded >= TALKS and disk.num_failed == 0


@pytest.mark.parametrize(("family", "key"), [("deepseek_v32", None), ("glm_moe_dsa", None), ("glm_moe_dsa", False)])
def test_drafts_do_not_change_answers(
    family: str, key: bool | None, shared: Path, engine: Callable[..., LLM], tmp_path: Path
) -> None:
    """The layer that drafts has an indexer of its own, whose keys lie in the page. The config.json of GLM-5.2 says that
    the passes of a step share a choice; key: index_share_for_mtp_iteration of the engine."""
    folder = predicting(tmp_path, family, shared / "models" / "quire-tiny", 0.05)
    options: dict[str, Any] = {"block_size": 16, "max_num_seqs": 3, "max_model_len": 256, "max_num_batched_tokens": 24}
    prompts = [[(5 * i * i + 3 * n) % 50 for i in range(n)] for n in (41, 5, 70)]
    wanted = [one.outputs[0].token_ids for one in engine(folder, **options).generate(prompts, GREEDY, use_tqdm=False)]
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "index_share_for_mtp_iteration": key}
    llm = engine(folder, **options, speculative_config=drafts)
    assert llm.engine.worker.model.args.prediction.shares == (family == "glm_moe_dsa" and key is None)
    assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)] == wanted
    runs, _, *accepted = llm.engine.core.state().stats.drafts
    assert accepted[0] > runs // 3 > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_a_cache_of_rows_rounds_and_no_more(
    family: str, oracle: Callable[..., Any], engine: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    """With latents dense and sparse: log-probabilities near those of transformers, and the same from reused blocks."""
    checkpoint = oracle(Tiny(family=family))
    options: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_logprobs": -1}
    llm = engine(checkpoint.folder, **options, kv_cache_dtype="fp8_ds_mla")
    (group,) = llm.engine.memory.geometry.groups
    row = 24 + 4 + 2 * 8
    assert [one.head_dim * one.item_bytes for one in group.components] == [row, *([16, 4] if "glm" in family else [])]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=-1)
    differences = []
    for out, ids in zip(llm.generate(prompts[1:], asked, use_tqdm=False), prompts[1:], strict=True):
        assert out.prompt_logprobs is not None
        table = [[row[i].logprob for i in range(len(row))] for row in out.prompt_logprobs[1:] if row]
        differences.append(np.abs(np.array(table) - checkpoint.logprobs(ids)[:-1]))
    every = np.concatenate([one.ravel() for one in differences])
    assert 1e-4 < every.mean() < 0.5, "tests/unit/models compares with rounded numbers exactly"
    texts = [[one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)] for _ in range(2)]
    assert texts[0] == texts[1]


def test_w8a8_with_drafts_and_rows(shared: Path, engine: Callable[..., LLM], tmp_path: Path) -> None:
    """INT8 weights and activations, a cache of rows, the layer that drafts: answers are those without drafts."""
    plain = predicting(tmp_path / "plain", "deepseek_v32", shared / "models" / "quire-tiny", 0.05)
    quantize_checkpoint(plain, tmp_path / "w8a8", FORMS["ct-int8-channel"])
    options: dict[str, Any] = {
        "quantization": "slimquant_marlin",
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": 64,
        "max_num_seqs": 3,
        "max_model_len": 256,
        "max_num_batched_tokens": 24,
        "skip_tokenizer_init": True,
    }
    prompts = [[(5 * i * i + 3 * n) % 50 for i in range(n)] for n in (41, 5, 70)]

    def answers(llm: LLM) -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, use_tqdm=False)]

    wanted = answers(engine(tmp_path / "w8a8", **options))
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "quantization": "slimquant_marlin"}
    llm = engine(tmp_path / "w8a8", **options, speculative_config=drafts)
    assert answers(llm) == wanted
    runs, _, *accepted = llm.engine.core.state().stats.drafts
    assert accepted[0] > runs // 3 > 0
    with pytest.raises(ConfigError, match="the layer that drafts is a part of the checkpoint.*contradicts"):
        engine(tmp_path / "w8a8", **options, speculative_config=drafts | {"quantization": "awq"})
    with pytest.raises(ConfigError, match="quantized as the model: leave it out"):
        engine(plain, skip_tokenizer_init=True, speculative_config=drafts | {"quantization": "fp8"})
