"""Logits processors that a caller in this process gives: Python functions that change the logits of a request.

They run in the order of the steps, before a token is drawn, and read the tokens from the device's history: so they see
every token of their request, however many steps are in flight. On a GPU they wait for the device.
"""

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.kernels.step.upload import Change
from quire.worker.features import StepFeature

LOG = logging.getLogger("quire")
Processors = Sequence[Any]


class LogitsProcessors(StepFeature):
    """Calls the functions of each request on its row of logits. One that fails ends its request: the row becomes NaN.

    history   [num_slots, L] int32 token ids of each slot's request by position, on the device
    """

    def __init__(self, history: Tensor) -> None:
        self._history = history
        self._asked: dict[str, Processors] = {}  # by id of a live request
        self._slots: dict[int, tuple[str, int, Processors]] = {}  # slot -> request, tokens of its prompt, functions
        self.controls = {"set_processors": self.set}

    def set(self, request_id: str, processors: Processors) -> None:
        """Note the functions of a request that comes, or forget those of one that has ended: ()."""
        if processors:
            self._asked[request_id] = processors
        else:
            self._asked.pop(request_id, None)

    def apply(self, plan: StepPlan) -> list[Change]:
        if self._slots:
            for slot in plan.released.tolist():
                self._slots.pop(slot, None)
        for a in plan.admitted if self._asked else ():
            if (found := self._asked.get(a.request_id)) is not None:
                self._slots[a.slot] = a.request_id, a.sampler.num_prompt, found
        return []

    def logits(self, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        """Change the rows of requests with functions."""
        if not self._slots:
            return
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if slot in self._slots:
                request_id, num_prompt, processors = self._slots[slot]
                ids = self._history[slot, :position].tolist()
                try:
                    changed = logits[row].clone()
                    for processor in processors:
                        changed = _call(processor, ids[:num_prompt], ids[num_prompt:], changed)
                    logits[row] = changed
                except Exception:  # a fault of the caller's function: the other requests go on
                    LOG.exception("a logits processor of request %s failed; the others go on", request_id)
                    logits[row] = float("nan")


def _call(processor: Any, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Call a function of (output ids, logits) or (prompt ids, output ids, logits), and return its logits [V]."""
    given = partial(processor, prompt) if len(inspect.signature(processor).parameters) == 3 else processor
    changed = given(output, logits)
    if not isinstance(changed, Tensor) or changed.shape != logits.shape:
        raise TypeError(f"it returned {type(changed).__name__}: it must return logits of shape {list(logits.shape)}")
    return changed
