"""Adapters beside quantized weights, drafts of layers, tiers, CacheBlend and ranks that step together, in float32."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.step import Tier

from ..support import eagle
from ..support.adapters import everything, merge, named, write_adapter
from ..support.addresses import free_address
from ..support.full import full_rows, only_full
from ..support.prediction_layers import predicting
from ..support.quantized_checkpoints import FORMS, quantize_checkpoint
from .adapters import ATOL, LORA, SCORED, Merged, check, mixed, scores

Engine = Callable[..., LLM]
ROUNDED = ("fp8-block", "ct-fp8-channel", "ct-int8-channel", "ct-int8-tensor")  # formats of activations too
WIDE = (("hidden_size", 128), ("intermediate_size", 128))


@pytest.mark.parametrize("form", ["ct-w4-group", *full_rows(form for form in FORMS if not FORMS[form].inputs)])
def test_over_quantized_weights_an_adapter_adds_to_what_they_mean(
    form: str, merged: Any, engine: Engine, prompts: Any, greedy: Any, tmp_path: Path
) -> None:
    """Weights alone are quantized: the truth is the dense checkpoint of their numbers, with the adapter merged."""
    case = merged(count=0, spec={"changes": WIDE})
    means = quantize_checkpoint(case.folder, tmp_path / "quantized", FORMS[form])
    shutil.copytree(case.folder, tmp_path / "dense")
    save_file({name: one.float().contiguous() for name, one in means.items()}, tmp_path / "dense/model.safetensors")
    case.folder = tmp_path / "dense"
    case.adapters = [write_adapter(case.folder, tmp_path / f"a{rank}", rank=rank, size=0.06) for rank in (2, 5)]
    case.folders = [case.folder, *(merge(case.folder, one, tmp_path / f"merged-{one.name}") for one in case.adapters)]
    case.requests = [None, *map(named, case.adapters)]
    check(case, engine, prompts[:4], greedy, engine(tmp_path / "quantized", **LORA, max_loras=2))


@pytest.mark.parametrize("form", ["ct-int8-channel", *full_rows(form for form in ROUNDED if form != "ct-int8-channel")])
def test_over_quantized_activations_an_adapter_reads_what_came_before_rounding(
    form: str, merged: Any, engine: Engine, prompts: Any, tmp_path: Path
) -> None:
    """Rounding moves an adapter's logits about as far as it moves the base's, and less than the adapter does."""
    case = merged(count=1, spec={"changes": WIDE})
    quantize_checkpoint(case.folder, tmp_path / "quantized", FORMS[form])
    truth = case.answers(engine, prompts[1:4], SCORED)
    llm = engine(tmp_path / "quantized", **LORA)
    alone = engine(tmp_path / "quantized", max_logprobs=-1).generate(prompts[1:4], SCORED, use_tqdm=False)
    given = [prompt for prompt in prompts[1:4] for _ in case.requests]
    found = llm.generate(given, SCORED, lora_request=case.requests * 3, use_tqdm=False)
    for at in range(3):
        np.testing.assert_array_equal(scores(found[2 * at]), scores(alone[at]))
        base, own = (np.abs(scores(found[2 * at + i]) - scores(truth[i][at])).mean() for i in (0, 1))
        moved = np.abs(scores(truth[1][at]) - scores(truth[0][at])).mean()
        assert own < 1.4 * base and own < 0.8 * moved, (base, own, moved)


@pytest.mark.parametrize("family", ["deepseek_v3", *full_rows(["glm4_moe", "deepseek_v32"])])
def test_drafts_of_a_prediction_layer_are_the_bases(
    family: str, engine: Engine, prompts: Any, greedy: Any, tmp_path: Path
) -> None:
    """The layer knows the base's next token; an adapter takes what agrees with its own tokens."""
    folder = predicting(tmp_path / "model", family, bundled_model(), 0.3)
    adapter = write_adapter(
        folder, tmp_path / "adapter", size=0.05, chosen=lambda name: "layers.4" not in name and everything(name)
    )
    plain = [engine(one) for one in (folder, merge(folder, adapter, tmp_path / "merged"))]
    expected = [llm.generate(prompts[:4], greedy(16), use_tqdm=False) for llm in plain]
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    llm = engine(folder, **LORA, speculative_config=drafts)
    pairs = mixed(1, prompts[:4])
    asked = [named(adapter) if number else None for _, number in pairs]
    found = llm.generate([prompts[prompt] for prompt, _ in pairs], greedy(16), lora_request=asked, use_tqdm=False)
    for (prompt, number), output in zip(pairs, found, strict=True):
        assert output.outputs[0].token_ids == expected[number][prompt].outputs[0].token_ids, (prompt, number)
    runs, drafts, *accepted = llm.engine.core.scheduler.drafts.totals
    assert runs and 0 < sum(accepted) < drafts


