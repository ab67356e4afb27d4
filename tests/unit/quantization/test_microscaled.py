"""MXFP4 as gpt-oss stores it: blocks and scales of a matrix, whole and cut over ranks, become the numbers they mean."""

import pytest
import torch
from torch import Tensor

from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, Part
from quire.kernels.pack.convert import Findings, convert
from quire.kernels.pack.matrix import QuantizedMatrix, dequantize
from quire.quantization.formats import FORMATS, tensor_names
from quire.quantization.microscaled import MXFP4

STORED = "model.layers.0.mlp.experts.down_proj"
ROWS, COLUMNS = 12, 128
SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def param_of(*parts: Part) -> Param:
    shape = sum(part.rows for part in parts), parts[0].local_shape[1]
    return Param("down", shape, parts, format="mxfp4", stored=MXFP4, scheme=MXFP4)


def stored() -> tuple[dict[str, Tensor], Tensor]:
    """Blocks [N, K / 32, 16] and scales [N, K / 32] by the names of gpt-oss, and the numbers that they mean."""
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (ROWS, COLUMNS // 32, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 129, (ROWS, COLUMNS // 32), generator=random, dtype=torch.uint8)
    means = torch.empty(ROWS, COLUMNS)
    for n in range(ROWS):
        for k in range(COLUMNS):
            code = int(blocks[n, k // 32, k % 32 // 2]) >> 4 * (k % 2) & 15
            means[n, k] = (-1) ** (code // 8) * SIZES[code % 8] * 2.0 ** (int(scales[n, k // 32]) - 127)
    return {f"{STORED}_blocks": blocks, f"{STORED}_scales": scales}, means


def loaded(param: Param, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a parameter, as a loader fills them: slices of the stored ones, rows in the parts' order."""
    made = {}
    for raw in FORMATS["mxfp4"].tensors(param):
        assert (raw.dtype, raw.readable) == ("uint8", ("U8",))
        slices = []
        for part in raw.parts:
            assert tensors[part.stored].shape == part.shape
            rows = tensors[part.stored].narrow(part.axis, part.start, part.count)
            if part.order:
                rows = rows.unflatten(0, (-1, len(part.order)))[:, list(part.order)].flatten(0, 1)
            slices.append(rows)
        made[raw.name] = torch.cat(slices).clone()
        assert made[raw.name].shape == raw.shape
    return made


SLICES = {
    "whole": (Part(STORED, (ROWS, COLUMNS), 0, ROWS),),
    "rows": (Part(STORED, (ROWS, COLUMNS), 3, 5),),
    "columns in blocks": (Part(STORED, (ROWS, COLUMNS), 32, 64, axis=1),),
    "interleaved rows": (Part(STORED, (ROWS, COLUMNS), 0, ROWS, order=(0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)),),
    "two parts": (Part(STORED, (ROWS, COLUMNS), 6, 4), Part(STORED, (ROWS, COLUMNS), 0, 2)),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_matrix_of_gpt_oss(name: str) -> None:
    param, (tensors, means) = param_of(*SLICES[name]), stored()
    names = {part.stored for raw in FORMATS["mxfp4"].tensors(param) for part in raw.parts}
    assert names == set(tensors) == set(tensor_names(param)) and not FORMATS["mxfp4"].objection(param)
    found = convert(param, loaded(param, tensors), torch.float32, findings := Findings())
    findings.check()
    assert isinstance(found, QuantizedMatrix) and found.check().shape == param.shape
    expected = [means.narrow(part.axis, part.start, part.count) for part in param.parts]
    expected = [
        rows[list(part.order)] if part.order else rows for rows, part in zip(expected, param.parts, strict=True)
    ]
    assert torch.equal(dequantize(found), torch.cat(expected))


@pytest.mark.parametrize("code", [128, 129, 255])
def test_scales_that_no_kernel_takes(code: int) -> None:
    """NaN, and powers of two above 2: bf16 does not hold the factor by which kernels multiply."""
    param, (tensors, _) = param_of(*SLICES["whole"]), stored()
    tensors[f"{STORED}_scales"][3, 1] = code
    convert(param, loaded(param, tensors), torch.float32, findings := Findings())
    if code == 128:
        findings.check()
        return
    with pytest.raises(WeightsError, match=f"^{STORED}_scales has a scale that is NaN or above 2, which"):
        findings.check()


def test_a_cut_block_is_refused() -> None:
    objection = FORMATS["mxfp4"].objection(param_of(Part(STORED, (ROWS, COLUMNS), 48, 48, axis=1)))
    assert objection == f"{STORED} has groups of 32 columns, which columns 48 to 96 of {COLUMNS} cut"
