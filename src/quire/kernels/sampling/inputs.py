"""Hard logits for samplers, on which every implementation is tested and measured."""

from collections.abc import Iterator

import torch
from torch import Tensor


def model_like(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Return [rows, vocab] float32, normal with the standard deviation of a trained model's logits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, vocab), generator=generator) * spread


def edge_rows(vocab: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield hard rows of logits for tests: (name, row [vocab] float32). Every row has a finite maximum."""
    row = model_like(1, vocab, seed)[0]
    yield "model_like", row
    yield "flat", torch.zeros(vocab)
    yield "bfloat16_ties", row.to(torch.bfloat16).to(torch.float32)
    yield "coarse_ties", row.round()
    yield "peaked", row * 30
    yield "nearly_flat", row * 0.01
    yield "far_from_zero", row + 1e4
    masked = torch.full_like(row, -torch.inf)
    masked[vocab // 2 :: 7] = row[vocab // 2 :: 7]
    yield "mostly_masked", masked
    single = torch.full_like(row, -torch.inf)
    single[-1] = -3.0
    yield "one_left", single
