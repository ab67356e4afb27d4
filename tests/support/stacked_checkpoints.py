"""Checkpoints that store all experts of a layer in one tensor, as released ones do: unquantized, and in MXFP4."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .quantized_checkpoints import mxfp4

EXPERT = re.compile(r"(?P<at>.+\.mlp\.experts)\.(?P<number>\d+)\.(?P<half>gate|up|down)_proj\.weight")
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def stack_experts(folder: Path, out: Path) -> Path:
    """Write the checkpoint in `folder` with gate_up_proj [E, 2I, H] and down_proj [E, H, I] in place of experts."""
    stored = _stored(folder)
    kept = {name: tensor for name, tensor in stored.items() if not EXPERT.fullmatch(name)}
    layers = {match["at"] for name in stored if (match := EXPERT.fullmatch(name))}
    for at in sorted(layers):
        count = 1 + max(int(match["number"]) for name in stored if (match := EXPERT.fullmatch(name)))
        gate, up, down = (
            torch.stack([stored[f"{at}.{number}.{half}_proj.weight"] for number in range(count)])
            for half in ("gate", "up", "down")
        )
        kept |= {f"{at}.gate_up_proj": torch.cat([gate, up], 1), f"{at}.down_proj": down}
    return _write(kept, json.loads((folder / "config.json").read_text()), out)


@torch.no_grad()
def round_experts(model: Any) -> dict[str, Tensor]:
    """Round the experts of a gpt-oss model of transformers to MXFP4. Return the blocks and scales of a checkpoint."""
    found = dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        blocks, scales = [], []
        for expert in parameter:  # [inputs, outputs]
            made, means = mxfp4(expert.T.contiguous(), torch.Generator())
            blocks.append(made["weight_packed"].unflatten(1, (-1, 16)))
            scales.append(made["weight_scale"])
            expert.copy_(means.T)
        found |= {f"{name}_blocks": torch.stack(blocks), f"{name}_scales": torch.stack(scales)}
    return found


def write_mxfp4(folder: Path, blocks: dict[str, Tensor], out: Path) -> Path:
    """Write the gpt-oss checkpoint in `folder` with the quantized experts that `round_experts` returned."""
    whole = {name.removesuffix("_blocks").removesuffix("_scales") for name in blocks}
    kept = {name: tensor for name, tensor in _stored(folder).items() if name not in whole}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": MXFP4_CONFIG}
    return _write(kept | blocks, config, out)


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _write(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> Path:
    out.mkdir()
    save_file({name: one.contiguous() for name, one in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out
