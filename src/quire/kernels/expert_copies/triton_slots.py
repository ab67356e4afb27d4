"""Count and choice of the copies of experts in one launch, with the results of `quire.kernels.expert_copies.slots`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.balancing import GOLDEN, SPREAD
from quire.kernels.triton_runtime import jit, tl, triton

BLOCK = 256  # pairs (token, chosen expert) of a program


def take(ids: Tensor, slots: Tensor, counts: Tensor, load: Tensor, first_row: int) -> Tensor:
    """Return the slot [T, k] int32 that computes each expert of `ids` [T, k] int32, and add the tokens to `load`.

    See `ExpertSlots` for the other parameters. An id that is no expert has slot -1, and is not counted.
    """
    out, pairs = torch.empty(ids.shape, dtype=torch.int32, device=ids.device), ids.numel()
    if pairs:
        _take_kernel[(triton.cdiv(pairs, BLOCK),)](
            ids.contiguous(),
            slots,
            counts,
            load,
            out,
            pairs,
            first_row,
            ids.shape[1],
            *slots.shape,
            GOLDEN,
            SPREAD,
            BLOCK,
            num_warps=4,
        )
    return out


@jit(do_not_specialize=["pairs"])
def _take_kernel(
    ids,
    slots,
    counts,
    load,
    out,
    pairs,
    first_row,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    COPIES: tl.constexpr,
    GOLDEN: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the slot of BLOCK pairs, and count the experts. Grid (ceil(pairs / BLOCK),).

    ids, out   [pairs] int32, -1: no expert;  first_row  number of the first token
    slots      [EXPERTS, COPIES] int32;  counts  [EXPERTS] int32;  load  [EXPERTS] int64, by atomic additions
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = pair // TOP_K
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    known = (expert >= 0) & (expert < EXPERTS)
    number = (first_row + row).to(tl.int64) * GOLDEN + expert.to(tl.int64) * SPREAD
    copy = (number & 0xFFFFFFFF) * tl.load(counts + expert, mask=known, other=1).to(tl.int64) >> 32
    slot = tl.load(slots + expert.to(tl.int64) * COPIES + copy, mask=known, other=-1)
    tl.store(out + pair, slot, mask=pair < pairs)
    tl.atomic_add(load + expert, tl.full([BLOCK], 1, tl.int64), mask=known, sem="relaxed")
