"""Work recorded as CUDA graphs: one memory pool for all of them, one launch each."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.worker.recorder import Key, Recorder, StepShape

NARROW = 256  # sequences: a captured step with prompts is made for them, and once more for as many as there can be


class Graphs(Recorder):
    """Work by key. What was captured under a key is replayed, the rest is run as it comes.

    Captured work reads and writes tensors at the addresses it had then, and never waits for the device. Graphs share
    their memory: what one leaves there is gone when the next runs, so results go to buffers from outside.

    sizes       sequences of the decode steps that are captured, ascending;  most_seqs  of any step
    tokens      tokens of the other steps whose layers are captured, ascending
    """

    static = True

    def __init__(self, sizes: tuple[int, ...] = (), tokens: tuple[int, ...] = (), most_seqs: int = 0) -> None:
        super().__init__("enforce_eager: no sizes are to be captured")
        self.sizes, self.tokens, self.most_seqs = sizes, tokens, most_seqs
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def fit(self, shape: StepShape) -> StepShape:
        """Padded to the next captured size where there is one."""
        if shape.decode and (size := self._round_up(shape.seqs)):
            return replace(shape, tokens=size, seqs=size, rows=size, recorded=True)
        rows = self._round_up(shape.rows) or shape.rows
        padded = next((size for size in self.tokens if size >= shape.tokens), 0)
        if padded:
            seqs = NARROW if shape.seqs <= NARROW < self.most_seqs else self.most_seqs
            return StepShape(padded, seqs, rows, False, shape.shared, recorded=True)
        return StepShape(shape.tokens, max(shape.seqs, rows), rows, False, shape.shared)

    def shapes(self) -> list[StepShape]:
        """See `Recorder`: what `fit` may give of recorded ones."""
        narrow, most, found = min(NARROW, self.most_seqs), self.most_seqs, []
        for tokens in reversed(self.tokens):
            wide = [(most, False)] if narrow < min(tokens, most) else []
            for seqs, shared in (*((narrow, shared) for shared in (False, True)), *wide):
                found.append(StepShape(tokens, seqs, 0, False, shared, recorded=True))
        for size in reversed(self.sizes):
            found += [StepShape(size, size, size, True, shared, recorded=True) for shared in (False, True)]
        return found

    def run(self, key: Key, work: Callable[[], None]) -> None:
        """See `Recorder`."""
        graph = self._graphs.get(key)
        if graph is None:
            self.counts["run"] += 1
            work()
        else:
            self.counts["replayed"] += 1
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
        self.counts["recorded"] += 1

    def unrecorded(self) -> dict[str, str]:
        """See `Recorder`."""
        if not self.sizes:
            return super().unrecorded()
        largest = self.tokens[-1] if self.tokens else 0
        return {
            f"decodes of more than {self.sizes[-1]} sequences": "no larger size is to be captured",
            f"steps with prompts of more than {largest} tokens": "launching them takes less time than the work does",
            "the head of steps with prompts": "a few launches; how many rows it has is not known ahead",
        }

    def __len__(self) -> int:
        return len(self._graphs)

    def _round_up(self, count: int) -> int:
        """The captured size that `count` sequences run in; 0 for none, and beyond the largest."""
        return next((size for size in self.sizes if size >= count > 0), 0)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One for all captures of a process: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream()
