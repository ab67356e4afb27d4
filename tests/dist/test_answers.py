"""Engines of several processes answer as one rank does, in float32: tokens are identical, log-probabilities near.

Every exchange is compared over the ranks. Each row of the table is an engine; each engine gets requests of all kinds.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.engine.replicas import Core, Replicas

from ..support.full import full_rows
from ..support.many_ranks import DIVIDED, LARGER, SIZES
from ..support.pairwise import Row, label, pairwise
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from ..support.tiny_models import CONTEXT, VOCAB, Tiny, mixed_prompts, random_model
from .conftest import NUM_TOKENS

NEAR = {"rtol": 1e-5, "atol": 1e-5}  # of a log-probability: the sums of ranks are added in another order
CHECKED: Row = {"check_collectives": True}
FAMILIES = ("qwen3_moe", "qwen3", "deepseek_v3")
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")
FACTORS: dict[str, list[Any]] = {
    "sizes": list(SIZES),
    "prefix": [True, False],
    "pool": ["normal", "small"],
    "depth": [1, 2],
}
KINDS: list[Row] = [
    {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "prompt_logprobs": 2}, {"temperature": 1.0, "min_p": 0.1, "logprobs": 0},
    {"temperature": 1.0, "n": 3}, {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.7, "logit_bias": {7: 3.0, 90: 2.0}},
    {"temperature": 0.0, "allowed_token_ids": list(range(20, 60))},
    {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": [5, 17]},
]  # fmt: skip


def requests(count: int = NUM_TOKENS) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of mixed lengths with every kind of parameters; two begin alike."""
    prompts = itertools.cycle(mixed_prompts())
    return [
        (next(prompts), SamplingParams(**({"max_tokens": count, "seed": i, "ignore_eos": True} | kind)))
        for i, kind in enumerate(KINDS)
    ]


