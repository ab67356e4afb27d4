"""Latent attention of many decodes over a shared prefix, which is read once for all of them.

The lanes of a tile are (row, head) pairs of several sequences. The kernel writes parts of each row's softmax;
`merge_kernel` adds them to the parts of the sequence's own context.
"""

from __future__ import annotations

from quire.kernels.attention.triton_plan import unspecialized
from quire.kernels.attention.triton_tiles import store_part
from quire.kernels.latent.triton_absorbed import attend_latents
from quire.kernels.triton_runtime import tl


@unspecialized("num_groups", "num_seqs", "num_items", "prefix_parts")
def shared_kernel(
    q_latent,
    q_rope,
    latent,
    rope,
    scales,
    table,
    table_rows,
    query_start,
    seq_lens,
    starts,
    members,
    blocks,
    sums_at,
    stats_at,
    num_groups,
    num_seqs,
    num_items,
    prefix_parts,
    stride_latent,
    stride_rope,
    stride_rope_head,
    latent_block,
    rope_block,
    stride_table,
    scale,
    v_scale,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention of a tile of M lanes over a part of a shared prefix. Grid (tiles, HEADS, prefix_parts).

    A group is a set of sequences with a common prefix. A lane is a pair (row, query head) of a sequence of the group.
    Sequences with numbers >= num_seqs in `members` are skipped: `expanded` computes them.

    q_latent, q_rope           queries [T, H, L], contiguous in a row, and [T, H, R]
    stride_latent, stride_rope, stride_table   elements from row to row of q_latent, of q_rope, of table
    stride_rope_head           elements from head to head of q_rope
    latent, rope               cache [blocks, 1, SIZE, L] and [blocks, 1, SIZE, R]
    scales                     of the codes of latents [blocks, 1, SIZE, tiles], in a cache of rows, else None
    latent_block, rope_block   elements from block to block of latent, of rope
    LATENT_TOKEN, ROPE_TOKEN   elements from token to token of latent, of rope
    table                      block tables [slots or sequences, blocks] int32
    table_rows                 [S] int32 row of `table` of each sequence; None: row s belongs to sequence s
    query_start, seq_lens      [S + 1] and [S] int32, of `AttentionMeta`
    starts, members, blocks    int32, of `SharedBlocks`: [num_groups + 1], [members], [S]
    sums_at, stats_at          `Plan.sums`, `Plan.stats`, outputs
    num_groups, num_seqs       number of groups; number of sequences S
    num_items                  number of items of the plan; the parts of prefixes follow them in sums_at and stats_at
    prefix_parts               number of parts of a shared prefix
    scale, EXACT               softmax scale * log2(e); precision of float32 products
    v_scale                    scale of all codes of an 8-bit cache, else None
    SIZE, TILE                 tokens of a block; tokens of a tile of keys
    L, LP, R, RP               widths of latent and rotated key, each also padded to a power of two
    HEADS, GROUP               number of groups of heads; heads of a group (of a program)
    ROWS, M                    lanes of a sequence, GROUP times its largest number of rows; lanes of a tile
    WIDTH                      power of two >= num_groups
    """
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
        q_latent,
        q_rope,
        row + within // GROUP,
        head * GROUP + within % GROUP,
        live,
        end - 1 + tl.zeros([M], tl.int32),
        latent,
        rope,
        scales,
        table + index.to(tl.int64) * stride_table,
        start,
        end,
        stride_latent,
        stride_rope,
        stride_rope_head,
        latent_block,
        rope_block,
        scale,
        SIZE % TILE != 0,
        EXACT,
        SIZE,
        TILE,
        L,
        LP,
        R,
        RP,
        LATENT_TOKEN,
        ROPE_TOKEN,
        M,
    )
    if v_scale is not None:
        sums *= v_scale
    # Each member has its own place, so its dead lanes may be written, too: `live` needs no register up to here.
    at = ((num_items + first * prefix_parts + part).to(tl.int64) * HEADS + head) * ROWS + lane
    at += (lane // ROWS).to(tl.int64) * ((prefix_parts * HEADS - 1) * ROWS)
    store_part(sums_at, stats_at, sums, top, weight, at, lane < count * ROWS, L, LP)
