"""The plan of a step's attention on a CPU: a list of calls, made once per step and used by every layer.

Decodes share calls. Their full blocks, sorted by id, form runs of (nearly) consecutive blocks. A run is one strided
view of the arena, which is not copied: each block meets the query of the sequence that owns it. Scattered blocks, and
last blocks that are partly filled, are copied together. Every block gives an output and a log-sum-exp; `Merge` lists
those of a sequence. Numpy and index tensors only: no keys, no values.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, as_list

MAX_GAP = 1  # unowned blocks a run may span: attending to one costs about as much as copying an owned one
MIN_RUN = 4  # shorter runs are copied together when there are several


@dataclass(frozen=True)
class Run:
    """A call of decode attention on blocks start .. stop - 1 of the KV cache, which are read in place as one view.

    owners   [n]: for each block, the index of the decode that has it in its context; 0 for a block of no decode
    """

    start: int
    stop: int
    owners: Tensor


@dataclass(frozen=True)
class Tail:
    """A call of decode attention on the first `num_tokens` tokens of `block`, in place; for steps with one decode."""

    block: int
    num_tokens: int


@dataclass(frozen=True)
class Copied:
    """A call of decode attention on n blocks that are copied into scratch. The last p of them may be partly filled.

    blocks   [n]: block ids
    owners   [n]: for each block, the index of the decode that has it in its context
    keep     dtype -> bit masks [p, 1, block_size, 1] for keys and values: -1 for tokens of the context, 0 past its end.
             A bitwise and is 14 times as fast as masked_fill_ (10 us, not 141, at 8 blocks of [8, 32, 128] bfloat16)
    mask     [n, 1, 1, block_size] added to the scores: 0 or -inf; None, and `keep` empty, if every block is full
    """

    blocks: Tensor
    owners: Tensor
    keep: dict[torch.dtype, Tensor]
    mask: Tensor | None


@dataclass(frozen=True)
class Merge:
    """Indices of block outputs that are merged, by their log-sum-exps, into the attention outputs of R decodes.

    rows    [R] indices of the decodes
    parts   [R, P] indices of the outputs of each decode's blocks; None: a single decode has all outputs, in order
    dead    [R, P] True for padding of `parts`; None: no padding
    """

    rows: Tensor
    parts: Tensor | None
    dead: Tensor | None


@dataclass(frozen=True)
class DecodePlan:
    """Attention calls for the decodes of a step: all sequences with one query row.

    rows     [S] index of each decode's query row in the step; None: the step has only decodes
    calls    calls of attention; each gives an output for every block that it reads
    merges   merges of these block outputs into the outputs of the decodes
    """

    rows: Tensor | None
    calls: tuple[Run | Tail | Copied, ...]
    merges: tuple[Merge, ...]


@dataclass(frozen=True)
class ChunkPlan:
    """Rows, positions and blocks of a sequence with several query rows.

    sequence      index of the sequence in the step, and its row of the block tables
    first, last   its query rows are rows first .. last - 1 of the step
    past, total   the query rows are at positions past .. total - 1 of the context
    blocks        [n] int64 block ids of the context
    """

    sequence: int
    first: int
    last: int
    past: int
    total: int
    blocks: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of a step: calls for its decodes (None: no decodes), and its sequences with several query rows."""

    decode: DecodePlan | None
    chunks: tuple[ChunkPlan, ...]


def plan_step(meta: AttentionMeta, block_size: int) -> AttentionPlan:
    """Return the attention plan of a step. `meta.plans` keeps it, so that all layers share it."""
    known = meta.plans.get(block_size)
    if isinstance(known, AttentionPlan):
        return known
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    single = [s for s in range(len(lengths)) if starts[s + 1] - starts[s] == 1]
    chunks = tuple(
        plan_chunk(meta, s, starts[s], starts[s + 1], length, block_size)
        for s, length in enumerate(lengths)
        if starts[s + 1] - starts[s] > 1
    )
    decode = _plan_decode(single, starts, lengths, meta.block_tables, block_size) if single else None
    plan = AttentionPlan(decode, chunks)
    meta.plans[block_size] = plan
    return plan


