"""Sampling on a GPU, without waiting for the host: the launches, and the memory that they share.

Every batch may be captured in a CUDA graph: sizes come from shapes, addresses stay, nothing is allocated. Tokens equal
the CPU's for the same logits, except where the last unit of a logarithm, an exponential or a float32 softmax decides:
see noise.py and triton_select.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.step import I32
from quire.kernels.sampling import Rows
from quire.kernels.sampling.rows import Mode
from quire.kernels.sampling.triton_draw import GROUP, pick_kernel, settle_kernel, stream_kernel
from quire.kernels.sampling.triton_edits import edit_kernel, penalize_kernel, prepare_kernel
from quire.kernels.sampling.triton_select import many_kernel, select_kernel
from quire.kernels.triton_runtime import INTERPRETED, triton

PARTS = 256  # most programs that read a row
PROGRAMS = 4096  # rows are cut until there are about so many programs
TILE = 1024  # ids per pass of a greedy or unfiltered program of 4 warps
WIDE = 2048  # ids per pass of a filtering program of 4 warps, and per sum of weights
FEW, LIST = 512, 16_384  # see triton_select.py
SELECT_WARPS, SELECT_TILE = 4, 1024  # three programs fit a multiprocessor: 256 rows run at once
MANY_TILE = 8192


@dataclass(frozen=True)
class Scratch:
    """Device memory for intermediate results of the sampling kernels, for at most R rows of V logits.

    A row is read in at most PARTS parts, by a program each. counters, broken and tally are 0 between batches.

    partial      [R, PARTS] int64: packed key (see keys.py) of the best id of each part
    counters     [R] int32: number of parts that are done
    broken       [R] int32: not 0 if the raw logits have NaN or +inf
    group_max    [R, ceil(V / GROUP)] float32: largest logit of each GROUP ids
    tile_mass    [R, ceil(V / WIDE)] float32: sum of weights of each WIDE ids
    group_list   [R, G] int32: groups with candidates
    values, ids  [R, LIST] float32 and int32: logits and ids of the candidates (ids that the filters may keep)
    before       [R, FEW] float64: sum of the probabilities of the ids that come before each candidate in sorted order
    pending      [R] int32: 0: the row is done. Else `many_kernel` draws its token: from a list of this length, or from
                 the whole row if -1
    masses       [R] float64: total weight that top-p refers to
    peaks        [R] float32: largest logit / temperature
    edited       [R, V] float32: logits after masks, bias and penalties, of the rows that have any
    tally        [R, V] int32: counts of tokens in the history, see triton_edits.py. `edited` and `tally` take most of
                 the memory
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
        """Allocate memory for at most `rows` rows of `vocab` logits.

        few, longest   sizes FEW and LIST, powers of two; tests make them small
        """

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
    """Return the `SamplerOperations` in Triton, with all memory for batches of up to `max_rows` rows."""
    return TritonSampling(max_rows, vocab, device)


