"""Families with recurrent layers: which layers are what, their sizes, and what is refused by name."""

from typing import Any

import pytest
from msgspec import structs

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.args.delta import DeltaArgs
from quire.args.experts import MoEArgs
from quire.args.latent import LatentArgs
from quire.args.layers import NONE, DenseArgs, GroupedArgs
from quire.args.mamba import MambaArgs
from quire.args.shortconv import ShortConvArgs
from quire.contracts.errors import ModelError, UnsupportedModel

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "dtype": "bfloat16",
}  # fmt: skip
NANO: dict[str, Any] = {  # as published, with fewer layers
    "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 52, "hidden_size": 2688, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "num_attention_heads": 32, "head_dim": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2",
    "rope_theta": 10_000, "mamba_ssm_cache_dtype": "float32", "layer_norm_epsilon": 1e-5, "use_conv_bias": True,
}  # fmt: skip


KIMI: dict[str, Any] = {  # as published, with fewer layers
    "num_hidden_layers": 5, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 32, "head_dim": 72,
    "num_key_value_heads": 32, "model_max_length": 1048576, "max_position_embeddings": ..., "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "rope_theta": 10_000.0, "rope_scaling": None, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "moe_intermediate_size": 1024, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
    "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 5], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip


def read(family: str, **changes: Any) -> ModelArgs:
    raw = {"model_type": family} | SIZES | changes
    return parse_checkpoint_config({key: value for key, value in raw.items() if value is not ...})


def kinds(args: ModelArgs) -> list[tuple[str, str]]:
    return [(type(one.mixer).__name__[:-4], type(one.feed_forward).__name__[:-4]) for one in args.layers]


def test_lfm2() -> None:
    args = read("lfm2", full_attn_idxs=[2], block_auto_adjust_ff_dim=True, block_multiple_of=16)
    assert [one[0] for one in kinds(args)] == ["ShortConv", "ShortConv", "Grouped", "ShortConv"]
    assert args.layers[0].mixer == ShortConvArgs(width=64, taps=3) and args.tie_word_embeddings
    assert args.layers[0].feed_forward == DenseArgs(width=64)  # 2/3 of 80, rounded up to a multiple of 16
    named = ["conv", "full_attention", "conv", "conv"]
    args = read("lfm2", layer_types=named, tie_embedding=False, block_ff_dim=96, block_auto_adjust_ff_dim=False)
    assert isinstance(args.layers[1].mixer, GroupedArgs) and not args.tie_word_embeddings
    assert args.layers[0].feed_forward == DenseArgs(width=96)


def test_nemotron_layers_are_one_thing_alone() -> None:
    args = read("nemotron_h", **NANO)
    assert kinds(args) == [
        ("Mamba", "None"),
        ("None", "MoE"),
        ("Mamba", "None"),
        ("Grouped", "None"),
        ("None", "MoE"),
    ]
    assert args.layers[0].mixer == MambaArgs(heads=64, groups=8, head_dim=64, state_dim=128)
    attention, experts = args.layers[3].mixer, args.layers[1].feed_forward
    assert isinstance(attention, GroupedArgs) and attention.rope.kind == "none" and attention.head_dim == 128
    assert isinstance(experts, MoEArgs) and (experts.act, experts.shared_size) == ("relu2", 3712)
    assert NONE not in args.mixers and args.expert_layers == (1, 4) and args.attending == (attention,)
    saved = NANO | {"layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"], "hybrid_override_pattern": ...}
    assert read("nemotron_h", **saved) == args
    assert kinds(read("nemotron_h", **NANO | {"hybrid_override_pattern": "M-*"}))[1] == ("None", "Dense")


def test_granite_rotates_heads_by_name_alone() -> None:
    sizes = {"shared_intermediate_size": 80, "num_local_experts": 0, "mamba_n_heads": 8, "mamba_d_state": 16}
    layers = {"layer_types": ["mamba", "mamba", "attention", "mamba"]}
    for word, kind in (("nope", "none"), ("rope", "default"), (None, "none")):
        args = read("granitemoehybrid", **sizes, **layers, position_embedding_type=word)
        assert args.attending[0].rope.kind == kind and not args.moe
    assert args.layers[0].mixer == MambaArgs(heads=8, groups=1, head_dim=16, state_dim=16)
    assert read("granitemoehybrid", **sizes | {"num_local_experts": 4, "num_experts_per_tok": 2}, **layers).moe


