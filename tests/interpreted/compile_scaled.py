"""Compiles products of few rows with 8-bit weights for Hopper, at real sizes; prints the name of each kernel."""

import re

import torch

from quire.contracts.scheme import Scheme
from quire.kernels import pdl, triton_runtime
from quire.kernels.linear import scaled
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.pack.matrix import empty as empty_matrix

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made

BLOCKS = Scheme(values="e4m3", block=(128, 128), inputs="group")
ROWS = Scheme(values="e4m3", block=(1, 128), inputs="group")
CHANNELS = Scheme(values="e4m3", block=(1, 0), inputs="token")
INTEGERS = Scheme(values="int8", block=(1, 0), inputs="tensor")


def check(made: Made) -> None:
    """Products run on tensor cores in the type of their operands; the copy engine reads all operands.

    Maxima and bounds of numbers do not leave NaN out.
    """
    assert not re.search(r"(min|max)\.(ftz\.)?f32", made.ptx) or made.name == "hopper._some_kernel", made
    if made.name == "hopper._some_kernel":
        kind = "s8.s8" if "i8" in made.signature["weight"] else "e4m3.e4m3"
        products = re.findall(r"wgmma\.mma_async\S+m64n(\d+)k32\.(?:f32|s32)\.(\S+) ", made.ptx)
        assert set(products) == {(str(made.constants["M"]), kind)}, (products, made)
        loop = made.ptx.split("Loop Header", 1)[1]
        assert "cp.async.bulk.tensor" in loop and "fence.proxy.async" not in loop, made


def main() -> None:
    """Products of a layer of Qwen3 8B, and shapes that divide badly; with --full also without dependent launches."""
    AbsentGpu(check)
    setattr(triton_runtime, "missing_hopper", lambda: "")  # noqa: B010

    def launch(
        scheme: Scheme, rows: int, n: int, k: int, *, gated: bool = False, residual: bool = False, bias: bool = False
    ) -> None:
        matrix = empty_matrix(scheme, (n << gated, k), "meta")
        packed = (scaled.pack_gated if gated else scaled.pack)(matrix)
        assert isinstance(packed, Scaled)
        x, y = (torch.empty(rows, width, dtype=torch.bfloat16, device="meta") for width in (k, n))
        added = torch.empty(n << gated, dtype=torch.bfloat16, device="meta") if bias else None
        if residual:
            scaled.run_add(x, packed, added, y)
        else:
            (scaled.run_gated if gated else scaled.run)(x, packed, added)

    for rows, dependent in (64, True), *full_rows(((2, True), (32, False))):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        launch(BLOCKS, rows, 12288, 4096, gated=True)
        launch(BLOCKS, rows, 4096, 12288, residual=True)
        if FULL:
            launch(BLOCKS, rows, 6144, 4096)
            launch(BLOCKS, rows, 4096, 4096, residual=True)
    for scheme in (ROWS, INTEGERS, *full_rows((BLOCKS, CHANNELS))):
        launch(scheme, 40, 576, 384, bias=True)
    for scheme in (CHANNELS, *full_rows((BLOCKS, ROWS, INTEGERS))):
        launch(scheme, 7, 640, 53248, bias=True, gated=True)
    if FULL:
        launch(ROWS, 64, 12288, 4096, gated=True)
        launch(INTEGERS, 64, 4096, 12288, residual=True)
