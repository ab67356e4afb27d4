"""Checkpoints of Qwen3-Next and Qwen3.5 with an MTP layer under its published names, and the layer's formula.

x_i = fc(norm(embedding of token i) | norm(state of token i - 1))      state: after the model's last norm
y = norm(decoder layer with full attention(x))                         logits of token i + 1: head(y_i)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .tiny_models import FAMILIES as EVERY
from .tiny_models import Tiny, random_model

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
AT = "mtp.layers.0."
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def with_layer(family: str) -> Any:
    """A random model of transformers, whose last layer is to be the MTP layer: it has full attention."""
    kinds = [*EVERY[family].options["layer_types"], "full_attention"]
    return random_model(Tiny(family=family, changes=(("num_hidden_layers", 4), ("layer_types", kinds))), 0)


def own_tensors(model: Any) -> dict[str, Tensor]:
    """Random weights of what an MTP layer has beside its decoder layer, without "mtp."."""
    hidden, random = model.config.hidden_size, torch.Generator().manual_seed(3)
    found = {f"{name}.weight": torch.randn(hidden, generator=random) / 5 for name in NORMS}
    return found | {"fc.weight": torch.randn(hidden, 2 * hidden, generator=random) / hidden**0.5}


def write(
    model: Any, own: dict[str, Tensor], folder: Path, *, stacked: bool = False, around: str = "", **keys: Any
) -> Path:
    """Write the checkpoint of a model without its last layer, which it has under the names of an MTP layer.

    stacked   the MTP layer has a tensor for all experts, the others one for each expert and matrix
    around    model_type of a model around this one, in whose checkpoint it lies; "": there is none
    keys      of config.json
    """
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    last = raw["num_hidden_layers"] - 1
    cut = {"num_hidden_layers": last, "layer_types": raw["layer_types"][:last]}
    raw |= cut | keys
    (folder / "config.json").write_text(json.dumps({"model_type": around, "text_config": raw} if around else raw))
    found = {
        name.replace(f"model.layers.{last}.", AT): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    if stacked:
        experts = [
            {side: found.pop(f"{AT}mlp.experts.{e}.{side}_proj.weight") for side in ("gate", "up", "down")}
            for e in range(model.config.num_experts)
        ]
        both = [torch.cat((one["gate"], one["up"])) for one in experts]
        found[f"{AT}mlp.experts.gate_up_proj"] = torch.stack(both)
        found[f"{AT}mlp.experts.down_proj"] = torch.stack([one["down"] for one in experts])
    if around:
        found = {name.replace("model.", "model.language_model.", 1): one for name, one in found.items()}
    save_file(found | {f"mtp.{name}": one for name, one in own.items()}, folder / "model.safetensors")
    return folder


class Formula:
    """The formula of the MTP layer in float32. model, own: of `with_layer` and `own_tensors`."""

    def __init__(self, model: Any, own: dict[str, Tensor]) -> None:
        self.model, self.own, self.last = model, own, model.config.num_hidden_layers - 1

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + self.own[f"{name}.weight"])

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> Tensor:
        """The state before each token; that before the first is unknown."""
        inner = self.model.model
        found = inner(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[self.last]
        states = inner.norm(found)[0]
        return torch.cat((torch.zeros_like(states[:1]), states[:-1]))

    @torch.inference_mode()
    def greedy(self, tokens: Sequence[int], first: int) -> list[int]:
        """The model's own tokens at the positions from `first` on."""
        likeliest: list[int] = self.model.lm_head(self.states(tokens)[first:]).argmax(-1).tolist()
        return likeliest

    def first(self, tokens: Sequence[int]) -> Tensor:
        """The logits [len(tokens), V] of the first draft behind each prefix of some tokens."""
        states, ends = self.states(tokens), range(1, len(tokens) + 1)
        return torch.cat([self.drafts(tokens[:end], states[:end], 1) for end in ends])

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], states: Tensor, count: int) -> Tensor:
        """The logits [count, V] of the likeliest drafts behind some tokens, with the `states` of these."""
        inner, ids, found = self.model.model, torch.tensor(list(tokens)), []
        for _ in range(count):
            embedded = self.norm(inner.embed_tokens(ids), "pre_fc_norm_embedding")
            x = torch.cat((embedded, self.norm(states, "pre_fc_norm_hidden")), -1) @ self.own["fc.weight"].T
            places = torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            turns = inner.rotary_emb(x[None], places)
            out = inner.layers[self.last](x[None], position_embeddings=turns, attention_mask=mask, position_ids=places)
            state = self.norm((out[0] if isinstance(out, tuple) else out)[0, -1:], "norm")
            found.append(self.model.lm_head(state)[0])
            ids, states = torch.cat((ids, found[-1].argmax()[None])), torch.cat((states, state))
        return torch.stack(found)
