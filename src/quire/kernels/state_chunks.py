"""Chunks of prompts for recurrent layers on a GPU: parts of 64 tokens that kernels compute by products of matrices.

Chunks are cut at multiples of 64 of the position, so the results of a token depend little on how its prompt was divided
into steps. A kernel of the step's first layer lists them; all layers read the list. Grids depend on the sizes of the
step's buffers alone: programs take chunks, or sequences, in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.states import StateMeta
from quire.kernels.triton_runtime import jit, tl

CHUNK = 64  # tokens
WIDTHS = (64, 256, 1024, 8192)  # the plan's kernel is compiled for at most so many slots
SOME, SOME_CHUNKS = 32, 64  # programs take sequences and chunks in turn when there may be more than so many


class Chunks(NamedTuple):
    """Chunks of prompts, on the device.

    counts      [2] int32: chunks, and sequences that have some
    chunks      [., 4] int32: first row, rows, sequence, rows of the sequence before it in the step
    sequences   [., 4] int32: sequence, its first chunk, number of its chunks, 0
    """

    counts: Tensor
    chunks: Tensor
    sequences: Tensor

    @property
    def chunk_programs(self) -> int:
        """Programs that take chunks in turn."""
        return _programs(len(self.chunks), SOME_CHUNKS)

    @property
    def seq_programs(self) -> int:
        """Programs that take sequences in turn."""
        return _programs(len(self.sequences), SOME)


def padded(size: int) -> int:
    """Return the next power of two that a product of matrices can have as a size."""
    return max(16, 1 << (size - 1).bit_length())


def planned(meta: StateMeta, rows: int, limit: int) -> Chunks:
    """Return the chunks of the sequences of more than `limit` rows, in a step of `rows` rows.

    The first layer of a step launches the kernel that lists them.
    """
    key, num_seqs = ("chunks", rows, limit), len(meta.slots)
    found = meta.plans.get(key)
    if not isinstance(found, Chunks):
        most = max(1, min(num_seqs, rows // (limit + 1)))
        sizes = (2, 4 * (rows // CHUNK + 2 * most), 4 * most)  # at most rows // CHUNK + 2 chunks of a sequence
        counts, chunks, sequences = (torch.empty(size, dtype=torch.int32, device=meta.slots.device) for size in sizes)
        meta.plans[key] = found = Chunks(counts, chunks.view(-1, 4), sequences.view(-1, 4))
        width = next(one for one in WIDTHS if one >= max(num_seqs, len(meta.kept_at)))  # one kernel for all steps
        _plan_kernel[(1,)](meta.query_start, meta.seq_lens, *found, num_seqs, limit, CHUNK=CHUNK, WIDTH=width)
    return found


def _programs(most: int, some: int) -> int:
    """Return the number of programs for at most so many units of work, of which most may be empty."""
    return min(most, some + most // 4)


@jit
def copied_behind(kept_at, slot, copy, past, end, CHUNK: tl.constexpr):
    """Return the chunk before which a scan of a sequence writes a copy; -1: no copy in this step.

    A copy of the sequence's end is written behind all chunks. Any other copy is written before the chunk in which its
    length lies, and another kernel goes on from there.

    past, end   length of the sequence before and after the step
    """
    length = tl.load(kept_at + 2 * slot + copy)
    behind = tl.where(length == end, (end + CHUNK - 1) // CHUNK, length // CHUNK)
    return tl.where((length > past) & (length <= end), behind, -1)


@jit(do_not_specialize=["num_seqs", "limit"])
def _plan_kernel(
    query_start, seq_lens, counts, chunks, sequences, num_seqs, limit, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):
    """List the chunks of the sequences of more than `limit` rows. Grid (1,). WIDTH: at least num_seqs."""
    s = tl.arange(0, WIDTH)
    first = tl.load(query_start + s, mask=s < num_seqs, other=0)
    rows = tl.load(query_start + s + 1, mask=s < num_seqs, other=0) - first
    end = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    past, prompt = end - rows, rows > limit
    before = past // CHUNK
    count = tl.where(prompt, (end + CHUNK - 1) // CHUNK - before, 0)
    at = tl.cumsum(count, 0) - count
    place = sequences + 4 * (tl.cumsum(prompt.to(tl.int32), 0) - 1)
    tl.store(place, s, mask=prompt)
    tl.store(place + 1, at, mask=prompt)
    tl.store(place + 2, count, mask=prompt)
    tl.store(counts, tl.sum(count, 0))
    tl.store(counts + 1, tl.sum(prompt.to(tl.int32), 0))
    for n in range(0, tl.max(count, 0)):
        own, place = n < count, chunks + 4 * (at + n)
        start = tl.maximum(past, (before + n) * CHUNK)
        tl.store(place, first + start - past, mask=own)
        tl.store(place + 1, tl.minimum(end, (before + n + 1) * CHUNK) - start, mask=own)
        tl.store(place + 2, s, mask=own)
        tl.store(place + 3, start - past, mask=own)
