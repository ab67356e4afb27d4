"""CacheBlend on a GPU: texts that were cached alone, in another order. In float32 the tokens are the CPU's for the same
part that is computed again; with all of it they are those of a whole prefill."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.step import Tier

from ..support.engines import tier_stats
from ..support.tiny_models import Tiny, random_model, write_model
from .test_engine import NOTES, TEXTS, make

EXAMPLE = Path(__file__).parents[2] / "examples" / "cache_blend.py"
BLENDS: dict[str, Any] = {"enable_cache_blend": True, "block_size": 16, "max_model_len": 512}
MODELS = {"dense": "", "experts": "qwen3_moe", "latent": "deepseek_v3"}
RATIOS = (0.0, 0.15, 0.6, 1.0)
PARTS = (range(20, 75), range(300, 341), range(75, 140))  # the tokens of each text, in a model without a tokenizer
ORDERS = ((2, 0, 1), (1, 2, 0))
QUESTION = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a random model of six layers; the dense one is the bundled model."""

    @cache
    def written(kind: str) -> Path:
        if kind == "dense":
            return bundled_model()
        sizes = {"vocab_size": 400, "num_hidden_layers": 6, "max_position_embeddings": 1024}
        model = random_model(Tiny(family=MODELS[kind], changes=tuple(sizes.items())), 3)
        target = tmp_path_factory.mktemp(kind)
        write_model(model, target, MODELS[kind])
        return target

    return written


def engine(model: Path, **options: Any) -> LLM:
    """Return an engine that moves KV."""
    return make(model, **BLENDS | options)


def prompt_of(order: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """Return a prompt of three tokens, the texts in an order and a question, and the places of the texts."""
    tokens, chunks = [9, 8, 7], []
    for part in order:
        chunks.append([len(tokens), len(tokens) + len(PARTS[part])])
        tokens = [*tokens, *PARTS[part]]
    return tokens + QUESTION, chunks


def ask(llm: LLM, order: tuple[int, ...], ratio: float | None, **fields: Any) -> RequestOutput:
    """Answer a prompt of cached texts; None: the prompt has no texts to reuse."""
    prompt, chunks = prompt_of(order)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2).clone(**fields)
    if ratio is not None:
        params = params.clone(kv_chunks=chunks, blend_ratio=ratio)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output


def remember(llm: LLM) -> None:
    """Cache every text alone, and nothing else."""
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for part in PARTS:
        llm.generate({"prompt_token_ids": list(part)}, params, use_tqdm=False)


def answers(llm: LLM) -> list[Any]:
    """Return tokens, cached tokens and log-probabilities of both orders by every ratio, greedy and sampled."""
    found = []
    for order in ORDERS:
        for ratio in (None, *RATIOS):
            for fields in ({}, {"temperature": 0.8, "seed": 5}):
                remember(llm)
                output = ask(llm, order, ratio, **fields)
                (one,) = output.outputs
                numbers = [row[token].logprob for token, row in zip(one.token_ids, one.logprobs or (), strict=True)]
                found.append((one.token_ids, output.num_cached_tokens, numbers))
    llm.engine.core.check()
    return found


@pytest.fixture(scope="module")
def expected(folder: Callable[[str], Path]) -> Callable[..., list[Any]]:
    """Return a function that returns the answers of the CPU, whose kernels are compared with the formula elsewhere."""

    @cache
    def computed(kind: str, cache_type: str) -> list[Any]:
        with engine(folder(kind), device="cpu", num_threads=1, kv_cache_dtype=cache_type) as llm:
            return answers(llm)

    return computed


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_depth": 1}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_the_cpu_s_for_every_ratio(
    kind: str, options: dict[str, Any], folder: Callable[[str], Path], expected: Callable[..., list[Any]]
) -> None:
    with engine(folder(kind), **options) as llm:
        found = answers(llm)
    wanted = expected(kind, "auto")
    for (tokens, cached, numbers), (others, known, logprobs) in zip(found, wanted, strict=True):
        assert (tokens, cached) == (others, known)
        assert numbers == pytest.approx(logprobs, abs=1e-3)
    per_order = 2 * (1 + len(RATIOS))
    for first in (0, per_order):
        plain, *reused = [found[at : at + 2] for at in range(first, first + per_order, 2)]
        assert all(cached == 48 + 32 + 64 for pair in reused for _, cached, _ in pair)
        assert [one[0] for one in reused[-1]] == [one[0] for one in plain], "all tokens are computed again"
        changes = [abs(a - b) for a, b in zip(reused[0][0][2], plain[0][2], strict=True)]
        assert max(changes) > 0.01, "the case tells nothing: reuse changes no number"


