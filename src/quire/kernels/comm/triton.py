"""The sum over ranks in Triton, with the residual in the same kernel. See `quire.kernels.comm`."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.comm import Peers
from quire.kernels.triton_runtime import jit, tl, triton

FEW = 1 << 15  # elements up to which a message is cut finely: its time is that of the signals
SMALL, LARGE = (512, 2), (2048, 8)  # (elements of a program at a time, warps): 8 elements a thread


@jit
def _meet(signals, rank, block, RANKS: tl.constexpr):
    """Wait until the program `block` of every rank has come here; what they wrote before is visible after.

    signals   [RANKS] int64, see `Peers`; that of (block, from) lies at element block * RANKS + from of the receiver
    """
    for peer in tl.static_range(RANKS):
        if peer != rank:
            signal = tl.load(signals + peer).to(tl.pointer_type(tl.int32)) + block * RANKS + rank
            while tl.atomic_cas(signal, 0, 1, sem="release", scope="sys") != 0:
                pass
    for peer in tl.static_range(RANKS):
        if peer != rank:
            signal = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + block * RANKS + peer
            while tl.atomic_cas(signal, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@jit
def _sum_kernel(
    part,
    residual,
    out,
    buffers,
    signals,
    rank,
    offset,
    count,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum the parts of all ranks, and the residual. Grid (programs,), the same on all ranks.

    part, residual, out   [count] of one type, contiguous; out may be the residual. residual is not read without ADD
    buffers, signals      [RANKS] int64, see `Peers`;  rank  this rank
    offset                elements from the beginning of a buffer to the place of this call
    """
    block = tl.program_id(0)
    step = tl.num_programs(0) * TILE
    lane = tl.arange(0, TILE)
    own = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(part.dtype.element_ty)), 16) + offset
    for at in range(block * TILE, count, step):
        ids = at + lane
        tl.store(own + ids, tl.load(part + ids, ids < count), ids < count)
    tl.debug_barrier()
    _meet(signals, rank, block, RANKS)
    tl.debug_barrier()
    for at in range(block * TILE, count, step):
        ids = at + lane
        total = tl.zeros([TILE], tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(part.dtype.element_ty)), 16) + offset
            total += tl.load(theirs + ids, ids < count, cache_modifier=".cg").to(tl.float32)
        if ADD:
            total += tl.load(residual + ids, ids < count).to(tl.float32)
        tl.store(out + ids, total.to(part.dtype.element_ty), ids < count)


def sum_ranks(part: Tensor, residual: Tensor | None, peers: Peers, buffer: int) -> Tensor:
    """Return residual + the sum of `part` over all ranks. The result overwrites `residual`, or `part` if it is None.

    part, residual   the same shape and dtype, contiguous; at most `Peers.room` bytes
    buffer           number of the buffer that this call uses; neighbouring calls need different ones
    Every rank calls this with the same shape and the same buffer.
    """
    count, out = part.numel(), part if residual is None else residual
    assert part.is_contiguous() and out.is_contiguous() and part.nbytes <= peers.room
    tile, warps = SMALL if count <= FEW else LARGE
    programs = max(1, min(peers.blocks, triton.cdiv(count, tile)))
    _sum_kernel[(programs,)](
        part,
        out,
        out,
        peers.buffers,
        peers.signals,
        peers.rank,
        buffer * (peers.room // part.element_size()),
        count,
        RANKS=len(peers.buffers),
        ADD=residual is not None,
        TILE=tile,
        num_warps=warps,
    )
    return out
