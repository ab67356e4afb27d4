"""Contexts whose tokens lie on several ranks (decode context parallelism), as latent attention reads them.

The tokens of a KV block are divided among the D ranks of a group: rank r has the tokens r * B to (r + 1) * B - 1 of its
D * B. So all ranks have the same block tables, and the part of a context on a rank is a paged context of its own:

    positions         0 .. B-1   B .. 2B-1  2B .. 3B-1  3B .. 4B-1  4B .. 5B-1      for D = 2
    block, rank       0, 0       0, 1       1, 0        1, 1        2, 0
    place on rank 0   0 .. B-1              B .. 2B-1               2B .. 3B-1

Few rows: every rank attends to its own part with the queries of all heads of the group, each row a sequence of its own,
and the parts are added up by their log-sum-exps. Many rows (prompts): the pages of their contexts are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from quire.contracts.blocks import GATHERED
from quire.distributed import Group
from quire.kernels.attention import AttentionMeta, Prompt
from quire.kernels.attention.eight_bits import gather, is_coded
from quire.kernels.host_copies import sent_array
from quire.kernels.latent import LatentView
from quire.kernels.latent.parts import packed_parts
from quire.kernels.latent.rows import row_view
from quire.kernels.latent_rows import latent_row

PIECE = 1024  # rows that attend at a time, each as a sequence


@dataclass(frozen=True)
class OwnedRows:
    """Rows of a step as sequences over this rank's part of their contexts.

    lengths   [T] int32: tokens of this rank up to the row's position, that of the row included; 0 for padding
    owners    [T] int64: sequence of the step to which the row belongs
    """

    lengths: Tensor
    owners: Tensor


class DividedContexts:
    """The contexts of a layer that lie on the ranks of a group.

    group    the ranks, in the order of their parts
    kernel   implementation of `quire.kernels.latent`
    """

    def __init__(self, group: Group, kernel: ModuleType) -> None:
        self.group, self.kernel = group, kernel

    def slots(self, meta: AttentionMeta, size: int) -> Tensor:
        """Return the slots [T] int64 of a step's tokens in this rank's cache; tokens of other ranks go to block 0.

        size   tokens of a block on a rank
        """
        known = meta.plans.get("slots of a rank")
        if not isinstance(known, Tensor):
            block, inside = meta.kv_slots // (size * self.group.size), meta.kv_slots % (size * self.group.size)
            block = torch.where(inside // size == self.group.rank, block, 0)
            known = meta.plans["slots of a rank"] = block * size + inside % size
        return known

    def absorbed(self, latents: Tensor, turned: Tensor, kv: LatentView, meta: AttentionMeta, scale: float) -> Tensor:
        """Return softmax-weighted sums of latents [n, h, L] over whole contexts, for the first n rows of a step.

        latents, turned   [n, h, L] and [n, h, R]: queries of this rank's h heads; see `absorbed` of the kernels
        """
        (rows, heads, width), ranks = latents.shape, self.group.size
        every = self.group.all_gather(torch.cat((latents, turned), 2)).transpose(0, 1)
        # With one row, or one head on each rank, `reshape` returns a view: kernels want contiguous latents.
        q_latent = every[..., :width].reshape(rows, ranks * heads, width).contiguous()
        q_rope = every[..., width:].reshape(rows, ranks * heads, -1)
        lse = torch.empty(rows, ranks * heads, dtype=torch.float32, device=latents.device)
        sums = [
            self.kernel.absorbed(q_latent[piece], q_rope[piece], kv, own, scale, lse[piece])
            for piece, own in self._pieces(meta, rows, kv.block_size)
        ]
        packed = packed_parts(sums[0] if len(sums) == 1 else torch.cat(sums), lse, ranks)
        joined: Tensor = self.kernel.join(self.group.all_to_all(packed))
        return joined

    def _pieces(self, meta: AttentionMeta, rows: int, size: int) -> list[tuple[slice, AttentionMeta]]:
        """Return the first rows of a step in pieces of PIECE, and the metadata of each, whose sequences are rows."""
        known = meta.plans.get(("pieces", rows))
        if not isinstance(known, list):
            own, device = self._rows(meta, size), meta.block_tables.device
            alone = meta.max_query_len == 1 and rows == len(meta.seq_lens)  # of decodes: sequences are the rows
            known = []
            for first in range(0, rows, PIECE):
                piece = slice(first, min(first + PIECE, rows))
                owners, tables, places = own.owners[piece], meta.block_tables, None
                if meta.table_rows is None:
                    tables = tables[owners]
                else:
                    places = meta.table_rows[owners]
                part = AttentionMeta(
                    query_start=torch.arange(len(owners) + 1, dtype=torch.int32, device=device),
                    seq_lens=own.lengths[piece],
                    block_tables=tables,
                    kv_slots=meta.kv_slots[piece],
                    table_rows=places,
                    max_query_len=1,
                    shared=meta.shared if alone and rows <= PIECE else None,
                    kv_group=meta.kv_group,
                )
                known.append((piece, part))
            meta.plans["pieces", rows] = known
        return known

    def _rows(self, meta: AttentionMeta, size: int) -> OwnedRows:
        """Return the rows of a step as sequences over this rank's part. size: tokens of a block on a rank"""
        device = meta.block_tables.device
        starts, lengths = (torch.as_tensor(one, device=device) for one in (meta.query_start, meta.seq_lens))
        row = torch.arange(len(meta.kv_slots), dtype=starts.dtype, device=device)
        found = torch.searchsorted(starts[1:], row, right=True)
        owners = found.clamp(max=len(lengths) - 1)
        tokens = lengths[owners] - starts[1:][owners] + row + 1
        whole, rest = tokens // (size * self.group.size), tokens % (size * self.group.size)
        own = whole * size + (rest - self.group.rank * size).clamp(0, size)
        return OwnedRows(torch.where(found < len(lengths), own, 0).int(), owners)

    def whole(self, kv: LatentView, meta: AttentionMeta) -> Iterator[tuple[LatentView, AttentionMeta]]:
        """Yield the gathered contexts of `meta.prompts`, a bounded number of tokens at a time, with their metadata."""
        known = meta.plans.get("gathered contexts")
        if not isinstance(known, list):
            known = [self._pages(meta, some, kv.block_size) for some in _bounded(meta.prompts or ())]
            meta.plans["gathered contexts"] = known
        for blocks, part in known:
            yield self._gathered(kv, blocks), part

    def _pages(self, meta: AttentionMeta, prompts: tuple[Prompt, ...], size: int) -> tuple[Tensor, AttentionMeta]:
        """Return the blocks [N] int64 of the contexts of prompts, and their metadata over the gathered pages.

        Page r * N + i of these is the part of rank r of block i. Prompt p is sequence p.
        """
        ranks, counts = self.group.size, [-(-_length(one) // (size * self.group.size)) for one in prompts]
        total, firsts = sum(counts), [0, *accumulate(counts)]
        index = np.empty((2, total), np.int64)
        table = np.zeros((len(prompts), ranks * max(counts)), np.int32)
        for number, (prompt, first, count) in enumerate(zip(prompts, firsts, counts, strict=False)):
            index[0, first : first + count] = prompt[2]
            index[1, first : first + count] = np.arange(count)
            pages = np.arange(ranks * count)
            table[number, : len(pages)] = pages % ranks * total + first + pages // ranks
        seqs, places = sent_array(index, meta.block_tables.device)
        rows = seqs if meta.table_rows is None else meta.table_rows[seqs].long()
        part = replace(
            meta,
            block_tables=sent_array(table, meta.block_tables.device),
            table_rows=None,
            prompts=tuple((first, last, number, past) for number, (first, last, _, past) in enumerate(prompts)),
            plans={},
        )
        return meta.block_tables[rows, places].long(), part

    def _gathered(self, kv: LatentView, blocks: Tensor) -> LatentView:
        """Return the parts of all ranks of some blocks [N], as a cache of pages."""
        if kv.scales is not None:
            latent = kv.latent.view(torch.uint8)
            width = latent_row(latent.shape[3], kv.rope.shape[3]).size
            rows = latent.as_strided((*latent.shape[:3], width), latent.stride())[blocks]
            return row_view(self.group.all_gather(rows).flatten(0, 1), latent.shape[3], kv.rope.shape[3])
        sides = [gather(side, blocks).flatten(1) for side in (kv.latent, kv.rope)]
        dtype, widths = kv.latent.dtype, [side.shape[1] for side in sides]
        own = torch.cat([side.view(torch.uint8) if is_coded(side) else side for side in sides], 1)
        pages = self.group.all_gather(own).flatten(0, 1).view(dtype)
        latent, rope = (side.view(len(pages), 1, kv.block_size, -1) for side in pages.split(widths, 1))
        return replace(kv, latent=latent, rope=rope)


def _length(prompt: Prompt) -> int:
    """Return the tokens of a prompt's context after the step."""
    first, last, _, past = prompt
    return past + last - first


def _bounded(prompts: tuple[Prompt, ...]) -> Iterator[tuple[Prompt, ...]]:
    """Yield prompts in groups of at most GATHERED tokens of context, or of one prompt."""
    found, tokens = list[Prompt](), 0
    for prompt in prompts:
        if found and tokens + _length(prompt) > GATHERED:
            yield tuple(found)
            found, tokens = [], 0
        found.append(prompt)
        tokens += _length(prompt)
    yield tuple(found)