class TritonSampling:
    """The `SamplerOperations` in Triton. `tokens`, `codes` [max_rows] and the masks have constant addresses.

    Rows past those of the batch are padding: the parameters of their slot are all zeros, and they are sampled greedily.
    Grammar masks and the index of each row's mask are neighbours in memory: one copy brings both to the device.
    """

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        width = -(-vocab // 32)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.codes = torch.zeros(max_rows, dtype=torch.uint8, device=device)
        self._keys = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.scratch = Scratch.make(max_rows, vocab, device)
        self._taken = torch.full((max_rows * (1 + width),), -1, dtype=torch.int32, device=device)
        self._places, self._masks = self._taken[:max_rows], self._taken[max_rows:].view(max_rows, width)

    def take_masks(self, places: I32, masks: I32) -> None:
        """Set the grammar masks of the next `sample`.

        See `SamplerOperations`. PyTorch keeps the pinned buffer until the copy has read it.
        """
        count = len(self._places)
        # NumPy fills it: PyTorch would wake all its threads, which spin on while masks are to be computed.
        host = torch.empty(count + masks.size, dtype=torch.int32, pin_memory=self._taken.is_cuda)
        words = host.numpy()
        words[: len(places)], words[len(places) : count], words[count:] = places, -1, masks.ravel()
        self._taken[: len(host)].copy_(host, non_blocking=True)

    def sample(self, logits: Tensor, rows: Rows, mode: Mode) -> None:
        """Draw one token for each row of logits [R, V], into `tokens` and `codes`. See `SamplerOperations`.

        logits   float32, or the dtype that the head computes in
        """
        if mode < Mode.FILTERED:
            self._pick(logits, rows, self.tokens, noise=mode == Mode.UNFILTERED)
            return
        if mode == Mode.FULL:
            self._rewrite(logits, rows)
        self._filtered(logits, rows, rewritten=mode == Mode.FULL)

    def keys(self, logits: Tensor, rows: Rows, mode: Mode, first: int) -> Tensor:
        """Return the packed keys of the best ids of each row, valid until the next call. See `SamplerOperations`."""
        self._pick(logits, rows, self._keys, noise=mode == Mode.UNFILTERED, first=first, keys=True)
        return self._keys[: len(logits)]

    def settle(self, keys: Tensor) -> None:
        """Set each row's token and its code (0: valid) from the largest of its packed keys. See `SamplerOperations`."""
        settle_kernel[(len(keys),)](keys, self.tokens, self.codes, num_warps=1)

    def _pick(
        self, logits: Tensor, rows: Rows, out: Tensor, *, noise: bool, first: int = 0, keys: bool = False
    ) -> None:
        """Draw greedy tokens; with `noise` also random ones, for rows that need noise. Reads no masks, no filters.

        out    [>= R] int64: gets tokens, or with `keys` their packed keys;  first  id of the first column
        """
        count, vocab = logits.shape
        parts, size = cut(count, vocab, TILE)
        pick_kernel[(parts, count)](
            logits,
            rows.slots,
            rows.positions,
            rows.table,
            self.scratch.partial,
            self.scratch.counters,
            out,
            self.codes,
            first,
            vocab,
            logits.stride(0),
            size,
            NOISE=noise,
            KEYS=keys,
            TILE=TILE,
            PARTS=PARTS,
            NATIVE=not INTERPRETED,
            num_warps=4,
        )

    def _filtered(self, logits: Tensor, rows: Rows, *, rewritten: bool) -> None:
        """Draw tokens of rows of every kind. `rewritten`: `_rewrite` ran before, and its copies replace their rows."""
        scratch = self.scratch
        count, vocab = logits.shape
        parts, size = cut(count, vocab, WIDE)
        groups, tiles = scratch.group_max.shape[1], scratch.tile_mass.shape[1]
        edited = scratch.edited if rewritten else logits
        stream_kernel[(parts, count)](
            logits,
            edited,
            rows.slots,
            rows.positions,
            rows.table,
            scratch.partial,
            scratch.group_max,
            scratch.tile_mass,
            vocab,
            logits.stride(0),
            size,
            groups,
            tiles,
            EDITED=rewritten,
            GROUP=GROUP,
            TILE=TILE,
            WIDE=WIDE,
            PARTS=PARTS,
            NATIVE=not INTERPRETED,
            num_warps=4,
        )
        few, longest = scratch.before.shape[1], scratch.values.shape[1]
        select_kernel[(count,)](
            logits,
            edited,
            scratch.broken,
            rows.slots,
            rows.positions,
            rows.table,
            scratch.partial,
            scratch.group_max,
            scratch.tile_mass,
            scratch.group_list,
            scratch.values,
            scratch.ids,
            scratch.before,
            scratch.pending,
            scratch.masses,
            scratch.peaks,
            self.tokens,
            self.codes,
            vocab,
            logits.stride(0),
            groups,
            tiles,
            size,
            EDITED=rewritten,
            GROUP=GROUP,
            GROUPS=scratch.group_list.shape[1],
            WIDE=WIDE,
            TILES=triton.next_power_of_2(tiles),
            FEW=few,
            LIST=longest,
            LANES=min(SELECT_WARPS * 32, few),
            TILE=SELECT_TILE,
            PARTS=PARTS,
            num_warps=SELECT_WARPS,
        )
        many_kernel[(count,)](
            logits,
            edited,
            rows.slots,
            rows.positions,
            rows.table,
            scratch.pending,
            scratch.masses,
            scratch.peaks,
            scratch.values,
            scratch.ids,
            self.tokens,
            self.codes,
            vocab,
            logits.stride(0),
            EDITED=rewritten,
            LIST=longest,
            TILE=MANY_TILE,
            NOISE_TILE=2048,
            num_warps=16,
        )

    def _rewrite(self, logits: Tensor, rows: Rows) -> None:
        """Copy the rows that have masks, bias or penalties, and apply these to the copies; logits stay unchanged."""
        scratch, places, masks = self.scratch, self._places, self._masks
        count, vocab = logits.shape
        parts, size = cut(count, vocab, TILE)
        length = rows.history.stride(0)
        prepare_kernel[(parts, count)](
            logits,
            scratch.edited,
            scratch.tally,
            scratch.broken,
            rows.history,
            rows.slots,
            rows.positions,
            rows.table,
            places,
            masks,
            vocab,
            logits.stride(0),
            length,
            masks.stride(0),
            size,
            TILE=TILE,
            num_warps=4,
        )
        edit_kernel[(count,)](
            logits,
            scratch.edited,
            rows.history,
            rows.slots,
            rows.positions,
            rows.table,
            places,
            masks,
            vocab,
            logits.stride(0),
            length,
            masks.stride(0),
            TILE=TILE,
            num_warps=4,
        )
        penalize_kernel[(min(parts, 32), count)](
            scratch.edited,
            scratch.tally,
            rows.history,
            rows.slots,
            rows.positions,
            rows.table,
            vocab,
            length,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )


def cut(rows: int, vocab: int, tile: int) -> tuple[int, int]:
    """Divide `rows` rows of `vocab` ids among programs. Return (programs of a row, ids of a program).

    tile   the number of ids of a program is a multiple of it
    """
    wanted = min(PARTS, max(1, PROGRAMS // rows))
    size = triton.cdiv(triton.cdiv(vocab, wanted), tile) * tile
    return triton.cdiv(vocab, size), size
