"""The upload of a CUDA device: one packed int32 buffer per step holds the step and its table changes.

`quire.kernels.step` describes the layout. Buffers are pinned and used in turn (a ring): the host writes the next step
while the device reads the last one. Tokens come back in a second ring.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.attention import SharedBlocks
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.step import HEADER, NUM_RUNS, RUN_WORDS, RUNS_AT, StepWords, fixed_words
from quire.kernels.step import triton as operations
from quire.kernels.step.upload import SHARED_GROUPS, Change, Upload, write_step

WORDS = 4 << 20  # int32 words of a buffer: 16 MiB


@dataclass
class _Pinned:
    """A pinned buffer, its numpy view, and the event `copied` after its last copy (None without a GPU)."""

    buffer: Tensor
    words: I32
    copied: torch.cuda.Event | None

    @staticmethod
    def make(*shape: int, gpu: bool) -> "_Pinned":
        buffer = torch.zeros(shape, dtype=torch.int32, pin_memory=gpu)
        return _Pinned(buffer, buffer.numpy(), torch.cuda.Event() if gpu else None)

    def wait(self) -> I32:
        """Wait until the last copy from or to the buffer has ended. Return the buffer as a NumPy array of int32."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.words


class PackedUpload(Upload):
    """The upload of a GPU with Triton: sends a step and its table changes in one copy.

    The copy goes to the device buffer `step.words`; a kernel writes the table changes to the tables.

    max_seqs     most sequences of a step
    dummy_slot   slot of the padding sequences
    depth        most steps that may be launched and not collected yet
    max_rows     most rows that a step samples
    decode_len   most tokens of a decode
    words        size of the buffer, in int32 words
    by_kernel    kernels make the copies, which then do not wait for the driver's copies on other streams; slower alone
    """

    def __init__(
        self,
        max_seqs: int,
        dummy_slot: int,
        device: torch.device,
        depth: int,
        *,
        max_rows: int = 0,
        decode_len: int = 1,
        words: int = WORDS,
        by_kernel: bool = False,
    ) -> None:
        gpu, shared_words = device.type == "cuda", SharedBlocks.words(SHARED_GROUPS, max_seqs)
        self.step = StepWords.view(torch.zeros(words, dtype=torch.int32, device=device), max_seqs, shared_words)
        self.shared = False
        self._move = operations.copy_words if by_kernel else _copy_words
        self._decode_len = decode_len
        self._dummy, self._fixed = dummy_slot, fixed_words(max_seqs, shared_words)
        assert words >= self._fixed + 4 + RUN_WORDS, "a buffer holds a step without changes and one run"
        self._ring = deque(_Pinned.make(words, gpu=gpu) for _ in range(depth + 2))
        self._results = deque(_Pinned.make(3, max_rows, gpu=gpu) for _ in range(depth + 1))

    def send(self, plan: StepPlan, changes: list[Change]) -> None:
        """Send a step and its table changes in one copy, or in more if the changes do not fit into one buffer."""
        shared = self._pack_shared(plan)
        self.shared = shared is not None
        while left := self._copy(plan, changes, shared):
            left = changes = self._copy(None, left)
            self.apply()

    def apply(self) -> None:
        operations.apply_runs(self.step.words)

    def fetch(self, out: Tensor) -> Callable[[], I32]:
        pinned = self._results[0]
        self._results.rotate(-1)
        self._move(out, pinned.buffer)
        if pinned.copied is not None:
            pinned.copied.record()
        return pinned.wait

    def _pack_shared(self, plan: StepPlan) -> I32 | None:
        """Return the words that describe shared prefixes to the kernels; None if no group has two decodes."""
        if not plan.shared:
            return None
        members = np.zeros(self._dummy + 1, bool)
        members[plan.slots[: plan.num_decodes]] = True
        if not any(members[group.slots].sum() > 1 for group in plan.shared):
            return None
        return pack_shared(
            plan.shared,
            plan.slots,
            plan.num_tokens,
            num_groups=SHARED_GROUPS,
            most_seqs=self.step.max_seqs,
            decode_len=self._decode_len,
        )

    def _copy(self, plan: StepPlan | None, changes: list[Change], shared: I32 | None = None) -> list[Change]:
        """Send a step with its changes (plan None: changes alone) in one copy; return the changes that did not fit.

        If not all changes fit, the step is not sent: the caller first sends the changes alone.
        """
        staging = self._ring.popleft()
        self._ring.append(staging)
        words = staging.wait()  # blocks only when the device is a whole ring behind
        runs, left = self._runs(changes)
        if left and plan is not None:
            return changes
        if plan is None:
            words[:HEADER] = 0
        else:
            write_step(words, plan, self.step, self._dummy)
            if shared is not None:
                words[self._fixed - len(self.step.shared) :][: len(shared)] = shared
        words[NUM_RUNS], words[RUNS_AT] = len(runs), self._fixed
        at = self._fixed + 4 * len(runs)
        if runs:
            table = words[self._fixed : at].reshape(-1, 4)
            addresses = np.array([target.data_ptr() + 4 * offset for target, offset, _ in runs], np.int64)
            table[:, :2] = addresses.view(np.int32).reshape(-1, 2)
            for row, (_, _, data) in zip(table, runs, strict=True):
                row[2:] = len(data), at
                words[at : at + len(data)] = data
                at += len(data)
        self._move(staging.buffer[:at], self.step.words[:at])
        if staging.copied is not None:
            staging.copied.record()
        return left

    def _runs(self, changes: list[Change]) -> tuple[list[Change], list[Change]]:
        """Split changes into (runs that fit into the buffer, changes that do not); a run has <= RUN_WORDS words."""
        room = len(self.step.words) - self._fixed
        runs: list[Change] = []
        for i, change in enumerate(changes):
            table, offset, data = change
            size = len(data)
            room -= 4 * -(-size // RUN_WORDS) + size
            if room < 0:
                if not runs:
                    half = size // 2
                    rest = [Change(table, offset, data[:half]), Change(table, offset + half, data[half:]), *changes[1:]]
                    return self._runs(rest)
                return runs, changes[i:]
            runs += (
                [change]
                if size <= RUN_WORDS
                else [Change(table, offset + at, data[at : at + RUN_WORDS]) for at in range(0, size, RUN_WORDS)]
            )
        return runs, []


def _copy_words(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
