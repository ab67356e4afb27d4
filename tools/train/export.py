"""Turn the parts written by train.py into a Hugging Face checkpoint folder.

Usage::

    python export.py --arch dense --parts run --tokenizer data/tokenizer --out quire-tiny
    python export.py --arch moe --parts run --tokenizer data/tokenizer --out quire-tiny-moe

Shards hold at most ``--limit`` bytes.  For the MoE model the copies of embedding and
head that DeepSeek checkpoints keep in the prediction layer are added.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatml import SPECIAL_TOKENS
from modeling import DenseConfig, MoeConfig

EOS, END_OF_TEXT, PAD = (SPECIAL_TOKENS.index(t) for t in ("<|im_end|>", "<|endoftext|>", "<|pad|>"))


def dense_config() -> dict[str, Any]:
    c = DenseConfig()
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate,
        "max_position_embeddings": 4096,
        "max_window_layers": c.layers,
        "model_type": "qwen3",
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": c.eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
    }


def moe_config() -> dict[str, Any]:
    c = MoeConfig()
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "ep_size": 1,
        "first_k_dense_replace": c.dense_layers,
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate,
        "kv_lora_rank": c.kv_lora,
        "max_position_embeddings": 4096,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": c.expert_intermediate,
        "moe_layer_freq": 1,
        "n_group": c.groups,
        "n_routed_experts": c.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": c.heads,
        "num_experts_per_tok": c.top_k,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": PAD,
        "q_lora_rank": c.q_lora,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "rms_norm_eps": c.eps,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "routed_scaling_factor": c.scaling,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": c.top_groups,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": c.v_dim,
        "vocab_size": c.vocab_size,
    }


def write_shards(state: dict[str, Tensor], out: Path, limit: int) -> None:
    """Shards of at most ``limit`` bytes and the index that maps names to them."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if size + tensor.nbytes > limit and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous().clone()
        size += tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(out / file), metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("dense", "moe"), required=True)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10_000_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {}
    for part in sorted(args.parts.glob("part-*.safetensors")):
        state |= load_file(str(part))
    if args.arch == "moe":
        last = f"model.layers.{MoeConfig().layers}."
        state[last + "embed_tokens.weight"] = state["model.embed_tokens.weight"]
        state[last + "shared_head.head.weight"] = state["lm_head.weight"]
    config = dense_config() if args.arch == "dense" else moe_config()
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": True,  # greedy prose loops
        "temperature": 0.7,
        "top_p": 0.9,
        "eos_token_id": [EOS, END_OF_TEXT],
        "pad_token_id": PAD,
    }
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.out / name)
    write_shards(state, args.out, args.limit)
    check(args.arch, state, args.out)


@torch.no_grad()
def check(arch: str, state: dict[str, Tensor], folder: Path) -> None:
    """The saved folder, read by transformers, must give the training code's logits."""
    from transformers import AutoModelForCausalLM

    from modeling import Dense, Moe

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(8, 8192, (2, 96), generator=torch.Generator().manual_seed(0))
    mine: Dense | Moe = Dense(DenseConfig()) if arch == "dense" else Moe(MoeConfig())
    load_hf_state(mine, state)
    gap = (mine.eval().logits(ids) - theirs(ids).logits).abs().max().item()
    print(f"{folder.name}: largest difference of logits to transformers {gap:.2e}")
    assert gap < 1e-4, gap


@torch.no_grad()
def load_hf_state(model: torch.nn.Module, state: dict[str, Tensor]) -> None:
    """Fill a model from tensors under Hugging Face names."""
    views = model.hf_state()  # type: ignore[operator]
    for name, target in views.items():
        target.copy_(state[name].to(target.dtype))


if __name__ == "__main__":
    main()
