"""The config.json of transformers' defaults, whole and with sizes alone."""

from typing import Any

# Keys that every published config.json has; in STATED further ones of a family, and values that transformers lacks.
SIZES = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    max_position_embeddings moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts
    n_routed_experts num_experts_per_tok q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim
    v_head_dim model_max_length num_experts_per_token""".split()
GROWING = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16_384}
STATED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granitemoehybrid": {
        "layer_types": ["attention"] * 32,
        "num_local_experts": 0,
        "shared_intermediate_size": 1024,
        "attention_multiplier": 0.02,
    },
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0}},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "ministral3": {"rope_parameters": GROWING | {"rope_theta": 1e6}},
}


def default_configs(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json of transformers' defaults, and its keys that every published one has: the sizes."""
    import transformers

    raw = transformers.AutoConfig.for_model(family, **STATED.get(family, {})).to_dict()
    return raw, {key: raw[key] for key in (*SIZES, *STATED.get(family, {})) if key in raw}
