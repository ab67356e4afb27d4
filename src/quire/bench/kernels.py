"""Times of all kernels, beside their floor and the library they replace.

The floor is the larger of bytes / memory rate and operations / matrix rate. Both rates are measured first. Successive
calls use different inputs, together several times the size of the cache; on a GPU they run in a CUDA graph. Every
result is compared with the library's or a reference before it is timed: a wrong kernel gets no time.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.bench.kernel_cases import OPERATIONS
from quire.bench.kernel_setup import KernelCase, Pair, Result, Setup
from quire.bench.workload import model_folder
from quire.config.checkpoint import read_checkpoint_config
from quire.config.resolve import CPU_BLOCK_SIZE
from quire.config.resolve_cuda import CUDA_BLOCK_SIZE
from quire.contracts.errors import ConfigError
from quire.kernels.select import select_kernels
from quire.kernels.triton_runtime import INTERPRETED, missing

MODELS = ("qwen3-0.6b", "qwen3-8b")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative, of the whole result
ROTATED = 256 << 20  # bytes of all inputs together: several times a cache of 50 to 60 MB
MAX_SETS = 64
CALLS, SAMPLES, LONGEST = 24, 9, 0.3  # least calls of a graph; most replays; most seconds of all replays
ROW_BY_ROW = ("heads", "attention", "shared")  # the reference is a loop over rows, for checks only
TRITON_ONLY = ("shared", "sampler", "step")
CHOSEN_AS = {"layer": "linear", "embedding": "linear", "shared": "attention"}  # operation -> operation of its kernel


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device.

    memory   bytes per second of a copy: bytes read plus bytes written
    matrix   operations per second of a matrix product; a multiplication and an addition are two
    """

    memory: float
    matrix: float

    def floor(self, case: KernelCase) -> float:
        """Return the least seconds that `case` can take: the longer of its memory time and its compute time."""
        return max(case.num_bytes / self.memory, case.flops / self.matrix)


def measure_rates(device: torch.device, dtype: torch.dtype, size: int | None = None) -> Rates:
    """Measure the rates of memory and of matrix products, each as the fastest of several runs.

    size   the copy has 8 * size^2 bytes, the matrix product 2 * size^3 operations; None: 8192 on CUDA, 1024 on a CPU
    """
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    large = torch.zeros(size * size * 8 // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(large)  # copied by a kernel: copy nodes of a graph are a third slower
    copy = seconds_per_call([lambda: torch.neg(large, out=target)], device, best=True)
    product = seconds_per_call([lambda: a @ b], device, best=True)
    return Rates(2 * large.nbytes / copy, 2 * size**3 / product)


def make_setup(model: str, device: str, dtype: str = "bfloat16") -> Setup:
    """Return the `Setup` of a bundled model configuration, with the kernels that an engine would choose for it."""
    args = read_checkpoint_config(model_folder(model))
    return Setup(args=args, device=torch.device(device), dtype=getattr(torch, dtype),
                 kernels=select_kernels(device, dtype, head_dim=args.head_dim),
                 block_size=CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE)


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
            row: dict[str, Any] = {"op": op, "kernel": kernel, "shape": case.shape, "us": None,
                                   "floor_us": _micro(rates.floor(case)), "floor_percent": None,
                                   "library": case.baseline, "library_us": None, "x_library": None, "wrong": untimed}
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


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device, *, best: bool = False) -> float:
    """Run `calls` in turn and return the median seconds of a call. `best`: return the shortest time instead."""
    for call in calls:
        call()
    samples = _on_gpu(calls) if device.type == "cuda" else _on_cpu(calls)
    return min(samples) if best else statistics.median(samples)


def _on_cpu(calls: Sequence[Callable[[], object]]) -> list[float]:
    samples = []
    for i in range(SAMPLES):
        began = time.perf_counter()
        calls[i % len(calls)]()
        samples.append(time.perf_counter() - began)
    return samples


def _on_gpu(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Time replays of a CUDA graph of all calls. Calls that cannot be captured are launched one by one."""
    rounds = math.ceil(CALLS / len(calls))

    def all_calls() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            all_calls()
        launch: Callable[[], None] = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        launch = all_calls
    launch()
    samples: list[float] = []
    while len(samples) < SAMPLES and sum(samples) * rounds * len(calls) < LONGEST:
        began, ended = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        began.record()
        launch()
        ended.record()
        ended.synchronize()
        samples.append(began.elapsed_time(ended) / 1000 / (rounds * len(calls)))
    return samples


def _micro(seconds: float) -> float:
    return float(f"{seconds * 1e6:.4g}")
