"""Experts and latent attention in config.json: what each family means when it is silent, and contradictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.errors import ModelError, UnsupportedModel

from ...support.changed_args import latent_of

BASE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip
V3: dict[str, Any] = BASE | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
QWEN: dict[str, Any] = BASE | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}


def read(raw: dict[str, Any], **changes: Any) -> ModelArgs:
    return parse_checkpoint_config({key: value for key, value in (raw | changes).items() if value is not ...})


def test_a_family_decides_where_the_file_is_silent() -> None:
    """transformers leaves these keys out of the files it writes; a V3 routed by softmax would be wrong, silently."""
    silent, spelled = read(V3), read(V3, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    assert silent.moe == spelled.moe and silent.moe is not None
    routing = silent.moe.routing
    assert (routing.scoring, routing.correction, routing.group_score, routing.normalize) == (
        "sigmoid",
        True,
        "top2",
        True,
    )
    assert silent.moe.shared_size == 48 and silent.moe.router_float and silent.extra_layers == 1
    old = read(V3, model_type="deepseek_v2", topk_method=...).moe
    assert old is not None and old.routing.scoring == "softmax" and not old.routing.correction
    assert old.routing.num_groups == 1, "greedy knows no groups"
    limited = read(V3, model_type="deepseek_v2", topk_method="group_limited_greedy").moe
    assert limited is not None and (limited.routing.num_groups, limited.routing.group_score) == (4, "max")


def test_both_names_of_the_expert_count() -> None:
    assert read(QWEN) == read(QWEN, num_experts=..., num_local_experts=8)


@pytest.mark.parametrize(
    ("raw", "layers"),
    [
        (V3, {1, 2, 3}),
        (V3 | {"moe_layer_freq": 2}, {2}),
        (V3 | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "first_k_dense_replace": ...}, {1, 3}),
        (V3 | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "first_k_dense_replace": None}, {1, 3}),
        (V3 | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, {1, 2, 3}),
        (QWEN, {0, 1, 2, 3}),
        (QWEN | {"decoder_sparse_step": 2}, {1, 3}),
        (QWEN | {"mlp_only_layers": [1], "decoder_sparse_step": 2}, {3}),
    ],
)
def test_which_layers_have_experts(raw: dict[str, Any], layers: set[int]) -> None:
    assert set(read(raw).expert_layers) == layers


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"n_group": 3}, ("16", "3")),
        ({"topk_group": 5}, ("5", "4")),
        ({"num_experts_per_tok": 9}, ("9", "8")),
        ({"num_key_value_heads": 2}, ("2", "4")),
        ({"qk_rope_head_dim": 7}, ("7",)),
        ({"n_group": 16, "topk_group": 8}, ("16",)),  # one expert to a group, of which the best two are wanted
        ({"num_local_experts": 8}, ("8", "16")),
        ({"q_lora_rank": -5}, ("-5",)),
        ({"n_shared_experts": -1}, ("-1",)),
        ({"first_k_dense_replace": -2}, ("-2",)),
        ({"num_mtp_layers": -3}, ("-3",)),
        ({"mlp_layer_types": ["dense", "sparse"]}, ("4",)),
        ({"mlp_layer_types": ["dense", "sparse", "spares", "sparse"]}, ("4",)),
    ],
)
def test_contradictions_are_named_with_their_numbers(changes: dict[str, Any], numbers: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as error:
        read(V3, **changes)
    assert all(f"={number}" in str(error.value) or f" {number} " in str(error.value) for number in numbers)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("key", ["n_group", "topk_group"])
@pytest.mark.parametrize("value", [0, "", [], {}, False, -1, 1.5, "2", [2]], ids=str)
def test_groups_are_counts_whether_or_not_they_are_used(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"config.json: {key}=.* must be a positive integer"):
        read(V3, model_type=model_type, **{key: value})


def test_no_groups_are_one() -> None:
    v2 = [("deepseek_v2", method) for method in ("greedy", "group_limited_greedy")]
    for model_type, method in (*v2, ("deepseek_v3", ...)):
        moe = read(V3, model_type=model_type, topk_method=method, n_group=None, topk_group=None).moe
        assert moe is not None and (moe.routing.num_groups, moe.routing.top_groups) == (1, 1)
    silent = read(V3, n_group=..., topk_group=...).moe
    assert silent is not None and (silent.routing.num_groups, silent.routing.top_groups) == (8, 4)


@pytest.mark.parametrize("value", ["", 0, [], {}])
def test_a_method_is_a_name_or_nothing(value: Any) -> None:
    assert read(V3, topk_method=None, scoring_func=None) == read(V3)
    with pytest.raises(UnsupportedModel, match="topk_method="):
        read(V3, topk_method=value)


def test_two_ways_to_name_the_layers_with_experts_must_agree() -> None:
    kinds = ["dense", "sparse", "dense", "sparse"]
    with pytest.raises(ModelError, match=r"mlp_layer_types\[2\]='dense' contradicts first_k_dense_replace=1"):
        read(V3, mlp_layer_types=kinds)


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (QWEN, {"num_experts": 2_000_000}, "num_experts=2000000"),
        (V3, {"n_routed_experts": 2_000_000}, "n_routed_experts=2000000"),
        (QWEN, {"num_experts": 1024, "num_hidden_layers": 512}, "num_hidden_layers=512, 512 of them with 1024 experts"),
        (QWEN, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        (V3, {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000"),
    ],
)
def test_more_than_can_be_planned_is_refused_by_name(raw: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"{named}.* (at most|more than) [0-9]+") as error:
        read(raw, **changes)
    assert "\n" not in str(error.value)


def test_a_missing_count_has_the_family_s_own_name() -> None:
    for raw, key in ((QWEN, "num_experts"), (V3, "n_routed_experts")):
        with pytest.raises(ModelError, match=f": {key} is missing"):
            read(raw, **{key: ...})


@pytest.mark.parametrize("changes", [{"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"attention_bias": True}])
def test_what_the_family_does_not_do_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        read(V3, **changes)


def test_a_layer_list_that_is_none_is_refused() -> None:
    with pytest.raises(ModelError, match="mlp_only_layers=1"):
        read(QWEN, mlp_only_layers=1)


def test_uninterleaved_v2_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="rope_interleave"):
        read(V3, model_type="deepseek_v2", rope_interleave=False)


@pytest.mark.parametrize(
    "kind",
    [
        {"rope_type": "linear"},
        {"rope_type": "yarn", "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scores_have_a_temperature_with_every_scaled_rope(kind: dict[str, Any]) -> None:
    """As in transformers: 0.1 x mscale_all_dim x ln factor + 1, squared; 0 means none."""

    def scale(value: float | None) -> float:
        latent = read(V3, rope_parameters=kind | {"factor": 4.0, "rope_theta": 1e4, "mscale_all_dim": value})
        return latent_of(latent).scale

    assert scale(0.9) == pytest.approx(24**-0.5 * (0.09 * 1.3862943611198906 + 1) ** 2)
    assert scale(0) == scale(None) == pytest.approx(24**-0.5)


def test_defaults_of_a_family_that_are_its_own() -> None:
    silent = read(BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2})
    assert (silent.norm.eps, silent.mixers[0].rope.theta) == (1e-5, 1e6)


def test_normalized_v2_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="norm_topk_prob"):
        read(V3, model_type="deepseek_v2", norm_topk_prob=True)


def test_latent_sizes_of_real_models(shared: Path) -> None:
    def latent(name: str) -> Any:
        raw = json.loads((shared / "hf" / name / "config.json").read_text())
        return latent_of(parse_checkpoint_config(raw))

    v3, lite = latent("DeepSeek-V3"), latent("DeepSeek-V2-Lite")
    assert round(v3.break_even) == 171  # DeepSeek-V3's sizes: 512 * 256 / (1088 - 320)
    assert v3.scale == pytest.approx(192**-0.5 * 1.3688879454113937**2)  # 0.1 ln 40 + 1
    assert (v3.q_rank, lite.q_rank, v3.kv_rank + v3.rope_dim) == (1536, 0, 576)
    assert lite.scale == pytest.approx(192**-0.5 * (0.0707 * 3.6888794541139363 + 1) ** 2)


def test_half_a_head_rotates_in_glm() -> None:
    glm = {key: value for key, value in V3.items() if "lora" not in key and "qk" not in key and key != "v_head_dim"}
    args = read(glm, model_type="glm4_moe", head_dim=16, use_qk_norm=True, n_group=1, topk_group=1)
    assert (args.mixers[0].rotary_dim, args.mixers[0].qk_norm) == (8, "head")
    nested = read(
        glm,
        model_type="glm4_moe",
        head_dim=16,
        n_group=1,
        topk_group=1,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25},
    )
    assert (nested.mixers[0].rotary_dim, nested.mixers[0].qk_norm) == (4, "")


def test_quantized_sizes_can_be_read() -> None:
    raw = V3 | {"quantization_config": {"quant_method": "fp8"}}
    assert parse_checkpoint_config(raw).moe == read(V3).moe


def test_kimi_is_deepseek_by_another_name() -> None:
    """Only its model_type tells: the architecture is DeepSeek's, which alone means DeepSeek-V3."""
    kimi = read(V3 | {"n_group": 1, "topk_group": 1}, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    plain = read(V3 | {"n_group": 1, "topk_group": 1}, architectures=["DeepseekV3ForCausalLM"])
    assert (kimi.model_type, plain.model_type) == ("kimi_k2", "deepseek_v3") and kimi.layers == plain.layers


def test_glm_with_latent_attention() -> None:
    types = ["dense", "sparse", "sparse", "dense"]
    args = read(
        {key: one for key, one in V3.items() if key != "first_k_dense_replace"} | {"n_group": 1, "topk_group": 1},
        model_type="glm4_moe_lite",
        mlp_layer_types=types,
    )
    assert args.expert_layers == (1, 2) and latent_of(args).kv_rank == V3["kv_lora_rank"] and args.norm.eps == 1e-5
