"""Compiles products of few rows with bfloat16 weights for Hopper, at real sizes; prints the name of each kernel."""

import re

import torch

from quire.kernels import pdl
from quire.kernels.activation import ACTS
from quire.kernels.linear import some_hopper

from ..support.full import FULL
from .compiling import AbsentGpu, Made


def check(made: Made) -> None:
    """Products run on tensor cores, one after the other without a wait; the copy engine reads both operands."""
    assert made.name == "hopper._some_kernel"
    products = re.findall(r"wgmma\.mma_async\S+m64n(\d+)k16\.f32\.(\S+) ", made.ptx)
    assert set(products) == {(str(made.signature["x"]).split("[")[1].split(",")[0], "bf16.bf16")}, (products, made)
    loop = made.ptx.split("Loop Header", 1)[1]
    assert "cp.async.bulk.tensor" in loop and "fence.proxy.async" not in loop, made


def main() -> None:
    """Products of a layer of Qwen3 8B, with and without dependent launches, and shapes that divide badly."""
    AbsentGpu(check)

    def launch(
        rows: int, n: int, k: int, *, gated: bool = False, residual: bool = False, bias: bool = False, act: str = "silu"
    ) -> None:
        x, y, weight, added = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((rows, k), (rows, n), (n << gated, k), (n << gated,))
        )
        some_hopper.product(x, weight, added if bias else None, y, residual=y if residual else None, act=act * gated)

    for rows, dependent in (4, True), (64, False):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        if dependent or FULL:
            launch(rows, 6144, 4096)
        if not dependent or FULL:
            launch(rows, 4096, 12288, residual=True)
        if FULL:
            launch(rows, 12288, 4096, gated=True)
    if FULL:
        launch(16, 5000, 1000, bias=True)
    for act in ACTS:
        launch(50, 3000, 520, bias=True, gated=True, act=act)
