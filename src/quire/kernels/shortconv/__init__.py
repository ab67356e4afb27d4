"""Short convolution between two gates: all that a recurrent layer of LFM2 does between its two projections.

mix(rows [T, 3 * C], weights, state, meta) -> [T, C]
    A row has the numbers b, c and x of C channels each. A row i of a sequence:

    v = b * x                                                    rounded to the dtype of rows
    y = c * (bias + sum of weights.conv[k] * v[i - K + 1 + k] over k)

    The values v before the step are `state.columns`; the layer keeps no matrix. The sum is float32, the result has the
    dtype of rows. Rows are contiguous; their stride may differ. `meta` and `state`: see `quire.kernels.states`. A
    pending row has the values v.

    Formula: LFM2 (Liquid AI), as transformers computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ShortConvWeights:
    """Weights of a short convolution, float32 and contiguous.

    conv   [K, C];  bias  [C], or None
    """

    conv: Tensor
    bias: Tensor | None = None
