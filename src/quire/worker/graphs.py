"""Work recorded as CUDA graphs: one memory pool for all of them, one launch each."""

import functools
from collections.abc import Callable
from typing import Any

import torch

Key = tuple[str, int, int]  # what it is, of what size, and the variant


class Graphs:
    """Work by key. What was captured under a key is replayed, the rest is run as it comes.

    Captured work reads and writes tensors at the addresses it had then, and never waits for the device. Graphs share
    their memory: what one leaves there is gone when the next runs, so results go to buffers from outside.
    """

    def __init__(self) -> None:
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: Key, work: Callable[[], None]) -> None:
        """Replay what was captured under `key`, or do `work`."""
        graph = self._graphs.get(key)
        if graph is None:
            work()
        else:
            graph.replay()

    def capture(self, key: Key, work: Callable[[], None]) -> None:
        """Capture `work`, whose kernels a rehearsal has loaded; one that it did not foresee is compiled in the middle.
        Larger work first: its memory serves the rest."""
        stream = _side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="relaxed"):
            work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def __len__(self) -> int:
        return len(self._graphs)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One for all captures of a process: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream()
