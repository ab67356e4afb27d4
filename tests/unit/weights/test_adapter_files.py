"""The files of an adapter: what is read, and what is refused by its name, with the fix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.contracts.errors import AdapterError
from quire.weights.adapter_files import AdapterFiles, digest_of, read_adapter, tail_of

MODULE = "base_model.model.model.layers.3.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "lora_dropout": 0.1}


def write(folder: Path, more: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    config = CONFIG | (more or {})
    shapes = {f"{MODULE}.lora_A.weight": (4, 6), f"{MODULE}.lora_B.weight": (10, 4)} if tensors is None else tensors
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    return folder


def scale(folder: Path) -> float:
    (module,) = read_adapter(folder).modules.values()
    return module.scale


def test_an_adapter_is_read_by_its_tensors(tmp_path: Path) -> None:
    found: AdapterFiles = read_adapter(write(tmp_path, {"target_modules": ["other"]}))
    ((tail, module),) = found.modules.items()
    assert tail == "layers.3.self_attn.q_proj" and module.name == "model.layers.3.self_attn.q_proj"
    assert (module.rank, module.a.shape, module.b.shape) == (4, (4, 6), (10, 4)) and not found.stacks


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {r"layers\.3\..*": 4}}, 1.0),
        ({"alpha_pattern": {"k_proj": 2, "proj": 3}}, 2.0),
        ({"r": 16, "rank_pattern": {"self_attn.q_proj": 4}}, 2.0),
    ],
)
def test_the_scale_is_that_of_peft(tmp_path: Path, more: dict[str, Any], expected: float) -> None:
    assert scale(write(tmp_path, more)) == expected


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"use_dora": True}, "use_dora=True: DoRA scales .* merge the adapter into the model"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: whole modules .* train it without"),
        ({"lora_bias": True}, "lora_bias=True: biases of adapters"),
        ({"bias": "all"}, "bias='all' changes biases of the model: train it with none"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is for models with transposed weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "new rows of the embedding"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not implemented: use LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "has changed the model's weights, too"),
        ({"use_magic": 3}, "'use_magic' is unknown, and its value 3 may change the answers"),
        ({"r": "four"}, "r='four': must be a number of at least 1"),
        ({"rank_pattern": {"q_proj": 8}}, "has rank 4, and adapter_config.json says 8"),
        ({"alpha_pattern": {"(": 8}}, "is no pattern"),
        ({"alpha_pattern": {"(a|a)+": 8}}, "may take for ever to match"),
        ({"alpha_pattern": {".*a.*a.*a.*a.*": 8}}, "with at most 4 repetitions"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern must be an object of numbers"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be an object of numbers of at least 1"),
        ({"r": True}, "r=True: must be a number"),
    ],
)
def test_what_would_change_answers_is_refused_by_name(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read_adapter(write(tmp_path, more))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{MODULE}.lora_A.weight": (4, 6)}, "has no .*lora_B.weight: download it again"),
        ({f"{MODULE}.lora_A.weight": (4, 6), f"{MODULE}.lora_B.weight": (10, 3)}, "do not fit together"),
        ({f"{MODULE}.lora_magnitude_vector": (10,)}, "belongs to DoRA"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 6)}, "train it without embed_tokens"),
        ({"base_model.model.lm_head.weight": (10, 6)}, "is no matrix of an adapter"),
        ({}, "has no tensors"),
    ],
)
def test_tensors_that_cannot_be_used_are_named(tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        read_adapter(write(tmp_path, None, tensors))


def test_matrices_of_all_experts(tmp_path: Path) -> None:
    """Both parameters of a module, of which one stands under `base_layer`, with a rank and an alpha of its own."""
    at = "base_model.model.model.layers.3.mlp.experts"
    tensors = {f"{at}.base_layer.lora_A.weight": (8, 6), f"{at}.base_layer.lora_B.weight": (10, 8)}
    tensors |= {f"{at}.lora_A.weight": (4, 5), f"{at}.lora_B.weight": (6, 4)}
    more = {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"down_proj": 6}}
    found = read_adapter(write(tmp_path, more, tensors))
    (stacks,) = found.stacks.values()
    assert not found.modules and [*found.stacks] == [3] and len(stacks) == 2
    assert stacks[0].ranks == {"gate_up_proj": (4, 2.0), "down_proj": (2, 3.0)}


def test_values_without_effect_are_taken(tmp_path: Path) -> None:
    """A newer PEFT writes keys that are not known here, with values that turn nothing on."""
    assert read_adapter(write(tmp_path, {"use_magic": False, "arrow_config": None, "loftq_config": {}}))


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="has no adapter_config.json: give the folder of an adapter"):
        read_adapter(tmp_path)
    write(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="only adapter_model.bin, which can run code .* safe_serialization=True"):
        read_adapter(tmp_path)
    weights.write_bytes((tmp_path / "adapter_model.bin").read_bytes()[:-4])
    with pytest.raises(AdapterError, match="truncated"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="is not a JSON object"):
        read_adapter(tmp_path)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    first = digest_of(write(tmp_path))
    assert digest_of(write(tmp_path)) == first != digest_of(write(tmp_path, {"lora_alpha": 9}))


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("model.layers.3.mlp.up_proj", "layers.3.mlp.up_proj"),
        ("model.language_model.layers.3.mlp.up_proj", "layers.3.mlp.up_proj"),
        ("backbone.layers.0.mixer.in_proj", "layers.0.mixer.in_proj"),
        ("model.layers.1.block_sparse_moe.gate_proj", "layers.1.mlp.gate_proj"),
        ("model.layers.1.block_sparse_moe.gate", "layers.1.block_sparse_moe.gate"),
        ("lm_head", "lm_head"),
        ("model.layers.1.block_sparse_moe.experts.3.w1", "layers.1.experts.3.gate"),
        ("model.layers.1.mlp.experts.3.down_proj", "layers.1.experts.3.down"),
        ("model.layers.1.mlp.shared_experts.down_proj", "layers.1.mlp.shared_experts.down_proj"),
    ],
)
def test_tails_of_names(name: str, tail: str) -> None:
    assert tail_of(name) == tail
