"""Attention of many rows on Hopper, in Gluon, with specialized warps.

One warp makes the copy engine (TMA) read queries, keys and values into rings of buffers. Two groups of four warps
compute 64 of a tile's rows each. A group starts the scores of the next tile of keys and the weighted sums of the last
tile at once, and computes one softmax while the matrix units work (the schedule of FlashAttention-3, Shah et al. 2024).
Programs are persistent: each takes several tiles of the plan, whose order balances their work.

A tile of keys is always read whole, so every value in the cache must be finite; `quire.kernels.heads` makes it so.
Contexts are read backwards, because their end needs the mask.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import gl, gluon_jit, hopper

if hopper is not None:
    mbarrier, tma = hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait


@gluon_jit
def nth_work(turn, programs):
    """Return the index of the piece of work that this program does in its turn number `turn`.

    Every other turn runs backwards, so that each program gets long and short tiles. programs: number of programs.
    """
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)


@gluon_jit
def _span(record, TILE: gl.constexpr, WINDOW: gl.constexpr, DIVIDED: gl.constexpr):
    """Read the record of a tile of queries, or of a part of its context if DIVIDED.

    Returns row, rows, position    first row; rows; position of the first row
    first, last                    first and last tile of keys
    whole, whole_end               tiles of keys that every row sees whole: the first, and the end
    """
    row, rows, position = gl.load(record), gl.load(record + 1), gl.load(record + 2)
    last = gl.cdiv(position + rows, TILE) - 1
    whole_end = gl.minimum((position + 1) // TILE, last)
    first, whole = 0, 0
    if WINDOW > 0:
        first = gl.maximum(position - WINDOW + 1, 0) // TILE
        whole = gl.minimum(gl.cdiv(gl.maximum(position + rows - WINDOW, 0), TILE), whole_end)
    if DIVIDED:
        part, parts, count = gl.load(record + 6), gl.load(record + 7), last - first + 1
        last = first + (part + 1) * count // parts - 1
        first += part * count // parts
        whole_end = gl.maximum(gl.minimum(whole_end, last), first)
        whole = gl.maximum(gl.minimum(whole, whole_end), first)
    return row, rows, position, first, whole, whole_end, last


@gluon_jit
def _read(
    q_rows,
    k_rows,
    v_rows,
    table,
    memory,
    work,
    block_rows,
    head_rows,
    stride_table,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    WORDS: gl.constexpr,
    ROW: gl.constexpr,
    DIVIDED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The reading warp. Keys come first: the queries of a tile wait until both groups are done with the last tile's.

    Arguments as in `prefill_kernel` and `_attend`.
    """
    queries, keys, values, bars, _halves = memory
    tiles, num_work, programs = work
    k_ready, v_ready, k_free, v_free, q_ready, q_free = bars
    TILE: gl.constexpr = keys.shape[1]
    W: gl.constexpr = keys.shape[2]
    count = 0
    for turn in range(gl.cdiv(num_work, programs)):
        piece = nth_work(turn, programs)
        if piece < num_work:
            record = tiles + piece // HEADS * WORDS
            row, _rows, _position, first, _whole, _whole_end, last = _span(record, TILE, WINDOW, DIVIDED)
            blocks = table + gl.load(record + ROW).to(gl.int64) * stride_table
            head = piece % HEADS
            block = gl.load(blocks + last * TILE // SIZE)
            for back in range(last - first + 1):
                at = (last - back) * TILE
                place = block * block_rows + head * head_rows + at % SIZE
                block = gl.load(blocks + gl.maximum(at - TILE, 0) // SIZE)
                stage, phase = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_ready.index(stage), PARTS * k_rows.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    k_to = keys.index(stage * PARTS + part)
                    tma.async_copy_global_to_shared(k_rows, [place, part * W], k_ready.index(stage), k_to)
                if back == 0:
                    mbarrier.wait(q_free, (turn & 1) ^ 1)
                    mbarrier.expect(q_ready, PARTS * q_rows.block_type.nbytes)
                    for part in gl.static_range(PARTS):
                        q_at = [row, head * GROUP, part * W]
                        tma.async_copy_global_to_shared(q_rows, q_at, q_ready, queries.index(part))
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), PARTS * v_rows.block_type.nbytes)
                for part in gl.static_range(PARTS):
                    v_to = values.index(stage * PARTS + part)
                    tma.async_copy_global_to_shared(v_rows, [place, part * W], v_ready.index(stage), v_to)
                count += 1


