"""What crosses between the host and the device in a step: the plan and changes of tables down, tokens back up.

A change of a table is (table, offset, words) until an implementation writes it: in place, here, or packed into a buffer
that a kernel distributes (`packed.py`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, SAMPLE, StepPlan
from quire.kernels.step import HEADER, NUM_SAMPLES, NUM_SEQS, NUM_TOKENS, StepWords, fixed_words

SHARED_GROUPS = 8  # of decodes with a common prefix, in one step


class Change(NamedTuple):
    """`words` belong at `offset`, counted in int32 words, of a contiguous table of any type."""

    table: Tensor
    offset: int
    words: I32


class Upload(Protocol):
    """The way of a step's words to the device, and of its tokens back.

    step     of the plan that was sent last
    shared   the step's decodes read a common prefix once: `step.shared` says which
    timed    the host is never ahead of the device, so that the host's clock measures a step
    """

    step: StepWords
    shared: bool
    timed: bool

    def send(self, plan: StepPlan, changes: list[Change]) -> None:
        """Bring a step and the changes before it to the device."""

    def apply(self) -> None:
        """Launch what of the changes is not in the tables yet; the first launch of a step."""

    def fetch(self, out: Tensor) -> Callable[[], I32]:
        """Launch the way back of `out`, which the next step writes; what is returned waits for it."""


class InPlaceUpload:
    """Writes step and changes where they belong, when they are sent: each step is over before the next is sent."""

    shared, timed = False, True

    def __init__(self, max_seqs: int, dummy_slot: int, device: torch.device) -> None:
        host = torch.zeros(fixed_words(max_seqs), dtype=torch.int32)
        self._host, self._words, self._dummy = host, host.numpy(), dummy_slot
        self.step = StepWords.view(host if device.type == "cpu" else host.to(device), max_seqs)

    def send(self, plan: StepPlan, changes: list[Change]) -> None:
        """See `Upload`."""
        write_step(self._words, plan, self.step, self._dummy)
        if self.step.words is not self._host:
            self.step.words.copy_(self._host)
        self.write(changes)

    @staticmethod
    def write(changes: list[Change]) -> None:
        """Write changes to their tables."""
        for table, offset, words in changes:
            if table.is_cpu:
                table.numpy().reshape(-1).view(np.int32)[offset : offset + len(words)] = words
            else:
                table.view(-1).view(torch.int32)[offset : offset + len(words)].copy_(torch.from_numpy(words))

    def apply(self) -> None:
        """Nothing is left to do."""

    def fetch(self, out: Tensor) -> Callable[[], I32]:
        """See `Upload`; waits at once."""
        found: I32 = out.cpu().numpy().copy()
        return lambda: found


def write_step(words: I32, plan: StepPlan, step: StepWords, dummy: int) -> None:
    """Write header, slots, starts and samples of a plan to `words`, and its sizes to `step`."""
    count, size = len(plan.slots), step.max_seqs
    slots, starts = words[HEADER : HEADER + size], words[HEADER + size : HEADER + 2 * size + 1]
    slots[:count] = plan.slots
    slots[count:] = dummy
    starts[0] = 0
    np.cumsum(plan.num_tokens, out=starts[1 : count + 1])
    starts[count + 1 :] = starts[count]
    sampled = np.flatnonzero(plan.outputs & SAMPLE)
    samples = words[HEADER + 2 * size + 1 :]
    samples[: len(sampled)] = sampled
    step.num_seqs, step.num_tokens, step.num_samples = count, int(starts[count]), len(sampled)
    words[NUM_SEQS], words[NUM_TOKENS], words[NUM_SAMPLES] = count, step.num_tokens, len(sampled)
