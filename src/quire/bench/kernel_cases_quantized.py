"""Cases of `quire bench kernels` for quantized linear layers, beside F.linear with the dequantized weight."""

from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.bench.kernel_setup import KernelCase, Pair, Setup
from quire.contracts.scheme import Scheme
from quire.kernels.linear import quantized_ref
from quire.kernels.select import KernelNeeds, load_kernel, select
from quire.quantization.pack.matrix import QuantizedMatrix, dequantize, empty

SCHEMES = {
    "fp8 blocks": Scheme(values="e4m3", block=(128, 128), inputs="group"),
    "fp8 channels": Scheme(values="e4m3", block=(1, 0), inputs="token"),
    "int8": Scheme(values="int8", block=(1, 0), inputs="token"),
    "w4, groups of 128": Scheme(values="w4", block=(1, 128), zeros=True),
    "w8, groups of 128": Scheme(values="w8", block=(1, 128)),
}


def quantized_cases(setup: Setup, shapes: Mapping[str, tuple[int, int]]) -> Iterator[KernelCase]:
    """Yield cases of the projections in `shapes`, for a quantization scheme of each kind.

    shapes   name of a projection -> (outputs, inputs)

    Operations on 8-bit activations count half in `flops`: tensor cores do twice as many of them per second.
    """
    for words, scheme in SCHEMES.items():
        needs = KernelNeeds(device=setup.device.type, dtype=str(setup.dtype).removeprefix("torch."), scheme=scheme)
        kernel = load_kernel("linear", select("linear", needs).name)
        for name, (n, k) in shapes.items():
            for rows in setup.rows:

                def pairs(count: int, n: int = n, k: int = k, rows: int = rows, scheme: Scheme = scheme,
                          kernel: ModuleType = kernel) -> list[Pair]:  # fmt: skip
                    return [_pair(setup, kernel, scheme, n, k, rows) for _ in range(count)]

                yield KernelCase(
                    shape=f"{words}: {name} {rows} x {k} -> {n}",
                    num_bytes=scheme.num_bytes(n, k) + rows * (k + n) * setup.item,
                    flops=2 * rows * n * k // (2 if scheme.inputs else 1), baseline="F.linear", make=pairs)  # fmt: skip


def _pair(setup: Setup, kernel: ModuleType, scheme: Scheme, n: int, k: int, rows: int) -> Pair:
    matrix, x = _random(scheme, n, k, setup.device), setup.randn(rows, k)
    weight = dequantize(matrix).to(setup.dtype)
    packed = kernel.pack(matrix)

    def run() -> Tensor:
        y: Tensor = kernel.run(x, packed, None)
        return y

    return Pair(run, lambda: F.linear(x, weight), lambda: quantized_ref.run(x, matrix, None))


def _random(scheme: Scheme, n: int, k: int, device: torch.device) -> QuantizedMatrix:
    """Return a matrix of random bits whose product with normal inputs is about 1. No code of e4m3 is NaN."""
    matrix = empty(scheme, (n, k), device)
    bits = torch.randint(0, 256, matrix.values.shape, dtype=torch.uint8, device=device)
    typical = {"e4m3": 150, "int8": 74, "w4": 5, "w8": 74}[scheme.values]
    if scheme.values == "e4m3":
        bits -= ((bits & 127) == 127).to(torch.uint8)
    matrix.values.copy_(bits.view(matrix.values.dtype))
    matrix.scale.uniform_(0.5, 1.5).div_(typical * k**0.5)
    if matrix.zero is not None:
        matrix.zero.random_(0, 16 if scheme.values == "w4" else 256)
    return matrix
