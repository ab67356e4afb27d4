"""Gated delta rule: all that a recurrent layer does between its two projections.

mix(qkv [T, C], gate [T, H * Dv], decay [T, H] or [T, H * Dk], strength [T, H], weights, state, meta, form)
        -> [T, H * Dv]
    A row of qkv has queries of G key heads, their keys (each G * Dk), and values of H heads (H * Dv), so C = 2 G Dk +
    H Dv. Key head g belongs to heads g * H / G to (g + 1) * H / G - 1. A row i of a sequence:

    u = silu(sum of weights.conv[k] * qkv[i - K + 1 + k] over k)    causal convolution of each of the C channels; the
                                                                    inputs before the step are `state.columns`
    q, k = their parts of u / sqrt(sum of squares + 1e-6), q also / sqrt(Dk);  v = its part of u
    g = -exp(weights.rate) * softplus(decay + weights.shift)        in float32, one for each head, or for each of its Dk
    b = sigmoid(strength), doubled if form.doubled
    S = exp(g) S;  S = S + k (b (v - S^T k))^T;  o = S^T q          S [Dk, Dv] is the head's part of `state.matrix`
    y = o / sqrt(mean of o^2 + eps) * weights.norm * act(gate)      act: silu, or sigmoid

    The result has the dtype of qkv; u, q, k, v, S and o are float32. Rows of qkv, gate, decay and strength are
    contiguous; their strides between rows may differ. `meta` and `state`: see `quire.kernels.states`. A pending row
    has qkv, decay and strength, one behind the other.

    Formulas: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), as Qwen3-Next has them; with a decay of each
    channel: Kimi Linear (arXiv 2510.26692). With form.lowest, g = form.lowest * sigmoid(exp(rate) * (decay + shift)).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FLOOR = 1e-6  # added to the sum of squares of queries and keys


@dataclass(frozen=True)
class DeltaForm:
    """Sizes and variants of a layer with the gated delta rule, on a rank.

    key_heads, heads, key_dim, value_dim   G, H, Dk, Dv
    eps       added to the mean of squares of a head's output
    act       activation of the gate, "silu" or "sigmoid"
    doubled   strengths are in 0 .. 2, so that eigenvalues may be negative
    lowest    see `mix`; 0: decays have no bound
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    eps: float
    act: str = "silu"
    doubled: bool = False
    lowest: float = 0.0

    @property
    def channels(self) -> int:
        """Channels of the convolution, C."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a layer with the gated delta rule, all float32 and contiguous.

    conv    [K, C];  rate  [H], the logarithm of the decay's rate;  shift  [H] or [H * Dk];  norm  [Dv]
    """

    conv: Tensor
    rate: Tensor
    shift: Tensor
    norm: Tensor
