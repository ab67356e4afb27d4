"""Llama 4's config.json: which layers attend in chunks, rotate, are normalized, grow, and have experts."""

from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config, read_checkpoint_config
from quire.args.layers import GroupedArgs
from quire.args.wrappers import unwrapped
from quire.contracts.errors import ModelError, UnsupportedModel

from ...support.tiny_models import Tiny, tiny_config


def read(**changes: Any) -> ModelArgs:
    return parse_checkpoint_config(tiny_config(Tiny(family="llama4_text"), **changes))


def windows(args: ModelArgs) -> list[int | None]:
    return [one.mixer.window for one in args.layers if isinstance(one.mixer, GroupedArgs)]


def test_the_published_model(shared: Path) -> None:
    """Its config.json lacks attn_scale, floor_scale and attn_temperature_tuning, and lists no layers."""
    args = read_checkpoint_config(shared / "hf" / "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic")
    rotated, full = args.layers[0].mixer, args.layers[3].mixer
    assert isinstance(rotated, GroupedArgs) and isinstance(full, GroupedArgs)
    assert (rotated.window, rotated.qk_norm, rotated.scores.growth) == (-8192, "plain", 0.0)
    assert (full.window, full.qk_norm, full.rope.kind) == (None, "", "none")
    assert (full.scores.growth, full.scores.trained, full.scores.ahead) == (0.1, 8192, 1)
    assert windows(args) == ([-8192] * 3 + [None]) * 12 and len(args.expert_layers) == 48
    assert args.moe is not None and args.moe.weigh_inputs and args.moe.shared_size == args.moe.expert_size == 8192
    assert args.wrapper is not None, "the modules that stay unquantized tell the names of tensors"
    assert (args.wrapper.root, args.wrapper.head) == ("language_model.model.", "language_model.lm_head.weight")


@pytest.mark.parametrize(
    ("quantization", "root"),
    [
        (None, "model.language_model."),
        ({"ignore": ["re:.*self_attn", "re:.*router"]}, "model.language_model."),
        ({"ignore": [r"re:language_model\.model\.layers\.\d+\.self_attn.*"]}, "language_model.model."),
        ({"modules_to_not_convert": ["language_model.model.layers.0.self_attn.q_proj"]}, "language_model.model."),
        ({"modules_to_not_convert": ["model.language_model.layers.0.self_attn"]}, "model.language_model."),
        ({"ignore": "language_model.model.", "ignored_layers": [3, None]}, "model.language_model."),
        ("no object", "model.language_model."),
    ],
    ids=str,
)
def test_names_of_modules_tell_those_of_tensors(quantization: Any, root: str) -> None:
    """Damaged values are left to the reader of the quantization."""
    raw = {"model_type": "llama4", "text_config": {}, "quantization_config": quantization}
    wrapper = unwrapped(raw, "config.json")[1]
    assert wrapper is not None and wrapper.root == root


def test_layers_by_their_lists() -> None:
    assert windows(read()) == [-8, None, -8] and read().expert_layers == (1,)
    listed: dict[str, Any] = {"no_rope_layers": [0, 1, 1], "layer_types": None, "moe_layers": [0, 2]}
    assert windows(read(**listed)) == [None, -8, -8] and read(**listed).expert_layers == (0, 2)
    assert windows(read(layer_types=["full_attention"] * 2 + ["chunked_attention"])) == [None, None, -8]
    assert windows(read(attention_chunk_size=256)) == [None] * 3, "as long as the context"
    assert windows(read(attention_chunk_size=None, layer_types=None)) == [None] * 3


def test_what_can_be_switched_off() -> None:
    plain = read(use_qk_norm=False, attn_temperature_tuning=False)
    for one in plain.layers:
        assert isinstance(one.mixer, GroupedArgs) and one.mixer.qk_norm == "" and not one.mixer.scores.growth


@pytest.mark.parametrize(("value", "grows"), [(4, True), (True, True), (0, False), (False, False), (None, False)])
def test_the_switch_of_growth_may_be_a_number(value: Any, grows: bool) -> None:
    unrotated = read(attn_temperature_tuning=value).layers[1].mixer
    assert isinstance(unrotated, GroupedArgs) and bool(unrotated.scores.growth) == grows


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"attn_temperature_tuning": "yes"}, ModelError, "attn_temperature_tuning='yes' must be true or false"),
        ({"attention_chunk_size": 0}, ModelError, "attention_chunk_size=0 lets a token attend to nothing"),
        ({"attention_chunk_size": None}, ModelError, "attention_chunk_size=null leaves open"),
        ({"layer_types": ["chunked_attention"]}, ModelError, "layer_types names 1 of 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, UnsupportedModel, "layer_types holds 'sliding_attention'"),
        ({"num_experts_per_tok": 2}, UnsupportedModel, "num_experts_per_tok=2 is not implemented"),
        ({"moe_layers": [True]}, ModelError, "moe_layers=.True. must be a list of layers"),
        ({"floor_scale": 1, "max_position_embeddings": 4096}, UnsupportedModel, "floor_scale=1 with max_position"),
        ({"floor_scale": 0}, ModelError, "floor_scale=0 must be"),
    ],
    ids=str,
)
def test_what_is_wrong_or_not_implemented_is_named(changes: dict[str, Any], error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        read(**changes)


def test_a_norm_after_yarn_is_refused() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModel, match="use_qk_norm with rope type 'yarn' is not implemented"):
        read(rope_parameters=yarn)


def test_other_families_have_no_chunks() -> None:
    raw = tiny_config(Tiny(family="llama"))
    with pytest.raises(UnsupportedModel, match="attention_chunk_size=8 changes the math"):
        parse_checkpoint_config(raw | {"attention_chunk_size": 8})
    with pytest.raises(UnsupportedModel, match="layer_types holds 'chunked_attention'"):
        parse_checkpoint_config(raw | {"layer_types": ["chunked_attention"] * 3})
