"""Adapters beside checkpoints into which they are merged by hand, in float32: logits within 1e-4, and greedy tokens.

Batches mix the base model and adapters of several ranks. `--full` runs every family, and some of them on ranks.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.kernels.lora import native
from quire.layers.linear import GatedLinear
from quire.traces.trace import trace

from ..support.adapters import named, write_adapter
from ..support.full import full_rows
from ..support.tiny_models import FAMILIES
from .adapters import ATOL, LORA, check
from .in_process import running_inside

ROWS: list[tuple[str, dict[str, Any]]] = [("qwen3", {}), ("deepseek_v3", {})]
FOREIGN: list[tuple[str, dict[str, Any]]] = [
    (one, {"model_impl": "transformers"}) for one in ("qwen3", "gemma3_text", "phi3")
]
MORE = [(family, {}) for family in FAMILIES if family not in ("qwen3", "deepseek_v3")] + [
    (family, {size: 2})
    for family in ("qwen3", "deepseek_v2", "mixtral", "phi3", "qwen3_next")
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
]


@pytest.mark.parametrize(("family", "ranks"), [*ROWS, *full_rows([*MORE, *FOREIGN])], ids=str)
def test_mixed_batches_answer_as_merged_weights(
    family: str, ranks: dict[str, Any], merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any
) -> None:
    case = merged(family)
    check(case, engine, prompts, greedy, engine(case.folder, **LORA, max_loras=3, **ranks))


@pytest.mark.parametrize("tied", [False, *full_rows([True])])
def test_eight_adapters_with_drafts_preemption_and_few_slots(
    tied: bool, merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any
) -> None:
    """Three slots for eight adapters, blocks for half of the requests, and drafts, which are those of the base."""
    case = merged(count=8, spec={"tied": tied}, use_rslora=True, alpha_pattern={"o_proj": 3})
    llm = engine(
        case.folder,
        **LORA,
        max_loras=3,
        max_cpu_loras=5,
        num_gpu_blocks_override=40,
        block_size=8,
        async_depth=2,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    check(case, engine, prompts[:4], greedy, llm)
    stats = llm.engine.core.scheduler.roster.adapters.stats()
    assert stats.loads > 8 and stats.failed == 0


def test_some_halves_of_fused_layers(merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any) -> None:
    """q and v without k, up without gate, and modules of other ranks."""
    chosen = lambda name: name.endswith(("q_proj.weight", "v_proj.weight", "up_proj.weight"))  # noqa: E731
    case = merged(count=2, chosen=chosen, rank_pattern={"v_proj": 2})
    llm = engine(case.folder, **LORA, max_loras=2, lora_target_modules=("q_proj", "v_proj", "up_proj", "lm_head"))
    check(case, engine, prompts[:3], greedy, llm)


def test_two_rows_that_change_their_adapters_are_noticed(
    merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is red for an engine that mixes up two rows of a step."""

    def swapped(x: Any, weights: Any, rows: Any, first: int = 0, shrink: Any = native.shrink) -> Any:
        slots = rows.slots.clone()
        if len(rows.groups) > 1:
            pair = rows.order[[rows.groups[0][1], rows.groups[1][1]]].long()
            slots[pair] = slots[pair.flip(0)]
        return shrink(x, weights, replace(rows, slots=slots), first)

    case = merged(count=2)
    monkeypatch.setattr(native, "shrink", swapped)
    with pytest.raises(AssertionError):
        check(case, engine, prompts[:3], greedy, engine(case.folder, **LORA, max_loras=2))


def test_beams_embeddings_and_streams_of_an_adapter(
    merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any
) -> None:
    from quire import BeamSearchParams

    case = merged(count=1)
    base, other = (engine(folder, max_logprobs=-1) for folder in case.folders)
    llm, adapter = engine(case.folder, **LORA), case.requests[1]
    beams = BeamSearchParams(beam_width=2, max_tokens=5)
    for wanted, asked in ((base, None), (other, adapter)):
        (expected,), (found,) = (
            wanted.beam_search([prompts[3]], beams),
            llm.beam_search([prompts[3]], beams, lora_request=asked),
        )
        assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]
        vectors = [
            one.embed([prompts[3]], use_tqdm=False, **more)[0].outputs.embedding
            for one, more in ((wanted, {}), (llm, {"lora_request": asked}))
        ]
        np.testing.assert_allclose(*vectors, atol=ATOL)
        (whole,) = llm.encode([prompts[3]], pooling_task="embed", use_tqdm=False, lora_request=asked)
        np.testing.assert_array_equal(whole.outputs.data, np.float32(vectors[1]))
        *_, last = llm.stream(prompts[2], greedy(6), lora_request=asked)
        assert (
            last.outputs[0].token_ids
            == wanted.generate([prompts[2]], greedy(6), use_tqdm=False)[0].outputs[0].token_ids
        )


