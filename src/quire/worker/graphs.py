"""The recorder of a GPU: CUDA graphs of padded sizes in one memory pool, one launch each."""

import functools
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from quire.plan.graphs import captured_bounds, captured_decodes
from quire.worker.recorder import Key, Recorder, StepShape

NARROW = 256  # sequences: steps with prompts are captured for at most this many, and once more for the most possible


class Graphs(Recorder):
    """CUDA graphs of steps of padded sizes; a `Recorder`. A step for which no graph exists runs eagerly.

    A replay reads and writes the tensors of the capture, at the same addresses, without waiting for the device. Graphs
    share their memory: a graph overwrites the intermediate results of the graph that ran before it. Results that must
    stay are written to buffers that exist before the capture.

    sizes, tokens, bounds, queries   `graph_sizes`, `graph_tokens`, `bounds` and `queries` of `Limits`
    most_seqs                        most sequences of any step
    joint                            replicas share experts of the drafter's layers, so that they make the same passes
    adapted                          steps with adapters are captured, too
    even                             decode steps have one size on all replicas, see `GraphPlan`
    short                            of `Limits`; set it before the shapes are asked for
    """

    static = True
    short = 0, 0

    def __init__(
        self,
        sizes: tuple[int, ...] = (),
        tokens: tuple[int, ...] = (),
        most_seqs: int = 0,
        bounds: tuple[int, ...] = (),
        queries: tuple[int, ...] = (1,),
        *,
        joint: bool = False,
        adapted: bool = False,
        even: bool = False,
    ) -> None:
        super().__init__("enforce_eager: no sizes are to be captured")
        self.sizes, self.tokens, self.most_seqs, self.bounds = sizes, tokens, most_seqs, bounds
        self.queries, self._decodes = queries, dict.fromkeys(captured_decodes(sizes, queries))
        self.joint, self.even = joint, even
        self._adapted = (False, True)[: 1 + adapted]
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def fit(self, shape: StepShape) -> StepShape:
        """Return `shape` padded to the smallest captured size that holds it, with `recorded` True.

        A step without such a size runs eagerly: its shape keeps its number of tokens, with `recorded` False.
        """
        if not shape.tokens:
            captured = bool(self.sizes or self.tokens) and shape.query in self._joined()
            return replace(shape, recorded=captured and shape.bound in self.bounds)
        seqs, query = (max(own, most) for own, most in zip((shape.seqs, shape.query), shape.most, strict=True))
        size, query = self._round_up(seqs), next((one for one in self.queries if one >= query), 0)
        if shape.decode and (size, query) in self._decodes and shape.bound in self._bounds(size, query):
            context = next(one for one in self._contexts(size) if not one or 0 < shape.context <= one)
            padded_to = {"tokens": size * query, "seqs": size, "rows": size * query, "query": query}
            return replace(shape, recorded=True, context=context, **padded_to)
        rows = self._round_up(shape.rows) or shape.rows
        padded = next((size for size in self.tokens if size >= shape.tokens), 0)
        alone = self.joint and shape.decode  # a graph with prompts has their pass, which other replicas would not join
        shape = replace(shape, decode=False, context=0)
        if padded and not alone and shape.bound in self._prompt_bounds(padded):
            seqs = NARROW if shape.seqs <= NARROW < self.most_seqs else self.most_seqs
            return replace(shape, tokens=padded, seqs=seqs, rows=rows, recorded=True, query=self.queries[-1])
        return replace(shape, seqs=max(shape.seqs, rows), rows=rows)

    def _bounds(self, size: int, query: int) -> tuple[int, ...]:
        """Return the bounds with which a decode step of `size` sequences, of at most `query` tokens, is captured."""
        if self.even:
            return (size * query,)
        return captured_bounds(self.bounds, self.sizes, size, self.queries, query)

    def _contexts(self, size: int) -> tuple[int, ...]:
        """Return the `context` of the shapes in which a decode step of `size` sequences is captured, 0 last."""
        sequences, tokens = self.short
        return (tokens, 0) if size <= sequences else (0,)

    def _prompt_bounds(self, tokens: int) -> tuple[int, ...]:
        """Return the bounds with which a step with prompts is captured, or rehearsed; (0,): with exact numbers."""
        return (0,) if self.even else captured_bounds(self.bounds, self.tokens, tokens)

    def shapes(self) -> list[StepShape]:
        """Return the shapes to capture: every recorded shape that `fit` may return. See `Recorder`."""
        narrow, most, found = min(NARROW, self.most_seqs), self.most_seqs, []
        for tokens in reversed(self.tokens):
            wide = [(most, False)] if narrow < min(tokens, most) else []
            of_prompts = StepShape(tokens, 0, 0, False, recorded=True, query=self.queries[-1])
            for seqs, shared in (*((narrow, shared) for shared in (False, True)), *wide):
                found += [
                    replace(of_prompts, seqs=seqs, shared=shared, bound=bound, adapted=adapted)
                    for bound in self._prompt_bounds(tokens)
                    for adapted in self._adapted
                ]
        for size, query in sorted(self._decodes, key=prod, reverse=True):
            rows = size * query
            found += [
                StepShape(rows, size, rows, True, shared, True, bound, query, adapted=adapted, context=context)
                for bound in self._bounds(size, query)
                for adapted in self._adapted
                for context in self._contexts(size)
                for shared in (False, True)
            ]
        joins = [(bound, query) for bound in reversed(self.bounds) for query in self._joined()] if found else []
        if self.even and self.joint:
            joins = [(size * query, query) for size, query in self._decodes]
        return [*found, *(StepShape(0, 0, 0, True, recorded=True, bound=bound, query=query) for bound, query in joins)]

    def run(self, key: Key, work: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            self.counts["run"] += 1
            work()
        else:
            self.counts["replayed"] += 1
            graph.replay()

    def capture(self, key: Key, work: Callable[[], None]) -> None:
        """Capture the launches of `work` as the CUDA graph of `key`.

        `StepRunner.rehearse` should have compiled the kernels of `work`: others are compiled during the capture. The
        caller captures larger work first, so that smaller work reuses its memory.
        """
        stream = _side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="relaxed"):
            work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.counts["recorded"] += 1

    def unrecorded(self) -> dict[str, str]:
        if not self.sizes:
            return super().unrecorded()
        largest = self.tokens[-1] if self.tokens else 0
        return {
            f"decodes of more than {self.sizes[-1]} sequences": "no larger size is to be captured",
            f"steps with prompts of more than {largest} tokens": "launching them takes less time than the work itself",
            "the head of steps with prompts": "a few launches; its number of rows is not known ahead",
        }

    def __len__(self) -> int:
        return len(self._graphs)

    def _joined(self) -> tuple[int, ...]:
        """Return the most tokens of a decode of other replicas, for which steps without tokens here are captured."""
        return self.queries if self.joint else (1,)

    def _round_up(self, count: int) -> int:
        """Return the smallest captured size >= `count`; 0 if `count` is 0 or above the largest size."""
        return next((size for size in self.sizes if size >= count > 0), 0)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """Return the capture stream of the process: one, since cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream()