def test_falcon_has_both_mixers_in_a_layer() -> None:
    factors = {"attention_in_multiplier": 0.5, "attention_out_multiplier": 0.75, "key_multiplier": 0.25}
    factors |= {"ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.3, "lm_head_multiplier": 0.1}
    several = {"mlp_multipliers": [0.9, 0.6], "ssm_multipliers": [1, 2, 3, 4, 5]}
    args = read("falcon_h1", mamba_d_ssm=128, mamba_n_heads=8, mamba_d_state=32, **factors, **several)
    (one,) = set(args.layers)
    assert isinstance(one.mixer, GroupedArgs) and one.mixer.factor == 16**-0.5 * 0.25 * 0.25
    assert one.beside == MambaArgs(
        heads=8, groups=1, head_dim=16, state_dim=32, norm="", scales=(2.0, 4.0, 6.0, 8.0, 10.0)
    )
    assert one.factors == (0.375, 0.3, 0.6) and args.ends.logit_scale == 0.1 and args.mixers == one.mixers
    assert [one.part(place).residual for place in range(3)] == [0.375, 0.3, 0.6] and not one.part(0).before
    normed = read("falcon_h1", mamba_d_ssm=None, mamba_rms_norm=True, mamba_norm_before_gate=False)
    assert normed.layers[0].beside == MambaArgs(heads=128, groups=1, head_dim=1, state_dim=256, norm="gated")


def test_olmo_hybrid_has_other_norms_in_layers_that_attend() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": None}
    args = read("olmo_hybrid", **sizes, rope_theta=None)
    assert [one[0] for one in kinds(args)] == ["Delta", "Delta", "Delta", "Grouped"]
    assert [one.norms for one in args.layers] == ["before", "before", "before", "after"]
    assert args.layers[0].mixer == DeltaArgs(key_heads=4, heads=4, key_dim=12, value_dim=24, eps=1e-5, doubled=True)
    (attention,) = args.attending
    assert isinstance(attention, GroupedArgs) and (attention.qk_norm, attention.num_kv_heads) == ("whole", 4)
    assert attention.rope.kind == "none" and not args.notes
    plain = read("olmo_hybrid", **sizes, linear_allow_neg_eigval=False, linear_key_head_dim=16, num_hidden_layers=2)
    assert plain.layers[0].mixer == DeltaArgs(key_heads=4, heads=4, key_dim=16, value_dim=32, eps=1e-5)
    assert [one[0] for one in kinds(plain)] == ["Delta", "Grouped"]


@pytest.mark.parametrize(
    ("settings", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": None}, None),
        ({"rope_theta": 500.0}, 500.0),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_theta": None}, 500.0),
        ({"rope_parameters": None, "rope_theta": None}, None),
    ],
    ids=str,
)
def test_olmo_hybrid_rotates_heads_unless_theta_is_null(settings: dict[str, Any], theta: float | None) -> None:
    (attention,) = read("olmo_hybrid", **settings).attending
    assert attention.rope.kind == ("none" if theta is None else "default")
    assert theta is None or attention.rope.theta == theta


def test_kimi_linear_as_published() -> None:
    args = read("kimi_linear", **KIMI)
    assert kinds(args) == [("Delta", "Dense"), ("Delta", "MoE"), ("Delta", "MoE"), ("Latent", "MoE"), ("Latent", "MoE")]
    delta = DeltaArgs(key_heads=32, heads=32, key_dim=128, value_dim=128, act="sigmoid", low_rank=128)
    assert args.layers[0].mixer == delta and delta.decays == 128
    (attention,), moe = args.attending, args.moe
    assert isinstance(attention, LatentArgs) and attention.rope.kind == "none" and not attention.interleaved
    assert attention.scale == 192**-0.5 and not attention.q_rank and args.max_position_embeddings == 1 << 20
    assert moe is not None and (moe.shared_size, moe.routing.scaling, moe.routing.top_k) == (1024, 2.446, 8)
    assert moe.routing.normalize and moe.routing.correction and moe.routing.scoring == "sigmoid"
    assert not args.notes and not args.tie_word_embeddings
    named = KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | {"kda_layers": None, "full_attn_layers": None}}
    assert [one[0] for one in kinds(read("kimi_linear", **named))] == ["Delta"] * 4 + ["Latent"]
    bounded = KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | {"gate_lower_bound": -5}}
    assert read("kimi_linear", **bounded).layers[0].mixer == structs.replace(delta, lowest=-5.0)


