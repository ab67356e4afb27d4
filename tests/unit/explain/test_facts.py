"""Facts that the plan shows beside parameters, and what it says where something does not run, fit or divide."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire.config.engine import EngineConfig
from quire.contracts.parallel import ALONE, Parallel
from quire.explain.render import render

from ...support.explained import explained
from ...support.full import FULL
from .conftest import Models

TOGETHER = Parallel(tp=8, experts=True)


Shown = tuple[dict[str, Any], str]
DRAFTS_AT = 61 if FULL else 5  # the layer behind the last one of DeepSeek-V3
EACH = "7.15 GiB" if FULL else "746.4 MiB"  # an eighth of Qwen3-30B-A3B


@pytest.fixture
def shown(shallow: Models) -> Callable[..., Shown]:
    return lambda model, *more, **options: show(shallow(f"hf/{model}"), *more, **options)


def show(folder: Path, parallel: Parallel = ALONE, device: str = "h200", **options: Any) -> Shown:
    """Return the plan of a model as JSON has it, and as it is printed."""
    config = EngineConfig.from_flat(model=str(folder), **options)
    plan = explained(config, parallel, device).describe()
    out = io.StringIO()
    Console(file=out, width=400, highlight=False).print(render(plan))
    return json.loads(json.dumps(plan)), out.getvalue()


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (
            "DeepSeek-V3",
            [
                "attention: latent, 128 query heads of 192 dimensions; values of 128",
                "rope: yarn, theta 10,000, factor 40 over 4,096 trained positions, "
                "64 of 192 dimensions of a head rotated",
                "router: top 8 of 256 experts, from the best 4 of 8 groups (by their two best experts), sigmoid scores "
                "with a bias that only chooses, weights renormalized, scaled by 2.5",
                "MLA cache: 512 + 64 values per token; "
                "absorbed for up to 170 query tokens per sequence, expanded K/V above",
                f"note: Multi-token-prediction (MTP) layers are skipped (layer {DRAFTS_AT} of the checkpoint)",
                f"model.layers.{DRAFTS_AT}.* (multi-token prediction)",
            ],
        ),
        (
            "GLM-4.5",
            [
                "attention: grouped-query, 96 query heads and 8 KV heads of 128 dimensions, "
                "normalized queries and keys",
                "rope: default, theta 1,000,000, 64 of 128 dimensions of a head rotated (partial)",
            ],
        ),
        ("Llama-3.1-8B", ["rope: llama3, theta 500,000, factor 8 over 8,192 trained positions, all 128 dimensions"]),
        ("Mixtral-8x7B-v0.1", ["router: top 2 of 8 experts, softmax scores, weights renormalized"]),
        ("DeepSeek-V2-Lite", ["router: top 6 of 64 experts, softmax scores, weights not renormalized"]),
        (
            "Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
            ["weights compressed-tensors (8-bit int weights per channel, 8-bit int activations per token)"],
        ),
    ],
)
def test_a_model_is_told_in_the_words_of_the_field(shown: Any, model: str, lines: list[str]) -> None:
    _, text = shown(model)
    assert [line for line in lines if line not in text] == []


def test_plans_that_cannot_run_say_so_first(shown: Any) -> None:
    plan, text = shown("Qwen3-0.6B", enable_cache_blend=True, enable_prefix_caching=False)
    (missing,) = plan["missing"]
    assert missing["remedy"] == "leave out --enable-cache-blend"
    assert text.startswith(f"Not runnable yet: {missing['feature']} is not implemented; the plan")
    for model, sizes in (
        ("Qwen3-0.6B", ALONE),
        ("Qwen3-0.6B", Parallel(dp=2)),
        ("Qwen3-0.6B", Parallel(tp=2, pp=2)),
        ("DeepSeek-V3", Parallel(tp=2, dp=4, experts=True)),
        ("DeepSeek-V3", Parallel(tp=2, dp=8, experts=True)),
    ):
        plan, text = shown(model, sizes)
        assert plan["missing"] == [] and "Not runnable" not in text


@pytest.mark.parametrize(
    ("parallel", "gate_up", "down", "router", "qkv"),
    [
        (ALONE, "", "", "", ""),
        (Parallel(tp=4), "rows of each expert", "columns of each expert", "", "rows"),
        (TOGETHER, "experts", "experts", "", "rows"),
        (Parallel(dp=8, experts=True), "experts", "experts", "", ""),
        (Parallel(dp=8), "", "", "", ""),
    ],
)
def test_only_expert_parallelism_cuts_by_experts(
    shown: Any, parallel: Parallel, gate_up: str, down: str, router: str, qkv: str
) -> None:
    plan, text = shown("Qwen3-30B-A3B", parallel)
    found = {one["name"].removeprefix("layers.0."): one["shard"] for one in plan["layers"][1]["weights"]}
    assert [
        found[name] for name in ("mlp.experts.gate_up", "mlp.experts.down", "mlp.router.weight", "attention.qkv.weight")
    ] == [gate_up, down, router, qkv]
    assert ("cut by experts" in text) == parallel.experts and ("cut by" in text) == bool(gate_up or qkv)


def test_parts_of_fused_weights_have_their_shapes(shown: Any) -> None:
    plan, text = shown("Qwen3-30B-A3B")
    weights = {one["name"]: one for one in plan["layers"][1]["weights"]}
    qkv, experts = weights["layers.0.attention.qkv.weight"], weights["layers.0.mlp.experts.gate_up"]
    assert (
        qkv["parts"]
        == [
            {"name": "q", "shape": [4096, 2048]},
            {"name": "k", "shape": [512, 2048]},
            {"name": "v", "shape": [512, 2048]},
        ]
        and not qkv["experts"]
    )
    assert experts["experts"] == 128 and [part["shape"] for part in experts["parts"]] == [[768, 2048]] * 2
    assert "attention.qkv.weight  5120 x 2048 (q 4096 x 2048, k 512 x 2048, v 512 x 2048) bfloat16" in text
    assert "mlp.experts.gate_up  196608 x 2048 (128 experts of gate 768 x 2048, up 768 x 2048) bfloat16" in text
    assert "mlp.experts.down  262144 x 768 (128 experts of 2048 x 768) bfloat16" in text


def test_ranks_are_told_with_their_kv_heads_and_weights(shown: Any) -> None:
    text = shown("Qwen3-30B-A3B", TOGETHER)[1]
    assert "── 8 ranks" in text
    assert "experts on ranks of the first stage: experts 0-15 on rank 0; experts 16-31 on rank 1; experts 32" in text
    assert "KV heads on tp ranks: head 0 on ranks 0-1; head 1 on ranks 2-3; head 2 on ranks 4-5; head 3" in text
    assert f"weights by device: 8 x cuda {EACH} each" in text
    assert "heads 0-1 on rank 0; heads 2-3 on rank 1" in shown("Qwen3-8B", Parallel(tp=4))[1]
    assert "KV cache: the same latents on every tp rank" in shown("DeepSeek-V2-Lite", Parallel(tp=4))[1]
    assert "weights by device: 1 x cuda 15.26 GiB" in shown("Qwen3-8B")[1]


EAGER = ", with --enforce-eager: more than 8 ranks share experts"


@pytest.mark.parametrize(
    ("parallel", "device", "fits", "gpus", "note"),
    [
        (ALONE, "h100", ["-tp 8 -pp 2"], 16, ""),
        (Parallel(tp=4, pp=2, dp=2), "h100", ["-tp 8 -pp 2 -dp 2"], 32, ""),
        (Parallel(dp=2, experts=True), "h100", ["-tp 8 -dp 2 --enable-expert-parallel"], 16, EAGER),
        (
            Parallel(dp=4, experts=True),
            "h200",
            ["-tp 2 -dp 4 --enable-expert-parallel", "-dp 8 --enable-expert-parallel"],
            8,
            "",
        ),
    ],
)
def test_what_would_fit_counts_the_ranks_that_were_asked_for(
    glm: Path, parallel: Parallel, device: str, fits: list[str], gpus: int, note: str
) -> None:
    plan, text = show(glm, parallel, device)
    told = f"It fits with {' or '.join(fits)} ({gpus} GPUs like this one{note})."
    assert plan["memory"]["refused"].endswith(told)
    assert plan["memory"]["kv_bytes_per_token"] == plan["memory"]["page_bytes"] / 128
    assert "KV cache: " in text and "per layer; a page, the block of" in text
    sizes = {"-tp": "tp", "-pp": "pp", "-dp": "dp"}
    for one in fits:
        words = one.removesuffix(" --enable-expert-parallel").split()
        flags = {sizes[flag]: int(size) for flag, size in zip(words[::2], words[1::2], strict=True)}
        larger = Parallel(experts=parallel.experts, **flags)
        assert "num_blocks" in show(glm, larger, device)[0]["memory"]


def test_a_phase_that_differs_in_nothing_is_told_once(shown: Any) -> None:
    assert shown("Qwen3-30B-A3B")[1].count("experts in prefill and decode: dispatcher none") == 1
    text = shown("Qwen3-30B-A3B", Parallel(dp=8, experts=True))[1]
    assert text.count("experts in prefill and decode: dispatcher pull") == 1
    wide = shown("Qwen3-30B-A3B", Parallel(tp=4, dp=4, experts=True))[1]
    assert wide.count("experts in prefill and decode: dispatcher all-gather") == 1
    assert "not pull with any kernel: pull joins at most 8 ranks" in wide
    assert "of one size on all replicas: that of the fullest" in wide and "of the fullest" not in text
