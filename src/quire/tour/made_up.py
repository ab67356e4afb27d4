"""A small DeepSeek-V3 with made-up weights, written to a folder: there is no trained one in the package.

Weights are drawn from a seed, scaled so that hidden states keep their size. Its words mean nothing; its shapes, its
routing and its cache are those of the large one in small. It reads the bundled model's tokens.
"""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.assemble.obtain import read_args
from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.plan.layout import layout

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 2,
}
SEED = 2


def make_model(folder: Path, changes: dict[str, Any]) -> None:
    """Write config, tokenizer and weights to a folder. Raises ConfigError for a change of a field that CONFIG lacks.

    changes   values of CONFIG that are replaced
    """
    for name in changes:
        if name not in CONFIG:
            raise ConfigError(f"--set {name} does not exist: give one of {', '.join(CONFIG)}.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=1) + "\n")
    for path in bundled_model().glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    args = read_args(EngineConfig.from_flat(load_format="dummy"), folder)
    random = torch.Generator().manual_seed(SEED)
    tensors = {}
    for part in (part for param in layout(args) for part in param.parts):
        if part.stored in tensors:
            continue
        if "norm" in part.stored:
            tensors[part.stored] = torch.ones(part.shape)
        else:
            scale = prod(part.shape[1:]) ** -0.5 if len(part.shape) > 1 else 0.02  # the second: corrections of experts
            tensors[part.stored] = torch.randn(part.shape, generator=random) * scale
    save_file(tensors, folder / "model.safetensors")
