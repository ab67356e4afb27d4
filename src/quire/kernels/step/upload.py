"""The upload of a step: the plan and table changes to the device, sampled tokens back to the host.

A table change is a value (table, offset, words). `InPlaceUpload` writes it directly; `packed.py` packs all changes into
one buffer, and a kernel writes them to the tables.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, SAMPLE, StepPlan
from quire.kernels.step import HEADER, NUM_ROWS, NUM_SEQS, StepWords, fixed_words

SHARED_GROUPS = 8  # groups of decodes with a common prefix in a step, at most


class Change(NamedTuple):
    """A change of a device table: `words` to write at `offset`, in int32 words. The table may have any dtype."""

    table: Tensor
    offset: int
    words: I32


class Upload(Protocol):
    """Copies a step's inputs and table changes to the device, and its sampled tokens to the host.

    step     inputs of the step sent last, as int32 words on the device
    shared   True: decodes of this step share a prefix, and attention reads it only once; see `step.shared`
    """

    step: StepWords
    shared: bool

    def send(self, plan: StepPlan, changes: list[Change]) -> None:
        """Send a step, and the table changes that come before its forward pass, to the device."""

    def apply(self) -> None:
        """Launch the kernel that writes the table changes that `send` sent. It is the first launch of a step."""

    def fetch(self, out: Tensor) -> Callable[[], I32]:
        """Launch the copy of `out` to the host. Return a function that waits for the copy and returns it.

        Call `fetch` before the next step overwrites `out`.
        """


class InPlaceUpload(Upload):
    """The upload of a CPU, or of a GPU without Triton: copies each input and table change to its tensor directly.

    Each step ends before the next one is sent.
    """

    shared = False

    def __init__(self, max_seqs: int, dummy_slot: int, device: torch.device) -> None:
        host = torch.zeros(fixed_words(max_seqs), dtype=torch.int32)
        self._host, self._words, self._dummy = host, host.numpy(), dummy_slot
        self.step = StepWords.view(host if device.type == "cpu" else host.to(device), max_seqs)

    def send(self, plan: StepPlan, changes: list[Change]) -> None:
        write_step(self._words, plan, self.step, self._dummy)
        if self.step.words is not self._host:
            self.step.words.copy_(self._host)
        self.write(changes)

    @staticmethod
    def write(changes: list[Change]) -> None:
        """Write changes to their tables on the device."""
        for table, offset, words in changes:
            if table.is_cpu:
                table.numpy().reshape(-1).view(np.int32)[offset : offset + len(words)] = words
            else:
                table.view(-1).view(torch.int32)[offset : offset + len(words)].copy_(torch.from_numpy(words))

    def apply(self) -> None:
        """Do nothing: `send` has written the changes."""

    def fetch(self, out: Tensor) -> Callable[[], I32]:
        found: I32 = out.cpu().numpy().copy()
        return lambda: found


def write_step(words: I32, plan: StepPlan, step: StepWords, dummy: int) -> None:
    """Write a plan to `words`, in the layout that `quire.kernels.step` describes, and its sizes to `step`.

    dummy   slot of the padding sequences
    """
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
    step.num_decodes = plan.num_decodes
    step.num_rows = int(starts[plan.num_decodes]) + len(sampled) - plan.num_decodes
    words[NUM_SEQS : NUM_ROWS + 1] = count, step.num_tokens, len(sampled), step.num_decodes, step.num_rows
