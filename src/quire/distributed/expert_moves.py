"""Moves of experts' weights between ranks, beside the steps that serve requests.

A thread of each rank fetches the weights of one layer's new slots into spare memory. All movers meet; then every rank
has the layer, and the plan of a step says that all ranks switch to it before this step. So a rank's weights are not
overwritten while another rank reads them, and the spare memory holds the moved experts of one layer. Ranks of other
pipeline stages fetch nothing and meet with the others, so that each of them knows how far all are.

On a GPU the thread copies on a stream of its own, beside the steps, and through host memory to other ranks. It follows
the main stream after each switch, so it reads weights that are in their places, and reuses spare memory that was read.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.distributed import Group

Moves = Sequence[tuple[int, int]]  # (destination slot, source slot)
Memory = Callable[[int, int], list[Tensor]]  # (layer, place on this rank) -> tensors of the expert there


class ExpertRanks(NamedTuple):
    """Ranks among which experts move.

    group     all ranks of all stages; the movers alone use it, so no other exchange may
    members   the ranks of the group that divide the experts of this rank's layers, in the order of their slots
    """

    group: Group
    members: tuple[int, ...]


class ExpertMover:
    """This rank's mover. `begin`, `switch` and `close` are called in one thread, which launches the steps.

    memory   the tensors of the expert in a place of a layer
    each     slots of a rank
    stream   stream of a GPU on which the thread copies; None: on a CPU
    ready    layers, counted over all calls of `begin`, whose weights all ranks have fetched
    told     of these, the layers of which all ranks know it: only they may be switched
    fault    error that ended the thread; None while it works
    """

    def __init__(self, ranks: ExpertRanks, memory: Memory, each: int, stream: torch.cuda.Stream | None = None) -> None:
        self._group, self._members = ranks
        self._memory, self._each, self._stream = memory, each, stream
        self._work: list[Moves] = []
        self._spare: list[tuple[int, list[Tensor]]] = []  # (place, weights) of the layer that was fetched last
        self.told = 0
        self._before, self._switched, self.ready = 0, 0, 0  # before: layers of earlier calls of `begin`
        self.fault: Exception | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread: threading.Thread | None = None

    def begin(self, work: Sequence[Moves]) -> None:
        """Begin to fetch the weights of every layer in turn: of a layer of another stage nothing. All moves of the last
        call have been switched to."""
        assert self._switched == len(self._work), "the last moves have not ended"
        self._before += len(self._work)
        self._work, self._switched = list(work), 0
        self._thread = threading.Thread(target=self._run, name="quire-expert-moves", daemon=True)
        self._thread.start()

    def switch(self, layer: int) -> None:
        """Write the fetched weights of the layer to their places. Called before the step that uses them is launched."""
        assert layer == self._switched, f"layer {layer} is switched, and {self._switched} comes next"
        assert self.ready > self._before + layer, "a layer is switched that has not come"
        for place, fetched in self._spare:
            for to, source in zip(self._memory(layer, place), fetched, strict=True):
                to.copy_(source)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._spare = []
        with self._changed:
            self._switched += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread at its next layer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                for layer, moves in enumerate(self._work):
                    with self._changed:
                        self._changed.wait_for(partial(self._may_fetch, layer))
                        if self._closed:
                            return
                    self._spare = self._fetch(layer, moves)
                    if self._stream is not None:
                        self._stream.synchronize()
                    self._group.barrier()
                    with self._changed:
                        self.ready += 1
                        self._changed.notify_all()
                    self._group.barrier()  # now every rank is ready, so that no switch ever waits
                    with self._changed:
                        self.told += 1
                        self._changed.notify_all()
        except Exception as error:  # serving goes on with the old map; the engine core sees that nothing moves
            with self._changed:
                self.fault = error
                self._changed.notify_all()

    def _may_fetch(self, layer: int) -> bool:
        """True when the weights before are in their places, or the mover is closed."""
        return self._closed or self._switched == layer

    def _fetch(self, layer: int, moves: Moves) -> list[tuple[int, list[Tensor]]]:
        """Fetch the layer's new experts of this rank and send those that other ranks want: all ranks in one order."""
        own, found = self._group.rank, []
        for to, source in moves:
            (taker, place), (giver, held) = divmod(to, self._each), divmod(source, self._each)
            taker, giver = self._members[taker], self._members[giver]
            if giver == own and taker == own:
                found.append((place, [one.clone() for one in self._memory(layer, held)]))
            elif giver == own:
                for one in self._memory(layer, held):
                    self._group.send(one, taker)
            elif taker == own:
                found.append(
                    (place, [self._group.receive(torch.empty_like(one), giver) for one in self._memory(layer, place)])
                )
        return found
