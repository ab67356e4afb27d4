"""The plan chooses one kernel for heads and attention of decodes where it was measured to be faster."""

from pathlib import Path
from typing import Any

import pytest

from quire.args.latent import IndexArgs, LatentArgs
from quire.args.layers import GroupedArgs, ScoreArgs
from quire.args.rope import RopeArgs
from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.kernels.joined.choice import JoinedDecodes, choose_decodes, choose_latent
from quire.plan.joined import joined_decodes, joined_router, short_decodes

HERE = "it needs a Hopper GPU and NVRTC"
TWO, EIGHT = (f"with {n} query heads of a KV head it was" for n in (2, 8))
EAGER, CODES = "enforce_eager runs each operation by itself", "the KV cache has 8 bits"


@pytest.mark.parametrize(
    ("model", "options", "device", "found"),
    [
        ("Qwen3-0.6B", {"max_model_len": 8192}, "h200", (2, f"{TWO} faster", range(1, 17), f"{TWO} faster")),
        ("Qwen3-0.6B", {"max_model_len": 8193}, "h200", (2, f"{TWO} faster", range(1, 17), f"{TWO} faster", 8192)),
        ("Qwen3-30B-A3B", {}, "h200", (4, f"{EIGHT} faster", range(0), f"{EIGHT} slower", 4096)),
        (
            "Qwen3-0.6B",
            {"tensor_parallel_size": 4, "max_model_len": 2048},
            "h200",
            (8, f"{TWO} faster", range(1, 17), f"{TWO} faster"),
        ),
        ("Qwen3-30B-A3B", {"max_model_len": 4096}, "h200", (4, f"{EIGHT} faster", range(0), f"{EIGHT} slower")),
        ("Qwen3-0.6B", {"enforce_eager": True}, "h200", (0, EAGER, range(0), EAGER)),
        ("Qwen3-0.6B", {"kv_cache_dtype": "fp8"}, "h200", (0, CODES, range(0), CODES)),
        ("Qwen3-0.6B", {}, "a100", (0, HERE, range(1, 17), f"{TWO} faster")),
        ("Qwen3-30B-A3B", {}, "a100", (0, HERE, range(0), f"{EIGHT} slower")),
    ],
)
def test_steps_and_reasons(
    shared: Path, model: str, options: dict[str, Any], device: str, found: tuple[Any, ...]
) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / model), **options), device).plan
    every = joined_decodes(plan)
    assert set(every) == set(range(plan.args.num_layers)) and set(every.values()) == {JoinedDecodes(*found)}
    assert short_decodes(plan) == ((found[0], found[4]) if len(found) > 4 else (0, 0))


@pytest.mark.parametrize(
    ("changes", "heads", "reason"),
    [
        ({"head_dim": 64}, (8, 4), "heads of 64 dimensions were not measured"),
        ({}, (16, 1), "16 query heads of a KV head were not measured"),
        ({}, (64, 32), "32 KV heads were slower in long contexts"),
        ({"scores": ScoreArgs(soft_cap=30.0)}, (8, 4), "scores are capped"),
        ({"window": -1024}, (8, 4), "contexts are cut into chunks"),
    ],
)
def test_what_clusters_do_not_take(changes: dict[str, Any], heads: tuple[int, int], reason: str) -> None:
    sizes: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128, "rotary_dim": 64}
    mixer = GroupedArgs(**sizes | changes, rope=RopeArgs(theta=1e4))
    one = choose_decodes(mixer, heads, eager=False, eight_bits=False, clusters="", context=1024)
    assert (one.sequences, one.why_sequences) == (0, reason)
    assert one.rows or heads == (16, 1)


def test_a_window_bounds_what_is_read() -> None:
    mixer = GroupedArgs(
        num_heads=8, num_kv_heads=4, head_dim=128, rotary_dim=128, rope=RopeArgs(theta=1e4), window=1024
    )
    one = choose_decodes(mixer, (8, 4), eager=False, eight_bits=False, clusters="", context=100_000)
    assert (one.sequences, one.context) == (4, 0)