def test_concurrent_callers_name_adapters(merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any) -> None:
    case = merged(count=2)
    expected = case.answers(engine, prompts[2:3], greedy(5))
    options = {"dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20}

    async def ask(llm: AsyncLLM, asked: LoRARequest | None) -> list[int]:
        outputs = [one async for one in llm.generate(prompts[2], greedy(5), lora_request=asked)]
        return outputs[-1].outputs[0].token_ids

    async def work() -> list[list[int]]:
        async with AsyncLLM(str(case.folder), **LORA, **options) as llm:
            return await asyncio.gather(*(ask(llm, one) for one in case.requests))

    assert asyncio.run(work()) == [one[0].outputs[0].token_ids for one in expected]


def test_steps_without_an_adapter_are_those_of_an_engine_without(
    merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any
) -> None:
    """Recorded steps are replayed, and a trace of a step with an adapter has its two kernels at each layer."""
    case = merged(count=1)
    plain, llm = engine(case.folder), engine(case.folder, **LORA, async_depth=1)
    for one in (plain, llm):
        one.generate(prompts[:4], greedy(12), use_tqdm=False)
    steps = [one.engine.runner.describe()["steps"] for one in (plain, llm)]  # type: ignore[union-attr]
    assert steps[0]["replayed"] == steps[1]["replayed"] > 5
    for one in (plain, llm):
        runner: Any = one.engine.runner
        gates = [layer for layer in runner.model.modules() if isinstance(layer, GatedLinear)]
        assert gates and all(layer.fused for layer in gates)

    def count(span: Any, name: str) -> int:
        return (span.name == name) + sum(count(inner, name) for inner in span.inside)

    found = trace(llm, prompts[2], max_tokens=2, lora_request=case.requests[1])
    assert count(found, "lora.native.shrink") == count(found, "lora.native.expand") == 2 * (3 * 4 + 1)
    llm.generate(prompts[:4], greedy(12), use_tqdm=False, lora_request=case.requests[1])
    more = llm.engine.runner.describe()["steps"]  # type: ignore[union-attr]
    assert more["replayed"] > steps[1]["replayed"] + 5, "steps with an adapter are recorded, too"


def test_errors_name_the_fix(merged: Any, engine: Callable[..., LLM], prompts: Any, tmp_path: Path) -> None:
    case = merged(count=2)
    one = case.requests[2]
    with pytest.raises(ValueError, match="--enable-lora"):
        engine(case.folder).generate(prompts[:1], lora_request=one)
    llm = engine(case.folder, enable_lora=True, max_lora_rank=2)
    for request, words in (
        (case.requests[1], "has rank 3, and max_lora_rank=2: raise --max-lora-rank"),
        (LoRARequest("gone", 1, str(tmp_path / "gone")), "does not exist: give the folder of an adapter"),
        (LoRARequest("unnamed"), "adapter 'unnamed' is unknown: give its folder as lora_path"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.generate(prompts[:1], lora_request=request)
    other = write_adapter(case.folder, tmp_path / "other", rank=1, chosen=lambda name: "q_proj" in name)
    small = engine(case.folder, enable_lora=True, lora_target_modules=("k_proj",))
    with pytest.raises(ValueError, match="q_proj is not among lora_target_modules: add q_proj"):
        small.generate(prompts[:1], lora_request=named(other))
    assert llm.generate(prompts[:1], SamplingParams(max_tokens=2), lora_request=[one], use_tqdm=False)[0].finished


def test_files_that_change_fail_the_requests_of_the_adapter_alone(
    merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any
) -> None:
    """They are read a second time when the adapter is loaded, after another one took its slot."""
    case = merged(count=2)
    llm = engine(case.folder, **LORA, max_loras=1)
    first, second = case.requests[1:]
    before = llm.generate(prompts[:1], greedy(5), lora_request=[first], use_tqdm=False)
    llm.generate(prompts[:1], greedy(5), lora_request=[second], use_tqdm=False)
    config = case.adapters[0] / "adapter_config.json"
    text = config.read_text()
    known = LoRARequest(first.lora_name)  # the content that was read
    config.write_text(text + " ")
    failed, fine = llm.generate(prompts[:2], greedy(5), lora_request=[known, None], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error" and "have changed" in (failed.outputs[0].error or "")
    assert fine.outputs[0].finish_reason == "length"
    config.write_text(text)
    again = llm.generate(prompts[:1], greedy(5), lora_request=[known], use_tqdm=False)
    assert again[0].outputs[0].token_ids == before[0].outputs[0].token_ids


def test_a_server_whose_models_are_adapters(merged: Any, engine: Callable[..., LLM], prompts: Any, greedy: Any) -> None:
    case = merged(count=2)
    expected = [one[0].outputs[0].token_ids for one in case.answers(engine, prompts[3:4], greedy(4))]
    sql, law = case.adapters
    options = {
        "model": str(case.folder),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 20,
    }
    more = {"lora_modules": (f"sql={sql}",), "allow_runtime_lora_updating": True, "served_model_name": ("base",)}
    body = {"prompt": prompts[3], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_inside(**options, **LORA, **more) as inside:
        server = inside.server

        def ask(model: str) -> Any:
            return server.ask("/v1/completions", body | {"model": model})

        assert ask("law").status == 404
        loaded = server.ask("/v1/load_lora_adapter", {"lora_name": "law", "lora_path": str(law)})
        assert loaded.status == 200
        for model, tokens in zip(("base", "sql", "law", "sql"), (*expected, expected[1]), strict=True):
            assert ask(model).json()["choices"][0]["token_ids"] == tokens, model
        parents = {one["id"]: one["parent"] for one in server.ask("/v1/models").json()["data"]}
        assert parents == {"base": None, "sql": "base", "law": "base"}
        text = server.ask("/metrics").body.decode()
        assert 'adapter="sql"' in text and re.search(r'adapter_loads_total{[^}]*source="files"[^}]*} [23]', text)
        assert server.ask("/v1/unload_lora_adapter", {"lora_name": "law"}).status == 200 and ask("law").status == 404
        inside.check()
