"""Inputs for tests and measurements of the expert kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.experts.form import ExpertForm
from quire.kernels.experts.quantized_ref import Pair
from quire.kernels.pack.dummy import random_matrix


@dataclass(frozen=True)
class Case:
    """A test case: T tokens that choose k of E experts, with hidden size H and inner size I.

    spread   "even": tokens choose among all experts; "one": all choose the same; "few": only a few are chosen
    """

    tokens: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    spread: str = "even"


CASES = (
    Case(1, 4, 2, 520, 24),
    Case(1, 8, 8, 16, 264),
    Case(3, 8, 3, 72, 40),
    Case(4, 5, 1, 40, 24, "one"),
    Case(7, 8, 8, 64, 24),
    Case(33, 6, 2, 96, 48, "few"),
    Case(70, 4, 1, 64, 72, "one"),
    Case(130, 16, 6, 32, 72),
    Case(0, 4, 2, 32, 16),
)


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x [T, H], weights [T, k], ids [T, k], gate_up [E, 2I, H], down [E, H, I]."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    t, e, h, i = case.tokens, case.experts, case.hidden, case.inner

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    scores = draw(t, e)
    if case.spread != "even":
        scores[:, : max(case.top_k, 1 if case.spread == "one" else 3)] += 100
    weights, ids = scores.topk(case.top_k)
    gate_up = (draw(e, 2 * i, h) * h**-0.5).to(dtype)
    down = (draw(e, h, i) * i**-0.5).to(dtype)
    return draw(t, h).to(dtype), weights.softmax(1) * 1.7, ids.int(), gate_up, down


def make_quantized(
    case: Case, scheme: Scheme, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, list[Pair]]:
    """Return x [T, H], weights [T, k], ids [T, k], and the random matrices (gate_up, down) of each expert."""
    x, weights, ids, _, _ = make(replace(case, inner=1), dtype, str(device))
    pairs = [
        (
            random_matrix(scheme, 2 * case.inner, case.hidden, device),
            random_matrix(scheme, case.hidden, case.inner, device),
        )
        for _ in range(case.experts)
    ]
    return x, weights, ids, pairs


def make_biases(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return random biases [E, 2I] and [E, H], as large as the products that they are added to."""
    generator = torch.Generator(device).manual_seed(case.tokens + 1)
    widths = 2 * case.inner, case.hidden
    first, second = (torch.randn(case.experts, one, generator=generator, device=device).to(dtype) for one in widths)
    return first, second


def packed_by(
    kernel: ModuleType,
    gate_up: Sequence[Any] | Tensor,
    down: Sequence[Any] | Tensor,
    act: str = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """Pack gate_up [E, 2I, H] and down [E, H, I] with `kernel`, an implementation; return the packed weights.

    Experts are packed one by one, the last first. Matrices may be quantized, and stand in sequences then.

    biases   [E, 2I] and [E, H]; None: unbiased experts
    """
    form = ExpertForm(act, biases is not None)
    packed = kernel.empty(len(gate_up), gate_up[0], down[0], gate_up[0].device, form)
    for place in reversed(range(len(gate_up))):
        matrices = (one[place].clone() if isinstance(one, Tensor) else one[place] for one in (gate_up, down))
        own = biases and tuple(one[place].clone() for one in biases)
        kernel.put(packed, place, *matrices, own)
    return packed
