"""N-gram drafts in Triton, a program for each sequence; contract: see `quire.kernels.ngram`."""

from __future__ import annotations

from quire.kernels.step import HEADER, NUM_DECODES, StepWords, Tables
from quire.kernels.triton_runtime import jit, tl

BLOCK = 1024  # positions that a program compares at a time


def propose(step: StepWords, tables: Tables, shortest: int, longest: int) -> None:
    """Write the drafts of a step's decodes to the token history. See `quire.kernels.ngram`."""
    _propose_kernel[(step.max_seqs,)](
        step.words,
        tables.computed,
        tables.hosted,
        tables.history,
        tables.history.stride(0),
        shortest,
        longest,
        step.max_seqs,
        BLOCK,
        HEADER,
        NUM_DECODES,
        num_warps=4,
    )


@jit
def _propose_kernel(
    packed,
    computed,
    hosted,
    history,
    history_stride,
    shortest,
    LONGEST: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    NUM_DECODES: tl.constexpr,
):
    """Write the drafts of a decode. Grid (MAX_SEQS,).

    packed              [.] int32, see `quire.kernels.step`
    computed, hosted, history   `Tables` by slot; drafts are written to `history`
    history_stride      elements from slot to slot in `history`
    shortest, LONGEST   numbers of tokens of an n-gram
    BLOCK               positions that are compared at a time
    """
    seq = tl.program_id(0)
    if seq >= tl.load(packed + NUM_DECODES):
        return
    starts = packed + HEADER + MAX_SEQS
    count = tl.load(starts + seq + 1) - tl.load(starts + seq) - 1
    if count <= 0:
        return
    slot = tl.load(packed + HEADER + seq).to(tl.int64)
    if tl.load(hosted + slot) != 0:
        return
    known = tl.load(computed + slot).to(tl.int32) + 1
    tokens = history + slot * history_stride
    best = tl.zeros([BLOCK], tl.int64)  # size of the longest match, then how early it ends
    lanes = tl.arange(0, BLOCK)
    at = 0
    while at < known:
        end = at + lanes  # an occurrence ends before this position, which has the first draft
        matches = (end > 0) & (end < known)
        size = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(LONGEST):
            matches = matches & (end > i)
            own = tl.load(tokens + known - 1 - i, mask=known > i, other=-2)
            matches = matches & (tl.load(tokens + end - 1 - i, mask=matches, other=-3) == own)
            size += matches.to(tl.int32)
        key = size.to(tl.int64) * 0x40000000 + 0x3FFFFFFF - end
        best = tl.maximum(best, tl.where((size >= shortest) & (size > 0), key, 0))
        at += BLOCK
    key = tl.max(best, 0)
    found = 0x3FFFFFFF - (key & 0x3FFFFFFF).to(tl.int32)
    first = 0
    while first < count:
        draft = first + lanes
        mine = draft < count
        source = found + draft % tl.maximum(known - found, 1)
        token = tl.load(tokens + source, mask=mine & (key > 0), other=-1)
        tl.store(tokens + known + draft, token, mask=mine)
        first += BLOCK
