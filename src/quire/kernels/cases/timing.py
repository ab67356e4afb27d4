"""Times of calls on a device, and the rates of its memory and of its matrix products.

On a GPU the calls run in a CUDA graph. Knows nothing of results.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.kernels.cases import KernelCase

CALLS, SAMPLES, LONGEST = 24, 9, 0.3  # least calls of a graph; most replays; most seconds of all replays


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
