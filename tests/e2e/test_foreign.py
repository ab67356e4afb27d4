"""Decoders that Quire has no file for answer as transformers' own model does, however a run is scheduled.

Logits of every position are within 1e-4, and 64 greedy tokens are equal, with chunks, preemption and cached prefixes.
"""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.args.layers import ForeignArgs
from quire.contracts.errors import ConfigError, UnsupportedModel
from quire.worker.recordings import LayerRecordings

from ..support.engines import core_of
from ..support.foreign_models import MODELS, foreign_config, make_foreign
from ..support.full import FULL, full_rows, only_full
from ..support.quantized_checkpoints import FORMS, QUANTIZED, quantize_checkpoint
from ..support.tiny_models import Oracle, Tiny

NUM_TOKENS, ATOL = 64 if FULL else 24, 1e-4
CHOSEN = ("starcoder2", "gpt_neox", "hunyuan_v1_dense", "opt")  # windows; fused heads; the module's heads; positions
MORE = [name for name in MODELS if name not in CHOSEN]
OWN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "gpt_oss")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Callable[[str], Oracle]:
    """Makes the checkpoint of a model_type, once."""
    return cache(lambda name: make_foreign(name, tmp_path_factory.mktemp, prompts, NUM_TOKENS))


def check(llm: LLM, truth: Oracle, prompts: list[list[int]], greedy: Callable[..., SamplingParams]) -> None:
    """Compare tokens and log-probabilities, and once more the tokens with cached prefixes."""
    expected = truth.greedy(prompts, NUM_TOKENS)
    for count in (NUM_TOKENS, 8):
        got = llm.generate(prompts, greedy(count), use_tqdm=False)
        assert [one.outputs[0].token_ids for one in got] == [tokens[:count] for tokens in expected]
    whole = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    scored = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)
    for ids, one in zip(whole, scored, strict=True):
        np.testing.assert_allclose(table_of(one), truth.logprobs(ids)[:-1], atol=ATOL, rtol=0)


def table_of(scored: RequestOutput) -> np.ndarray:
    """Return the log-probabilities of all tokens behind each token of a prompt but the last."""
    assert scored.prompt_logprobs is not None
    return np.array([[row[i].logprob for i in range(len(row))] for row in scored.prompt_logprobs[1:] if row])


@pytest.mark.parametrize("name", [*CHOSEN, *full_rows(MORE)])
def test_answers_of_transformers(
    name: str,
    foreign: Callable[[str], Oracle],
    engine: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Callable[..., SamplingParams],
) -> None:
    truth, blocks = foreign(name), 40
    llm = engine(truth.folder, max_num_batched_tokens=16, block_size=8, num_gpu_blocks_override=blocks, max_logprobs=-1)
    check(llm, truth, prompts, greedy)
    if name == "gpt_neox":  # with windows 40 blocks are enough
        assert core_of(llm).scheduler.num_preempted > 0
    assert llm.engine.args.foreign is not None and llm.engine.args.model_type == name


def test_layers_without_foreign_operations_are_recorded(
    foreign: Callable[[str], Oracle], engine: Callable[..., LLM], greedy: Callable[..., SamplingParams]
) -> None:
    """All operations of StarCoder2's layers are kernels of ours, so a CPU replays its small steps."""
    llm = engine(foreign("starcoder2").folder)
    assert all(isinstance(one.mixer, ForeignArgs) and not one.mixer.operations for one in llm.engine.args.layers)
    llm.generate([[5, 6, 7]], greedy(8), use_tqdm=False)
    recorder = llm.engine.worker.programs.recorder
    if isinstance(recorder, LayerRecordings):  # where native kernels can be built
        assert recorder.counts["replayed"] > 3 and not recorder.obstacles


