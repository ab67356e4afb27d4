"""Cases of `quire bench kernels` for quantized layers and experts, beside the same numbers unquantized."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.nn.functional as F

from quire.contracts.scheme import Scheme
from quire.kernels.cases import KernelCase, KernelSetup, Pair, made
from quire.kernels.experts.inputs import Case, make_quantized
from quire.kernels.linear import quantized_ref
from quire.kernels.pack.dummy import random_matrix
from quire.kernels.pack.matrix import dequantize
from quire.kernels.select import KernelNeeds, load_kernel, select

SCHEMES = {
    "fp8 blocks": Scheme(values="e4m3", block=(128, 128), inputs="group"),
    "fp8 channels": Scheme(values="e4m3", block=(1, 0), inputs="token"),
    "int8": Scheme(values="int8", block=(1, 0), inputs="token"),
    "w4, groups of 128": Scheme(values="w4", block=(1, 128), zeros=True),
    "mxfp4": Scheme(values="e2m1", block=(1, 32)),
    "nvfp4": Scheme(values="e2m1", block=(1, 16), factor=True),
    "w8, groups of 128": Scheme(values="w8", block=(1, 128)),
}


def quantized_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of all projections of a layer, for a quantization scheme of each kind.

    Operations on 8-bit activations count half in `flops`: tensor cores do twice as many of them per second.
    """
    for words, scheme in SCHEMES.items():
        for name, (n, k) in setup.projections.items():
            for rows in setup.rows if name != "head" else ():
                yield KernelCase(
                    shape=f"{words}: {name} {rows} x {k} -> {n}",
                    num_bytes=scheme.num_bytes(n, k) + rows * (k + n) * setup.item,
                    flops=2 * rows * n * k // (2 if scheme.inputs else 1),
                    baseline="F.linear",
                    make=made(_linear_pair, setup, scheme, n, k, rows),
                )


def _linear_pair(setup: KernelSetup, scheme: Scheme, n: int, k: int, rows: int) -> Pair:
    matrix, x = random_matrix(scheme, n, k, setup.device), setup.randn(rows, k)
    weight, kernel = dequantize(matrix).to(setup.dtype), _kernel(setup, "linear", scheme)
    return Pair(
        partial(kernel.run, x, kernel.pack(matrix), None),
        lambda: F.linear(x, weight),
        lambda: quantized_ref.run(x, matrix, None),
    )


def expert_cases(setup: KernelSetup) -> Iterator[KernelCase]:
    """Yield cases of experts with integer weights: those of the model, or 16 with a quarter of a dense model's MLP."""
    moe, hidden, inner, count, k = setup.args.moe, setup.args.hidden_size, setup.inner // 4, 16, 4
    if moe:
        inner, count, k = moe.expert_size, moe.routing.num_experts, moe.routing.top_k
    for words, scheme in SCHEMES.items():
        expert = scheme.num_bytes(2 * inner, hidden) + scheme.num_bytes(hidden, inner)
        for rows in () if scheme.inputs else setup.rows:
            yield KernelCase(
                shape=f"{words}: {rows} x {hidden} -> {inner}, {k} of {count} experts",
                baseline="unquantized",
                num_bytes=min(count, rows * k) * expert + 2 * rows * hidden * setup.item,
                flops=6 * rows * k * hidden * inner,
                make=made(_expert_pair, setup, scheme, Case(rows, count, k, hidden, inner)),
            )


def _expert_pair(setup: KernelSetup, scheme: Scheme, case: Case) -> Pair:
    x, weights, ids, pairs = make_quantized(case, scheme, setup.dtype, setup.device)
    plain = [tuple(dequantize(one).to(setup.dtype) for one in pair) for pair in pairs]
    runs = []
    for kernel, matrices in (_kernel(setup, "experts", scheme), pairs), (_kernel(setup, "experts", None), plain):
        packed = kernel.empty(case.experts, *matrices[0], setup.device)
        for place, pair in enumerate(matrices):
            kernel.put(packed, place, *pair)
        runs.append(partial(kernel.run, x, weights, ids, packed))
    return Pair(*runs)


def _kernel(setup: KernelSetup, op: str, scheme: Scheme | None) -> Any:
    """Return the implementation of an operation for weights of a scheme (None: unquantized)."""
    needs = KernelNeeds(device=setup.device.type, dtype=str(setup.dtype).removeprefix("torch."), scheme=scheme)
    return load_kernel(op, select(op, needs).name)
