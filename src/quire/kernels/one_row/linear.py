"""Linear layers of one row by `product`, as far as it takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.one_row.product import Form, Weight, multiply, takes
from quire.kernels.quantize.triton import GROUP

Norm = tuple[Tensor, float]


def scaled(x: Tensor, packed: Scaled, into: Epilogue, norm: Norm | None = None) -> Tensor | None:
    """Return the product of the row x [1, K] with an 8-bit weight, `into.y`; None: it is not for this kernel.

    norm   weight [K] and eps of an RMS norm of x; None: no norm
    """
    own = Weight(packed.values, packed.scales, None, into.y.shape[1])
    form = _form(8, x, into, norm)._replace(powers=packed.powers)
    if packed.block != GROUP or packed.rule != GROUP or not _fits(form, x, own, into, norm):
        return None
    return multiply(form, x, own, into.y, norm=norm, residual=into.residual)


def words(x: Tensor, weight: Weight, bits: int, group: int, into: Epilogue, norm: Norm | None = None) -> Tensor | None:
    """Return the product of the row x [1, K] with a weight of `weight_only.words`, `into.y`; None: as in `scaled`.

    bits, group   see `words.product`
    """
    form = _form(4, x, into, norm)._replace(zeros=weight.zeros is not None)
    layout = bits == 4 and group == GROUP and weight.scales.dtype == torch.float32
    if not layout or not _fits(form, x, weight, into, norm):
        return None
    return multiply(form, x, weight, into.y, norm=norm, residual=into.residual)


def _form(bits: int, x: Tensor, into: Epilogue, norm: Norm | None) -> Form:
    wide = into.y.dtype == torch.float32
    return Form(bits, x.shape[1], into.gated, norm is not None, wide=wide)


def _fits(form: Form, x: Tensor, weight: Weight, into: Epilogue, norm: Norm | None) -> bool:
    return into.bias is None and takes(form, x, weight, into.act, norm and norm[0], into.residual)