@pytest.mark.parametrize(
    ("model", "options", "device", "found"),
    [
        ("DeepSeek-V2-Lite", {}, "h200", (16, "with 16 heads it was faster", 8192)),
        ("DeepSeek-V2-Lite", {"max_model_len": 8192}, "h200", (16, "with 16 heads it was faster", 0)),
        ("DeepSeek-V3", {}, "h200", (0, "more heads than 16 were not measured", 0)),
        ("DeepSeek-V2-Lite", {"enforce_eager": True}, "h200", (0, EAGER, 0)),
        ("DeepSeek-V2-Lite", {"kv_cache_dtype": "fp8"}, "h200", (0, CODES, 0)),
        ("DeepSeek-V2-Lite", {}, "a100", (0, HERE, 0)),
        (
            "DeepSeek-V2-Lite",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "h200",
            (0, "contexts are divided among ranks", 0),
        ),
    ],
)
def test_latent_attention(
    shared: Path, model: str, options: dict[str, Any], device: str, found: tuple[int, str, int]
) -> None:
    sequences, why, context = found
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / model), **options), device).plan
    every = joined_decodes(plan)
    assert set(every) == set(range(len(plan.args.layers))), "layers that predict further tokens, too"
    assert set(every.values()) == {JoinedDecodes(sequences, why, range(0), why, context, latent=True)}
    assert short_decodes(plan) == ((sequences, context) if context else (0, 0))


@pytest.mark.parametrize(
    ("changes", "heads", "reason"),
    [
        ({"kv_rank": 256}, 16, "it has no latents of 256 and 64 dimensions"),
        ({"rope_dim": 32}, 16, "it has no latents of 512 and 32 dimensions"),
        ({}, 17, "more heads than 16 were not measured"),
        (
            {"index": IndexArgs(num_heads=4, head_dim=128, top_k=2048, interleaved=False)},
            16,
            "its rows attend to chosen tokens",
        ),
    ],
)
def test_latents_that_clusters_do_not_take(changes: dict[str, Any], heads: int, reason: str) -> None:
    sizes: dict[str, Any] = {"q_rank": 0, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128, "scale": 0.1}
    mixer = LatentArgs(num_heads=heads, rope=RopeArgs(theta=1e4), **sizes | changes)
    one = choose_latent(mixer, heads, eager=False, eight_bits=False, clusters="", context=1024, divided=False)
    assert (one.sequences, one.why_sequences) == (0, reason)


@pytest.mark.parametrize(("device", "options"), [("h200", {"batch_invariant": True}), ("", {"device": "cpu"})])
def test_none_with_other_kernels(shared: Path, device: str, options: dict[str, Any]) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / "Qwen3-0.6B"), **options), device).plan
    assert joined_decodes(plan) == {}


@pytest.mark.parametrize(
    ("model", "options", "device", "found"),
    [
        ("Qwen3-30B-A3B", {}, "h200", ""),
        ("DeepSeek-V2-Lite", {}, "h200", ""),
        ("Qwen3-30B-A3B", {"quantization": "fp8"}, "h200", ""),
        ("Qwen3-30B-A3B", {"dtype": "float16"}, "h200", "it takes bfloat16, not float16"),
        ("Qwen3-30B-A3B", {"batch_invariant": True}, "h200", "its product keeps a fixed order"),
        ("Qwen3-30B-A3B", {"load_format": "dummy", "routing": "uniform"}, "h200", "experts are drawn, not chosen"),
        ("Qwen3-30B-A3B", {}, "a100", HERE),
        ("Qwen3-30B-A3B", {}, "cpu", None),
        ("DeepSeek-V3", {}, "h200", "experts have groups"),
        ("GLM-4.5", {}, "h200", "160 experts of 5,120 inputs have no room in registers"),
        ("Qwen3-0.6B", {}, "h200", None),
    ],
)
def test_routers(shared: Path, model: str, options: dict[str, Any], device: str, found: str | None) -> None:
    plan = plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / model), **options), device).plan
    assert joined_router(plan) == found
