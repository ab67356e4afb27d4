"""Random adapters in PEFT's form for a checkpoint, and the checkpoint with an adapter merged into it, by hand."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.contracts.adapters import LoRARequest

Chosen = Callable[[str], bool]


def everything(name: str) -> bool:
    """Return True for each matrix that a linear layer multiplies."""
    return "embed" not in name and ".experts." not in name


def adaptable(weights: dict[str, Tensor], chosen: Chosen = everything) -> list[str]:
    """Return the stored names of the linear layers that an adapter may change."""
    return [name for name, tensor in weights.items() if name.endswith(".weight") and tensor.dim() == 2 and chosen(name)]


def write_adapter(
    checkpoint: Path,
    folder: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    chosen: Chosen = everything,
    size: float = 0.1,
    head: bool = False,
    **config: Any,
) -> Path:
    """Write a random adapter for a checkpoint's linear layers. head: also for a tied head"""
    weights, random = load_file(checkpoint / "model.safetensors"), torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": "all-linear",
    } | config
    tensors = {}
    shapes = {name.removesuffix(".weight"): tuple(weights[name].shape) for name in adaptable(weights, chosen)}
    if head and "lm_head" not in shapes:
        shapes["lm_head"] = tuple(weights["model.embed_tokens.weight"].shape)
    for name, (outputs, inputs) in shapes.items():
        own = next((value for key, value in options.get("rank_pattern", {}).items() if name.endswith(key)), rank)
        at = f"base_model.model.{name}"
        tensors[f"{at}.lora_A.weight"] = size * torch.randn(own, inputs, generator=random)
        tensors[f"{at}.lora_B.weight"] = size * torch.randn(outputs, own, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return folder


def merge(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """Write the checkpoint with W + scale B A in the place of each W that the adapter changes."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(checkpoint / "model.safetensors")
    config, pairs = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name in pairs:
        if not name.endswith(".lora_A.weight"):
            continue
        a, b = pairs[name], pairs[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha = next(
            (v for k, v in config.get("alpha_pattern", {}).items() if module.endswith(k)), config["lora_alpha"]
        )
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        stored = f"{module}.weight"
        if stored == "lm_head.weight" and stored not in weights:
            weights[stored] = weights["model.embed_tokens.weight"].clone()
            own = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(own | {"tie_word_embeddings": False}))
        weights[stored] = (weights[stored].double() + scale * b.double() @ a.double()).float()
    save_file(weights, folder / "model.safetensors")
    return folder


def named(folder: Path, number: int = 1) -> LoRARequest:
    """Return the request for the adapter in a folder."""
    return LoRARequest(folder.name, number, str(folder))