@pytest.mark.parametrize(
    ("limit", "steps"),
    [(None, (0.0, float("inf"))), ([0.1, {"__float__": "Infinity"}], (0.1, float("inf"))), ([0, 2], (0.0, 2.0))],
    ids=str,
)
def test_bounds_of_steps(limit: Any, steps: tuple[float, float]) -> None:
    mixer = read("nemotron_h", **NANO, time_step_limit=limit).layers[0].mixer
    assert isinstance(mixer, MambaArgs) and mixer.steps == steps


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4}, "recurrent layers alone"),
        ("lfm2", {"layer_types": ["conv", "mlp", "conv", "conv"]}, "layer_types holds 'mlp'"),
        ("lfm2", {"full_attn_idxs": [0], "conv_L_cache": 1}, "conv_L_cache=1"),
        ("lfm2", {"full_attn_idxs": "0"}, "full_attn_idxs='0' must be a list of layers"),
        ("lfm2", {"full_attn_idxs": [0], "conv_dim": 32}, "conv_dim=32"),
        ("nemotron_h", NANO | {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='MX' must be"),
        ("nemotron_h", NANO | {"hybrid_override_pattern": "MEE"}, "recurrent layers alone"),
        ("nemotron_h", NANO | {"moe_latent_size": 64}, "moe_latent_size=64"),
        ("nemotron_h", NANO | {"mlp_bias": True}, "mlp_bias=true"),
        ("nemotron_h", NANO | {"mlp_hidden_act": "silu"}, "hidden_act='silu'"),
        ("nemotron_h", NANO | {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ("nemotron_h", NANO | {"n_groups": 7}, "not a multiple of 7 groups"),
        ("nemotron_h", NANO | {"time_step_limit": [2, 1]}, "time_step_limit"),
        ("nemotron_h", NANO | {"conv_kernel": 1}, "convolution over one token"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 4, "position_embedding_type": "alibi"}, "must be"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 7}, "mamba_n_heads=7"),
        ("falcon_h1", {"attention_in_multiplier": 2.0, "attention_bias": True}, "attention_in_multiplier"),
        ("falcon_h1", {"ssm_in_multiplier": 2.0, "mamba_proj_bias": True}, "ssm_in_multiplier"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers=.* must be a list of 2"),
        ("falcon_h1", {"layers_block_type": ["mamba"] * 4}, 'other than "hybrid"'),
        ("olmo_hybrid", {"linear_num_value_heads": 6, "linear_num_key_heads": 4}, "not a multiple of linear_num_key"),
        ("olmo_hybrid", {"linear_key_head_dim": 512}, "linear_key_head_dim=512 must be .* at most 256"),
        ("olmo_hybrid", {"linear_key_head_dim": 200}, "heads of 200 and 400 numbers"),
        ("olmo_hybrid", {"linear_num_key_heads": 64, "linear_value_head_dim": 8}, "heads of 0 and 8 numbers"),
        (
            "olmo_hybrid",
            {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act='gelu_pytorch_tanh' is not implemented behind",
        ),
        ("olmo_hybrid", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1"),
        ("kimi_linear", KIMI | {"mla_use_nope": False}, "mla_use_nope=false"),
        ("kimi_linear", KIMI | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ("kimi_linear", KIMI | {"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "each of the layers 1 to 5 once"),
        ("kimi_linear", KIMI | {"linear_attn_config": {"kda_layers": "all"}}, "kda_layers='all' must be a list"),
        ("kimi_linear", KIMI | {"linear_lower_bound": 5.0}, "linear_lower_bound=5.0 must be a number below zero"),
        ("kimi_linear", KIMI | {"linear_attn_config": [1]}, "linear_attn_config=.* must be an object"),
        ("jamba", {}, "'jamba' is not implemented yet: it needs recurrent layers of the first Mamba"),
        ("bamba", {}, "'bamba' is not implemented yet"),
        ("minimax", {}, "'minimax' is not implemented yet: it needs recurrent layers .lightning attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((UnsupportedModel, ModelError), match=words):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [("nemotron_h", NANO, "mamba_ssm_cache_dtype"), ("qwen3_5_text", {}, "mamba_ssm_dtype")],
)
def test_a_type_of_states_in_the_file_is_told_and_not_followed(family: str, changes: dict[str, Any], key: str) -> None:
    for value in ("float32", None):
        assert not [note for note in read(family, **changes | {key: value}).notes if key in note]
    (note,) = [note for note in read(family, **changes | {key: "bfloat16"}).notes if key in note]
    assert note.startswith(f"{key}='bfloat16' is not followed") and "--mamba-ssm-cache-dtype" in note
