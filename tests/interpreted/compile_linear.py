"""Compiles products with integer weights in words for sm_90, at the sizes of real models; prints each kernel's name."""

import re

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels import pdl
from quire.kernels.linear import weight_only
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.pack.matrix import empty as empty_matrix
from quire.kernels.weight_only import words

from ..support.full import FULL, full_rows
from .compiling import AbsentGpu, Made

NVFP4 = Scheme(values="e2m1", block=(1, 16), factor=True)


def check(made: Made) -> None:
    """Products run on tensor cores; weights come 16 bytes at a time, and each step reads scales of its own."""
    given = made.constants
    if made.name == "hopper._few_kernel":
        assert "mma.sync" in made.ptx and re.search(r"ld\.global\.L1::evict_first\S*\.v4", made.ptx), made
    if made.name == "hopper._some_kernel":
        loop = made.file("ttgir").read_text().split("scf.for", 1)[1].split("scf.yield", 1)[0]
        powers = made.signature["scales"] == "*i32"
        scales = len(re.findall(rf"tt\.load .*tensor<[0-9x]+x!tt\.ptr<{'i32' if powers else 'f32'}>", loop))
        deep = next(deep for deep in (128, 64, 32) if given["GROUP"] % deep == 0)
        assert "wgmma" in made.ptx and scales == (2 if powers else 128 // deep * (1 + given["FIRST"])), (scales, made)


def main() -> None:
    """Every kernel, in the forms with most branches; with --full the products of Qwen3 8B and 0.6B, and of an MLP of
    Llama 3 70B in eight parts.

    The kernels for Hopper take bfloat16 alone: float16 goes to those of all GPUs.
    """
    AbsentGpu(check)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(
        rows: int,
        n: int,
        k: int,
        group: int = 128,
        bits: int = 4,
        gated: bool = False,
        zeros: bool = True,
        residual: bool = False,
        act: str = "silu",
        powers: bool = False,
    ) -> None:
        units, steps = -(-(n << gated) // 64) * 4, -(-k // 128)
        packed = empty(units, steps * 128 * bits // 256, 32, 4, dtype=torch.int32)
        scales = empty(units, k // group, 16, dtype=torch.float32)
        if powers:
            scales = empty(units, steps, 16, dtype=torch.int32)
        y, none = empty(rows, n), empty(units, k // group, 16, dtype=torch.uint8) if zeros else None
        if rows > words.MOST_ROWS:
            shape = (n << gated, k)
            words.unpack(packed, scales, none, shape, torch.bfloat16, bits=bits, group=group, gated=gated)
        else:
            words.product(
                empty(rows, k),
                packed,
                scales,
                none,
                Epilogue(y, act=act * gated, residual=y if residual else None),
                bits=bits,
                group=group,
                counters=empty(9999, dtype=torch.int32),
            )

    setattr(pdl, "in_use", lambda: True)  # noqa: B010
    launch(1, 12288, 4096, gated=True)
    launch(8, 1000, 1024, 32, zeros=False)
    launch(16, 4096, 12288, residual=True)
    launch(128, 3072, 1024, 64, gated=True)
    launch(8, 3072, 1024, 64, gated=True, act="swiglu_oai")
    launch(128, 8192, 3584, 32, bits=8)
    launch(300, 8192, 3584, 32, bits=8)
    for rows in (8, 64, 128, 300):
        launch(rows, 5760, 2880, 32, gated=rows == 8, zeros=False, powers=True)
    for rows, scheme in (
        (64, Scheme(values="e2m1", block=(1, 32))),
        (300, Scheme(values="e2m1", block=(1, 32))),
        (64, Scheme(values="w4", block=(1, 128), zeros=True)),
        (300, Scheme(values="w8", block=(1, 0), zeros=True)),
    ):
        packed = weight_only.pack(empty_matrix(scheme, (6144, 4096), "meta"))
        weight_only.run(empty(rows, 4096, dtype=torch.float16), packed, None)
    for n, k, rows in ((24576, 4096, (1, 64)), (4096, 12288, (1, 16, 300)), *full_rows([(4096, 4096, (128, 256))])):
        gated = n == 24576
        packed = (weight_only.pack_gated if gated else weight_only.pack)(empty_matrix(NVFP4, (n, k), "meta"))
        for count in rows:
            (weight_only.run_gated if gated else weight_only.run)(empty(count, k), packed, None)
    if not FULL:
        return
    for dependent in (False, True):
        setattr(pdl, "in_use", lambda dependent=dependent: dependent)  # noqa: B010
        for rows in (1, 16, 64, 256):
            launch(rows, 6144, 4096)
            launch(rows, 12288, 4096, gated=True)
            launch(rows, 4096, 12288, residual=True)
    launch(3, 4096, 4096)
    for rows in (8, 32, 64, 128, 300):
        launch(rows, 1000, 1024, 32, zeros=False)
        launch(rows, 3072, 1024, 64, gated=True)
        launch(rows, 3584, 8192, 8192, bits=8, gated=True, zeros=False)
        launch(rows, 8192, 3584, 32, bits=8)
    for values, n, k, group in (("w4", 512, 64, 32), ("w4", 6144, 4096, 128), ("w8", 192, 1024, 0)):
        packed = weight_only.pack(empty_matrix(Scheme(values=values, block=(1, group), zeros=True), (n, k), "meta"))
        for rows in (1, 64, 300):
            weight_only.run(empty(rows, k, dtype=torch.float16), packed, None)
    gate_up = weight_only.pack_gated(empty_matrix(Scheme(values="w4", block=(1, 32)), (1024, 64), "meta"))
    weight_only.run_gated(empty(5, 64, dtype=torch.float16), gate_up, None)
