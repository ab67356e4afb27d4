"""The kernel of products of one row, on a CPU: what it computes, and what it reads before its wait."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.norm import ref as norms
from quire.kernels.one_row import product
from quire.kernels.one_row.product import Form, Tiling, Weight
from quire.kernels.quantize import ref as quantize
from quire.kernels.weight_only.words import repack, repack_scales

from ...support.one_row import COMPILER, emulate

if not COMPILER:
    pytest.skip("needs a compiler", allow_module_level=True)

BEHIND = 16  # numbers behind y that stay as they are


@pytest.mark.parametrize(
    ("form", "tiling", "outputs", "added"),
    [
        (Form(8, 256, wide=True), Tiling(2, 3), 272, True),  # 5 units of a block, 2 of the last one; pieces of 2.5
        (Form(8, 384), Tiling(3, 1), 208, False),
        (Form(8, 384, norm=True, powers=True), Tiling(4, 1), 48, True),  # a unit: the last warp has no step
        (Form(8, 384, True, True), Tiling(2, 2), 128, False),
        (Form(8, 640, True), Tiling(3, 2), 256, True),
        (Form(4, 256, wide=True), Tiling(3, 1), 208, False),
        (Form(4, 384, norm=True), Tiling(2, 2), 112, True),
        (Form(4, 384, True), Tiling(4, 3), 88, True),  # pieces of fewer steps than are ahead
        (Form(4, 512, True, True), Tiling(3, 3), 72, False),
    ],
)
def test_one_matrix(
    form: Form,
    tiling: Tiling,
    outputs: int,
    added: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two orders of threads, the residual in y where types allow it; 4 bits with zero points and without."""
    kernels = emulate(monkeypatch, tmp_path, tiling)
    torch.manual_seed(outputs)
    x, norm = (
        torch.randn(1, form.inputs).bfloat16(),
        (1 + torch.randn(form.inputs) / 4).bfloat16(),
    )
    x[:, 128:256] *= 30
    if form.bits == 8 and not form.norm:  # groups of almost zeros and of zeros
        x[:, :128] *= 1e-13
        x[:, 128:256] = 0
    if form.bits == 4:  # a group of numbers that float16 has not, and in each group some that are too small for it
        x[:, :128] *= 1e9
        x[:, ::3] *= 1e-6
    residual = torch.randn(1, outputs).bfloat16() if added else None
    inputs = _inputs(form, norms.rms_norm(x, norm, 1e-5) if form.norm else x)
    for weight, numbers in _weights(form, outputs):
        form = form._replace(zeros=weight.zeros is not None)
        kernel, wanted = kernels(form), inputs @ numbers.T
        if form.gated:
            wanted = torch.nn.functional.silu(wanted[:, :outputs]) * wanted[:, outputs:]
        if residual is not None:
            wanted += residual.double()
        for early in (False, True):
            y, own = _result(1, outputs, form.wide), residual
            if residual is not None and not form.wide:
                own = y.copy_(residual)
            kernel.early, kernel.released = early, _hide([x] if own is None else [x, own])
            given = (norm, 1e-5) if form.norm else None
            assert product.multiply(form, x, weight, y, norm=given, residual=own) is y
            _compare(y, wanted)


