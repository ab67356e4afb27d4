"""Gemma 4 in config.json: heads by kind of layer, values from keys, shared KV, embeddings for layers, experts."""

from typing import Any

import pytest

from quire.args.check_layer import check_layer
from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.layers import BesideArgs, DenseArgs, GroupedArgs
from quire.args.rope import RopeArgs
from quire.contracts.errors import ModelError, UnsupportedModel
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone, layout
from quire.weights.match import is_unread

# The language model of the published sizes; its keys lie in text_config, beside those of images.
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 5376, "intermediate_size": 21_504,
    "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
    "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
    "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "dtype": "bfloat16", "use_bidirectional_attention": "vision",
}  # fmt: skip
CHANGED: dict[str, Any] = {  # of the small ones
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 2, "attention_k_eq_v": False, "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 12, "use_double_wide_mlp": True, "sliding_window": 512,
}  # fmt: skip
SMALL = TEXT | CHANGED


def read(**changes: Any) -> ModelArgs:
    return parse_checkpoint_config(TEXT | changes)


def mixers(args: ModelArgs) -> list[GroupedArgs]:
    found = [one.mixer for one in args.layers]
    assert all(isinstance(one, GroupedArgs) for one in found)
    return found  # type: ignore[return-value]


def test_the_layer_that_shows_what_texts_before_it_change() -> None:
    """Behind the first layer with full attention, and one with KV of its own; 1 where no layer is left behind it."""
    assert check_layer(read()) == 6
    assert check_layer(read(layer_types=["full_attention"] * 60)) == 1
    assert check_layer(read(num_hidden_layers=6)) == 1 == check_layer(read(num_hidden_layers=7))
    assert check_layer(read(num_hidden_layers=8)) == 6


def test_heads_by_kind_of_layer() -> None:
    args = read()
    windowed, full = mixers(args)[0], mixers(args)[5]
    assert [one.window is None for one in mixers(args)] == [i % 6 == 5 for i in range(60)]
    assert (windowed.num_kv_heads, windowed.head_dim, windowed.window, windowed.values) == (16, 256, 1024, "normed")
    assert (full.num_kv_heads, full.head_dim, full.rotary_dim, full.values) == (4, 512, 512, "keys")
    assert windowed.rope == RopeArgs(theta=1e4)
    assert full.rope == RopeArgs(theta=1e6, kind="proportional", part=0.25)
    assert {(one.factor, one.num_heads, one.qk_norm, one.kv_from) for one in mixers(args)} == {(1.0, 32, "head", -1)}
    assert args.tie_word_embeddings and args.ends.logit_cap == 30.0 and not args.norm.plus_one
    assert args.notes == ()
    stored = [part.stored for param in layout(args) for part in param.parts if "layers.5." in part.stored]
    assert "model.layers.5.self_attn.k_proj.weight" in stored and "model.layers.5.self_attn.v_proj.weight" not in stored


def test_a_wrapped_file_and_sizes_by_layer_mean_the_same() -> None:
    own = {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    saved = {key: value for key, value in TEXT.items() if "global" not in key}
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(60)]
    assert parse_checkpoint_config(saved | {"per_layer_config": own, "layer_types": kinds}) == read()
    around = {"model_type": "gemma4", "text_config": TEXT, "vision_config": {}, "tie_word_embeddings": True}
    assert parse_checkpoint_config(around).layers == read().layers


def test_the_last_layer_is_full() -> None:
    args = read(num_hidden_layers=4, layer_types=["full_attention", *["sliding_attention"] * 3])
    assert [one.window for one in mixers(args)] == [None, 1024, 1024, None]
    assert [one.window is None for one in mixers(read(num_hidden_layers=4))] == [False, False, False, True]
    long = read(num_hidden_layers=4, sliding_window=1 << 18)  # no window is short, and heads differ all the same
    assert [(one.window, one.head_dim) for one in mixers(long)] == [(None, 256)] * 3 + [(None, 512)]


def test_bytes_of_a_token() -> None:
    """In bfloat16 a layer with a window keeps 16 KiB of a token and a full one 8 KiB: its blocks hold twice as many."""
    args = read()
    geometry = rank_geometry(args, alone(args), dtype="bfloat16", device="cuda", block_size=None)
    sizes = {
        group.window: (group.page_bytes // len(group.layers) // group.block_size, group.block_size)
        for group in geometry.groups
    }
    assert sizes == {1024: (16_384, 128), None: (8_192, 256)}
    assert geometry.num_tokens(0) == 0 and len({group.page_bytes for group in geometry.groups}) == 1


def test_layers_that_read_the_kv_of_earlier_ones() -> None:
    args = parse_checkpoint_config(SMALL)
    assert [args.kept_by(layer) for layer in range(30)] == [*range(18), *([16] * 5 + [17]) * 2]
    wide = [one.feed_forward for one in args.layers]
    assert wide == [DenseArgs(width=6144, act="gelu_tanh")] * 18 + [DenseArgs(width=12_288, act="gelu_tanh")] * 12
    assert args.inputs == 256 and args.layers[0].scaled
    geometry = rank_geometry(args, alone(args), dtype="bfloat16", device="cuda", block_size=None)
    assert sorted(layer for group in geometry.groups for layer in group.layers) == list(range(18))
    shapes = {param.name: param.shape for param in layout(args)}
    assert shapes["layers.18.attention.qkv.weight"] == (8 * 256, 2048)
    assert "layers.18.attention.head_norm.k" not in shapes and "layers.17.attention.head_norm.k" in shapes
    assert shapes["inputs.embed.weight"] == (262_144, 30 * 256)


def test_experts_beside_the_mlp() -> None:
    args = read(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704)
    part = args.layers[0].feed_forward
    assert isinstance(part, BesideArgs) and part.dense.width == 21_504
    assert args.moe == part.experts and args.expert_layers == tuple(range(60))
    assert (part.experts.expert_size, part.experts.act, part.experts.stored) == (704, "gelu_tanh", "rows")
    routing = part.experts.routing
    assert (routing.num_experts, routing.top_k, routing.normalize, routing.expert_scale) == (128, 8, True, True)
    assert read(num_experts=128, top_k_experts=8, moe_intermediate_size=704).moe is None


@pytest.mark.parametrize(
    ("changes", "kind", "named"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedModel, "use_bidirectional_attention='all'"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, UnsupportedModel, "per_layer_config"),
        ({"layer_types": ["full_attention"] * 60, "per_layer_config": {"0": 3}}, UnsupportedModel, "per_layer_config"),
        ({"sliding_window": None}, ModelError, "sliding_window=null"),
        ({"num_kv_shared_layers": 55}, ModelError, "num_kv_shared_layers=55"),
        ({"num_kv_shared_layers": 61}, ModelError, "num_kv_shared_layers=61"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, UnsupportedModel, "vocab_size_per_layer"),
        ({"enable_moe_block": True, "num_experts": 8}, ModelError, "top_k_experts is missing"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.5}
                }
            },
            ModelError,
            "must be at most 1",
        ),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_named(changes: dict[str, Any], kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        read(**changes)


def test_projections_of_layers_without_kv_are_not_read() -> None:
    """Published files have keys and values for every layer."""
    args = parse_checkpoint_config(SMALL)
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        assert is_unread(f"model.layers.18.self_attn.{name}", args)
        assert not is_unread(f"model.layers.17.self_attn.{name}", args)
    assert not is_unread("model.layers.18.self_attn.q_proj.weight", args)
