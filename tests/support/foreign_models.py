"""Tiny random checkpoints of decoders that Quire has no file for, made by transformers, with its answers.

python -m tests.support.foreign_models MODEL_TYPE FOLDER     writes a checkpoint
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .tiny_models import MARGIN, Oracle, generate, mixed_prompts

SIZES: Mapping[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GPT: Mapping[str, Any] = {"n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96}
# model_type -> keys of its config.json beside SIZES; None: the key is left out
MODELS: Mapping[str, Mapping[str, Any]] = {
    "starcoder2": {"sliding_window": 9},
    "gpt_neox": {
        "num_key_value_heads": None, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    },
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    "stablelm": {"use_qkv_bias": True},
    "falcon": {"num_key_value_heads": None, "ffn_hidden_size": 128, "multi_query": True},
    "opt": {"num_key_value_heads": None, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "glm": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "arcee": {},
    "vaultgemma": {
        "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
    },
    "helium": {"head_dim": 16},
    "nemotron": {"head_dim": 16},
    "apertus": {},
    "gptj": {**dict.fromkeys(SIZES), **_GPT, "vocab_size": 96, "rotary_dim": 8},
    "gpt_bigcode": {**dict.fromkeys(SIZES), **_GPT, "vocab_size": 96},
    "persimmon": {"num_key_value_heads": None},
    "cohere": {"logit_scale": 2.0},
    "olmo": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
    "granitemoe": {
        "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.0,
    },
    "dots1": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "head_dim": 16, "n_group": 2, "topk_group": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2, "head_dim": 16,
    },
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
}  # fmt: skip


def foreign_config(model_type: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model. changes: keys beside those of `MODELS`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = {**SIZES, **MODELS.get(model_type, {}), **changes}
    return CONFIG_MAPPING[model_type](
        **{key: value for key, value in keys.items() if value is not None or "token" in key}
    )


def random_foreign(model_type: str, seed: int, **changes: Any) -> Any:
    """Return a random model whose matrices are large enough that errors show, in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(foreign_config(model_type, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(4)
            else:
                param.add_(0.2 * torch.randn_like(param))
    return model


def make_foreign(
    model_type: str, make_folder: Callable[[str], Path], prompts: Sequence[list[int]], steps: int = 64, **changes: Any
) -> Oracle:
    """Write a checkpoint in which no greedy choice of `steps` tokens behind the prompts is close."""
    for seed in range(60):
        model = random_foreign(model_type, seed, **changes)
        answers = generate(model, list(prompts), steps)
        if min(min(margins) for _, margins in answers) > MARGIN:
            folder = make_folder(model_type)
            model.save_pretrained(folder)
            oracle = Oracle(folder, model)
            for prompt, (tokens, _) in zip(prompts, answers, strict=True):
                oracle._greedy[tuple(prompt)] = tokens
            return oracle
    raise AssertionError(f"no seed of {model_type} has clear choices")


if __name__ == "__main__":
    make_foreign(sys.argv[1], lambda name: Path(sys.argv[2]), mixed_prompts())
