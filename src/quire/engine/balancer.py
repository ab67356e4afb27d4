"""Balancing of experts while requests are served: when to look at loads, which map comes next, when a layer switches.

count    ranks count the tokens of each expert, on the device
plan     every `step_interval` steps the counts of the last `window_size` steps make a new map, in a thread
move     ranks fetch the new weights of one layer at a time, beside the steps; results tell how far all of them are
switch   the plan of the next step says that a layer has its new map: all ranks switch to it before that step
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from quire.config.balancing import EplbConfig
from quire.engine.eplb import ExpertMap, balanced_map, balancedness, expert_map, moves

LOG = logging.getLogger("quire").getChild("balancing")
Control = Callable[[str, dict[str, Any]], object]  # runs an operation on every rank, and returns a list of its values
LEAST_GAIN = 0.05  # part of the busiest rank's tokens for which a layer's weights move: a move takes most of them
DEADLINE = 60.0  # seconds without a moved layer, after which a warning is due


class Balancer:
    """The balancing of an engine's experts. One thread uses it.

    experts    the map in use; a layer may have switched to the next one already
    control    see `Executor.control`
    groups, nodes   see `engine.eplb.balanced_map`
    balancedness   of the last counts, with the map that was in use; 0 before the first
    loads          tokens of each rank in those counts, [layers][ranks]; []: before the first
    """

    def __init__(
        self,
        settings: EplbConfig,
        experts: ExpertMap,
        control: Control,
        *,
        groups: int = 1,
        nodes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.experts, self.balancedness = experts, 0.0
        self.loads: list[list[int]] = []
        self._settings, self._control, self._clock = settings, control, clock
        self._groups, self._nodes = groups, nodes
        self._step = settings.step_interval * 3 // 4  # nothing is known at the start: the first look comes early
        self._thread = ThreadPoolExecutor(1, "quire-balance")
        self._planned: Future[tuple[ExpertMap, list[list[tuple[int, int]]]]] | None = None
        self._next: ExpertMap | None = None  # the map whose weights move
        self._moved, self._switched, self._total = 0, 0, 0  # layers: told by results; switched; of all maps
        self._progress, self._warned, self._stopped = 0.0, False, False

    def next_switch(self) -> int:
        """Return the layer that switches to its new map in the step that is being planned; -1 for none."""
        self._step += 1
        if self._stopped:
            return -1
        if self._next is not None:
            return self._switch()
        if self._planned is not None:
            if self._planned.done():
                self._move()
            return -1
        interval, window = self._settings.step_interval, self._settings.window_size
        if window < interval and self._step % interval == interval - window:
            self._control("experts", {"what": "reset"})
        elif self._step % interval == 0:
            self._look()
        return -1

    def note(self, moved: int) -> None:
        """Take from a step's result how many layers have come to all ranks, since the start; -1 after a fault."""
        if moved < 0:
            self._stop("a rank cannot fetch weights")
        if moved > self._moved:
            self._moved, self._progress = moved, self._clock()

    def close(self) -> None:
        """End the thread that plans."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _stop(self, why: str, fault: BaseException | None = None) -> None:
        """Balance no more."""
        if not self._stopped:
            LOG.error(
                "experts are not balanced any more, because %s: requests are served with the experts as they "
                "are. Start the engine again to balance them.",
                why,
                exc_info=fault,
            )
        self._stopped = True

    def _look(self) -> None:
        """Collect the counts of all ranks and begin to plan."""
        counts: Any = self._control("experts", {"what": "load"})
        load = np.sum(np.array(counts, np.int64), axis=0)
        if not load.any():
            return
        self.balancedness = balancedness(load, self.experts)
        self.loads = self.experts.rank_load(load).round().astype(int).tolist()
        if self._settings.log_balancedness:
            LOG.info("balancedness of experts over the last steps: %.3f", self.balancedness)
        self._planned = self._thread.submit(self._plan, load)

    def _plan(self, load: Any) -> tuple[ExpertMap, list[list[tuple[int, int]]]]:
        """Return the next map and the moves of weights. Layers whose busiest rank gains little stay as they are."""
        old = self.experts
        new = balanced_map(
            load, self._settings.num_redundant_experts, old.ranks, groups=self._groups, nodes=self._nodes, old=old
        )
        before, after = (one.rank_load(load).max(axis=1) for one in (old, new))
        held = np.where((after < (1 - LEAST_GAIN) * before)[:, None], new.experts, old.experts)
        new = expert_map(held, load.shape[1], old.ranks)
        return new, moves(old, new)

    def _move(self) -> None:
        """Tell the ranks to move weights, if the planned map differs."""
        assert self._planned is not None
        planned, self._planned = self._planned, None
        if (fault := planned.exception()) is not None:
            self._stop("no map could be made", fault)
            return
        new, steps = planned.result()
        if any(steps):
            self._control("experts", {"what": "move", "moves": steps, "slots": new.slots, "counts": new.counts})
            self._next, self._progress, self._warned = new, self._clock(), False

    def _switch(self) -> int:
        """Return the next layer that has come to all ranks, or -1."""
        assert self._next is not None
        if self._moved <= self._switched:
            if not self._warned and self._clock() - self._progress > DEADLINE:
                self._warned = True
                LOG.warning(
                    "no expert weights have moved for %.0f s (%d of %d layers have moved): requests are served "
                    "with the old map.",
                    DEADLINE,
                    self._switched - self._total,
                    len(self._next.experts),
                )
            return -1
        layer = self._switched - self._total
        self._switched += 1
        if layer + 1 == len(self._next.experts):
            self.experts, self._next, self._total = self._next, None, self._switched
        return layer
