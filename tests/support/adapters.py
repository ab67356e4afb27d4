"""Random adapters in PEFT's form for a checkpoint, and the checkpoint with an adapter merged into it, by hand."""

import json
import math
import re
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
    stacked: bool = False,
    **config: Any,
) -> Path:
    """Write a random adapter for a checkpoint's linear layers.

    head      also for a tied head
    stacked   also for the parameters that have the matrices of all experts, as PEFT's `target_parameters`
    """
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
    for module, sizes in stacks(checkpoint, weights).items() if stacked else ():
        for at, (parameter, (num, outputs, inputs)) in zip((".base_layer", ""), sizes.items(), strict=True):
            own = options.get("rank_pattern", {}).get(parameter, rank)
            name = f"base_model.model.{module}{at}"
            tensors[f"{name}.lora_A.weight"] = size * torch.randn(num * own, inputs, generator=random)
            tensors[f"{name}.lora_B.weight"] = size * torch.randn(outputs, own * num, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return folder


def stacks(checkpoint: Path, weights: dict[str, Tensor]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return the modules with the matrices of all experts: name -> parameter -> experts, outputs, inputs of each."""
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    config = json.loads((checkpoint / "config.json").read_text())
    for name, tensor in weights.items():
        stored = re.fullmatch(r".*experts\.(?:0\.(w1|w2|gate_proj|down_proj)\.weight|(\w+_proj))", name)
        if stored is None or "shared" in name:
            continue
        module = name[: name.index("experts") + len("experts")]
        if stored[2]:
            num, rows, columns = tensor.shape
            transposed = (rows == config["hidden_size"]) == (stored[2] == "gate_up_proj")
            found.setdefault(module, {})[stored[2]] = (num, columns, rows) if transposed else (num, rows, columns)
            continue
        num = sum(name.replace("experts.0.", f"experts.{one}.") in weights for one in range(64))
        double = 2 if stored[1] in ("w1", "gate_proj") else 1
        parameter = "gate_up_proj" if double == 2 else "down_proj"
        found.setdefault(module, {})[parameter] = (num, double * len(tensor), tensor.shape[1])
    return {module: dict(sorted(own.items(), reverse=True)) for module, own in found.items()}


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
        if module.endswith(("experts", "experts.base_layer")):
            _merge_stack(checkpoint, weights, config, module.removesuffix(".base_layer"), a, b)
            continue
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


def _merge_stack(
    checkpoint: Path, weights: dict[str, Tensor], config: dict[str, Any], module: str, a: Tensor, b: Tensor
) -> None:
    """Add scale * B A of each expert, as `ParamWrapper.get_delta_weight` of PEFT 0.21 computes them."""
    sizes = stacks(checkpoint, weights)[module]
    parameter, num = next((key, n) for key, (n, *own) in sizes.items() if own == [len(b), a.shape[1]])
    rank = config.get("rank_pattern", {}).get(parameter, config["r"])
    alpha = config.get("alpha_pattern", {}).get(parameter, config["lora_alpha"])
    factors = a.double().reshape(num, -1, a.shape[1]), b.double().reshape(len(b), -1, num)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    delta = scale * torch.einsum("o r e, e r i -> e o i", factors[1], factors[0])
    if (stored := f"{module}.{parameter}") in weights:
        own = delta if weights[stored].shape == delta.shape else delta.mT
        weights[stored] = (weights[stored].double() + own).float()
        return
    names = {"gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")), "down_proj": (("w2",), ("down_proj",))}
    for expert in range(num):
        sides = next(one for one in names[parameter] if f"{module}.{expert}.{one[0]}.weight" in weights)
        for side, part in zip(sides, delta[expert].chunk(len(sides)), strict=True):
            name = f"{module}.{expert}.{side}.weight"
            weights[name] = (weights[name].double() + part).float()


def named(folder: Path, number: int = 1) -> LoRARequest:
    """Return the request for the adapter in a folder."""
    return LoRARequest(folder.name, number, str(folder))
