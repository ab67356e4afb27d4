"""The model of all rungs of the ladder: quire-tiny (a Qwen3) as plain functions over a dict of tensors, in float32.

Only attention differs from rung to rung: each gives `forward` a function that gets the rotated queries, keys and
values of the new tokens, keeps keys and values somewhere, and returns what every query has read.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from quire.config.bundled import bundled_model

Weights = dict[str, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q [T, H, D], k and v [T, KV, D] -> [T, H, D]
Linear = Callable[[Tensor, str], Tensor]  # x [T, K] and the name of a matrix [N, K] -> [T, N]

PROMPTS = ("The quire is a stack of folded pages.", "import json", "Once there was a scheduler that")
NEW = 12  # tokens of an answer


def load() -> tuple[dict[str, Any], Weights]:
    """Return config.json and the weights, in float32."""
    folder = bundled_model()
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    return config, {name: one.float() for file in files for name, one in load_file(file).items()}


def prompts() -> list[list[int]]:
    """Return the token ids of PROMPTS."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundled_model() / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square, over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate pairs of a head's numbers by an angle that grows with the position. x [T, H, D]"""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def forward(
    config: dict[str, Any],
    weights: Weights,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
    linear: Linear | None = None,
) -> Tensor:
    """Return the logits [T, V] of new tokens. ids and positions [T]: of one request, or of many behind each other."""
    linear = linear or (lambda x, name: F.linear(x, weights[name]))
    eps, size, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        x = norm(hidden, weights[at + "input_layernorm.weight"], eps)
        q, k, v = (linear(x, f"{at}self_attn.{one}_proj.weight").view(len(ids), -1, size) for one in "qkv")
        q = rotate(norm(q, weights[at + "self_attn.q_norm.weight"], eps), positions, theta)
        k = rotate(norm(k, weights[at + "self_attn.k_norm.weight"], eps), positions, theta)
        read = attend(layer, q, k, v).reshape(len(ids), -1)
        hidden = hidden + linear(read, at + "self_attn.o_proj.weight")
        x = norm(hidden, weights[at + "post_attention_layernorm.weight"], eps)
        inner = F.silu(linear(x, at + "mlp.gate_proj.weight")) * linear(x, at + "mlp.up_proj.weight")
        hidden = hidden + linear(inner, at + "mlp.down_proj.weight")
    return F.linear(norm(hidden, weights["model.norm.weight"], eps), weights["model.embed_tokens.weight"])


def softmax_attention(q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Return what queries at positions first, first + 1, ... read from all keys up to their own. keys [S, KV, D]"""
    keys, values = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (keys, values))
    scores = torch.einsum("thd,shd->hts", q, keys) * q.shape[-1] ** -0.5
    seen = torch.arange(len(keys)) <= first + torch.arange(len(q))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


@cache
def reference() -> Any:
    """Return transformers' own model in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)


def truth(ids: list[int], new: int = NEW) -> list[int]:
    """Return the greedy answer of transformers' own model."""
    model = reference()
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(one) for one in out[0, len(ids) :]]


def check(found: list[list[int]]) -> None:
    """Compare answers to PROMPTS with transformers', and say so."""
    for ids, answer in zip(prompts(), found, strict=True):
        assert answer == truth(ids, len(answer)), (answer, truth(ids, len(answer)))
    print(f"{len(found)} answer{'s' * (len(found) > 1)} of {len(found[0])} tokens: those of transformers")
