"""The type of the KV cache, its scales in checkpoints of every spelling, and the engine that uses them."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.args.checkpoint import ModelArgs, read_checkpoint_config
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, UserError, WeightsError
from quire.explain.describe import plan_engine
from quire.explain.render import render
from quire.plan.cache_dtype import E4M3, E5M2, cache_notes, choose_cache
from quire.plan.memory import MemoryPlan
from quire.quantization.read import find_quantization, read_quantization
from quire.quantization.rules import rules_of
from quire.reports.engine import PlanReport
from quire.weights.cache_scales import read_scales
from quire.weights.files import read_checkpoint

from ...support.quantized_checkpoints import numbers

FP8 = numbers(8, "float", "tensor")
ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8}
TEXT = "The quire is a stack of folded pages. In 1455 about"


@pytest.mark.parametrize(
    ("asked", "quantization", "dtype", "scaled", "noted"),
    [
        ("auto", {}, "bfloat16", False, False),
        ("auto", {"kv_cache_scheme": FP8}, E4M3, True, False),
        ("auto", {"kv_cache_scheme": "static"}, E4M3, True, False),
        ("auto", {"kv_cache_quant_algo": "FP8"}, E4M3, True, False),
        ("auto", {"kv_cache_quant_algo": "NVFP4"}, "bfloat16", False, True),
        ("auto", {"kv_cache_scheme": numbers(8, "int", "tensor")}, "bfloat16", False, True),
        ("auto", {"kv_cache_scheme": numbers(8, "float", "attn_head")}, "bfloat16", False, True),
        ("auto", {"kv_cache_scheme": FP8 | {"dynamic": True}}, "bfloat16", False, True),
        ("fp8", {}, E4M3, True, False),
        ("fp8_e4m3", {"kv_cache_scheme": FP8}, E4M3, True, False),
        ("fp8", {"kv_cache_scheme": numbers(8, "int", "tensor")}, E4M3, False, True),
        ("fp8_e5m2", {}, E5M2, False, False),
        ("fp8_ds_mla", {}, "fp8_ds_mla", False, False),
        ("fp8_ds_mla", {"kv_cache_scheme": FP8}, "fp8_ds_mla", False, True),
        ("fp8_e5m2", {"kv_cache_scheme": FP8}, E5M2, False, True),
        ("bfloat16", {"kv_cache_scheme": FP8}, "bfloat16", False, False),
    ],
)
def test_the_type_of_the_cache(asked: str, quantization: dict[str, Any], dtype: str, scaled: bool, noted: bool) -> None:
    found = choose_cache(asked, "bfloat16", quantization)
    assert (found.dtype, found.scaled, bool(found.notes)) == (dtype, scaled, noted)
    assert bool(found.features) == (dtype != "bfloat16")
    assert cache_notes(found, "cuda", "bfloat16") == found.notes
    assert (cache_notes(found, "cpu", "bfloat16") != found.notes) == (dtype in (E4M3, E5M2))


GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144, "hidden_size": 5376,
    "intermediate_size": 21_504, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0, "dtype": "bfloat16",
}  # fmt: skip
DRAFTER: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 262_144, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 262_144, "dtype": "bfloat16", "use_sliding_window": True,
    "sliding_window": 256, "max_window_layers": 0,
}  # fmt: skip


def test_a_type_that_is_not_of_the_computation_is_refused() -> None:
    assert choose_cache("half", "float16", {}).dtype == "float16"
    with pytest.raises(ConfigError, match="kv_cache_dtype=float16: the model computes in bfloat16"):
        choose_cache("float16", "bfloat16", {})


def test_a_checkpoint_may_quantize_the_cache_alone(tmp_path: Path) -> None:
    config = read_quantization({"quantization_config": ALONE}, "config.json")
    assert rules_of(config)("model.layers.0.self_attn.q_proj") is None
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    config = find_quantization(tmp_path, {}).config
    assert rules_of(config)("model.layers.0.self_attn.q_proj") is None
    assert choose_cache("auto", "float32", config).dtype == E4M3


def test_kernels_of_an_8_bit_cache_on_gpus() -> None:
    """Hopper's kernels read such a cache; a GPU without 8-bit numbers is refused in one line."""
    config = EngineConfig.from_flat(kv_cache_dtype="fp8")
    chosen = {choice.op: choice for choice in plan_engine(config, described="h200").plan.kernels}
    assert chosen["heads"].name == "triton" and chosen["attention"].name == "hopper"
    assert {"e4m3 cache", "e5m2 cache"} <= set(chosen["attention"].features)
    words = r"kv_cache_dtype=fp8: this GPU has no heads kernel .*8\.9, this GPU has 8\.0.*: set"
    with pytest.raises(ConfigError, match=words):
        plan_engine(config, described="a100")


