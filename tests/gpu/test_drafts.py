"""Speculative decoding on a GPU, in float32: every answer is that of plain decoding, from captured steps and others."""

from itertools import product
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model

from ..support import qwen_prediction as qwen
from ..support.engines import draft_totals
from ..support.tiny_models import Tiny, make_oracle, mixed_prompts
from .test_engine import DEVICE, RECURRENT, SURE, TEXTS, make, run, tokens

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.7, "seed": 3}, {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 0.4, "min_p": 0.02, "n": 2},
    {"temperature": 0.0, "bad_words": [" return"], "logit_bias": {5: 1.0}},
    {"temperature": 0.0, "speculative_tokens": 1},
)  # fmt: skip


def answers(llm: LLM, drafts: bool = True) -> list[list[tuple[int, ...]]]:
    """Return the tokens of every request, after a run in another order that has filled the prefix cache."""
    texts = [*SURE, *TEXTS]
    fields = [dict(FIELDS[i % len(FIELDS)]) for i in range(len(texts))]
    for one in fields:
        if not drafts:
            one.pop("speculative_tokens", None)
    params = [SamplingParams(max_tokens=48, ignore_eos=True, **one) for one in fields]
    llm.generate(texts[::-1], params[::-1], use_tqdm=False)
    outputs = llm.generate(texts, params, use_tqdm=False)
    llm.engine.core.check()
    return [[tuple(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[list[tuple[int, ...]]]:
    """The answers of plain decoding."""
    with make(bundled_model()) as llm:
        return answers(llm, drafts=False)


@pytest.mark.parametrize(
    "options",
    [
        {"k": 3},
        {"k": 1, "async_depth": 1},
        {"k": 7, "enforce_eager": True},
        {"k": "auto"},
        {"k": 3, "max_num_seqs": 20},
        {"k": 3, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 10},
    ],
    ids=str,
)
def test_answers_are_those_of_plain_decoding(options: dict[str, Any], plain: list[list[tuple[int, ...]]]) -> None:
    k = options.pop("k")
    with make(bundled_model(), speculative_config=NGRAM | {"num_speculative_tokens": k}, **options) as llm:
        assert answers(llm) == plain
        runs, made, accepted = draft_totals(llm)
        assert 0 < sum(accepted) < made and runs > 20, "drafts that are right and wrong"


@pytest.mark.parametrize(
    "options",
    [{}, {"k": 1, "enforce_eager": True}, {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 26}],
    ids=str,
)
@pytest.mark.parametrize("family", RECURRENT)
def test_drafts_over_states(family: str, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Turns of conversations, whose states go on from checkpoints that steps with drafts have made."""
    folder = make_oracle(Tiny(family=family), mixed_prompts(), tmp_path_factory.mktemp, DEVICE).folder
    k = options.pop("k", 3)
    sizes: dict[str, Any] = {"block_size": 16, "max_model_len": 256} | options
    texts = [[*prompt[:40], *prompt[:40], i + 3] for i, prompt in enumerate(mixed_prompts())]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    with (
        make(folder, **sizes) as plain,
        make(folder, speculative_config=NGRAM | {"num_speculative_tokens": k}, **sizes) as drafting,
    ):
        for _ in range(3):
            news, found = (tokens(run(llm, texts, params)) for llm in (plain, drafting))
            assert found == news
            texts = [[*text, *new, 7] for text, new in zip(texts, news, strict=True)]
            drafting.engine.core.check()
        _, made, accepted = draft_totals(drafting)
        assert 0 < sum(accepted) < made, "drafts that are right and wrong"


@pytest.mark.parametrize(
    ("family", "drafter"),
    [*((family, family) for family in RECURRENT), *product(("qwen3_next", "qwen3_5_text"), ("mtp", "qwen3"))],
)
def test_layers_draft_for_states(family: str, drafter: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prediction layers and models of random weights are wrong; a model that drafts for itself is right, also behind
    checkpoints."""
    if drafter == "mtp":
        model, config = qwen.with_layer(family), {"method": "mtp"}
        folder = qwen.write(model, qwen.own_tensors(model), tmp_path_factory.mktemp(family))
    else:
        folder, own = (
            make_oracle(Tiny(family=one), mixed_prompts(), tmp_path_factory.mktemp, DEVICE).folder
            for one in (family, drafter)
        )
        config = {"method": "draft_model", "model": str(own)}
    sizes: dict[str, Any] = {"block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 32}
    texts = [[*prompt[:40], i + 3] for i, prompt in enumerate(mixed_prompts())]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    with (
        make(folder, **sizes) as plain,
        make(folder, speculative_config=config | {"num_speculative_tokens": 3}, **sizes) as drafting,
    ):
        for _ in range(3):
            news, found = (tokens(run(llm, texts, params)) for llm in (plain, drafting))
            assert found == news
            texts = [[*text, *new, 7] for text, new in zip(texts, news, strict=True)]
            drafting.engine.core.check()
        _, made, accepted = draft_totals(drafting)
        assert made > 500 and (sum(accepted) > 0.99 * made if drafter == family else sum(accepted) < 0.5 * made)
