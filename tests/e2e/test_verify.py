"""`verify`: equal models are found equal, and the layer of a changed tensor is named."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import EngineConfig
from quire.contracts.errors import ConfigError
from quire.explain.parity import NUM_TOKENS, TOLERANCE, verify

CONFIG = EngineConfig.from_flat(num_threads=1, use_tqdm_on_load=False, kv_cache_memory_bytes=1 << 24)
STAGES = ["embed", "layer 0", "layer 1", "layer 2", "norm", "logits"]


@pytest.fixture
def perturbed(tmp_path: Path) -> Callable[[Path, str], Path]:
    """A copy of a checkpoint in which the named tensor is a tenth larger."""

    def copy(folder: Path, tensor: str) -> Path:
        target = tmp_path / "perturbed"
        shutil.copytree(folder, target)
        (file,) = target.glob("*.safetensors")
        tensors = load_file(file)
        tensors[tensor] = tensors[tensor] * 1.1
        save_file(tensors, file, metadata={"format": "pt"})
        return target

    return copy


def test_a_model_equals_itself_in_every_stage(oracle: Any) -> None:
    report = verify(str(oracle().folder), CONFIG)
    assert [row.name for row in report.rows] == STAGES
    assert report.ok and report.first_divergent is None
    assert report.num_prompt == 48 and len(report.ours) == NUM_TOKENS
    assert all(row.relative < TOLERANCE / 50 for row in report.rows)  # rounding is far from the tolerance
    assert report.ours == tuple(report.theirs)
    assert "all 32 equal" in report.render() and "equal: no stage" in report.render()


@pytest.mark.parametrize(
    ("tensor", "stage"),
    [
        ("model.embed_tokens.weight", "embed"),
        ("model.layers.0.self_attn.o_proj.weight", "layer 0"),
        ("model.layers.1.self_attn.k_norm.weight", "layer 1"),
        ("model.layers.2.mlp.up_proj.weight", "layer 2"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "logits"),
    ],
)
def test_the_layer_of_a_perturbed_tensor_is_named(oracle: Any, perturbed: Any, tensor: str, stage: str) -> None:
    folder = oracle().folder
    report = verify(str(perturbed(folder, tensor)), CONFIG, reference=folder)
    assert report.first_divergent == stage and not report.ok
    before = report.rows[: STAGES.index(stage)]
    assert all(row.relative < TOLERANCE / 50 for row in before)
    (marked,) = [line for line in report.render().splitlines() if "diverges" in line]
    assert marked.startswith(stage)
    assert f"{stage} is the first stage" in report.render()


def test_a_token_that_differs_is_told_with_its_margin(oracle: Any, perturbed: Any) -> None:
    folder = oracle().folder
    report = verify(str(perturbed(folder, "model.layers.0.self_attn.o_proj.weight")), CONFIG, reference=folder)
    assert report.first_token is not None and report.margin > 0
    assert f"greedy tokens: {report.first_token} of 32 equal" in report.render()


@pytest.mark.parametrize(("chunk", "depth"), [(7, 1), (16, 2)])
def test_chunks_and_depth_are_verified_as_they_run(oracle: Any, chunk: int, depth: int) -> None:
    config = EngineConfig.from_flat(
        num_threads=1, max_num_batched_tokens=chunk, max_num_seqs=2, async_depth=depth, block_size=8,
        kv_cache_memory_bytes=1 << 22,
    )  # fmt: skip
    assert verify(str(oracle().folder), config).ok


def test_the_bundled_model_on_a_text() -> None:
    report = verify("", CONFIG, "The module provides")
    assert report.ok and report.model == "quire-tiny" and len(report.rows) == 11
    assert report.num_prompt < 10


def test_a_short_context_cuts_the_prompt_or_is_refused(oracle: Any, tmp_path: Path) -> None:
    folder = str(oracle().folder)
    short = EngineConfig.from_flat(num_threads=1, max_model_len=40, kv_cache_memory_bytes=1 << 22)
    assert verify(folder, short).num_prompt == 8
    with pytest.raises(ConfigError, match="max_model_len"):
        verify(folder, EngineConfig.from_flat(num_threads=1, max_model_len=32, kv_cache_memory_bytes=1 << 22))


def test_without_transformers_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, oracle: Any) -> None:
    folder = oracle().folder
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[verify\]'` in Quire's folder"):
        verify(str(folder), CONFIG)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


ROUTED = [f"layer {layer}{what}" for layer in (1, 2) for what in (" router", "")]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_router_decisions_are_compared(oracle: Any, tiny: Any, family: str) -> None:
    report = verify(str(oracle(tiny(family=family)).folder), CONFIG)
    assert report.ok, report.render()
    found = {row.name for row in report.rows if row.name.endswith("router")}
    assert found == {"layer 1 router", *({"layer 0 router", "layer 2 router"} if family == "mixtral" else ()),
                     *({"layer 2 router"} if family not in ("mixtral", "qwen2_moe") else ())}


@pytest.mark.parametrize(
    ("tensor", "stage"),
    [
        ("model.layers.1.mlp.gate.weight", "layer 1 router"),
        ("model.layers.2.mlp.gate.e_score_correction_bias", "layer 2 router"),
        ("model.layers.1.mlp.experts.5.up_proj.weight", "layer 1"),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", "layer 1"),
        ("model.layers.2.self_attn.kv_b_proj.weight", "layer 2 router"),
    ],
)
def test_the_router_or_expert_of_a_perturbed_tensor_is_named(
    oracle: Any, tiny: Any, perturbed: Any, tensor: str, stage: str
) -> None:
    """The router of a layer comes behind its attention: what is wrong there is seen in the router first."""
    folder = oracle(tiny(family="deepseek_v3")).folder
    report = verify(str(perturbed(folder, tensor)), CONFIG, reference=folder)
    assert report.first_divergent == stage, report.render()


def test_the_trained_model_with_experts(shared: Path) -> None:
    report = verify(str(shared / "models" / "quire-tiny-moe"), CONFIG, "The module provides")
    assert report.ok and [row.name for row in report.rows[:5]] == ["embed", "layer 0", *ROUTED[:2], "layer 2 router"]
