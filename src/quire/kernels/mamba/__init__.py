"""Mamba 2: all that a recurrent layer does between its two projections.

mix(inner [T, C], gate [T, H * P], step [T, H], weights, state, meta, form) -> [T, H * P]
    A row of inner has values of H heads (H * P), then N inputs and N outputs of each of G groups, so C = H P + 2 G N.
    Group g belongs to heads g * H / G to (g + 1) * H / G - 1. A row i of a sequence:

    u = silu(bias + sum of weights.conv[k] * inner[i - K + 1 + k] over k)   causal convolution of each of the C
                                                          channels; the inputs before the step are `state.columns`
    x, b, c = their parts of u
    d = softplus(step + weights.shift), at least form.lowest and at most form.highest      in float32, one for each head
    S = exp(-exp(weights.rate) d) S + b (d x)^T;  o = S^T c + weights.skip x     S [N, P] is the head's part of
                                                                                 `state.matrix`
    y = o * silu(gate)                                              norm "": the result
    y = y / sqrt(mean of y^2 + eps) * weights.norm                  norm "gated"; the means are over the numbers of the
                                                                    heads of a group
    y = o / sqrt(mean of o^2 + eps) * weights.norm * silu(gate)     norm "first"

    The result has the dtype of inner; u, d, x, S and o are float32. Rows of inner, gate and step are contiguous; their
    strides between rows may differ. `meta` and `state`: see `quire.kernels.states`. A pending row has inner and step,
    one behind the other.

    Formulas: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), as Nemotron-H, Granite 4 and Falcon-H1 have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MambaForm:
    """Sizes and variants of a layer with Mamba 2, on a rank.

    heads, groups, head_dim, state_dim   H, G, P, N
    norm              "", "gated" or "first"; see `mix`
    eps               added to the mean of squares
    lowest, highest   bounds of d
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    norm: str = "gated"
    eps: float = 1e-5
    lowest: float = 0.0
    highest: float = float("inf")

    @property
    def width(self) -> int:
        """Numbers of all heads, H P."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, C."""
        return self.width + 2 * self.groups * self.state_dim


@dataclass(frozen=True)
class MambaWeights:
    """Weights of a layer with Mamba 2, all float32 and contiguous.

    conv  [K, C];  rate  [H], the logarithm of the decay's rate;  shift, skip  [H];  bias  [C], or None
    norm  [H * P]; None: the form has no norm
    """

    conv: Tensor
    rate: Tensor
    shift: Tensor
    skip: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
