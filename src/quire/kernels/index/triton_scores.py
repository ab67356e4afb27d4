"""Scores of an indexer: rows of a step against the keys of all tokens before them.

Keys are the rows of the product and heads its columns, so that a key's sum over heads stays in a few threads, and what
lies behind a context spoils only its own score. Rows of a prompt share the keys that a program reads.

Floor: 2 Hi D operations a pair of row and token. A decode reads 2 D bytes a token, D + 4 of 8-bit codes.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["places"])
def score_kernel(
    q,
    weights,
    keys,
    scales,
    table,
    places,
    scores,
    bins,
    stride_q,
    stride_weights,
    keys_block,
    scales_block,
    stride_table,
    stride_scores,
    num_rows,
    top_k,
    HEADS: tl.constexpr,
    HEADSP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BINS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score SPAN tokens for TOGETHER rows, which are of one sequence. Grid (spans, groups of rows).

    q, weights      [rows, HEADS, D] and [rows, HEADS] float32; stride_q, stride_weights  elements from row to row
    keys, scales    cache [blocks, 1, SIZE, D] and [blocks, 1, SIZE, 1] or None; keys_block, scales_block  elements from
                    block to block
    table           block tables; stride_table  elements from row to row
    places          [rows, 2] position, and row of `table`; -1: none
    scores          [rows, stride_scores] float32, output; -0 becomes 0. Rows with at most top_k tokens get none
    bins            [rows, BINS] int32, cleared for the kernels of `triton_select`, or None
    num_rows        rows in all;  HEADSP, DP  HEADS and D padded to powers of two
    KEYS            keys of a product;  EXACT  precision of products of float32
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin, first = tl.program_id(0) * SPAN, tl.program_id(1) * TOGETHER
    each = first + tl.arange(0, TOGETHER)
    own = tl.load(places + 2 * each, mask=each < num_rows, other=-1)  # positions of the rows
    end = tl.max(own, 0) + 1
    if bins is not None:
        if begin == 0:
            place = each[:, None] * BINS + tl.arange(0, BINS)[None, :]
            tl.store(bins + place, tl.zeros([TOGETHER, BINS], tl.int32), mask=(each < num_rows)[:, None])
    if (end > top_k) & (begin < end):
        lane, dims = tl.arange(0, TOGETHER * HEADSP), tl.arange(0, DP)
        row, head = first + lane // HEADSP, lane % HEADSP
        live = (row < num_rows) & (head < HEADS)
        pointers = q + row.to(tl.int64)[:, None] * stride_q + (head * D)[:, None] + dims[None, :]
        queries = tl.load(pointers, mask=live[:, None] & (dims < D)[None, :], other=0.0)
        factor = tl.load(weights + row.to(tl.int64) * stride_weights + head, mask=live, other=0.0)
        blocks = table + tl.load(places + 2 * first + 1).to(tl.int64) * stride_table
        stop = tl.minimum(end, begin + SPAN)
        token = begin + tl.arange(0, KEYS)
        block = tl.load(blocks + token // SIZE, mask=token < stop, other=0)
        for at in tl.range(begin, stop, KEYS):
            token = at + tl.arange(0, KEYS)
            following = tl.load(blocks + (token + KEYS) // SIZE, mask=token + KEYS < stop, other=0)
            known = token < stop
            wide = block.to(tl.int64)
            place = wide * keys_block + (token % SIZE) * D
            key = tl.load(keys + place[:, None] + dims[None, :], mask=known[:, None] & (dims < D)[None, :], other=0.0)
            products = tl.dot(key.to(queries.dtype), tl.trans(queries), input_precision=EXACT)
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * factor[None, :]
            if TOGETHER == 1:
                score = tl.sum(products, 1)[:, None]
            else:
                score = tl.sum(tl.reshape(products, [KEYS, TOGETHER, HEADSP]), 2)
            if scales is not None:
                score *= tl.load(scales + wide * scales_block + token % SIZE, mask=known, other=0.0)[:, None]
            score = tl.where(score == 0, 0.0, score)
            to = scores + each.to(tl.int64)[None, :] * stride_scores + token[:, None]
            tl.store(to, score, mask=token[:, None] <= own[None, :])
            block = following
