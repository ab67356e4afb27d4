"""Latent attention on Hopper (compute capability 9.0): the Triton kernels, and a Gluon kernel for many rows.

Its warps are specialized, as in `attention/hopper_prefill`: one makes the copy engine (TMA) read tiles of the expanded
keys and values. Two groups of four warps take 64 rows each; they compute the softmax of one tile while the matrix units
compute the scores of the next tile and the sums of the last. A tile is read whole, even past the end of a context,
where the next one begins: `prepare` keeps all of it finite in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.hopper import describe
from quire.kernels.attention.hopper_prefill import advance, as_operand, begin_scores, make_bars, nth_work, softmax
from quire.kernels.attention.triton_plan import TILE_WORDS, multiprocessors
from quire.kernels.attention.triton_tiles import LOG2E
from quire.kernels.latent import LatentView, triton
from quire.kernels.latent.triton_expanded import STEP, cut_prompts, workspace
from quire.kernels.triton_runtime import gl, gluon_jit, hopper

if hopper is not None:
    mbarrier, tma = hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

ROWS, STAGES = 128, 2  # rows of a tile of queries; tiles of STEP keys in flight
PLAIN, TURNED, VALUE = 128, 64, 128  # widths P, R and V that the kernel supports

prepare, project, absorbed, chosen, join = triton.prepare, triton.project, triton.absorbed, triton.chosen, triton.join


def expanded(q: Tensor, kv_up: Tensor, cache: LatentView, meta: AttentionMeta, scale: float, out: Tensor) -> Tensor:
    """Compute attention of `meta.prompts` with keys and values made from the latents; return `out`.

    See `quire.kernels.latent`.
    """
    heads, width, _ = kv_up.shape
    sizes = width - out.shape[2], cache.rope.shape[3], out.shape[2]
    strange = q.dtype != torch.bfloat16 or q.stride(1) != q.shape[2] or q.stride(0) % 8
    if strange or sizes != (PLAIN, TURNED, VALUE) or meta.row_positions is not None:
        return triton.expanded(q, kv_up, cache, meta, scale, out)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
    queries = q.as_strided((len(q), heads * q.shape[2]), (q.stride(0), 1))
    for tiles, *tokens in cut_prompts(meta, cache.block_size, ROWS, triton.most(kv_up)):
        made, ropes = workspace(kv_up, cache, *tokens)
        _expanded_kernel[(min(multiprocessors(), len(tiles) * heads),)](
            describe(queries, [ROWS, PLAIN]),
            describe(queries, [ROWS, TURNED]),
            describe(made, [STEP, PLAIN]),
            describe(ropes, [STEP, TURNED]),
            out,
            lse,
            tiles,
            out.stride(0),
            scale * LOG2E,
            HEADS=heads,
            P=PLAIN,
            R=TURNED,
            V=VALUE,
            STAGES=STAGES,
            WORDS=TILE_WORDS,
            num_warps=4,
            maxnreg=168,
        )
        del made, ropes  # else two workspaces would exist at once
    return out


@gluon_jit
def _span(record, TILE: gl.constexpr):
    """Read the record of a tile of queries; "piece" is the part of the sequence's context in the workspace.

    Returns row, rows     first row; rows
    first                 position of the first row, counted from the begin of the piece
    place                 begin of the piece in the workspace
    start                 tokens of the context before the piece
    last, whole           last tile of keys; number of tiles that every row sees whole
    """
    row, rows, place, start = gl.load(record), gl.load(record + 1), gl.load(record + 3), gl.load(record + 4)
    first = gl.load(record + 2) - start
    last = gl.cdiv(gl.minimum(gl.load(record + 5), first + rows), TILE) - 1
    return row, rows, first, place, start, last, gl.minimum(gl.maximum(first + 1, 0) // TILE, last)


@gluon_jit
def _read(
    q_plain,
    q_turned,
    made,
    ropes,
    tiles,
    plain,
    turned,
    keys,
    short,
    values,
    bars,
    num_work,
    programs,
    HEADS: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """The reading warp. Keys come first: the queries of a tile wait until both groups are done with the last tile's.

    Arguments as in `_expanded_kernel`; plain, turned: buffers of queries; keys, short, values: rings of unrotated keys,
    rotated keys and values, all in shared memory; bars: see `make_bars`.
    """
    k_ready, v_ready, k_free, v_free, q_ready, q_free = bars
    TILE: gl.constexpr = keys.shape[1]
    count = 0
    for turn in range(gl.cdiv(num_work, programs)):
        work = nth_work(turn, programs)
        if work < num_work:
            row, _rows, _first, place, _start, last, _whole = _span(tiles + work // HEADS * WORDS, TILE)
            head = work % HEADS
            for back in range(last + 1):
                at = place + (last - back) * TILE
                stage, phase = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_ready.index(stage), made.block_type.nbytes + ropes.block_type.nbytes)
                tma.async_copy_global_to_shared(made, [at, head * (P + V)], k_ready.index(stage), keys.index(stage))
                tma.async_copy_global_to_shared(ropes, [at, 0], k_ready.index(stage), short.index(stage))
                if back == 0:
                    mbarrier.wait(q_free, (turn & 1) ^ 1)
                    mbarrier.expect(q_ready, q_plain.block_type.nbytes + q_turned.block_type.nbytes)
                    tma.async_copy_global_to_shared(q_plain, [row, head * (P + R)], q_ready, plain)
                    tma.async_copy_global_to_shared(q_turned, [row, head * (P + R) + P], q_ready, turned)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), made.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    made, [at, head * (P + V) + P], v_ready.index(stage), values.index(stage)
                )
                count += 1


@gluon_jit
def _store(
    out,
    lse,
    record,
    sums,
    top,
    weight,
    head,
    stride_out,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    V: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Store the output and log-sum-exp of a tile's rows, merged with those of earlier pieces of the context.

    The merge happens here: if the loop began with the earlier state, ptxas would wait for each of its products. The
    record is read again, so that it needs no registers during the loop.
    """
    row, rows, start = gl.load(record), gl.load(record + 1), gl.load(record + 4)
    lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, V, gl.SliceLayout(0, SUMS))
    place, live = (row + lane).to(gl.int64), lane < rows
    to_lse, to_out = lse + place * HEADS + head, out + (place * stride_out + head * V)[:, None] + dims[None, :]
    before = gl.load(to_lse, mask=live & (start > 0), other=float("-inf"))  # -inf: its weight is 0
    above = gl.maximum(top, before)
    kept, decay = gl.exp2(before - above), gl.exp2(top - above)
    weight = weight * decay + kept
    earlier = gl.load(to_out, mask=(live & (start > 0))[:, None], other=0.0).to(gl.float32)
    sums = sums * decay[:, None] + earlier * kept[:, None]
    gl.store(to_out, (sums / weight[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    gl.store(to_lse, above + gl.log2(weight), mask=live)


@gluon_jit
def _attend(
    out,
    lse,
    tiles,
    plain,
    turned,
    keys,
    short,
    values,
    bars,
    num_work,
    programs,
    stride_out,
    scale,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """A computing group of four warps: the first (HALF 0) or second 64 rows of every tile.

    Arguments as in `_expanded_kernel` and `_read`. SCORES, SUMS: layouts of scores and of sums.
    """
    k_ready, v_ready, k_free, v_free, q_ready, q_free = bars
    TILE: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    queries, parts = (plain.slice(HALF * 64, 64), turned.slice(HALF * 64, 64)), (keys, short)
    count = 0
    for turn in range(gl.cdiv(num_work, programs)):
        work = nth_work(turn, programs)
        if work < num_work:
            head = work % HEADS
            _row, _rows, first, _place, _start, last, whole = _span(tiles + work // HEADS * WORDS, TILE)
            positions = first + (HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES)))
            top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
            weight = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            sums = gl.zeros([64, V], gl.float32, SUMS)
            mbarrier.wait(q_ready, turn & 1)
            mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1)
            scores = begin_scores(queries, parts, count % STAGES, TILE, SCORES)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_free.index(count % STAGES))
            count += 1
            exact, top, weight, _decay = softmax(
                scores, top, weight, positions, last * TILE, scale, 0.0, True, 0, False
            )
            state = as_operand(exact, keys.dtype, SUMS), sums, top, weight, count
            for back in range(last - whole):
                at = (last - 1 - back) * TILE
                state = advance(
                    queries, state, parts, values, bars, (), positions, at, scale, 0.0, True, 0, False, 1, 0
                )
            for _back in range(whole):
                state = advance(
                    queries, state, parts, values, bars, (), positions, 0, scale, 0.0, False, 0, False, 1, 0
                )
            weights, sums, top, weight, count = state
            mbarrier.arrive(q_free)
            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            sums = warpgroup_mma(weights, values.index(before), sums)
            mbarrier.arrive(v_free.index(before))
            weight = gl.convert_layout(weight, gl.SliceLayout(1, SUMS))
            top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
            _store(out, lse, tiles + work // HEADS * WORDS, sums, top, weight, head, stride_out, HALF, HEADS, V, SUMS)


@gluon_jit
def _expanded_kernel(
    q_plain,
    q_turned,
    made,
    ropes,
    out,
    lse,
    tiles,
    stride_out,
    scale,
    HEADS: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """Grid: as many programs as multiprocessors. 4 warps, 168 registers per thread (redistributed inside).

    q_plain, q_turned   descriptors of the queries as rows [T, HEADS (P + R)], in tiles [ROWS, P] and [ROWS, R]
    made, ropes         descriptors of a workspace [n, HEADS (P + V)] and [n, R], in tiles [STEP, P] and [STEP, R]
    out, lse            [T, HEADS, V] and [T, HEADS] float32 (base 2): state after earlier pieces, and output
    stride_out          elements from row to row of out
    tiles               [m, WORDS] int32, see `triton_expanded.cut_prompts`
    scale               scale * log2(e)
    P, R, V, STAGES     widths, see `quire.kernels.latent`; tiles of keys in the ring
    """
    plain = gl.allocate_shared_memory(made.dtype, q_plain.block_shape, q_plain.layout)
    turned = gl.allocate_shared_memory(made.dtype, q_turned.block_shape, q_turned.layout)
    keys = gl.allocate_shared_memory(made.dtype, [STAGES] + made.block_shape, made.layout)
    short = gl.allocate_shared_memory(made.dtype, [STAGES] + ropes.block_shape, ropes.layout)
    values = gl.allocate_shared_memory(made.dtype, [STAGES] + made.block_shape, made.layout)
    bars = make_bars(STAGES)
    num_work, programs = gl.load(tiles + 6) * HEADS, gl.num_programs(0)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out,
                    lse,
                    tiles,
                    plain,
                    turned,
                    keys,
                    short,
                    values,
                    bars,
                    num_work,
                    programs,
                    stride_out,
                    scale,
                    0,
                    HEADS,
                    V,
                    STAGES,
                    WORDS,
                ),
            ),
            (
                _attend,
                (
                    out,
                    lse,
                    tiles,
                    plain,
                    turned,
                    keys,
                    short,
                    values,
                    bars,
                    num_work,
                    programs,
                    stride_out,
                    scale,
                    1,
                    HEADS,
                    V,
                    STAGES,
                    WORDS,
                ),
            ),
            (
                _read,
                (
                    q_plain,
                    q_turned,
                    made,
                    ropes,
                    tiles,
                    plain,
                    turned,
                    keys,
                    short,
                    values,
                    bars,
                    num_work,
                    programs,
                    HEADS,
                    P,
                    R,
                    V,
                    STAGES,
                    WORDS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