@pytest.mark.parametrize("form", ["awq", *full_rows(["ct-w4-group", "gptq-order", "ct-mxfp4", "ct-nvfp4"])])
def test_quantized_weights(
    form: str, foreign: Callable[[str], Oracle], engine: Callable[..., LLM], tmp_path: Path
) -> None:
    """Heads of GPT-NeoX lie apart in a stored matrix, and are rows of packed words."""
    plain = foreign("gpt_neox")
    means = quantize_checkpoint(plain.folder, tmp_path / "quantized", FORMS[form])
    truth = Oracle(tmp_path / "quantized", copy.deepcopy(plain.model))
    changed = {name: one for name, one in means.items() if QUANTIZED.search(name)}
    assert changed and not truth.model.load_state_dict(changed, strict=False).unexpected_keys
    llm, ids = engine(truth.folder, max_logprobs=-1), [5, 9, 33, 70, 2, 8, 44, 12, 90]
    (scored,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=-1), use_tqdm=False)
    np.testing.assert_allclose(table_of(scored), truth.logprobs(ids)[:-1], atol=ATOL, rtol=0)


@only_full
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts(
    method: str,
    foreign: Callable[[str], Oracle],
    engine: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Callable[..., SamplingParams],
) -> None:
    truth = foreign("gpt_neox")
    drafter = {"method": "ngram"} if method == "ngram" else {"model": str(truth.folder)}
    llm = engine(truth.folder, speculative_config=drafter | {"num_speculative_tokens": 3})
    got = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in got] == truth.greedy(prompts, NUM_TOKENS)


@only_full
def test_embeddings(foreign: Callable[[str], Oracle], engine: Callable[..., LLM], prompts: list[list[int]]) -> None:
    truth = foreign("gpt_neox")
    (out,) = engine(truth.folder).embed(prompts[:1], use_tqdm=False)
    with torch.no_grad():
        last = truth.model.base_model(torch.tensor(prompts[:1])).last_hidden_state[0, -1]
    np.testing.assert_allclose(np.array(out.outputs.embedding), (last / last.norm()).numpy(), atol=ATOL, rtol=0)


@only_full
def test_grammars_and_host_memory() -> None:
    """The bundled model, which has a tokenizer: answers under a grammar are those of Quire's own layers."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema))
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "kv_offload_gb": 0.05}
    answers = []
    for impl in ("quire", "transformers"):
        with LLM(model_impl=impl, num_threads=1, use_tqdm_on_load=False, **options) as llm:
            found = llm.generate(["Data:", "JSON of it:"], params, use_tqdm=False)
            answers.append([one.outputs[0].text for one in found])
    assert answers[0] == answers[1]
    assert all(isinstance(json.loads(text)["a"], int) for text in answers[0])


@pytest.mark.parametrize("family", [*OWN[:1], *full_rows(OWN[1:])])
def test_own_families_answer_alike(
    family: str,
    oracle: Any,
    engine: Callable[..., LLM],
    prompts: list[list[int]],
    greedy: Callable[..., SamplingParams],
) -> None:
    truth = oracle(Tiny(family=family))
    llm = engine(truth.folder, model_impl="transformers", max_num_batched_tokens=16, block_size=8, max_logprobs=-1)
    assert llm.engine.args.foreign is not None
    check(llm, truth, prompts, greedy)


def refusal(tmp_path: Path, name: str, changes: dict[str, Any], **options: Any) -> str:
    """Return the error for an engine of a configuration without weights."""
    foreign_config(name, **changes).save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModel, ConfigError)) as caught:
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **options)
    return str(caught.value)


def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert "by the length of the longest text" in refusal(
        tmp_path / "a", "stablelm", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    )
    assert "is not implemented" in refusal(tmp_path / "b", "stablelm", {}, model_impl="quire")
    assert "operations of the module stand between" in refusal(
        tmp_path / "c", "hunyuan_v1_dense", {"head_dim": 16}, tensor_parallel_size=2
    )
    assert "cross-attention" in refusal(tmp_path / "d", "t5", {})
    assert "recurrent layers" in refusal(tmp_path / "e", "mamba2", {"num_heads": 8, "head_dim": 16})


@only_full
def test_llama_4_derives_positions_from_a_cache(tmp_path: Path) -> None:
    found = refusal(tmp_path, "llama4_text", {"head_dim": 16, "num_hidden_layers": 4}, model_impl="transformers")
    assert "positions from the length of a cache" in found