@pytest.mark.parametrize("method", full_rows(["draft_model", "eagle", "eagle3"]))
def test_drafters_of_their_own_are_the_bases(
    method: str, merged: Any, engine: Engine, prompts: Any, greedy: Any, tmp_path: Path
) -> None:
    """A draft model that is the base, and heads that guess: each adapter takes what agrees with its own tokens."""
    if method == "draft_model":
        case = merged(count=2)
        drafter = case.folder
    else:
        target = eagle.model(tmp_path / "target", bundled_model(), 0.04)
        drafter = eagle.write(tmp_path / "head", method, eagle.knowing(method, target))
        case = Merged(target, tmp_path, 2)
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": 2}
    llm = engine(case.folder, **LORA, max_loras=2, speculative_config=drafts)
    check(case, engine, prompts, greedy, llm, 20 * ATOL)  # weights of heads' models are large
    runs, made, *accepted = llm.engine.core.scheduler.drafts.totals
    assert runs and 0 < sum(accepted) < made


@only_full
def test_prefill_and_decode_apart(merged: Any, engine: Engine, greedy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode node reads the blocks of the adapter that the prefill node computed, and no others."""
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", "a key that both engines know")
    case = merged(count=2)
    both = {**LORA, "max_loras": 2, "kv_offload_gb": 0.01, "block_size": 16}
    role = lambda name: {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": name}}  # noqa: E731
    first = engine(case.folder, **both, **role("kv_producer"), kv_share=free_address())
    second = engine(case.folder, **both, **role("kv_consumer"), kv_peers=(first.engine.config.share.kv_share,))
    prompt = [(7 * at) % 90 + 3 for at in range(70)]
    expected = [one[0].outputs[0].token_ids for one in case.answers(engine, [prompt], greedy(8))]
    asked = SamplingParams(max_tokens=1, temperature=0.0, kv_transfer_params={"do_remote_decode": True})
    for number, request in enumerate(case.requests):
        (made,) = first.generate([prompt], asked, lora_request=[request], use_tqdm=False)
        params = SamplingParams(
            max_tokens=8, temperature=0.0, ignore_eos=True, kv_transfer_params=made.kv_transfer_params
        )
        (found,) = second.generate([prompt], params, lora_request=[request], use_tqdm=False)
        assert found.outputs[0].token_ids == expected[number] and found.num_cached_tokens == 64, number


@only_full
def test_prompts_as_embeddings(merged: Any, engine: Engine, greedy: Any) -> None:
    """An adapter reads embeddings as it reads the tokens that have them; blocks belong to prompt and adapter."""
    case = merged(count=2)
    llm = engine(case.folder, **LORA, max_loras=2, enable_prompt_embeds=True)
    prompt = [(7 * at) % 90 + 3 for at in range(40)]
    with torch.inference_mode():
        given = {"prompt_embeds": llm.engine.runner.model.embed(torch.tensor(prompt)).clone()}  # type: ignore[union-attr]
    expected = [one[0].outputs[0].token_ids for one in case.answers(engine, [prompt], greedy(8))]
    for turn in range(2):
        for number, request in enumerate(case.requests):
            (found,) = llm.generate([given], greedy(8), lora_request=[request], use_tqdm=False)
            assert found.outputs[0].token_ids == expected[number]
            assert bool(found.num_cached_tokens) == bool(turn)


def test_blocks_of_tiers_belong_to_the_adapter(merged: Any, engine: Engine, greedy: Any) -> None:
    """A prompt for the base and three adapters, with room for one on the device: what comes back is its own."""
    case = merged(count=3)
    llm = engine(
        case.folder,
        **LORA,
        max_loras=3,
        num_gpu_blocks_override=8,
        max_num_seqs=2,
        kv_offload_gb=0.01,
        kv_offload_policy="write_through",
    )
    prompt = [(7 * at) % 90 + 3 for at in range(70)]
    expected = [one[0].outputs[0].token_ids for one in case.answers(engine, [prompt], greedy(8))]
    assert len(set(map(tuple, expected))) >= 3
    fetched = []
    for turn in range(3):
        for number, request in enumerate(case.requests):
            (output,) = llm.generate([prompt], greedy(8), lora_request=[request], use_tqdm=False)
            assert output.outputs[0].token_ids == expected[number], (turn, number)
            assert bool(output.num_cached_tokens) == bool(turn)
            fetched += [one.tier for one in output.metrics.origins.values()] if output.metrics else []
    assert fetched.count(Tier.HOST) >= 6


def test_blended_chunks_belong_to_the_adapter(merged: Any, engine: Engine, greedy: Any) -> None:
    """A chunk that the base has computed is nothing to an adapter; computed again whole, it gives its answers."""
    case = merged(count=1)
    llm = engine(case.folder, **LORA, enable_cache_blend=True, block_size=8)
    note = [(5 * at) % 80 + 4 for at in range(40)]
    prompt = [3, 4, 5, *note, 6, 7]
    expected = [one[0].outputs[0].token_ids for one in case.answers(engine, [prompt], greedy(6))]

    def ask(number: int) -> tuple[list[int], int]:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, kv_chunks=[(3, 43)], blend_ratio=1.0)
        (output,) = llm.generate([prompt], params, lora_request=[case.requests[number]], use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens or 0

    llm.generate([note], greedy(1), use_tqdm=False)
    assert ask(1) == (expected[1], 0)
    llm.reset_prefix_cache()
    llm.generate([note], greedy(1), lora_request=[case.requests[1]], use_tqdm=False)
    tokens, cached = ask(1)
    assert tokens == expected[1] and cached >= 32
    assert ask(0) == (expected[0], 0)


@pytest.mark.parametrize(
    "ranks",
    full_rows(
        [
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize("family", full_rows(["mixtral", "qwen3_moe", "deepseek_v3"]))
def test_ranks_that_have_experts(
    family: str, ranks: dict[str, Any], merged: Any, engine: Engine, prompts: Any, greedy: Any
) -> None:
    case = merged(family, count=2)
    check(case, engine, prompts, greedy, engine(case.folder, **LORA, max_loras=2, **ranks))


EXPERTS: dict[str, Any] = {"lora_target_modules": ("all-linear", "experts")}


@pytest.mark.parametrize(
    ("family", "stacked", "ranks"),
    [
        ("gpt_oss", True, {}),
        *full_rows(
            [
                ("mixtral", False, {}),
                ("qwen3_moe", True, {}),
                ("deepseek_v3", False, {}),
                ("llama4_text", True, {}),
                ("qwen3_5_moe_text", True, {}),
                ("nemotron_moe", False, {}),
                ("lfm2_moe", False, {}),
                ("gemma4_moe", True, {}),
                ("qwen2_moe", True, {"tensor_parallel_size": 2}),
                ("gpt_oss", True, {"tensor_parallel_size": 2}),
                ("qwen3_moe", False, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
                ("mixtral", True, {"pipeline_parallel_size": 2}),
                ("mixtral", False, {"data_parallel_size": 2}),
                ("qwen3_moe", True, {"model_impl": "transformers"}),
            ]
        ),
    ],
    ids=str,
)
def test_adapters_of_routed_experts(
    family: str, stacked: bool, ranks: dict[str, Any], merged: Any, engine: Engine, prompts: Any, greedy: Any
) -> None:
    """Matrices for each expert, or for parameters that have those of all experts."""
    each: dict[str, Any] = {"chosen": lambda name: "embed" not in name}
    if stacked:
        each = {"stacked": True, "alpha_pattern": {"down_proj": 5}}
    if "model_impl" in ranks:  # the module routes by itself
        each["chosen"] = lambda name: everything(name) and not name.endswith(".gate.weight")
    case = merged(family, count=2, **each)
    check(case, engine, prompts, greedy, engine(case.folder, **LORA, **EXPERTS, max_loras=2, **ranks))


@only_full
def test_five_hundred_adapters_by_zipfs_law(merged: Any, engine: Engine, greedy: Any, tmp_path: Path) -> None:
    """200 requests for 500 adapters in 32 slots: all end, each with the tokens of its adapter alone."""
    case = merged(count=0)
    dice = random.Random(0)
    names = dice.choices(range(500), [1 / (number + 1) for number in range(500)], k=200)
    asked = {
        number: named(write_adapter(case.folder, tmp_path / f"a{number}", rank=1 + number % 16, seed=number))
        for number in range(500)
    }
    prompts = [[dice.randint(3, 90) for _ in range(dice.randint(1, 30))] for _ in names]
    llm = engine(case.folder, **LORA, max_loras=32, max_cpu_loras=64, max_num_seqs=16)
    requests = [asked[number] for number in names]
    found = llm.generate(prompts, greedy(8), lora_request=requests, use_tqdm=False)
    stats = llm.engine.core.scheduler.roster.adapters.stats()
    assert stats.failed == stats.waiting == 0 and stats.loads >= len(set(names))
    alone = engine(case.folder, **LORA, max_loras=1, max_num_seqs=1)
    for number, prompt, output in zip(names, prompts, found, strict=True):
        (one,) = alone.generate([prompt], greedy(8), lora_request=[asked[number]], use_tqdm=False)
        assert output.outputs[0].token_ids == one.outputs[0].token_ids, number
    hits, misses = list[float](), list[float]()
    for number, prompt in zip(names, prompts, strict=True):  # one after the other: time to the first token
        reads = llm.engine.core.scheduler.roster.adapters.stats().loads
        begun = time.perf_counter()
        llm.generate([prompt], greedy(1), lora_request=[asked[number]], use_tqdm=False)
        missed = llm.engine.core.scheduler.roster.adapters.stats().loads > reads
        (misses if missed else hits).append(1e3 * (time.perf_counter() - begun))
    print(f"loads {stats}; ms to the first token: hits {quantiles(hits)}, misses {quantiles(misses)}")
    assert misses and hits


def quantiles(values: list[float]) -> str:
    return f"{len(values)}: " + ", ".join(f"p{at} {np.percentile(values, at):.1f}" for at in (50, 90, 99))
