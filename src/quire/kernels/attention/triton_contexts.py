"""Contexts of prompts side by side: what many rows read is made of a cache of codes once, and not for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, Prompt
from quire.kernels.host_copies import sent


def context_blocks(meta: AttentionMeta, prompts: tuple[Prompt, ...], size: int) -> tuple[Tensor, Tensor]:
    """Return the blocks of the contexts of some prompts, one after the other, [n] int64, and their block table.

    size   tokens of a block
    The table is that of the step, but numbers blocks by their places among those n. `meta.plans` keeps the result for
    other layers.
    """
    key = "contexts", prompts, size
    known = meta.plans.get(key)
    if not isinstance(known, tuple):
        table, counts = meta.block_tables, count_blocks(prompts, size)
        own = sent([prompt[2] for prompt in prompts], table.device)
        own = own if meta.table_rows is None else meta.table_rows[own].long()
        made, blocks, begin = torch.zeros_like(table), list[Tensor](), 0
        for row, count in zip(own.split(1), counts, strict=True):
            blocks.append(table.index_select(0, row)[0, :count])
            numbers = torch.arange(begin, begin + count, dtype=table.dtype, device=table.device)
            made[:, :count].index_copy_(0, row, numbers[None])
            begin += count
        known = meta.plans[key] = torch.cat(blocks).long(), made
    return known


def count_blocks(prompts: tuple[Prompt, ...], size: int) -> list[int]:
    """Return the number of blocks of the context of each prompt after the step. size: tokens of a block"""
    return [-(-(past + last - first) // size) for first, last, _, past in prompts]