@pytest.mark.parametrize("kind", MODELS)
def test_codes_of_an_8_bit_cache_are_moved(
    kind: str, folder: Callable[[str], Path], expected: Callable[..., list[Any]]
) -> None:
    """The first token's log-probability; later ones may follow another code."""
    with engine(folder(kind), kv_cache_dtype="fp8") as llm:
        found = answers(llm)
    for (_, cached, numbers), (_, known, logprobs) in zip(found, expected(kind, "fp8"), strict=True):
        assert cached == known and numbers[0] == pytest.approx(logprobs[0], abs=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"async_depth": 1, "max_num_batched_tokens": 64}, {"enforce_eager": True}], ids=str
)
def test_beside_other_requests(options: dict[str, Any]) -> None:
    """Decodes and prompts of the same steps have the tokens that they have without, whatever is moved beside them; so
    has a prompt that is computed again."""
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(len(TEXTS))
    ]
    found = []
    with engine(bundled_model(), max_num_seqs=12, **options) as llm:
        for ratios in ((None, None), (1.0, 0.15), (1.0, 0.0)):
            remember(llm)
            prompts: list[Any] = list(TEXTS)
            given = list(params)
            for order, ratio in zip(ORDERS, ratios, strict=True):
                tokens, chunks = prompt_of(order)
                prompts.insert(4, {"prompt_token_ids": tokens})
                one = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
                given.insert(4, one if ratio is None else one.clone(kv_chunks=chunks, blend_ratio=ratio))
            outputs = llm.generate(prompts, given, use_tqdm=False)
            assert ratios[0] is None or [one.num_cached_tokens for one in outputs[4:6]] == [144, 144]
            del outputs[4]  # the second order
            found.append([tuple(one.outputs[0].token_ids) for one in outputs])
            llm.engine.core.check()
    assert found[0] == found[1] == found[2]


def test_texts_come_back_from_the_host(expected: Callable[..., list[Any]]) -> None:
    """The device has forgotten them: other prompts took their blocks."""
    wanted = expected("dense", "auto")
    sizes = {"num_gpu_blocks_override": 36, "max_num_seqs": 2}
    with engine(bundled_model(), kv_offload_gb=0.05, kv_offload_policy="write_through", **sizes) as llm:
        for at, order in enumerate(ORDERS):
            for which, ratio in enumerate(RATIOS):
                remember(llm)
                others = [{"prompt_token_ids": [700 + 50 * i + j % 40 for j in range(400)]} for i in range(4)]
                llm.generate(others, SamplingParams(max_tokens=1), use_tqdm=False)
                loaded = tier_stats(llm, Tier.HOST).num_loaded
                output = ask(llm, order, ratio)
                tokens, cached, _ = wanted[2 * (at * (1 + len(RATIOS)) + 1 + which)]
                assert (output.outputs[0].token_ids, output.num_cached_tokens) == (tokens, cached)
                assert tier_stats(llm, Tier.HOST).num_loaded >= loaded + 9
        llm.engine.core.check()


def test_texts_between_separators(folder: Callable[[str], Path]) -> None:
    """Their blocks are said to be blended."""
    notes = [f"{line}\n" * 2 for line in NOTES.strip().split("\n")]
    with engine(bundled_model()) as llm:
        for note in notes:
            llm.generate(note, SamplingParams(max_tokens=1), use_tqdm=False)
        question = "\nWhat is the code of Lakral?<|im_end|>\n<|im_start|>assistant\n"
        text = " # # ".join(["<|im_start|>user\n", *(notes[i] for i in (2, 0, 3, 1)), question])
        (output,) = llm.generate(text, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    assert "5411" in output.outputs[0].text and (output.num_cached_tokens or 0) >= 3 * 16
    assert output.metrics is not None
    assert {one.tier for one in output.metrics.origins.values()} == {Tier.BLENDED}


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("cache_blend", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def coarse() -> Iterator[LLM]:
    """The bundled model in bfloat16, the type of the kernels that serve most models."""
    with engine(bundled_model(), dtype="bfloat16", max_model_len=1024, max_num_batched_tokens=1024) as llm:
        yield llm


def test_a_few_computed_tokens_join_texts_in_bfloat16(example: Any, coarse: LLM) -> None:
    """A border cuts the note of the question, so that neither text has the answer alone."""
    cases = [example.make_case(coarse, True, seed) for seed in range(6)]
    found = {}
    for ratio in (None, 0.0, 0.3, 1.0):
        given = [example.ask(coarse, texts, question, ratio) for texts, question, _ in cases]
        found[ratio] = sum(code in text for (text, _, _), (_, _, code) in zip(given, cases, strict=True))
        assert ratio is None or min(reused for _, _, reused in given) > 300
    print(found)
    assert found[None] == found[1.0] >= 5 and found[0.3] >= found[None] - 1 and found[0.0] <= found[None] - 2


@pytest.mark.parametrize(
    "given",
    [
        {"method": "draft_model", "model": "quire-tiny"},
        {"method": "ngram", "prompt_lookup_min": 1},
    ],
    ids=str,
)
def test_drafts_behind_moved_tokens(given: dict[str, Any], expected: Callable[..., list[Any]]) -> None:
    """Tokens do not depend on drafts. With all tokens computed again, a draft model that is the model is right."""
    wanted = expected("dense", "auto")
    with engine(bundled_model(), speculative_config=given | {"num_speculative_tokens": 3}) as llm:
        for at, order in enumerate(ORDERS):
            for which, ratio in enumerate(RATIOS):
                remember(llm)
                output = ask(llm, order, ratio)
                assert output.outputs[0].token_ids == wanted[2 * (at * (1 + len(RATIOS)) + 1 + which)][0]
                made, *right = output.outputs[0].drafts
                assert given["method"] == "ngram" or ratio < 1 or made == sum(right) > 8
        llm.engine.core.check()
