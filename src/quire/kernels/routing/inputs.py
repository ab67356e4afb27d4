"""Inputs for tests and measurements of routing: the routers of released models, and small ones with every feature."""

import torch
from torch import Tensor

from quire.args.experts import Routing

QWEN3 = Routing(num_experts=128, top_k=8, scoring="softmax", normalize=True)
DEEPSEEK_V2 = Routing(num_experts=160, top_k=6, scoring="softmax", num_groups=8, top_groups=3, scaling=16.0)
DEEPSEEK_V3 = Routing(
    num_experts=256,
    top_k=8,
    scoring="sigmoid",
    correction=True,
    num_groups=8,
    top_groups=4,
    group_score="top2",
    normalize=True,
    normalize_eps=1e-20,
    scaling=2.5,
)
ROUTINGS = (
    QWEN3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    Routing(num_experts=60, top_k=4, scoring="softmax"),
    Routing(num_experts=1, top_k=1, scoring="sigmoid"),
    Routing(
        num_experts=12, top_k=3, scoring="sigmoid", correction=True, num_groups=3, top_groups=2, group_score="top2"
    ),
    Routing(num_experts=512, top_k=16, scoring="softmax"),
    Routing(num_experts=6, top_k=6, scoring="softmax"),
)


def make(
    routing: Routing, tokens: int, kind: str = "distinct", device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return logits [T, E] float32, and correction [E] float32, or None for a router without a correction.

    kind   "distinct" scores; "ties": many scores are equal; "negative": the correction makes most scores negative
    """
    generator = torch.Generator(device).manual_seed(seed)
    logits = 3 * torch.randn(tokens, routing.num_experts, generator=generator, device=device)
    if kind == "ties":
        logits = logits.round()
    if not routing.correction:
        return logits, None
    correction = torch.randn(routing.num_experts, generator=generator, device=device) - 5 * (kind == "negative")
    return logits, correction.round() if kind == "ties" else correction