def plan_chunk(meta: AttentionMeta, s: int, first: int, last: int, length: int, block_size: int) -> ChunkPlan:
    """Return the plan of the last rows of sequence `s`: rows first .. last - 1 of the step.

    length   context length of the sequence, these rows included
    """
    blocks = meta.block_tables[s, : -(-length // block_size)].long()
    return ChunkPlan(sequence=s, first=first, last=last, past=length - (last - first), total=length, blocks=blocks)


def _plan_decode(single: list[int], starts: list[int], lengths: list[int], tables: Tensor, size: int) -> DecodePlan:
    rows = None if single == list(range(starts[-1])) else torch.tensor([starts[s] for s in single])
    length = np.array([lengths[s] for s in single], np.int64)
    count = -(-length // size)
    owner = np.repeat(np.arange(len(single)), count)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    block = tables.numpy()[np.array(single)[owner], ordinal].astype(np.int64)
    valid = np.minimum(size, length[owner] - ordinal * size)
    calls, place, num_outputs = _cut(block, owner, valid, size, len(single))
    return DecodePlan(rows, calls, _merges(count, place, num_outputs))


def _cut(
    block: np.ndarray, owner: np.ndarray, valid: np.ndarray, size: int, num_rows: int
) -> tuple[tuple[Run | Tail | Copied, ...], np.ndarray, int]:
    """Return the calls, the index of each entry's output among all outputs, and the number of outputs.

    An entry is a pair (sequence, block): `block`, `owner` and `valid` (tokens) describe the entries. size: block size.
    """
    place = np.empty(len(block), np.int64)
    calls: list[Run | Tail | Copied] = []
    position = 0
    runs = _runs(block, np.flatnonzero(valid == size))
    short = [run for run in runs if len(run) < MIN_RUN]
    copied = [np.concatenate(short)] if len(short) > 1 else []
    for run in runs:
        if len(run) < MIN_RUN and len(short) > 1:
            continue
        first, last = int(block[run[0]]), int(block[run[-1]])
        owners = np.zeros(last - first + 1, np.int64)
        owners[block[run] - first] = owner[run]
        calls.append(Run(first, last + 1, torch.from_numpy(owners)))
        place[run] = position + block[run] - first
        position += len(owners)
    partial = np.flatnonzero(valid < size)
    if num_rows == 1 and len(partial):
        calls.append(Tail(int(block[partial[0]]), int(valid[partial[0]])))
        place[partial] = position
        position += 1
    elif len(partial):
        copied.append(partial)
    if copied:
        entries = np.concatenate(copied)
        calls.append(_copied(block[entries], owner[entries], valid[entries], size))
        place[entries] = position + np.arange(len(entries))
        position += len(entries)
    return tuple(calls), place, position


def _runs(block: np.ndarray, entries: np.ndarray) -> list[np.ndarray]:
    """Group entries into runs of increasing block ids. A block of several sequences appears in several runs."""
    runs: list[np.ndarray] = []
    entries = entries[np.argsort(block[entries], kind="stable")]
    while len(entries):
        again = np.r_[False, np.diff(block[entries]) == 0]
        once, entries = entries[~again], entries[again]
        runs += np.split(once, np.flatnonzero(np.diff(block[once]) > MAX_GAP + 1) + 1)
    return runs


def _copied(block: np.ndarray, owner: np.ndarray, valid: np.ndarray, size: int) -> Copied:
    blocks, owners = torch.from_numpy(block), torch.from_numpy(owner)
    if (valid == size).all():
        return Copied(blocks, owners, {}, None)
    empty = torch.from_numpy(np.arange(size)[None, :] >= valid[:, None])
    bits = empty[int(np.argmax(valid < size)) :].int().sub_(1)[:, None, :, None]
    mask = torch.zeros(empty.shape).masked_fill_(empty, float("-inf"))
    return Copied(blocks, owners, {torch.float32: bits, torch.bfloat16: bits.short()}, mask[:, None, None, :])


def _merges(count: np.ndarray, place: np.ndarray, num_outputs: int) -> tuple[Merge, ...]:
    """Group sequences whose block counts have the same bit length, so that padding at most doubles the work."""
    first = np.cumsum(count) - count
    if len(count) == 1 and (place == np.arange(len(place))).all() and num_outputs == len(place):
        return (Merge(torch.zeros(1, dtype=torch.int64), None, None),)
    widths = np.array([int(c).bit_length() for c in count])
    merges = []
    for width in np.unique(widths):
        rows = np.flatnonzero(widths == width)
        column = np.arange(count[rows].max())
        dead = column[None, :] >= count[rows][:, None]
        parts = place[np.where(dead, first[rows][:, None], first[rows][:, None] + column[None, :])]
        merges.append(
            Merge(torch.from_numpy(rows), torch.from_numpy(parts), torch.from_numpy(dead) if dead.any() else None)
        )
    return tuple(merges)
