"""`QuantizedRows`: activations in 8 bits with their scales, as they travel between ranks and as kernels take them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import GROUP


@dataclass(frozen=True)
class QuantizedRows:
    """Rows [T, H] of activations in 8 bits; x = values * scale.

    values   [T, H] contiguous, float8_e4m3fn or int8
    scales   [T, G] float32, with any strides: a scale for each 128 columns; G = 1: a scale for each row
    dtype    dtype of the activations, and of the results of a kernel that takes the rows
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape (T, H) of the activations."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of values and scales."""
        return self.values.device

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice | Tensor) -> "QuantizedRows":
        return QuantizedRows(self.values[rows], self.scales[rows], self.dtype)

    def float(self) -> Tensor:
        """Return x in float32, [T, H]."""
        columns, scales = self.shape[1], self.scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(GROUP, 1)[:, :columns]
        return self.values.float() * scales
