"""Every kernel against its floor and against the library it replaces.

The floor is the larger of bytes over the memory's rate and operations over the matrix units' rate, both measured here
first. Calls go over inputs that together are several times the cache, on a GPU inside a CUDA graph. A result is
compared with the library's before it is timed: a wrong kernel has no speed.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.bench.kernel_cases import OPERATIONS, Case, Setup
from quire.bench.workload import model_folder
from quire.config.checkpoint import read_checkpoint_config
from quire.config.resolve import CPU_BLOCK_SIZE
from quire.config.resolve_cuda import CUDA_BLOCK_SIZE
from quire.contracts.errors import ConfigError
from quire.kernels.select import select_kernels

MODELS = ("qwen3-0.6b", "qwen3-8b")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative, of the whole result
ROTATED = 256 << 20  # bytes of all inputs together: several times a cache of 50 to 60 MB
MAX_SETS = 64
CALLS, SAMPLES = 24, 9  # of a graph, at least; of its replays
ROW_BY_ROW = ("heads", "attention")  # whose reference is a loop over rows, for checking only


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bytes read and written per second by a copy, operations per second by a product."""

    memory: float
    matrix: float

    def floor(self, case: Case) -> float:
        """Seconds that no kernel can beat."""
        return max(case.num_bytes / self.memory, case.flops / self.matrix)


def measure_rates(device: torch.device, dtype: torch.dtype, size: int | None = None) -> Rates:
    """The two rates, of a copy of `size`^2 elements and a product of `size`^3; the fastest of several runs."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    large = torch.empty(size * size * 8, dtype=torch.uint8, device=device)
    target = torch.empty_like(large)
    copy = seconds_per_call([lambda: target.copy_(large)], device, best=True)
    product = seconds_per_call([lambda: a @ b], device, best=True)
    return Rates(2 * large.numel() / copy, 2 * size**3 / product)


def make_setup(model: str, device: str, dtype: str = "bfloat16") -> Setup:
    """The kernels that an engine would choose for one of the bundled configurations."""
    args = read_checkpoint_config(model_folder(model))
    return Setup(args=args, device=torch.device(device), dtype=getattr(torch, dtype),
                 kernels=select_kernels(device, dtype, head_dim=args.head_dim),
                 block_size=CUDA_BLOCK_SIZE if device == "cuda" else CPU_BLOCK_SIZE)


def choose_operations(names: Sequence[str]) -> list[str]:
    """The operations of these names (all without names); raises `ConfigError` for an unknown one."""
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise ConfigError(f"there is no operation {unknown[0]!r}: use {', '.join(OPERATIONS)}.")
    return list(names) or list(OPERATIONS)


def measure_kernels(setup: Setup, rates: Rates, operations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each case: times in microseconds, `x_floor` and `x_library` as ratios (the second: how many times
    faster than the library), or what is `wrong`."""
    chosen = {choice.op: choice.name for choice in setup.kernels.choices}
    for op in operations:
        for case in OPERATIONS[op](setup):
            row: dict[str, Any] = {"op": op, "kernel": chosen[op], "shape": case.shape, "us": None,
                                   "floor_us": _micro(rates.floor(case)), "x_floor": None, "library": case.baseline,
                                   "library_us": None, "x_library": None, "wrong": ""}
            if op in ROW_BY_ROW and chosen[op] == "ref":
                yield row | {"wrong": "only the reference, which is not timed"}
            else:
                yield row | _measure(setup, case, rates)


def _measure(setup: Setup, case: Case, rates: Rates) -> dict[str, Any]:
    count = max(2, min(MAX_SETS, math.ceil(ROTATED / case.num_bytes))) if setup.device.type == "cuda" else 2
    pairs = case.make(count)
    error = relative_error(pairs[0].run(), pairs[0].baseline())
    if not error <= TOLERANCE[setup.dtype]:
        return {"wrong": f"differs by {error:.1e} from {case.baseline}"}
    ours = seconds_per_call([pair.run for pair in pairs], setup.device)
    library = seconds_per_call([pair.baseline for pair in pairs], setup.device)
    return {"us": _micro(ours), "x_floor": round(ours / rates.floor(case), 2), "library_us": _micro(library),
            "x_library": round(library / ours, 2)}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| over all elements; NaN when there is one."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def seconds_per_call(calls: Sequence[Callable[[], object]], device: torch.device, *, best: bool = False) -> float:
    """The median time of one of `calls`, which are made in turn; `best`: the shortest instead."""
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
    """Replays of a graph of all calls; what cannot be captured is launched one by one."""
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
    samples = []
    for _ in range(SAMPLES):
        began, ended = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        began.record()
        launch()
        ended.record()
        ended.synchronize()
        samples.append(began.elapsed_time(ended) / 1000 / (rounds * len(calls)))
    return samples


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 2)