@gluon_jit
def softmax(
    scores,
    top,
    weight,
    positions,
    start,
    scale,
    cap,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    CAPPED: gl.constexpr,
):
    """Compute softmax weights from the scores [64, TILE] of a tile of keys; update the running softmax (base 2).

    top, weight   [64] maxima and sums of weights of the tiles before
    positions     [64] position of each row
    start         position of the first key of the tile
    scale, cap    see `triton_tiles.rescore`

    Returns weights [64, TILE], new maxima [64], new sums of weights [64], and the factor [64] of earlier sums.
    """
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (gl.exp2(2.0 * 1.4426950408889634 * scale * scores) + 1.0))
        scale = 1.0
    if MASKED:
        columns = start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        seen = columns[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (columns[None, :] > positions[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    above = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - above[:, None])
    decay = gl.exp2(top - above)
    return weights, above, weight * decay + gl.sum(weights, 1), decay


@gluon_jit
def as_operand(weights, DTYPE: gl.constexpr, SUMS: gl.constexpr):
    """Return softmax weights [64, TILE] float32 rounded to DTYPE, as a left operand in registers.

    One `cvt` instruction rounds two weights. With separate rounding, ptxas packs the halves in the wrong order and
    swaps them twice per iteration.
    """
    if DTYPE == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.float16, is_pure=True, pack=2
        )
    return gl.convert_layout(pairs, gl.DotOperandLayout(0, SUMS, 2))


@gluon_jit
def begin_scores(queries, keys, stage, TILE: gl.constexpr, SCORES: gl.constexpr):
    """Start the product queries . keys [64, TILE] for the tile in buffer `stage`; return the scores under way.

    queries, keys   tuples of one part, or of two parts whose products are added
    """
    scores = warpgroup_mma(
        queries[0],
        keys[0].index(stage).permute((1, 0)),
        gl.zeros([64, TILE], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    if len(queries) > 1:
        scores = warpgroup_mma(queries[1], keys[1].index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon_jit
def whole_scores(scores, halves, count, PART: gl.constexpr):
    """Return the scores [64, TILE] of tile `count` of keys from the part that this group has made of half the columns.

    halves   (): the part is the whole; or the buffers [4, 64, TILE] through which the groups give each other their
             parts, and the barriers [4] that say that one is there. Both take turns: a group writes a buffer again when
             the other group has given its part of the next tile: by then it has read this one
    PART     0 or 1, half that this group has made
    """
    if len(halves) > 0:
        buffers, given = halves
        mine, other = count % 2 * 2 + PART, count % 2 * 2 + 1 - PART
        buffers.index(mine).store(scores)
        gl.thread_barrier()  # one thread speaks for all four warps
        mbarrier.arrive(given.index(mine))
        mbarrier.wait(given.index(other), (count // 2) & 1)
        scores += buffers.index(other).load(scores.type.layout)
    return scores


@gluon_jit
def advance(
    queries,
    state,
    keys,
    values,
    bars,
    halves,
    positions,
    start,
    scale,
    cap,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    CAPPED: gl.constexpr,
    PARTS: gl.constexpr,
    PART: gl.constexpr,
):
    """Compute scores and weights of the next tile of keys, while the matrix units add the values of the tile before.

    state          weights of the tile before; weighted sums of values, maxima and sums of weights of the running
                   softmax; number of tiles before this one, in all pieces of work
    bars           see `make_bars`
    halves, PART   see `whole_scores`; PARTS: parts of the columns of a tile, each in a buffer of its own
    others         see `begin_scores` and `softmax`

    Returns the new state.
    """
    weights, sums, top, weight, count = state
    k_ready, v_ready, k_free, v_free, _q_ready, _q_free = bars
    STAGES: gl.constexpr = values.shape[0] // PARTS
    SCORES: gl.constexpr = positions.type.layout.parent
    SUMS: gl.constexpr = sums.type.layout
    stage, before = count % STAGES, (count - 1) % STAGES
    mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
    scores = begin_scores(queries, keys, stage * PARTS + PART, values.shape[1], SCORES)
    mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
    sums = warpgroup_mma(weights, values.index(before * PARTS + PART), sums, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(stage))
    scores = whole_scores(scores, halves, count, PART)
    exact, top, weight, decay = softmax(scores, top, weight, positions, start, scale, cap, MASKED, WINDOW, CAPPED)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(v_free.index(before))
    sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
    return as_operand(exact, values.dtype, SUMS), sums, top, weight, count + 1


@gluon_jit
def make_bars(STAGES: gl.constexpr):
    """Make the barriers (k_ready, v_ready, k_free, v_free, q_ready, q_free).

    ready   the copy engine has written the buffer
    free    both computing groups have read the buffer
    k, v    one barrier for each of the STAGES buffers of keys, and of values
    q       one barrier for the buffer of queries
    """
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    return k_ready, v_ready, k_free, v_free, q_ready, q_free


@gluon_jit
def make_halves(TILE: gl.constexpr):
    """Make the buffers and barriers of `whole_scores`."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    buffers = gl.allocate_shared_memory(gl.float32, [4, 64, TILE], swizzled)
    given = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(given.index(i), count=1)
    return buffers, given


@gluon_jit
def _attend(
    memory,
    work,
    ends,
    scale,
    cap,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    CAPPED: gl.constexpr,
    WORDS: gl.constexpr,
    DIVIDED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """A computing group of four warps: the first (HALF 0) or second 64 rows of every tile.

    If PARTS is 2, tiles have 64 rows: both groups compute all of them, each with its half of the columns.

    memory   buffers of queries, keys and values in shared memory; bars, see `make_bars`; halves, see `whole_scores`
    work     tiles, number of pieces of work, number of programs
    ends     out, stride_out, sinks, v_scale, sums_at, stats_at

    Other arguments as in `prefill_kernel`. SCORES, SUMS: layouts of scores and of sums.
    """
    queries, keys, values, bars, halves = memory
    tiles, num_work, programs = work
    k_ready, v_ready, k_free, v_free, q_ready, q_free = bars
    TILE: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    W: gl.constexpr = D // PARTS
    PART: gl.constexpr = HALF * (PARTS - 1)
    FIRST: gl.constexpr = HALF * 64 * (2 - PARTS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    # Queries stay in registers if there is room. With groups of 2 heads ptxas would move them all the time.
    HELD: gl.constexpr = GROUP != 2 and W <= 128
    ring = (keys,)
    half = queries.index(PART).reshape([128 // PARTS, W]).slice(FIRST, 64)
    lane = FIRST + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    dims = PART * W + gl.arange(0, W, gl.SliceLayout(0, SUMS))
    count = 0
    for turn in range(gl.cdiv(num_work, programs)):
        piece = nth_work(turn, programs)
        if piece < num_work:
            head = piece % HEADS
            record = tiles + piece // HEADS * WORDS
            row, rows, position, first, whole, whole_end, last = _span(record, TILE, WINDOW, DIVIDED)
            positions = position + (FIRST + gl.arange(0, 64, gl.SliceLayout(1, SCORES))) // GROUP
            mbarrier.wait(q_ready, turn & 1)
            mbarrier.wait(k_ready.index(count % STAGES), (count // STAGES) & 1)
            mine = (half.load(gl.DotOperandLayout(0, SCORES, 2)),) if HELD else (half,)
            scores = begin_scores(mine, ring, count % STAGES * PARTS + PART, TILE, SCORES)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_free.index(count % STAGES))
            scores = whole_scores(scores, halves, count, PART)
            if HELD:
                mbarrier.arrive(q_free)  # not before a product has had them: until then warps may still be reading
            count += 1
            top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
            weight = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            sums = gl.zeros([64, W], gl.float32, SUMS)
            exact, top, weight, _decay = softmax(
                scores, top, weight, positions, last * TILE, scale, cap, True, WINDOW, CAPPED
            )
            state = as_operand(exact, keys.dtype, SUMS), sums, top, weight, count
            for back in range(last - whole_end):
                at = (last - 1 - back) * TILE
                state = advance(
                    mine,
                    state,
                    ring,
                    values,
                    bars,
                    halves,
                    positions,
                    at,
                    scale,
                    cap,
                    True,
                    WINDOW,
                    CAPPED,
                    PARTS,
                    PART,
                )
            for _back in range(whole_end - whole):
                state = advance(
                    mine,
                    state,
                    ring,
                    values,
                    bars,
                    halves,
                    positions,
                    0,
                    scale,
                    cap,
                    False,
                    WINDOW,
                    CAPPED,
                    PARTS,
                    PART,
                )
            if WINDOW > 0:
                for back in range(whole - first):
                    at = (whole - 1 - back) * TILE
                    state = advance(
                        mine,
                        state,
                        ring,
                        values,
                        bars,
                        halves,
                        positions,
                        at,
                        scale,
                        cap,
                        True,
                        WINDOW,
                        CAPPED,
                        PARTS,
                        PART,
                    )
            weights, sums, top, weight, count = state
            if not HELD:
                mbarrier.arrive(q_free)
            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            sums = warpgroup_mma(weights, values.index(before * PARTS + PART), sums)
            mbarrier.arrive(v_free.index(before))
            weight = gl.convert_layout(weight, gl.SliceLayout(1, SUMS))
            top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
            parts = gl.load(record + 7) if DIVIDED else 1
            if parts == 1:
                _store(ends, row, rows, sums, top, weight, head, lane, dims, GROUP, D)
            elif DIVIDED:
                lanes = rows * GROUP
                _store_part(ends, record, sums, top, weight, head, lane, dims, lanes, HEADS, D, 128 // PARTS)


@gluon_jit
def _store(ends, row, rows, sums, top, weight, head, lane, dims, GROUP: gl.constexpr, D: gl.constexpr):
    """Store the attention of 64 lanes of a tile: the weighted sums by the sums of weights, that of sinks included.

    lane, dims   [64] lanes of the tile, and [W] columns, in the layout of sums [64, W]
    others       as in `_attend`
    """
    out, stride_out, sinks, v_scale, _sums_at, _stats_at = ends
    heads = head * GROUP + lane % GROUP
    if sinks is not None:
        sink = gl.load(sinks + heads).to(gl.float32) * 1.4426950408889634
        weight += gl.exp2(sink - top)
    if v_scale is not None:
        weight = weight / v_scale
    place = (row + lane // GROUP).to(gl.int64) * stride_out + heads * D
    gl.store(
        out + place[:, None] + dims[None, :],
        (sums / weight[:, None]).to(out.dtype.element_ty),
        mask=(lane < rows * GROUP)[:, None],
    )


@gluon_jit
def _store_part(
    ends,
    record,
    sums,
    top,
    weight,
    head,
    lane,
    dims,
    lanes,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Store the softmax state of 64 lanes of a tile of ROWS, after a part of the context, for `triton_prefill`'s merge.

    record        record of the tile and part, in `Plan.tiles`
    lane, lanes   [64] lanes; those from `lanes` on are not stored
    others        as in `_attend`
    """
    _out, _stride_out, _sinks, v_scale, sums_at, stats_at = ends
    at = (gl.load(record + 8).to(gl.int64) * HEADS + head) * ROWS + lane
    if v_scale is not None:
        sums = sums * v_scale
    live = lane < lanes
    gl.store(stats_at + 2 * at, top, mask=live)
    gl.store(stats_at + 2 * at + 1, weight, mask=live)
    gl.store(sums_at + (at * D)[:, None] + dims[None, :], sums, mask=live[:, None])


@gluon_jit
def prefill_kernel(
    out,
    q_rows,
    k_rows,
    v_rows,
    table,
    tiles,
    sinks,
    stride_out,
    block_rows,
    head_rows,
    stride_table,
    scale,
    cap,
    v_scale,
    sums_at,
    stats_at,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    TILE: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    CAPPED: gl.constexpr,
    WORDS: gl.constexpr,
    ROW: gl.constexpr,
    DIVIDED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Compute attention of all tiles of query rows, or of parts of their contexts.

    Grid: at most as many programs as multiprocessors.

    A program has 4 warps with 168 registers per thread, which it redistributes.

    out                      [T, H, D], output
    stride_out               elements from row to row of `out`
    q_rows                   descriptor of the queries [T, H, D] in tiles [128 / PARTS / GROUP, GROUP, D / PARTS]
    k_rows, v_rows           descriptors of the cache as rows [R, D] in tiles [TILE, D / PARTS]
    block_rows, head_rows    rows of the cache from block to block, and from head to head
    table                    [slots or sequences, blocks] int32, block tables
    stride_table             elements from row to row of `table`
    tiles                    `Plan.tiles` of 128 / PARTS rows, WORDS words each
    ROW                      word of a tile that is its row of `table`
    sinks                    [H], or None
    scale, cap, CAPPED       see `triton_tiles.rescore`
    v_scale                  number that multiplies the result, or None
    DIVIDED                  True: contexts may be divided; their parts are written to sums_at, stats_at
    sums_at, stats_at        `Plan.tile_sums`, `Plan.tile_stats`, outputs
    WINDOW                   number of tokens that a row sees; 0: all
    HEADS                    number of KV heads
    GROUP                    number of query heads of a KV head
    SIZE, TILE               tokens of a block, and of a tile of keys
    STAGES                   number of buffers for tiles of keys, and for tiles of values
    PARTS                    1: a group of warps computes half the rows of a tile; 2: half the columns, because the sums
                             of 64 rows of 512 columns fill the registers of both groups
    """
    W: gl.constexpr = D // PARTS
    queries = gl.allocate_shared_memory(k_rows.dtype, [PARTS, 128 // PARTS // GROUP, GROUP, W], q_rows.layout)
    keys = gl.allocate_shared_memory(k_rows.dtype, [STAGES * PARTS, TILE, W], k_rows.layout)
    values = gl.allocate_shared_memory(k_rows.dtype, [STAGES * PARTS, TILE, W], v_rows.layout)
    bars = make_bars(STAGES)
    halves = make_halves(TILE) if PARTS == 2 else ()
    memory = queries, keys, values, bars, halves
    work = tiles, gl.load(tiles + 5) * HEADS, gl.num_programs(0)
    ends = out, stride_out, sinks, v_scale, sums_at, stats_at
    sizes: gl.constexpr = (HEADS, GROUP, D, STAGES, WINDOW, CAPPED, WORDS, DIVIDED, PARTS)
    of_read: gl.constexpr = (HEADS, GROUP, SIZE, STAGES, WINDOW, WORDS, ROW, DIVIDED, PARTS)
    gl.warp_specialize(
        [
            (_attend, (memory, work, ends, scale, cap, 0) + sizes),
            (_attend, (memory, work, ends, scale, cap, 1) + sizes),
            (
                _read,
                (q_rows, k_rows, v_rows, table, memory, work, block_rows, head_rows, stride_table) + of_read,
            ),
        ],
        [4, 1],
        [240, 24],
    )
