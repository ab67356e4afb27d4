"""Sampling on a GPU without a word to the host: the launches, and the memory that they share.

Every batch may be captured in a CUDA graph: sizes come from shapes, addresses stay, nothing is allocated. Tokens
equal the CPU's for the same logits, but for what depends on the last unit of a logarithm, an exponential or a float32
softmax: see noise.py and triton_select.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling import Rows
from quire.kernels.sampling.rows import Mode
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


def operations(max_rows: int, vocab: int, device: torch.device) -> TritonSampling:
    """With all memory that batches of up to `max_rows` rows need."""
    return TritonSampling(max_rows, vocab, device)


class TritonSampling:
    """See `SamplerOperations`; tokens, codes [max_rows] and masks stay where they are.

    Rows beyond the live ones are padding: they belong to a slot whose row is all zeros, and are sampled greedily for
    nothing. The masks lie behind each other, places first, so that one copy brings them.
    """

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        width = -(-vocab // 32)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.codes = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        self.scratch = Scratch.make(max_rows, vocab, device)
        self._taken = torch.full((max_rows * (1 + width),), -1, dtype=torch.int32, device=device)
        self._places, self._masks = self._taken[:max_rows], self._taken[max_rows:].view(max_rows, width)

    def take_masks(self, places: I32, masks: I32) -> None:
        """See `SamplerOperations`. PyTorch keeps the pinned buffer until it was read."""
        count = len(self._places)
        # Filled by NumPy: PyTorch would wake all its threads, which go on spinning where masks are to be computed.
        host = torch.empty(count + masks.size, dtype=torch.int32, pin_memory=self._taken.is_cuda)
        words = host.numpy()
        words[: len(places)], words[len(places) : count], words[count:] = places, -1, masks.ravel()
        self._taken[: len(host)].copy_(host, non_blocking=True)

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """See `SamplerOperations`; logits in float32, or what the head computes in."""
        if mode < Mode.FILTERED:
            self._pick(logits, rows, noise=mode == Mode.PLAIN)
            return
        if mode == Mode.FULL:
            self._rewrite(logits, rows)
        self._filtered(logits, rows, rewritten=mode == Mode.FULL)

    def _pick(self, logits: Tensor, rows: Rows, *, noise: bool) -> None:
        """Greedy tokens; with noise plain ones for the rows that ask for it. Masks, filters are not read."""
        count, vocab = logits.shape
        parts, size = cut(count, vocab, TILE)
        pick_kernel[(parts, count)](
            logits, rows.slots, rows.positions, rows.table, self.scratch.partial, self.scratch.counters, self.tokens,
            self.codes, vocab, logits.stride(0), size, NOISE=noise, TILE=TILE, PARTS=PARTS, NATIVE=not INTERPRETED,
            num_warps=4,
        )  # fmt: skip

    def _filtered(self, logits: Tensor, rows: Rows, *, rewritten: bool) -> None:
        """For rows of every kind; `rewritten`: after `_rewrite`, whose copies are read where a row has one."""
        scratch = self.scratch
        count, vocab = logits.shape
        parts, size = cut(count, vocab, WIDE)
        groups, tiles = scratch.group_max.shape[1], scratch.tile_mass.shape[1]
        edited = scratch.edited if rewritten else logits
        stream_kernel[(parts, count)](
            logits, edited, rows.slots, rows.positions, rows.table, scratch.partial, scratch.group_max,
            scratch.tile_mass, vocab, logits.stride(0), size, groups, tiles, EDITED=rewritten, GROUP=GROUP, TILE=TILE,
            WIDE=WIDE, PARTS=PARTS, NATIVE=not INTERPRETED, num_warps=4,
        )  # fmt: skip
        few, longest = scratch.before.shape[1], scratch.values.shape[1]
        select_kernel[(count,)](
            logits, edited, scratch.broken, rows.slots, rows.positions, rows.table, scratch.partial, scratch.group_max,
            scratch.tile_mass, scratch.group_list, scratch.values, scratch.ids, scratch.before, scratch.pending,
            scratch.masses, scratch.peaks, self.tokens, self.codes, vocab, logits.stride(0), groups, tiles, size,
            EDITED=rewritten, GROUP=GROUP, GROUPS=scratch.group_list.shape[1], WIDE=WIDE,
            TILES=triton.next_power_of_2(tiles), FEW=few, LIST=longest, LANES=min(SELECT_WARPS * 32, few),
            TILE=SELECT_TILE, PARTS=PARTS, num_warps=SELECT_WARPS,
        )  # fmt: skip
        many_kernel[(count,)](
            logits, edited, rows.slots, rows.positions, rows.table, scratch.pending, scratch.masses, scratch.peaks,
            scratch.values, scratch.ids, self.tokens, self.codes, vocab, logits.stride(0), EDITED=rewritten,
            LIST=longest, TILE=MANY_TILE, NOISE_TILE=2048, num_warps=16,
        )  # fmt: skip

    def _rewrite(self, logits: Tensor, rows: Rows) -> None:
        """Copy the rows that have masks, bias or penalties, and apply these; logits are not touched."""
        scratch, places, masks = self.scratch, self._places, self._masks
        count, vocab = logits.shape
        parts, size = cut(count, vocab, TILE)
        length = rows.history.stride(0)
        prepare_kernel[(parts, count)](
            logits, scratch.edited, scratch.tally, scratch.broken, rows.history, rows.slots, rows.positions, rows.table,
            places, masks, vocab, logits.stride(0), length, masks.stride(0), size, TILE=TILE, num_warps=4,
        )  # fmt: skip
        edit_kernel[(count,)](
            logits, scratch.edited, rows.history, rows.slots, rows.positions, rows.table, places, masks, vocab,
            logits.stride(0), length, masks.stride(0), TILE=TILE, num_warps=4,
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
