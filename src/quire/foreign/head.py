"""The operations of a model of transformers around its head: a factor and a cap of logits, read off from numbers."""

from typing import Any

import torch
from torch import Tensor

from quire.foreign.skeleton import Skeleton, refused

WIDTH = 5  # ids of the head that is tried


def fitted_head(raw: dict[str, Any], skeleton: Skeleton) -> tuple[float, float | None]:
    """Return the factor on logits, and their cap. Raises `UnsupportedModel` if logits become something else."""
    run = _Head(skeleton)
    try:
        small, huge = run(torch.full((1, 1), 1e-3)), run(torch.full((1, 1), 1e6))
    except Exception as error:
        raise refused(raw, f"what is around its head cannot be run ({type(error).__name__})") from None
    scale = float(small[0, 0]) / 1e-3
    largest = float(huge[0, 0])
    cap = largest if largest < 0.5e6 * scale else None
    if cap is not None and cap < 1:  # the slope at 0 is the factor, with an error that is small beside the cap
        raise refused(raw, f"its logits are capped at {cap:g}")
    logits = 20 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))
    ours = logits * scale if cap is None else cap * torch.tanh(logits * scale / cap)
    found = run(logits)
    if found.shape != ours.shape or not torch.allclose(found, ours, atol=1e-3, rtol=1e-3):
        raise refused(raw, "its logits are more than products with the head, a factor and a cap")
    return round(scale, 7) if abs(scale - round(scale, 7)) < 1e-6 else scale, cap


class _Output(tuple[Tensor]):
    """A result of a base model: hidden states, and nothing else."""

    def __new__(cls, hidden: Tensor) -> "_Output":
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _Head:
    """A model of transformers from the head's products on: the base model and the head are replaced."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton

    def __call__(self, logits: Tensor) -> Tensor:
        """Return what becomes of logits [T, WIDTH]."""
        model, base = self.skeleton.model, self.skeleton.base
        head = model.get_output_embeddings()
        hidden = torch.randn(1, len(logits), self.skeleton.config.hidden_size)
        seen = list[Tensor]()

        def product(x: Tensor) -> Tensor:
            seen.append(x)
            return logits[None]

        base.forward = lambda *args, **kwargs: _Output(hidden)
        head.forward = product
        try:
            with torch.no_grad():
                out = model(input_ids=torch.zeros(1, len(logits), dtype=torch.int64), use_cache=False)
        finally:
            del base.forward, head.forward
        if not (seen and torch.equal(seen[0], hidden)):
            factor = seen[0] / hidden
            if not torch.allclose(factor, factor.flatten()[0].expand_as(factor)):
                raise ValueError("the head reads something else than the base model's result")
            return out.logits[0] * float(factor.flatten()[0])
        result: Tensor = out.logits[0]
        return result