@pytest.mark.parametrize(
    ("form", "tiling", "outputs"),
    [
        (Form(8, 256, True, picks=4), Tiling(2, 2), 128),
        (Form(8, 384, True, picks=3, powers=True), Tiling(4, 1), 128),
        (Form(8, 128, picks=5, down=True), Tiling(2, 3), 272),  # a piece has several experts of several units
        (Form(8, 384, picks=2, down=True, powers=True), Tiling(3, 2), 176),
        (Form(8, 256, picks=1, down=True), Tiling(4, 1), 80),
    ],
)
def test_experts(form: Form, tiling: Tiling, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that is none adds zero, whatever its weight is. The second product adds to y."""
    kernel = emulate(monkeypatch, tmp_path, tiling)(form)
    torch.manual_seed(outputs)
    picks, ids = form.picks, torch.tensor([[2, -1, 0, 1, 2]], dtype=torch.int32)[:, : form.picks]
    x, weights = torch.randn(picks if form.down else 1, form.inputs).bfloat16(), torch.rand(1, picks)
    weights[ids < 0] = torch.nan
    ((weight, numbers),) = _weights(form, outputs, experts=3)
    products = (numbers[ids[0].clamp(min=0)] @ _inputs(form, x)[:, :, None]).squeeze(2)
    residual = torch.randn(1, outputs).bfloat16()
    if form.down:
        wanted = weights.nan_to_num(0).double() @ products + residual.double()
    else:
        wanted = torch.nn.functional.silu(products[:, :outputs]) * products[:, outputs:]
    if form.down:
        x[ids[0] < 0] = torch.inf
    for early in (False, True):
        y = _result(len(wanted), outputs, form.wide)
        own = y.copy_(residual) if form.down else None
        kernel.early, kernel.released = early, _hide([x, ids] if own is None else [x, own])
        product.multiply(form, x, weight, y, residual=own, chosen=(ids, weights))
        _compare(y, wanted)


def _weights(form: Form, outputs: int, experts: int = 0) -> list[tuple[Weight, Tensor]]:
    """Return weights for the kernel, and their numbers in float64. experts: of a weight for each; 0: one matrix."""
    k, groups, rows, many = form.inputs, form.inputs // 128, outputs << form.gated, (experts,) * bool(experts)
    if form.bits == 8:
        values = torch.randn(*many, rows, k).to(torch.float8_e4m3fn)
        scales = torch.rand(*many, -(-rows // 128), groups) + 0.5
        numbers = scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :]
        return [(Weight(values, scales, None, outputs), values.double() * numbers)]
    four = torch.randint(16, (rows, k), dtype=torch.uint8)
    scales, zeros = torch.rand(rows, groups) / 64, torch.randint(16, (rows, groups), dtype=torch.uint8)
    words, packed = repack(four[:, ::2] | four[:, 1::2] << 4, 4, form.gated), repack_scales(scales, form.gated)
    made = []
    for given, middle in ((repack_scales(zeros, form.gated), zeros.double()), (None, torch.full((rows, groups), 8.0))):
        numbers = (four.unflatten(1, (-1, 128)) - middle[:, :, None]) * scales.double()[:, :, None]
        made.append((Weight(words, packed, given, outputs), numbers.flatten(1)))
    return made


def _inputs(form: Form, x: Tensor) -> Tensor:
    """Return rows as the products take them, in float64."""
    if form.bits != 8:
        return x.double()
    values, scales = quantize.fp8_groups(x, form.powers)
    return values.double() * scales.double().repeat_interleave(128, 1)


def _result(rows: int, outputs: int, wide: bool) -> Tensor:
    """Return memory for a result, with numbers behind it; all are NaN."""
    whole = torch.full((rows * outputs + BEHIND,), torch.nan, dtype=torch.float32 if wide else torch.bfloat16)
    return whole[: rows * outputs].view(rows, outputs)


def _hide(tensors: Sequence[Tensor]) -> Callable[[], object]:
    """Clear tensors. Return a function whose first call brings their numbers back."""
    kept = [(one, one.clone()) for one in tensors]
    for one in tensors:
        one.fill_(torch.nan if one.is_floating_point() else 0)

    def bring() -> None:
        while kept:
            one, before = kept.pop()
            one.copy_(before)

    return bring


def _compare(y: Tensor, wanted: Tensor) -> None:
    """Compare a result of `_result`."""
    behind = y.as_strided((BEHIND,), (1,), y.numel())
    assert behind.isnan().all()
    least = wanted.norm() / wanted.numel() ** 0.5
    errors = (y.double() - wanted).abs()
    assert (errors <= (2e-5 if y.dtype == torch.float32 else 4e-3) * (wanted.abs() + least)).all(), errors
