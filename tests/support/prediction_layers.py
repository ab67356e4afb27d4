"""Tiny models with a prediction layer (MTP) that knows them: random checkpoints in the form of the published ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .tiny_models import Tiny, random_model, write_model

VOCAB, CONTEXT, LAYERS = 8192, 1024, 4
# With prediction layers: grouped-query attention, latent attention, that of GLM-4.7-Flash, and with an indexer.
# `predicting` also writes glm_moe_dsa, with layers that share an indexer.
FAMILIES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32")


@torch.no_grad()
def predicting(folder: Path, family: str, tokenizer: Path, scale: float, seed: int = 0) -> Path:
    """Write a model of four layers whose next token depends, with scale 0, on its last token alone.

    The prediction layer behind them gives a token the embedding that the model's head sees. Attention and experts of
    all five layers are scaled alike. So with scale 0 every draft is the model's own token, and with more some are.
    """
    changes: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS + 1, "max_position_embeddings": CONTEXT}
    if family == "glm_moe_dsa":
        changes["indexer_types"] = ["full", "shared", "full", "shared", "full"]
    model = random_model(Tiny(family=family, changes=tuple(changes.items())), seed)
    model.model.embed_tokens.weight.copy_(torch.randn_like(model.model.embed_tokens.weight))
    model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight) / 4)
    for name, value in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            value.mul_(scale)
    write_model(model, folder, family)
    raw, hidden = json.loads((folder / "config.json").read_text()), model.config.hidden_size
    spelled = "num_mtp_layers" if "num_mtp_layers" in raw else "num_nextn_predict_layers"
    by_layer = ("layer_types", "mlp_layer_types", "indexer_types")
    raw = {key: one[:LAYERS] if key in by_layer else one for key, one in raw.items()}
    raw |= {"num_hidden_layers": LAYERS, spelled: 1}
    if family == "glm_moe_dsa":  # as GLM-5.2 has it
        raw["index_share_for_mtp_iteration"] = True
    (folder / "config.json").write_text(json.dumps(raw))
    own = {
        "enorm": torch.ones(hidden),
        "hnorm": torch.rand(hidden) + 0.5,
        "eh_proj": torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1),
        "shared_head.norm": model.model.norm.weight,
        "shared_head.head": model.lm_head.weight,
        "embed_tokens": model.model.embed_tokens.weight,
    }
    given = load_file(folder / "model.safetensors")
    given |= {f"model.layers.{LAYERS}.{name}.weight": value.detach().clone() for name, value in own.items()}
    save_file(given, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def noisy(folder: Path, to: Path) -> Path:
    """Write a checkpoint with noise in its matrices."""
    random = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            tensors[name] = tensor + 0.08 * tensor.std() * torch.randn(tensor.shape, generator=random)
    to.mkdir()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


@torch.no_grad()
def small(folder: Path, to: Path) -> Path:
    """Write a model without experts that has the embedding and the head of the one in `folder`."""
    changes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    model = random_model(Tiny(family="qwen3", changes=tuple(changes.items())), 0)
    given = load_file(folder / "model.safetensors")
    for name, value in model.named_parameters():
        if name.startswith(("model.embed_tokens", "model.norm", "lm_head")):
            value.copy_(given[name])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value.mul_(0.0)
    write_model(model, to, "qwen3")
    return to
