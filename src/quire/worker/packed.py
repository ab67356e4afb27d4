"""A plan as one packed int32 buffer for the device: the step's sequences and what changes in the slot tables.

The layout is described in `quire.kernels.step`. Buffers are pinned and used in turn, so that the next step can be
written while the device still reads the last one.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, SAMPLE, StepPlan
from quire.kernels.step import HEADER, NUM_RUNS, NUM_SAMPLES, NUM_SEQS, NUM_TOKENS, RUN_WORDS, RUNS_AT

WORDS = 4 << 20  # of a buffer: 16 MiB
Change = tuple[int, I32]  # device address, the words that go there


@dataclass
class _Staging:
    """A pinned buffer, its numpy view, and what says that a GPU has read it."""

    buffer: Tensor
    words: I32
    read: torch.cuda.Event | None


class PackedSteps:
    """Writes steps for sequences of at most `max_seqs` into the device buffer `device` [WORDS] int32.

    slots, starts, samples, shared   views of the device buffer: [max_seqs], [max_seqs + 1], [max_seqs] and
                                     [shared_words] int32
    """

    def __init__(
        self, max_seqs: int, dummy_slot: int, device: torch.device, depth: int, *, shared_words: int = 0,
        words: int = WORDS,
    ) -> None:  # fmt: skip
        self.device = torch.zeros(words, dtype=torch.int32, device=device)
        self.max_seqs = max_seqs
        self._dummy = dummy_slot
        self._fixed = HEADER + 3 * max_seqs + 1 + shared_words
        assert words >= self._fixed + 4 + RUN_WORDS, "a buffer holds a step without changes and one run"
        pinned = device.type == "cuda"
        self._ring: deque[_Staging] = deque()
        for _ in range(depth + 2):
            buffer = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
            self._ring.append(_Staging(buffer, buffer.numpy(), torch.cuda.Event() if pinned else None))
        self.slots, self.starts, _samples, self.shared = torch.split(
            self.device[HEADER : self._fixed], [max_seqs, max_seqs + 1, max_seqs, shared_words]
        )

    def upload(self, plan: StepPlan | None, changes: list[Change], shared: I32 | None = None) -> list[Change]:
        """Send a step, or changes alone (None), in one copy; returns the changes that did not fit.

        What is left must be sent before the step is: call with None until nothing is.
        """
        staging = self._next()
        words = staging.words
        runs, left = self._runs(changes)
        if left and plan is not None:
            return changes
        if plan is None:
            words[:HEADER] = 0
        else:
            self._write_step(words, plan)
            if shared is not None:
                words[self._fixed - len(self.shared) :][: len(shared)] = shared
        words[NUM_RUNS], words[RUNS_AT] = len(runs), self._fixed
        at = self._fixed + 4 * len(runs)
        if runs:
            table = words[self._fixed : at].reshape(-1, 4)
            table[:, :2] = np.array([address for address, _ in runs], np.int64).view(np.int32).reshape(-1, 2)
            for row, (_, data) in zip(table, runs, strict=True):
                row[2:] = len(data), at
                words[at : at + len(data)] = data
                at += len(data)
        self.device[:at].copy_(staging.buffer[:at], non_blocking=True)
        if staging.read is not None:
            staging.read.record()
        return left

    def _next(self) -> _Staging:
        """The buffer that was sent longest ago; waits only when the device is a whole ring behind."""
        staging = self._ring.popleft()
        self._ring.append(staging)
        if staging.read is not None:
            staging.read.synchronize()
        return staging

    def _runs(self, changes: list[Change]) -> tuple[list[Change], list[Change]]:
        """As many changes as fit, in runs; and the others."""
        room = len(self.device) - self._fixed
        runs: list[Change] = []
        for i, (address, data) in enumerate(changes):
            count = -(-len(data) // RUN_WORDS)
            room -= 4 * count + len(data)
            if room < 0:
                if not runs:
                    half = len(data) // 2
                    rest = [(address, data[:half]), (address + 4 * half, data[half:]), *changes[1:]]
                    return self._runs(rest)
                return runs, changes[i:]
            runs += [(address + 4 * at, data[at : at + RUN_WORDS]) for at in range(0, len(data), RUN_WORDS)]
        return runs, []

    def _write_step(self, words: I32, plan: StepPlan) -> None:
        count, size = len(plan.slots), self.max_seqs
        slots, starts = words[HEADER : HEADER + size], words[HEADER + size : HEADER + 2 * size + 1]
        samples = words[HEADER + 2 * size + 1 :]
        slots[:count] = plan.slots
        slots[count:] = self._dummy
        starts[0] = 0
        np.cumsum(plan.num_tokens, out=starts[1 : count + 1])
        starts[count + 1 :] = starts[count]
        sampled = np.flatnonzero(plan.outputs & SAMPLE)
        samples[: len(sampled)] = sampled
        words[NUM_SEQS], words[NUM_TOKENS], words[NUM_SAMPLES] = count, starts[count], len(sampled)
