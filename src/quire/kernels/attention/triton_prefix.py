"""Attention of many decodes over a shared prefix, which is read once for all of them.

The lanes of a tile are query heads of several sequences. The kernel writes parts of each row's softmax; the decode
kernel adds them to the parts of the sequence's own context.
"""

from __future__ import annotations

from quire.kernels.attention.triton_plan import unspecialized
from quire.kernels.attention.triton_tiles import LOWEST, attend, load_queries, store_part
from quire.kernels.triton_runtime import tl


@unspecialized("num_groups", "num_items", "prefix_parts")
def prefix_kernel(
    q,
    k,
    v,
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
    num_items,
    prefix_parts,
    stride_q,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    scale,
    cap,
    v_scale,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute attention of a tile of lanes over a part of a shared prefix. Grid (tiles, KV heads, prefix_parts).

    A group is a set of sequences with a common prefix. A lane is a pair (row, query head) of a sequence of the group.

    q                          [T, H, D]
    k, v                       cache [blocks, HEADS, SIZE, D]
    table                      block tables [slots or sequences, blocks] int32
    stride_q, stride_table     elements from row to row of q, of table
    stride_block, stride_head, stride_token   elements from block to block, head to head, token to token of the cache
    table_rows                 [S] int32 row of `table` of each sequence; None: row s belongs to sequence s
    query_start, seq_lens      [S + 1] and [S] int32, of `AttentionMeta`
    starts, members, blocks    int32, of `SharedBlocks`: [num_groups + 1], [members], [S]
    sums_at, stats_at          `Plan.sums`, `Plan.stats`, outputs
    num_groups, prefix_parts   number of groups; number of parts of a shared prefix
    num_items                  number of items of the plan; the parts of prefixes follow them in sums_at and stats_at
    scale, cap, CAPPED, EXACT, SIZE, TILE, D, DP   see `triton_tiles`
    v_scale                    scale of the codes of an 8-bit cache, else None
    HEADS, GROUP               number of KV heads; number of query heads of a KV head
    ROWS, M                    lanes of a sequence, GROUP times its largest number of rows; lanes of a tile
    WIDTH                      power of two >= num_groups
    """
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
    seq = tl.load(members + member, mask=lane < count * ROWS, other=0)
    row = tl.load(query_start + seq)
    num_rows = tl.load(query_start + seq + 1) - row
    leader = tl.load(members + first)
    tokens = tl.load(blocks + leader) * SIZE
    live = (lane < count * ROWS) & (within < num_rows * GROUP) & (num_rows * GROUP <= ROWS)
    live = live & (tl.load(seq_lens + seq) - num_rows >= tokens - 1)
    if table_rows is not None:
        leader = tl.load(table_rows + leader)
    queries = load_queries(q, row + within // GROUP, head * GROUP + within % GROUP, live, stride_q, D, DP)
    sums = tl.zeros([M, DP], tl.float32)
    top = tl.zeros([M], tl.float32) + LOWEST
    steps = tl.cdiv(tokens, TILE)
    end = tl.minimum((part + 1) * steps // prefix_parts * TILE, tokens)
    sums, top, weight = attend(
        queries,
        sums,
        top,
        tl.zeros([M], tl.float32),
        end - 1 + tl.zeros([M], tl.int32),
        k + head * stride_head,
        v + head * stride_head,
        table + leader.to(tl.int64) * stride_table,
        part * steps // prefix_parts * TILE,
        end,
        stride_block,
        stride_token,
        scale,
        cap,
        SIZE % TILE != 0,
        0,
        CAPPED,
        EXACT,
        SIZE,
        TILE,
        D,
        DP,
    )
    at = ((num_items + member * prefix_parts + part).to(tl.int64) * HEADS + head) * ROWS + within
    if v_scale is not None:
        sums *= v_scale
    store_part(sums_at, stats_at, sums, top, weight, at, live, D, DP)
