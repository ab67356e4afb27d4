"""Mamba 2 for prompts on a GPU, in chunks of 64 tokens: products of matrices in place of steps by row.

In a chunk with rows i and j, c the sum of -exp(rate) d up to a row, S the matrix before the chunk, B and C the inputs
and outputs of the group:

    O = exp(c) C S + lower(C_i.B_j exp(c_i - c_j) d_j) X + skip X;   S = exp(c_m) S + B^T (exp(c_m - c) d X)

The last formula with m < 64 gives the matrix after m rows of the chunk: copies may be at any length. No exponent is
above 0.

`planned` lists the chunks, once per step. In a layer `_convolve_kernel` makes B, C, X, d and c of chunks;
`_scan_kernel` goes through the chunks of a sequence, for a part of the values of a head, with S in registers: it does
what depends on S alone; `_states_kernel` finishes copies at lengths inside a chunk, and writes all columns;
`_outputs_kernel` adds the rest of O, and gates it; `_norm_kernel` norms the heads of a group.

Products and scratch have the dtype of inner; sums, d, c and S are float32. For float32 rows the products have three
parts in TF32, which loses next to nothing.

Formulas: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), section 6.

Floor: 4 N P operations a token and head in `_scan_kernel`, 128 (N + P) in `_outputs_kernel`. The scratch of a token has
2 G N + H P numbers of the dtype of inner.
"""

from __future__ import annotations

import torch

from quire.kernels.mamba.triton_call import NORMS, MambaCall, step_of
from quire.kernels.state_chunks import CHUNK, Chunks, copied_behind, padded, planned
from quire.kernels.state_rows import convolved, keep_columns
from quire.kernels.triton_runtime import jit, tl

SPLIT = 32  # most values of a head in a program that goes through a sequence, or that makes outputs
NORMED = 128  # numbers of a row that a program norms


