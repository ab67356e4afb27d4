"""Attention of many decodes to latents that they share, read once for all: lanes of a tile are (row, head) pairs of
several sequences. What comes out are parts of each row's softmax, which `merge_kernel` adds to the sequence's own.
"""

from __future__ import annotations

from quire.kernels.attention.triton_plan import unspecialized
from quire.kernels.attention.triton_tiles import store_part
from quire.kernels.latent.triton_absorbed import attend_latents
from quire.kernels.triton_runtime import tl


@unspecialized("num_groups", "num_seqs", "num_items", "prefix_parts")
def shared_kernel(
    q_latent, q_rope, latent, rope, table, table_rows, query_start, seq_lens, starts, members, blocks, sums_at,
    stats_at, num_groups, num_seqs, num_items, prefix_parts, stride_latent, stride_rope, stride_rope_head,
    latent_block, rope_block, stride_table, scale, EXACT: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    M: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tiles of M lanes, HEADS groups of GROUP heads, prefix_parts cuts of the shared context). WIDTH >=
    num_groups. A member may be no sequence of this part of the step: the other form of attention has it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.arange(0, WIDTH)
    real = groups < num_groups
    sizes = tl.load(starts + groups + 1, mask=real, other=0) - tl.load(starts + groups, mask=real, other=0)
    tiles = tl.cdiv(sizes * ROWS, M)
    before = tl.cumsum(tiles, 0) <= program
    group = tl.sum(before.to(tl.int32), 0)
    if group >= num_groups:
        return
    first = tl.load(starts + group)
    count = tl.load(starts + group + 1) - first
    lane = (program - tl.sum(tl.where(before, tiles, 0), 0)) * M + tl.arange(0, M)
    member, within = first + lane // ROWS, lane % ROWS
    seq = tl.load(members + member, mask=lane < count * ROWS, other=num_seqs)
    here = seq < num_seqs
    row = tl.load(query_start + seq, mask=here, other=0)
    num_rows = tl.load(query_start + seq + 1, mask=here, other=0) - row
    tokens = tl.max(tl.load(blocks + seq, mask=here, other=0), 0) * SIZE
    live = here & (within < num_rows * GROUP) & (num_rows * GROUP <= ROWS)
    live = live & (tl.load(seq_lens + seq, mask=here, other=0) - num_rows >= tokens - 1)
    index = tl.min(tl.where(live, seq, num_seqs), 0)
    if index == num_seqs:
        return
    if table_rows is not None:
        index = tl.load(table_rows + index)
    steps = tl.cdiv(tokens, TILE)
    start = part * steps // prefix_parts * TILE
    end = tl.minimum((part + 1) * steps // prefix_parts * TILE, tokens)
    sums, top, weight = attend_latents(
        q_latent, q_rope, row + within // GROUP, head * GROUP + within % GROUP, live, end - 1 + tl.zeros([M], tl.int32),
        latent, rope, table + index.to(tl.int64) * stride_table, start, end, stride_latent, stride_rope,
        stride_rope_head, latent_block, rope_block, scale, SIZE % TILE != 0, EXACT, SIZE, TILE, L, LP, R, RP, M,
    )  # fmt: skip
    # A member's place is its own: what is no lane of its rows may be written, and `live` needs no register up to here.
    at = ((num_items + first * prefix_parts + part).to(tl.int64) * HEADS + head) * ROWS + lane
    at += (lane // ROWS).to(tl.int64) * ((prefix_parts * HEADS - 1) * ROWS)
    store_part(sums_at, stats_at, sums, top, weight, at, lane < count * ROWS, L, LP)
