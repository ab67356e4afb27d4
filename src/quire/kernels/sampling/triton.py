"""Sampling on a GPU without a word to the host: the launches, and the memory that they share.

Every function may be captured in a CUDA graph: sizes come from shapes, addresses stay, nothing is allocated. Tokens
equal the CPU's for the same logits, but for what depends on the last unit of a logarithm, an exponential or a float32
softmax: see noise.py and triton_select.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.sampling.triton_draw import GROUP, pick_kernel, stream_kernel
from quire.kernels.sampling.triton_edits import edit_kernel, penalize_kernel, prepare_kernel
from quire.kernels.sampling.triton_select import many_kernel, select_kernel
from quire.kernels.triton_runtime import INTERPRETED, triton

PARTS = 256  # at most so many programs read one row
PROGRAMS = 4096  # rows are cut until there are about so many
TILE = 1024  # ids per pass of a greedy or plain program of 4 warps
WIDE = 2048  # ids per pass of a filtering program of 4 warps, and per sum of weights
FEW, LIST = 512, 16_384  # see triton_select.py
SELECT_WARPS, SELECT_TILE = 4, 1024  # three programs fit a multiprocessor: 256 rows run at once
MANY_TILE = 8192


@dataclass(frozen=True)
class Rows:
    """Whose logits they are, on the device: row -> slot -> parameters.

    slots, positions   [R] int: a row's slot and the position of the token that is drawn
    table              [S, ROW_WORDS] int32, see triton_rows.py;  history  [S, L] int32
    masks              [M, ceil(V / 32)] int32, see `Executor.release`;  places  [R] int32: which of them is the row's
                       (-1: none), read where the slot says that there may be one
    """

    slots: Tensor
    positions: Tensor
    table: Tensor
    history: Tensor
    places: Tensor
    masks: Tensor


@dataclass(frozen=True)
class Scratch:
    """Memory between kernels, for at most R rows of V logits. The kernels leave what must be 0 as 0.

    partial  [R, PARTS] int64 packed keys;  counters, broken  [R] int32
    group_max, tile_mass   float32 per GROUP and per WIDE ids;  group_list  [R, G] int32
    values, ids, before    the candidates: [R, LIST] float32, [R, LIST] int32, [R, FEW] float64
    pending, masses, peaks [R] int32, float64, float32: what is left for the kernel of long lists
    edited, tally          [R, V] float32 and int32: by far the most
    """

    vocab: int
    partial: Tensor
    counters: Tensor
    broken: Tensor
    group_max: Tensor
    tile_mass: Tensor
    group_list: Tensor
    values: Tensor
    ids: Tensor
    before: Tensor
    pending: Tensor
    masses: Tensor
    peaks: Tensor
    edited: Tensor
    tally: Tensor

    @staticmethod
    def make(rows: int, vocab: int, device: torch.device, *, few: int = FEW, longest: int = LIST) -> Scratch:
        """For at most `rows` rows. few, longest: powers of two; tests make them small."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        longest = min(longest, triton.next_power_of_2(vocab))
        tiles = triton.cdiv(vocab, WIDE)
        return Scratch(
            vocab=vocab,
            partial=zeros(rows, PARTS, dtype=torch.int64),
            counters=zeros(rows),
            broken=zeros(rows),
            group_max=zeros(rows, triton.cdiv(vocab, GROUP), dtype=torch.float32),
            tile_mass=zeros(rows, tiles, dtype=torch.float32),
            group_list=zeros(rows, triton.next_power_of_2(tiles) * (WIDE // GROUP)),
            values=zeros(rows, longest, dtype=torch.float32),
            ids=zeros(rows, longest),
            before=zeros(rows, few, dtype=torch.float64),
            pending=zeros(rows),
            masses=zeros(rows, dtype=torch.float64),
            peaks=zeros(rows, dtype=torch.float32),
            edited=zeros(rows, vocab, dtype=torch.float32),
            tally=zeros(rows, vocab),
        )


def pick(logits: Tensor, rows: Rows, scratch: Scratch, tokens: Tensor, codes: Tensor, *, noise: bool) -> None:
    """Greedy tokens of logits [R, V]; with noise plain ones for the rows that ask for it. Masks, filters are not read.

    tokens [R] int64 (0 where a row failed), codes [R] uint8: 0, 1 (NaN or +inf) or 2 (nothing but -inf).
    """
    count, vocab = logits.shape
    parts, size = cut(count, vocab, TILE)
    pick_kernel[(parts, count)](
        logits, rows.slots, rows.positions, rows.table, scratch.partial, scratch.counters, tokens, codes,
        vocab, logits.stride(0), size, NOISE=noise, TILE=TILE, PARTS=PARTS, NATIVE=not INTERPRETED, num_warps=4,
    )  # fmt: skip


def filtered(logits: Tensor, rows: Rows, scratch: Scratch, tokens: Tensor, codes: Tensor, *, rewritten: bool) -> None:
    """As `pick`, for rows of every kind; `rewritten`: after `rewrite`, whose copies are read where a row has one."""
    count, vocab = logits.shape
    parts, size = cut(count, vocab, WIDE)
    groups, tiles = scratch.group_max.shape[1], scratch.tile_mass.shape[1]
    edited = scratch.edited if rewritten else logits
    stream_kernel[(parts, count)](
        logits, edited, rows.slots, rows.positions, rows.table, scratch.partial, scratch.group_max, scratch.tile_mass,
        vocab, logits.stride(0), size, groups, tiles, EDITED=rewritten, GROUP=GROUP, TILE=TILE, WIDE=WIDE,
        PARTS=PARTS, NATIVE=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    few, longest = scratch.before.shape[1], scratch.values.shape[1]
    select_kernel[(count,)](
        logits, edited, scratch.broken, rows.slots, rows.positions, rows.table, scratch.partial, scratch.group_max,
        scratch.tile_mass, scratch.group_list, scratch.values, scratch.ids, scratch.before, scratch.pending,
        scratch.masses, scratch.peaks, tokens, codes, vocab, logits.stride(0), groups, tiles, size,
        EDITED=rewritten, GROUP=GROUP, GROUPS=scratch.group_list.shape[1], WIDE=WIDE,
        TILES=triton.next_power_of_2(tiles), FEW=few, LIST=longest, LANES=min(SELECT_WARPS * 32, few),
        TILE=SELECT_TILE, PARTS=PARTS, num_warps=SELECT_WARPS,
    )  # fmt: skip
    many_kernel[(count,)](
        logits, edited, rows.slots, rows.positions, rows.table, scratch.pending, scratch.masses, scratch.peaks,
        scratch.values, scratch.ids, tokens, codes, vocab, logits.stride(0), EDITED=rewritten, LIST=longest,
        TILE=MANY_TILE, NOISE_TILE=2048, num_warps=16,
    )  # fmt: skip


def rewrite(logits: Tensor, rows: Rows, scratch: Scratch) -> None:
    """Copy the rows that have masks, bias or penalties, and apply these; logits [R, V] are not touched."""
    count, vocab = logits.shape
    parts, size = cut(count, vocab, TILE)
    length = rows.history.stride(0)
    prepare_kernel[(parts, count)](
        logits, scratch.edited, scratch.tally, scratch.broken, rows.history, rows.slots, rows.positions, rows.table,
        rows.places, rows.masks, vocab, logits.stride(0), length, rows.masks.stride(0), size, TILE=TILE, num_warps=4,
    )  # fmt: skip
    edit_kernel[(count,)](
        logits, scratch.edited, rows.history, rows.slots, rows.positions, rows.table, rows.places, rows.masks, vocab,
        logits.stride(0), length, rows.masks.stride(0), TILE=TILE, num_warps=4,
    )  # fmt: skip
    penalize_kernel[(min(parts, 32), count)](
        scratch.edited, scratch.tally, rows.history, rows.slots, rows.positions, rows.table, vocab, length,
        TILE=TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def cut(rows: int, vocab: int, tile: int) -> tuple[int, int]:
    """How many programs share a row, and how many ids each reads: a multiple of `tile`."""
    wanted = min(PARTS, max(1, PROGRAMS // rows))
    size = triton.cdiv(triton.cdiv(vocab, wanted), tile) * tile
    return triton.cdiv(vocab, size), size