def ask(llm: LLM, asked: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*asked, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def compare(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in other.outputs]
        assert [c.text for c in mine.outputs] == [c.text for c in other.outputs]
        assert [(c.finish_reason, c.stop_reason) for c in mine.outputs] == [
            (c.finish_reason, c.stop_reason) for c in other.outputs
        ]
        near(mine.prompt_logprobs, other.prompt_logprobs)
        for one, right in zip(mine.outputs, other.outputs, strict=True):
            near(one.logprobs, right.logprobs)


def near(found: Any, expected: Any) -> None:
    """The same tokens by rank at every position, with log-probabilities that are near."""
    if expected is None:
        assert found is None
        return
    for one, right in zip(found, expected, strict=True):
        if right is None:
            assert one is None
            continue
        assert {i: e.rank for i, e in one.items()} == {i: e.rank for i, e in right.items()}
        np.testing.assert_allclose([one[i].logprob for i in right], [e.logprob for e in right.values()], **NEAR)


USUAL: list[Row] = [  # a row for each kind of sizes; together they have every pair of ways of scheduling
    {"sizes": "tp2", "prefix": True, "pool": "normal", "depth": 2, "family": "qwen3"},
    {"sizes": "tp2-dcp2", "prefix": True, "pool": "small", "depth": 1, "family": "deepseek_v3"},
    {"sizes": "dp2", "prefix": False, "pool": "normal", "depth": 1, "family": "qwen3"},
    {"sizes": "dp2-ep", "prefix": False, "pool": "small", "depth": 2, "family": "qwen3_moe"},
    {"sizes": "pp2", "prefix": True, "pool": "normal", "depth": 1, "family": "gpt_oss"},
    {"sizes": "tp2", "prefix": True, "pool": "normal", "depth": 2, "family": "falcon_h1"},
]  # fmt: skip


def more_rows() -> list[Row]:
    """Every size, each in another way of scheduling, on the families in turn, and every pair of values. Simulated ranks
    compare all sizes of all families in `tests/unit/layers/test_ranks.py`."""
    sizes, *ways = FACTORS.values()
    found = [
        dict(zip(FACTORS, (size, *way), strict=True)) for size, way in zip(sizes, itertools.product(*ways), strict=True)
    ]
    found += [row for row in pairwise(FACTORS) if row not in found]
    for number, row in enumerate(found):
        families = EXPERTS if row["sizes"].endswith("-ep") else FAMILIES
        row["family"] = families[number % len(families)]
    divided: Row = {"prefix": True, "pool": "normal", "depth": 2}
    sizes = [*((size, "deepseek_v3") for size in DIVIDED), ("tp2-dcp2", "kimi_linear")]
    found += [divided | {"sizes": size, "family": family} for size, family in sizes]
    return [row for row in found if row not in USUAL]


def num_preempted(core: Core) -> int:
    return sum(one.scheduler.num_preempted for one in (core.cores if isinstance(core, Replicas) else (core,)))


@pytest.mark.parametrize("row", [*USUAL, *full_rows(more_rows())], ids=label)
def test_answers_of_one_rank(
    row: Row, checkpoint: Callable[[str], Path], engine: Callable[..., LLM], truth: Callable[..., list[RequestOutput]]
) -> None:
    folder, sizes = checkpoint(row["family"]), (SIZES | DIVIDED)[row["sizes"]]
    size = 16 // sizes.get("decode_context_parallel_size", 1)  # of a rank's part of a block
    options: Row = {"enable_prefix_caching": row["prefix"], "block_size": size, "max_num_batched_tokens": 48}
    if row["pool"] == "small":
        options["num_gpu_blocks_override"] = 24 if sizes.get("data_parallel_size", 1) == 1 else 16  # of a replica
    ranks = engine(folder, **options, **CHECKED, async_depth=row["depth"], **sizes)
    compare(ask(ranks, requests()), truth(requests(), folder))
    assert (num_preempted(ranks.engine.core) > 0) == (row["pool"] == "small")
    again = ask(ranks, requests(8))
    compare(again, truth(requests(8), folder))
    if row["pool"] == "normal" or row["sizes"] in DIVIDED:
        assert (sum(output.num_cached_tokens for output in again) > 0) == row["prefix"]


MORE_DRAFTS = [
    ("deepseek_v3", "tp2"), ("qwen3", "dp2"), ("qwen3_moe", "dp2-ep"), ("glm4_moe", "dp2-tp2-ep"),
    ("trained", "tp2-ep"), ("trained", "dp2"), ("trained", "tp2"), ("trained", "dp2-tp2-ep"), ("deepseek_v3", "tp4"),
    ("qwen3_moe", "dp4-ep"), ("qwen3", "pp2"), ("trained", "dp2-pp2-ep"), ("deepseek_v3", "tp2-pp2"),
    ("deepseek_v3", "tp2-dcp2"), ("deepseek_v3", "tp2-dcp2-pp2"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "sizes"), [("trained", "dp2-ep"), ("trained", "pp2"), *full_rows(MORE_DRAFTS)])
def test_drafts_are_accepted_by_all_ranks_alike(
    family: str,
    sizes: str,
    checkpoint: Callable[[str], Path],
    engine: Callable[..., LLM],
    truth: Callable[..., list[RequestOutput]],
    shared: Path,
) -> None:
    """The trained model drafts with its own layer, the others look n-grams up."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if family == "trained":
        drafts = {"method": "mtp", "num_speculative_tokens": 2}
    folder = shared / "models" / "quire-tiny-moe" if family == "trained" else checkpoint(family)
    options = {"async_depth": 2, "speculative_config": drafts, "max_num_batched_tokens": 48}
    ranks = engine(folder, **CHECKED, **options, **(LARGER | SIZES | DIVIDED)[sizes])
    compare(ask(ranks, requests(32)), truth(requests(32), folder))
    cores = ranks.engine.core.cores if isinstance(ranks.engine.core, Replicas) else (ranks.engine.core,)
    for core in cores:
        runs, made, *accepted = core.scheduler.drafts.totals
        assert runs > 10 and 0 < sum(accepted) < made


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def texts() -> list[tuple[str, SamplingParams]]:
    """Requests that need a tokenizer: stop strings, bad words and grammars, beside others."""
    schema = StructuredOutputsParams(json=SCHEMA)
    kinds: list[Row] = [
        {"stop": [".9", "json"]},
        {"stop": ["\n"], "include_stop_str_in_output": True, "temperature": 1.0},
        {"structured_outputs": schema},
        {"structured_outputs": schema, "temperature": 1.0, "n": 2, "logprobs": 1},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
        {"bad_words": ["the", " is"]},
        {},
    ]
    return [
        (f"The json module {i}", SamplingParams(**({"temperature": 0.0, "max_tokens": 40, "seed": i} | kind)))
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("sizes", "depth"),
    [("tp2-pp2", 1), *full_rows([("tp2", 2), ("dp2", 2), ("tp4", 1), ("pp2", 2), ("dp4", 2)])],
)
def test_texts_of_the_bundled_model(
    sizes: str, depth: int, engine: Callable[..., LLM], truth: Callable[..., list[RequestOutput]]
) -> None:
    found = ask(engine(**CHECKED, async_depth=depth, **(LARGER | SIZES)[sizes]), texts())
    compare(found, truth(texts()))
    assert {"name", "age"} == set(json.loads(found[2].outputs[0].text))
    assert found[0].outputs[0].stop_reason == ".9"


@pytest.mark.parametrize(
    ("sizes", "method"), [("tp2-pp2", "MEAN"), *full_rows([("tp2", "LAST"), ("tp2", "MEAN"), ("tp2-pp2", "LAST")])]
)
def test_embeddings(sizes: str, method: str, checkpoint: Callable[[str], Path], engine: Callable[..., LLM]) -> None:
    options = {"pooler_config": {"pooling_type": method, "normalize": True}, "max_num_batched_tokens": 16}
    folder = checkpoint("qwen3")
    one, many = engine(folder, **options), engine(folder, **options, **CHECKED, **SIZES[sizes])
    expected = one.embed(mixed_prompts(), use_tqdm=False)
    for _ in range(2):  # the second time with cached prefixes
        for found, right in zip(many.embed(mixed_prompts(), use_tqdm=False), expected, strict=True):
            np.testing.assert_allclose(found.outputs.embedding, right.outputs.embedding, **NEAR)


WIDE: Row = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose slices for 2 and 4 ranks are whole blocks of 128 and groups of 32."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**WIDE)).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with experts, whose rows are whole groups of 128."""
    folder = tmp_path_factory.mktemp("experts")
    random_model(Tiny(family="qwen3_moe", heads=(16, 4)), 0).save_pretrained(folder)
    return folder


MORE_FORMS = [
    ("ct-w4-group", "tp4"), ("gptq-zeros", "tp2"), ("fp8-block", "pp2"), ("ct-w4-group", "tp2"), ("awq", "tp2"),
    ("ct-int8-weights", "tp2"), ("ct-int8-channel", "pp2"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "sizes"), [("awq", "tp2-pp2"), *full_rows(MORE_FORMS)])
def test_quantized_weights_whose_numbers_do_not_depend_on_the_cut(
    form: str, sizes: str, wide: Path, tmp_path: Path, engine: Callable[..., LLM]
) -> None:
    """Groups of 32 divide each slice. Stages compute what one rank does, also with quantized activations. The slices
    of all forms are compared in `tests/unit/quantization/test_formats.py`."""
    quantize_checkpoint(wide, tmp_path / "quantized", FORMS[form])
    same(engine, tmp_path / "quantized", sizes)


def test_options_whose_numbers_do_not_depend_on_stages(wide: Path, engine: Callable[..., LLM]) -> None:
    same(engine, wide, "pp2", kv_cache_dtype="fp8", quantization="fp8")


def same(engine: Callable[..., LLM], folder: Path, sizes: str, **options: Any) -> None:
    """Assert that ranks answer as one rank does."""
    asked = requests(24)
    expected = ask(engine(folder, **options), asked)
    compare(ask(engine(folder, **options, **CHECKED, **SIZES[sizes]), asked), expected)


CUTS = [
    ("fp8-block", {"kv_cache_dtype": "fp8"}, "tp2", 1e-3), ("", {"quantization": "fp8"}, "tp2", 5e-2),
    ("fp8-block", {}, "dp2-ep", 1e-3),
]  # fmt: skip
MORE_CUTS = [
    ("fp8-block", {}, "tp4", 1e-3), ("", {"kv_cache_dtype": "fp8"}, "tp2", 1e-3), ("ct-int8-channel", {}, "tp2", 0.2),
    ("fp8-block", {}, "tp2", 1e-3), ("fp8-static", {}, "tp2", 1e-3),
]  # fmt: skip


@pytest.mark.parametrize(("form", "options", "sizes", "bound"), [*CUTS, *full_rows(MORE_CUTS)], ids=str)
def test_quantized_numbers_that_depend_on_the_cut(
    form: str,
    options: Row,
    sizes: str,
    bound: float,
    wide: Path,
    experts: Path,
    tmp_path: Path,
    engine: Callable[..., LLM],
) -> None:
    """The mean difference of prompts' log-probabilities is within a bound. Other tokens or slices give more than 1.

    - 1e-3 where activations or keys and values are rounded to 8 bits by scales that every rank has alike. The sum of
      the layer before differs in its last bit, so a value may be rounded to its neighbour, 6% away.
    - 5e-2 for weights that are quantized when they are loaded: 4e-3 on one CPU, 5e-6 on another whose attention sums in
      another order.
    - 0.2 where each token of the input of a row-parallel product has a scale. A rank takes the maximum of its slice,
      an engine of one rank that of the whole row, so most values are rounded to others.

    Rows of replicas go to the experts in 8 bits: `tests/unit/distributed/test_wire.py` compares the bits.
    """
    folder = wide = experts if sizes == "dp2-ep" else wide
    if form:
        folder = tmp_path / "quantized"
        quantize_checkpoint(wide, folder, FORMS[form])
    asked = [(prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)) for prompt in mixed_prompts()]
    one, many = engine(folder, **options), engine(folder, **options, **CHECKED, **SIZES[sizes])
    right, found = (
        np.array(
            [
                entry[token].logprob
                for output in ask(llm, asked)
                for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
        )
        for llm in (one, many)
    )
    print(f"{form} {options} {sizes}: mean {np.abs(found - right).mean():.1e}, most {np.abs(found - right).max():.1e}")
    assert np.abs(found - right).mean() < bound