def test_the_scratch_of_an_8_bit_cache_is_in_the_plan_s_memory(shared: Path) -> None:
    """On Hopper for heads that its kernel has; `explain` names the limit and the kernel of other steps."""

    def planned(**options: Any) -> PlanReport:
        return plan_engine(EngineConfig.from_flat(model=str(shared / "hf" / "Qwen3-0.6B"), **options), described="h200")

    coded, plain = planned(kv_cache_dtype="fp8"), planned()
    assert (coded.plan.widened_tokens, coded.plan.scratch_bytes) == ((131_072,), 512 << 20)
    assert 4 * 131_072 * 8 * 128 == 512 << 20, "two-byte keys and values of 8 heads of 128"
    assert (plain.plan.widened_tokens, plain.plan.scratch_bytes) == ((0,), 0)
    small = planned(kv_cache_dtype="fp8", block_size=16).plan
    assert small.widened_tokens == (0,) and small.scratch_bytes == 0, "the kernel reads blocks of 64 tokens"
    lost = [one.memory.kv_bytes for one in (plain, coded) if isinstance(one.memory, MemoryPlan)]
    page = coded.plan.geometry.page_bytes
    assert 512 << 20 <= lost[0] - lost[1] + 2 * page
    shown = io.StringIO()
    Console(file=shown, width=400).print(render(coded.describe()))
    assert "scratch of 512.0 MiB: keys and values that prompts read are widened" in shown.getvalue()
    assert "more than 131,072 tokens or have few rows for them, run the triton kernel" in shown.getvalue()
    shown.truncate(0)
    Console(file=shown, width=400).print(render(plain.describe()))
    assert "scratch" not in shown.getvalue()


# --- scales -----------------------------------------------------------------------------------------------------------


def write(folder: Path, scales: dict[str, torch.Tensor]) -> ModelArgs:
    """The bundled model with these tensors below each `self_attn`, times 1 + layer / 8."""
    shutil.copytree(bundled_model(), folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": ALONE}))
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for layer in range(raw["num_hidden_layers"]):
        stored |= {
            f"model.layers.{layer}.self_attn.{name}": (value * (1 + layer / 8)).to(value.dtype)
            for name, value in scales.items()
        }
    save_file(stored, folder / "model.safetensors")
    return read_checkpoint_config(folder)


def scale(number: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([number], dtype=dtype)


@pytest.mark.parametrize(
    "scales",
    [
        {"k_scale": scale(0.5), "v_scale": scale(0.25)},
        {"k_proj.k_scale": scale(0.5)[0], "v_proj.v_scale": scale(0.25)[0]},
        {"k_proj.output_scale": scale(0.5, torch.bfloat16), "v_proj.output_scale": scale(0.25, torch.float16)},
    ],
    ids=lambda scales: next(iter(scales)),
)
def test_scales_by_every_name(tmp_path: Path, scales: dict[str, torch.Tensor]) -> None:
    args = write(tmp_path, scales)
    found = read_scales(read_checkpoint(tmp_path), args)
    assert found == [(0.5 * (1 + i / 8), 0.25 * (1 + i / 8)) for i in range(args.num_layers)]


def test_a_scale_for_both_sides_and_no_scales(tmp_path: Path) -> None:
    args = write(tmp_path / "both", {"kv_scale": scale(0.5)})
    assert read_scales(read_checkpoint(tmp_path / "both"), args)[0] == (0.5, 0.5)
    args = write(tmp_path / "none", {})
    assert read_scales(read_checkpoint(tmp_path / "none"), args) == []


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"k_scale": scale(0.0), "v_scale": scale(1.0)}, "k_scale is 0, a scale must be a positive number"),
        ({"k_scale": scale(1.0), "v_scale": scale(float("nan"))}, "v_scale is nan, a scale"),
        ({"k_scale": scale(float("inf")), "v_scale": scale(1.0)}, "k_scale is inf, a scale"),
        ({"k_scale": scale(-1.0), "v_scale": scale(1.0)}, "k_scale is -1, a scale"),
        ({"k_scale": torch.ones(8), "v_scale": scale(1.0)}, r"k_scale has shape \[8\], and the KV cache has one scale"),
        ({"k_scale": scale(1.0)}, "k_scale is stored, and layer 0 has no scale for its values"),
        (
            {"k_scale": torch.ones(1, dtype=torch.int64), "v_scale": scale(1.0)},
            "k_scale is stored as I64, a scale must be",
        ),
    ],
)
def test_scales_that_cannot_be_used(tmp_path: Path, scales: dict[str, torch.Tensor], words: str) -> None:
    args = write(tmp_path, scales)
    with pytest.raises(WeightsError, match=words) as raised:
        read_scales(read_checkpoint(tmp_path), args)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=words):
        LLM(str(tmp_path), num_threads=1, use_tqdm_on_load=False, kv_cache_memory_bytes=1 << 22)


# --- engines ----------------------------------------------------------------------------------------------------------


def engine(model: str = "", **options: Any) -> LLM:
    return LLM(
        model,
        num_threads=1,
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=1 << 23,
        use_tqdm_on_load=False,
        **options,
    )


def logprobs(llm: LLM, text: str = TEXT) -> list[float]:
    """Of the tokens of a prompt, which later rows compute from the cache."""
    (made,) = llm.generate(text, SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0), use_tqdm=False)
    return [next(iter(one.values())).logprob for one in (made.prompt_logprobs or [])[1:] if one]