def mix_prompts(call: MambaCall, limit: int) -> None:
    """Compute the rows of sequences of more than `limit` rows, and update their states."""
    inner, form, rows, weights = call.inner, call.form, len(call.inner), call.weights
    plan, sizes, values = planned(call.meta, rows, limit), call.sizes, padded(form.head_dim)
    units, x = inner.new_empty((rows, 2, form.groups, form.state_dim)), inner.new_empty((rows, form.width))
    rates = inner.new_empty((2, rows, form.heads), dtype=torch.float32)
    exact = inner.dtype == torch.float32
    options = {"CHUNK": CHUNK, "PRODUCTS": "tf32x3" if exact else "tf32"}
    _convolve_kernel[(2 * form.groups + form.heads, plan.chunk_programs)](
        inner,
        call.step,
        weights.conv,
        weights.bias,
        weights.rate,
        weights.shift,
        *plan[:2],
        *call.places[:3],
        call.state.columns,
        units,
        x,
        *rates,
        call.strides[0],
        *call.strides[2:4],
        form.lowest,
        form.highest,
        **sizes,
        **call.taps,
        PP=values,
        CHUNK=CHUNK,
        num_warps=8,
    )
    split = min(SPLIT, values)
    scan = -(-form.head_dim // split), form.heads, plan.seq_programs
    _scan_kernel[scan](
        plan.counts,
        plan.sequences,
        *call.places,
        call.state.matrix,
        units,
        x,
        *rates,
        call.y,
        call.strides[4],
        **sizes,
        **options,
        SPLIT=split,
        num_warps=8,
        num_stages=1 if exact else 2,
    )
    _states_kernel[scan](
        inner,
        plan.counts,
        plan.sequences,
        *call.places,
        call.state.columns,
        call.state.matrix,
        units,
        x,
        *rates,
        call.strides[0],
        *call.strides[3:],
        **sizes,
        **call.columns,
        **options,
        SPLIT=split,
        num_warps=4,
        num_stages=1,
    )
    _finish(call, plan, units, x, rates, options)


def _finish(
    call: MambaCall, plan: Chunks, units: torch.Tensor, x: torch.Tensor, rates: torch.Tensor, options: dict[str, object]
) -> None:
    """Make the results of chunks, of which the part that comes from S is in y."""
    form, sizes, values, programs = call.form, call.sizes, padded(call.form.head_dim), plan.chunk_programs
    norm, width = NORMS.index(form.norm), form.width // form.groups
    large = call.inner.dtype == torch.float32 or values > 64 or sizes["NP"] > 128
    warps = 8 if large else 4 if min(values, sizes["NP"]) >= 64 else 2  # of 16 values, those of 4 warps are wrong
    squares = rates.new_empty(rates.shape[1:]) if norm else None
    _outputs_kernel[(form.heads, programs)](
        call.gate,
        call.weights.skip,
        *plan[:2],
        units,
        x,
        *rates,
        squares,
        call.y,
        call.strides[1],
        **sizes,
        **options,
        PP=values,
        NORM=norm,
        num_warps=warps,
        num_stages=1,
    )
    if norm:
        block = min(NORMED, padded(width))
        _norm_kernel[(form.groups * -(-width // block), programs)](
            call.gate,
            call.weights.norm,
            *plan[:2],
            squares,
            call.y,
            call.strides[1],
            form.eps,
            PER=form.heads // form.groups,
            PERP=padded(form.heads // form.groups),
            P=form.head_dim,
            G=form.groups,
            NORM=norm,
            CHUNK=CHUNK,
            BLOCK=block,
            num_warps=4,
        )


@jit
def _convolve_kernel(
    inner,
    step,
    conv,
    bias,
    rate,
    shift,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    columns,
    units,
    values,
    faded,
    steps,
    inner_stride,
    step_stride,
    columns_stride,
    lowest,
    highest,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    TAPS: tl.constexpr,
    PP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Make B, C, X, c and d of chunks: a program those of a side of a group, or of a head. Grid (2 G + H, programs).

    units    [T, 2, G, N] B and C;  values  [T, H, P] X;  faded, steps  [T, H] c and d
    NP, PP   N and P, padded to powers of two. For the other parameters see `_decode_kernel` and `Chunks`
    """
    WIDTH: tl.constexpr = H * P
    CHANNELS: tl.constexpr = WIDTH + 2 * G * N
    part, flat, state, value = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, NP), tl.arange(0, PP)
    i = flat[:, None]
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        own = columns + tl.load(slots + s).to(tl.int64) * columns_stride
        given, j = inner + first.to(tl.int64) * inner_stride, before + i
        if part < 2 * G:
            own_state, stated = part * N + state[None, :], (i < rows) & (state < N)[None, :]
            side = WIDTH + own_state
            u = convolved(given, own, conv, bias, j, past, side, stated, CHANNELS, TAPS, inner_stride, False)
            to = units + row * (2 * G * N) + (i * (2 * G * N) + own_state)
            tl.store(to, u.to(units.dtype.element_ty), mask=stated)
        else:
            head = part - 2 * G
            channel, shown = head * P + value[None, :], (i < rows) & (value < P)[None, :]
            x = convolved(given, own, conv, bias, j, past, channel, shown, CHANNELS, TAPS, inner_stride, False)
            tl.store(values + row * WIDTH + (i * WIDTH + channel), x.to(values.dtype.element_ty), mask=shown)
            live = flat < rows
            raw = tl.load(step + row * step_stride + (flat * step_stride + head), mask=live, other=0.0)
            d = step_of(raw.to(tl.float32) + tl.load(shift + head), lowest, highest)
            c = tl.cumsum(tl.where(live, -tl.exp(tl.load(rate + head)) * d, 0.0), 0)
            tl.store(steps + row * H + (flat * H + head), d, mask=live)
            tl.store(faded + row * H + (flat * H + head), c, mask=live)


@jit
def _scan_kernel(
    counts,
    sequences,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    matrix,
    units,
    x,
    faded,
    steps,
    y,
    matrix_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Go through the chunks of sequences, for SPLIT values of a head. Grid (ceil(P / SPLIT), H, programs).

    y   [T, H, P]: becomes the part of O that comes from S. For the other parameters see `_convolve_kernel`

    A copy at a length gets the matrix after the last whole chunk before it, `_states_kernel` goes on from there. The
    chunks come in three runs that end at the copies: Triton 3.6 compiles a condition in the loop of products wrongly.
    It also loses a number that the loop of runs would carry besides the matrix. Values are the rows of all products, at
    most 32 of them: products of warpgroups, which have 64, read beyond their operands in such loops.
    """
    head = tl.program_id(1)
    value, n, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, NP), tl.arange(0, CHUNK)
    in_value, in_state, i, j = value < P, n < N, flat[:, None], flat[None, :]
    inside, at = in_value[:, None] & in_state[None, :], head * N * P + n[None, :] * P + value[:, None]
    for p in range(tl.program_id(2), tl.load(counts + 1), tl.num_programs(2)):
        s = tl.load(sequences + 4 * p)
        first, end = tl.load(query_start + s).to(tl.int64), tl.load(seq_lens + s)
        past = end - (tl.load(query_start + s + 1) - first).to(tl.int32)
        slot = tl.load(slots + s).to(tl.int64)
        begin, chunks = past // CHUNK, (end + CHUNK - 1) // CHUNK
        one = copied_behind(kept_at, slot, 0, past, end, CHUNK)
        two = copied_behind(kept_at, slot, 1, past, end, CHUNK)
        lower, upper = tl.minimum(one, two), tl.maximum(one, two)
        held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0).to(tl.float32)
        for run in range(0, 3):
            since = tl.maximum(begin, tl.where(run == 0, begin, tl.where(run == 1, lower, upper)))
            upto = tl.where(run == 0, lower, tl.where(run == 1, upper, chunks))
            for chunk in range(since, upto):
                start = tl.maximum(past, chunk * CHUNK)
                rows, row = tl.minimum(end, (chunk + 1) * CHUNK) - start, first + (start - past)
                live = flat < rows
                stated, shown = live[:, None] & in_state[None, :], in_value[:, None] & live[None, :]
                b_at = units + row * (2 * G * N) + (i * (2 * G) + head // (H // G)) * N + n[None, :]
                bs, cs = tl.load(b_at, mask=stated, other=0.0), tl.load(b_at + G * N, mask=stated, other=0.0)
                x_at = row * (H * P) + (j * H + head) * P + value[:, None]
                new = tl.load(x + x_at, mask=shown, other=0.0).to(tl.float32)
                fade = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
                d = tl.load(steps + row * H + (flat * H + head), mask=live, other=0.0)
                last = tl.load(faded + (row + rows - 1) * H + head)
                out = tl.exp(fade)[None, :] * tl.dot(held.to(bs.dtype), tl.trans(cs), input_precision=PRODUCTS)
                tl.store(y + x_at, out.to(bs.dtype), mask=shown)
                new *= (d * tl.exp(tl.minimum(last - fade, 0.0)))[None, :]
                held = tl.dot(new.to(bs.dtype), bs, tl.exp(last) * held, input_precision=PRODUCTS)
            if (run < 2) & (upto >= 0) & (one == upto):
                target = tl.load(kept + 2 * slot).to(tl.int64)
                tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
            if (run < 2) & (upto >= 0) & (two == upto):
                target = tl.load(kept + 2 * slot + 1).to(tl.int64)
                tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
        tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)


@jit
def _states_kernel(
    inner,
    counts,
    sequences,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    matrix,
    units,
    x,
    faded,
    steps,
    inner_stride,
    columns_stride,
    matrix_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Finish copies of matrices at lengths inside a chunk, from what the scan left there; write all columns.

    Grid as that of `_scan_kernel`. The columns before the step have been read by all kernels that need them.
    """
    WIDTH: tl.constexpr = H * P
    CHANNELS: tl.constexpr = WIDTH + 2 * G * N
    head = tl.program_id(1)
    group = head // (H // G)
    value, n, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, NP), tl.arange(0, CHUNK)
    in_value, in_state, i = value < P, n < N, flat[:, None]
    inside, at = in_state[:, None] & in_value[None, :], head * N * P + n[:, None] * P + value[None, :]
    shared = (tl.program_id(0) == 0) & (head % (H // G) == 0)
    x_at, b_at, c_at = head * P + value, WIDTH + group * N + n, WIDTH + (G + group) * N + n
    for p in range(tl.program_id(2), tl.load(counts + 1), tl.num_programs(2)):
        s = tl.load(sequences + 4 * p)
        first, end = tl.load(query_start + s).to(tl.int64), tl.load(seq_lens + s)
        past = end - (tl.load(query_start + s + 1) - first).to(tl.int32)
        slot = tl.load(slots + s).to(tl.int64)
        own, given = columns + slot * columns_stride, inner + first * inner_stride
        for copy in range(0, 3):
            length, target = end, slot  # the state itself comes last
            if copy < 2:
                length = tl.load(kept_at + 2 * slot + copy)
                target = tl.load(kept + 2 * slot + copy).to(tl.int64)
            if (length > past) & (length <= end):
                to, upto = columns + target * columns_stride, length - past
                keep_columns(given, own, to, upto, past, x_at, in_value, CHANNELS, TAPS, TAPSP, inner_stride)
                if shared:
                    keep_columns(given, own, to, upto, past, b_at, in_state, CHANNELS, TAPS, TAPSP, inner_stride)
                    keep_columns(given, own, to, upto, past, c_at, in_state, CHANNELS, TAPS, TAPSP, inner_stride)
            start = tl.maximum(past, length // CHUNK * CHUNK)
            if (copy < 2) & (length > start) & (length < end):
                row, live = first + (start - past), flat < length - start
                from_b = units + row * (2 * G * N) + (i * (2 * G) + group) * N + n[None, :]
                bs = tl.load(from_b, mask=live[:, None] & in_state[None, :], other=0.0)
                from_x = x + row * WIDTH + (i * H + head) * P + value[None, :]
                new = tl.load(from_x, mask=live[:, None] & in_value[None, :], other=0.0).to(tl.float32)
                fade = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
                d = tl.load(steps + row * H + (flat * H + head), mask=live, other=0.0)
                then = tl.load(faded + (row + length - start - 1) * H + head)
                new *= (d * tl.exp(tl.minimum(then - fade, 0.0)))[:, None]
                place = matrix + target * matrix_stride + at
                held = tl.exp(then) * tl.load(place, mask=inside, other=0.0).to(tl.float32)
                held += tl.dot(tl.trans(bs), new.to(bs.dtype), input_precision=PRODUCTS)
                tl.store(place, held.to(matrix.dtype.element_ty), mask=inside)


@jit
def _outputs_kernel(
    gate,
    skip,
    counts,
    chunks,
    units,
    x,
    faded,
    steps,
    squares,
    y,
    gate_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
    PP: tl.constexpr,
    NORM: tl.constexpr,
):
    """Finish O of chunks, for a head: add the part within the chunk and the skip, and gate. Grid (H, programs).

    squares   [T, H] sums of squares of the results, or None: the form has no norm
    NORM      index in `NORMS`. For the other parameters see `_scan_kernel` and `mix`
    """
    head = tl.program_id(0)
    flat, value, n = tl.arange(0, CHUNK), tl.arange(0, PP), tl.arange(0, NP)
    i, j, in_value, in_state = flat[:, None], flat[None, :], value < P, n < N
    for chunk in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * chunk).to(tl.int64), tl.load(chunks + 4 * chunk + 1)
        live = flat < rows
        stated, shown = live[:, None] & in_state[None, :], live[:, None] & in_value[None, :]
        b_at = units + row * (2 * G * N) + (i * (2 * G) + head // (H // G)) * N + n[None, :]
        bs, cs = tl.load(b_at, mask=stated, other=0.0), tl.load(b_at + G * N, mask=stated, other=0.0)
        fade = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
        d = tl.load(steps + row * H + (flat * H + head), mask=live, other=0.0)
        seen = tl.dot(cs, tl.trans(bs), input_precision=PRODUCTS)
        seen *= tl.exp(tl.minimum(fade[:, None] - fade[None, :], 0.0)) * d[None, :]
        seen = tl.where(i >= j, seen, 0.0).to(bs.dtype)
        at = row * (H * P) + (i * H + head) * P + value[None, :]
        given = tl.load(x + at, mask=shown, other=0.0)
        o = tl.dot(seen, given, input_precision=PRODUCTS)
        o += tl.load(y + at, mask=shown, other=0.0).to(tl.float32) + tl.load(skip + head) * given.to(tl.float32)
        if NORM != 2:
            z_at = gate + row * gate_stride + (i * gate_stride + head * P + value[None, :])
            z = tl.load(z_at, mask=shown, other=0.0).to(tl.float32)
            o *= z * tl.sigmoid(z)
        if NORM != 0:
            tl.store(squares + row * H + (flat * H + head), tl.sum(o * o, 1), mask=live)
        tl.store(y + at, o.to(y.dtype.element_ty), mask=shown)


@jit
def _norm_kernel(
    gate,
    norm,
    counts,
    chunks,
    squares,
    y,
    gate_stride,
    eps,
    PER: tl.constexpr,
    PERP: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    NORM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm BLOCK numbers of the rows of chunks, over the heads of their group. Grid (G * parts of a group, programs).

    squares     [T, H] sums of squares of y;  y  [T, H, P], becomes the result
    PER, PERP   heads of a group; padded to a power of two. For the other parameters see `_outputs_kernel`
    """
    WIDTH: tl.constexpr = PER * P
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    group, flat, member = tl.program_id(0) // PARTS, tl.arange(0, CHUNK), tl.arange(0, PERP)
    place = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    within, column = place < WIDTH, group * WIDTH + place
    scale = tl.load(norm + column, mask=within, other=0.0)
    for chunk in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * chunk).to(tl.int64), tl.load(chunks + 4 * chunk + 1)
        live = flat < rows
        sums_at = squares + row * (G * PER) + (flat[:, None] * (G * PER) + group * PER + member[None, :])
        sums = tl.load(sums_at, mask=live[:, None] & (member < PER)[None, :], other=0.0)
        factor = tl.rsqrt(tl.sum(sums, 1) / WIDTH + eps)
        at, shown = row * (G * WIDTH) + (flat[:, None] * (G * WIDTH) + column[None, :]), live[:, None] & within[None, :]
        result = tl.load(y + at, mask=shown, other=0.0).to(tl.float32) * factor[:, None] * scale[None, :]
        if NORM == 2:
            z_at = gate + row * gate_stride + (flat[:, None] * gate_stride + column[None, :])
            z = tl.load(z_at, mask=shown, other=0.0).to(tl.float32)
            result *= z * tl.sigmoid(z)
        tl.store(y + at, result.to(y.dtype.element_ty), mask=shown)
