"""From a `QuantizedMatrix` to the tensors that a checkpoint stores for it, the way of `convert.py` backwards."""

import torch
from torch import Tensor

from quire.kernels.pack.matrix import QuantizedMatrix, unpacked
from quire.kernels.pack.words import join_nibbles
from quire.quantization.kfirst import AWQ
from quire.quantization.microscaled import NV_PACKED
from quire.quantization.rows import PACKED


def stored_tensors(matrix: QuantizedMatrix, form: str, scales: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint stores for a matrix, by role: "values", "scale", "zero", "shape", "factor".

    form     checkpoint format, a name of `FORMATS`. "pack-quantized" needs K % 8 == 0, "awq" needs N % 8 == 0
    scales   dtype of the stored scales, unless they are a byte each (MXFP4, NVFP4)
    """
    scale = matrix.scale if matrix.scheme.scale_bytes == 1 else matrix.scale.to(scales)
    if form == AWQ.name:
        assert matrix.zero is not None
        return {
            "values": _awq_words(unpacked(matrix)),
            "scale": scale.t().contiguous(),
            "zero": _awq_words(matrix.zero),
        }
    if form == PACKED.name:
        assert matrix.zero is None
        return {"values": matrix.values.view(torch.int32), "scale": scale, "shape": torch.tensor(matrix.shape)}
    if form == NV_PACKED.name:
        assert matrix.factor is not None
        return {"values": matrix.values, "scale": scale, "factor": 1 / matrix.factor[0]}
    return {"values": matrix.values, "scale": scale}


def _awq_words(values: Tensor) -> Tensor:
    """Pack 4-bit values [n, k] uint8 into words [k, n / 8]: number 2a + b of a word lies in nibble 4b + a."""
    ordered = values.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)
    return join_nibbles(ordered.t()).contiguous().view(torch.int32)
