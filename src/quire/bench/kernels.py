"""Times of all kernels, beside their floor and the library they replace.

The floor is the larger of bytes / memory rate and operations / matrix rate. Both rates are measured first. Successive
calls use different inputs, together several times the size of the cache; on a GPU they run in a CUDA graph. Every
result is compared with the library's or a reference before it is timed: a wrong kernel gets no time.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.args.checkpoint import read_checkpoint_config
from quire.bench.kernel_cases import OPERATIONS
from quire.bench.kernel_setup import Setup
from quire.bench.workload import model_folder
from quire.contracts.errors import ConfigError
from quire.kernels.cases import KernelCase, Pair, Result
from quire.kernels.cases.timing import Rates, seconds_per_call
from quire.kernels.select import select_kernels
from quire.kernels.supports import DENSE
from quire.kernels.triton_runtime import INTERPRETED, missing
from quire.plan.kv_geometry import CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE

MODELS = ("qwen3-0.6b", "qwen3-8b")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative, of the whole result
ROTATED = 256 << 20  # bytes of all inputs together: several times a cache of 50 to 60 MB
MAX_SETS = 64
RECURRENT = ("delta", "mamba", "shortconv")
ROW_BY_ROW = ("heads", "attention", "shared", *RECURRENT)  # the reference is a loop over rows, for checks only
TRITON_ONLY = ("shared", "sampler", "step")
CHOSEN_AS = {"layer": "linear", "embedding": "linear", "shared": "attention"}  # operation -> operation of its kernel


def make_setup(model: str, device: str) -> Setup:
    """Return the `Setup` of a bundled model configuration, with the kernels that an engine would choose for it."""
    args = read_checkpoint_config(model_folder(model))
    return Setup(
        args=args,
        device=torch.device(device),
        dtype=torch.bfloat16,
        kernels=select_kernels(
            device, "bfloat16", ops=(*DENSE, *RECURRENT), head_dim=max(one.head_dim for one in args.attending)
        ),
        block_size=CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE,
    )


def choose_operations(names: Sequence[str]) -> list[str]:
    """Return `names` as a list; without names, all operations. Raises `ConfigError` for an unknown name."""
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise ConfigError(f"there is no operation {unknown[0]!r}: use {', '.join(OPERATIONS)}.")
    return list(names) or list(OPERATIONS)


def measure_kernels(setup: Setup, rates: Rates, operations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure every case of `operations`. Yield a row (dict) of results for each.

    us, floor_us, library_us   microseconds of Quire's operation, its floor (`Rates.floor`), and the library's
    floor_percent              100 * floor / time of Quire's operation
    x_library                  time of the library's operation / time of Quire's
    wrong                      the reason why the case has no times; "" for a case with times
    """
    chosen = {choice.op: choice.name for choice in setup.kernels.choices}
    for op in operations:
        kernel = chosen.get(CHOSEN_AS.get(op, op), "triton")
        untimed = _untimed(setup, op, kernel)
        for case in OPERATIONS[op](setup):
            row: dict[str, Any] = {
                "op": op,
                "kernel": kernel,
                "shape": case.shape,
                "us": None,
                "floor_us": _micro(rates.floor(case)),
                "floor_percent": None,
                "library": case.baseline,
                "library_us": None,
                "x_library": None,
                "wrong": untimed,
            }
            yield row if untimed else row | _measure(setup, case, rates)


def _untimed(setup: Setup, op: str, kernel: str) -> str:
    """Return the reason why an operation is not measured here; "" if it is."""
    if op in TRITON_ONLY and not INTERPRETED:
        return "only on a GPU" if setup.device.type == "cpu" else missing()
    return "only the reference, which is not timed" if op in ROW_BY_ROW and kernel == "ref" else ""


def _measure(setup: Setup, case: KernelCase, rates: Rates) -> dict[str, Any]:
    count = max(2, min(MAX_SETS, math.ceil(ROTATED / case.num_bytes))) if setup.device.type == "cuda" else 2
    pairs = case.make(count)
    if wrong := _difference(pairs[0], case.baseline, TOLERANCE[setup.dtype]):
        return {"wrong": wrong}
    ours, floor = seconds_per_call([pair.run for pair in pairs], setup.device), rates.floor(case)
    found = {"us": _micro(ours), "floor_percent": round(100 * floor / ours, 1)}
    calls = [pair.baseline for pair in pairs if pair.baseline is not None]
    if not calls:
        return found
    library = seconds_per_call(calls, setup.device)
    return found | {"library_us": _micro(library), "x_library": round(library / ours, 2)}


def _difference(pair: Pair, baseline: str, tolerance: float) -> str:
    """Return the difference of a result from the expected one as text; "" if it is within the tolerance."""
    found = [part.clone() for part in _parts(pair.run())]
    expected = pair.expected or pair.baseline
    assert expected is not None, "a case without a library has a reference"
    for mine, right in zip(found, _parts(expected()), strict=True):
        error = relative_error(mine, right)
        if not error <= (tolerance if right.is_floating_point() else 0):
            return f"differs by {error:.1e} from {baseline if expected is pair.baseline else 'its reference'}"
    return ""


def _parts(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, with the Euclidean norm over all elements; NaN if there is a NaN.

    For integers, return the share of wrong elements. For different shapes, return infinity.
    """
    if found.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return float((found != expected).double().mean())
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def _micro(seconds: float) -> float:
    return float(f"{seconds * 1e6:.4g}")