def test_an_engine_with_an_8_bit_cache() -> None:
    """Twice the blocks, logits near those of the float32 cache, other identities of blocks, kernels with reasons."""
    plain = engine()
    expected = torch.tensor(logprobs(plain))
    for asked, dtype, bound in (("fp8", E4M3, 0.15), ("fp8_e5m2", E5M2, 0.3)):
        llm = engine(kv_cache_dtype=asked)
        near = (torch.tensor(logprobs(llm)) - expected).abs()
        assert 0 < near.mean() < bound, near.mean()
        geometry, memory = llm.engine.memory.geometry, llm.engine.memory
        assert memory.num_blocks + 1 == 4 * (plain.engine.memory.num_blocks + 1), "float32 has four bytes"
        assert {c.dtype for c in geometry.groups[0].components} == {dtype}
        assert llm.engine.core.scheduler.roster._root != plain.engine.core.scheduler.roster._root
        reasons = {c.op: dict(c.rejected) for c in llm.engine.kernels.choices}
        assert all(f"has no {dtype[7:11]} cache" in reasons[op]["native"] for op in ("heads", "attention"))
        assert str(llm.engine.core.facts.plans["cache"]) == f"{dtype} (as asked; all scales are 1)"
        assert any("saves memory on a CPU, and is slow" in note for note in llm.engine.notes)


def test_hits_of_the_prefix_cache_equal_recomputation() -> None:
    """The same codes are read; a last bit of float32 may turn a code of the rows that are computed."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    long = TEXT * 6
    with_cache, without = engine(kv_cache_dtype="fp8"), engine(kv_cache_dtype="fp8", enable_prefix_caching=False)
    made = []
    for llm in (with_cache, with_cache, without):
        (output,) = llm.generate(long, params, use_tqdm=False)
        made.append(
            (
                output.num_cached_tokens,
                output.outputs[0].token_ids,
                [next(iter(one.values())).logprob for one in output.outputs[0].logprobs or []],
            )
        )
    assert made[1][0] and made[1][0] > 0 and not made[0][0] and not made[2][0]
    assert made[0][1] == made[1][1] == made[2][1]
    torch.testing.assert_close(torch.tensor(made[1][2]), torch.tensor(made[2][2]), rtol=0, atol=2e-3)


def test_the_scales_of_a_checkpoint_reach_the_kernels(tmp_path: Path) -> None:
    """`auto` follows the checkpoint; with scales that fit the numbers the result is nearer than with others."""
    write(tmp_path / "fit", {"k_scale": scale(0.02), "v_scale": scale(0.01)})
    write(tmp_path / "far", {"k_scale": scale(1e-4), "v_scale": scale(0.01)})
    expected = torch.tensor(logprobs(engine()))
    fit, far = engine(str(tmp_path / "fit")), engine(str(tmp_path / "far"))
    assert str(fit.engine.core.facts.plans["cache"]) == f"{E4M3} (as in the checkpoint; scales of the checkpoint)"
    views = fit.engine.worker.programs.kv
    assert [round(view.k_scale, 6) for view in views] == [round(0.02 * (1 + i / 8), 6) for i in range(len(views))]
    errors = [(torch.tensor(logprobs(llm)) - expected).abs().mean() for llm in (fit, far)]
    assert errors[0] < 0.15 and errors[1] > 2 * errors[0], "keys above 448 * 1e-4 are clamped"
    assert engine(str(tmp_path / "far"), kv_cache_dtype="float32").engine.core.facts.plans["cache"] == ""


def test_each_kv_group_has_its_part_of_the_scratch(tmp_path: Path) -> None:
    """Windowed layers of Gemma 4 have 16 KV heads of 256, the others 4 of 512; the draft model has 4 of 128."""
    for name, raw in (("gemma", GEMMA4), ("draft", DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))

    def planned(**options: Any) -> PlanReport:
        given = {"model": str(tmp_path / "gemma"), "kv_cache_dtype": "fp8", "max_model_len": 8192, **options}
        return plan_engine(EngineConfig.from_flat(**given), described="h200")

    plan = planned().plan
    assert [(one.window, one.block_size) for one in plan.geometry.groups] == [(1024, 128)] * 5 + [(None, 256)]
    assert plan.widened_tokens == (32_768,) * 5 + (65_536,)
    small = planned(block_size=32).plan  # blocks of a window are too small for the kernel, and only these
    assert small.widened_tokens == (0,) * 5 + (65_536,) and small.scratch_bytes == 512 << 20
    drafts = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    drafted = planned(speculative_config=drafts)
    assert drafted.plan.widened_tokens == (32_768,) * 5 + (65_536, 262_144), "a group of the draft model alone"
    shown = io.StringIO()
    Console(file=shown, width=400).print(render(drafted.describe()))
    words = "more than 32,768 (KV group 0) or 65,536 (KV group 5) or 262,144 (KV group 6) tokens or have few rows"
    assert words in shown.getvalue()
