"""Published EAGLE heads: their config.json in both forms gives the names and shapes of their tensors."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.config.engine import EngineConfig
from quire.config.speculators import resolve_speculators
from quire.contracts.errors import ConfigError, UnsupportedModel
from quire.plan.drafts import with_spelling
from quire.plan.layout import layout

LLAMA: dict[str, Any] = {  # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128256,
    "draft_vocab_size": 32000,
}  # fmt: skip
QWEN: dict[str, Any] = {  # RedHatAI/Qwen3-8B-speculator.eagle3
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
    "norm_before_residual": True, "target_hidden_size": None, "torch_dtype": "bfloat16",
    "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [
        {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}},
    "transformer_layer_config": {
        "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936},
}  # fmt: skip
ANGEL = LLAMA | {
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
}
FIRST = {key: value for key, value in LLAMA.items() if key != "draft_vocab_size"} | {
    "architectures": ["LlamaForCausalLM"],
    "bias": False,
}  # yuhuili/EAGLE-LLaMA3.1-Instruct-8B


def named(raw: dict[str, Any], method: str, stored: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    args = with_spelling(parse_checkpoint_config(raw, head=method), stored)
    return {part.stored: part.shape for param in layout(args) for part in param.parts}


@pytest.mark.parametrize(
    ("raw", "at", "wide", "positions"),
    [(LLAMA, "midlayer", 14336, 2048), (QWEN, "layers.0", 12288, 40960), (ANGEL, "midlayer", 12288, 40960)],
)
def test_eagle3_heads(raw: dict[str, Any], at: str, wide: int, positions: int) -> None:
    assert named(raw, "eagle3") == {
        "fc.weight": (4096, 12288),
        f"{at}.hidden_norm.weight": (4096,),
        f"{at}.input_layernorm.weight": (4096,),
        f"{at}.self_attn.q_proj.weight": (4096, 8192),
        f"{at}.self_attn.k_proj.weight": (1024, 8192),
        f"{at}.self_attn.v_proj.weight": (1024, 8192),
        f"{at}.self_attn.o_proj.weight": (4096, 4096),
        f"{at}.post_attention_layernorm.weight": (4096,),
        f"{at}.mlp.gate_proj.weight": (wide, 4096),
        f"{at}.mlp.up_proj.weight": (wide, 4096),
        f"{at}.mlp.down_proj.weight": (4096, wide),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
        "d2t": (32000,),
    }
    args = parse_checkpoint_config(raw, head="eagle3")
    assert args.eagle is not None and args.eagle.context == positions and args.max_position_embeddings > 2**20
    assert args.eagle.norm_residual == (raw is QWEN) and args.eagle.reads(36) == (2, 18, 33)
    if raw is LLAMA:
        assert sum(prod(shape) for shape in named(raw, "eagle3").values()) * 2 >> 20 == 810, "MiB; the file has 811"


def test_heads_of_gpt_oss_normalize_the_states_before_the_projection() -> None:
    """RedHatAI/gpt-oss-20b-speculator.eagle3 has the tensors of other heads and input_norm.weight."""
    wide = {"hidden_size": 2880, "head_dim": 64, "num_attention_heads": 64, "vocab_size": 201_088}
    raw = QWEN | {"transformer_layer_config": QWEN["transformer_layer_config"] | wide, "norm_before_fc": True}
    shapes = named(raw, "eagle3")
    assert shapes["input_norm.weight"] == (8640,) and len(shapes) == 15
    each = named(LLAMA | {"eagle_config": {"fc_norm": True, "norm_output": True}}, "eagle3")
    assert [each[f"fc_norm.{place}.weight"] for place in range(3)] == [(4096,)] * 3 and len(each) == 17
    args = parse_checkpoint_config(LLAMA | {"eagle_config": {"norm_output": True}}, head="eagle3")
    assert args.eagle is not None and args.eagle.norm_output and not args.eagle.norms
    with pytest.raises(UnsupportedModel, match="belong to EAGLE-3, and this is an EAGLE head"):
        parse_checkpoint_config(FIRST | {"norm_output": True}, head="eagle")
    with pytest.raises(UnsupportedModel, match="use_last_layernorm=False of an EAGLE head is not implemented"):
        parse_checkpoint_config(LLAMA | {"eagle_config": {"use_last_layernorm": False}}, head="eagle3")


def test_eagle_heads() -> None:
    shapes = named(FIRST, "eagle")
    assert shapes["fc.weight"] == (4096, 8192) and shapes["layers.0.self_attn.q_proj.weight"] == (4096, 4096)
    assert len(shapes) == 9 and not {"norm.weight", "lm_head.weight", "layers.0.input_layernorm.weight"} & shapes.keys()
    old = named(FIRST, "eagle", ("fc.weight", "fc.bias", "layers.0.mlp.down_proj.weight"))
    assert old.keys() - shapes.keys() == {"fc.bias"}
    library = named(
        {"speculators_model_type": "eagle", "transformer_layer_config": FIRST, "fusion_bias": False},
        "eagle",
        ("fusion_fc.weight", "transformer.mlp.down_proj.weight"),
    )
    assert {name.replace("fusion_fc", "fc").replace("transformer", "layers.0") for name in library} == shapes.keys()


@pytest.mark.parametrize(
    ("raw", "method"), [(LLAMA, ""), (QWEN, ""), (LLAMA, "eagle"), ({"speculators_model_type": "dflash"}, "eagle3")]
)
def test_a_head_is_not_a_model_nor_another_head(raw: dict[str, Any], method: str) -> None:
    with pytest.raises(UnsupportedModel, match="this is a head of method (eagle3|dflash), which drafts for another"):
        parse_checkpoint_config(raw, head=method)


@pytest.mark.parametrize("name", [None, "", 5])
def test_a_head_that_names_no_model_is_not_served_with_the_bundled_one(name: Any, tmp_path: Path) -> None:
    library = QWEN["speculators_config"] | {"verifier": {"name_or_path": name}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"speculators_config": library}))
    with pytest.raises(ConfigError, match="speculators_config names no verifier"):
        resolve_speculators(EngineConfig(), tmp_path)
