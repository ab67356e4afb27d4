"""The gated delta rule for prompts on a GPU, in chunks of 64 tokens: products of matrices in place of steps by row.

Chunks are cut at multiples of 64 of the position, so the results of a token depend little on how its prompt was divided
into steps. In a chunk with rows i and j, c the sum of g up to a row, S the matrix before the chunk:

    A = strict-lower(b_i k_i.k_j exp(c_i - c_j));  T = (I + A)^-1;  X = T b (V - exp(c) K S)
    O = exp(c) Q S + lower(q_i.k_j exp(c_i - c_j)) X;   S = exp(c_m) S + K^T (exp(c_m - c) X)

The last formula with m < 64 gives the matrix after m rows of the chunk: copies may be at any length. No exponent is
above 0. Where decays differ by channel of the key, c has a number for each, exp(c) and its like multiply channels of
Q and K, and exp(c_i - c_j) stands inside the sums of k_i.k_j and q_i.k_j (triton_channels.py).

`planned` lists the chunks, once per step. In a layer `_convolve_kernel` makes q, k and v of chunks; `solve_kernel`
(triton_solve.py) makes c and T of chunks and heads; three kernels of triton_channels.py make them where decays
differ by channel, and products of q and k; `_scan_kernel` goes through the chunks of a sequence, for a part of
the values of a head, with S in registers: it does what depends on S alone; `_states_kernel` finishes copies at lengths
inside a chunk, and writes all columns; `_outputs_kernel` adds the part of O within the chunk and normalizes. Grids
depend on the sizes of the step's buffers alone.

Products and scratch have the dtype of qkv, sums and S are float32; T is made of float32 numbers, in TF32. For float32
rows the products have three parts in TF32, which loses next to nothing.

Formulas: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484), sections 3 and 4.

Floor: 6 Dk Dv operations a token and head in `_scan_kernel`. The scratch of a token has 2 G Dk + H (Dv + 64) numbers of
the dtype of qkv; those of q, k and T are read by each part of the values. With decays by channel it has H (3 Dk + 64)
more, and H (Dk + 64) of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.delta.triton_channels import fade_kernel, finish_copy, products_kernel, solve_channels_kernel
from quire.kernels.delta.triton_rows import opened, unit
from quire.kernels.delta.triton_solve import solve_kernel
from quire.kernels.state_chunks import CHUNK, Chunks, copied_behind, padded, planned
from quire.kernels.state_rows import convolved, keep_columns
from quire.kernels.states import StateMeta, StateView
from quire.kernels.triton_runtime import jit, tl

PART = 32  # numbers of keys that are multiplied at a time
PART_BY_CHANNEL = 16  # the same with decays by channel: more spill registers
LEVELS = CHUNK.bit_length() - 1  # of halves of chunks
SPLIT = 32  # most values of a head in a program that goes through a sequence


@dataclass(frozen=True)
class DeltaCall:
    """The arguments of `mix`, and its result y. See `quire.kernels.delta`."""

    qkv: Tensor
    gate: Tensor
    decay: Tensor
    strength: Tensor
    weights: DeltaWeights
    state: StateView
    meta: StateMeta
    form: DeltaForm
    y: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Rows of the step."""
        return self.qkv, self.gate, self.decay, self.strength

    @property
    def weights_of(self) -> tuple[Tensor, ...]:
        """Weights of the layer."""
        return self.weights.conv, self.weights.rate, self.weights.shift, self.weights.norm

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Tensors that say which rows and states sequences have."""
        meta = self.meta
        return meta.query_start, meta.seq_lens, meta.slots, meta.kept_at, meta.kept

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from row to row of the inputs, and from state to state."""
        assert self.state.matrix is not None
        return (*(one.stride(0) for one in (*self.inputs, self.state.columns, self.state.matrix)),)

    @property
    def by_channel(self) -> bool:
        """True if each channel of a key has a decay."""
        return len(self.weights.shift) != self.form.heads

    @property
    def products(self) -> str:
        """Precision of products of float32 numbers."""
        return "tf32x3" if self.qkv.dtype == torch.float32 else "tf32"

    @cached_property
    def sizes(self) -> dict[str, int | bool]:
        """Constants of all kernels."""
        form, taps = self.form, len(self.weights.conv)
        return {
            "G": form.key_heads,
            "H": form.heads,
            "DK": form.key_dim,
            "DV": form.value_dim,
            "DKP": padded(form.key_dim),
            "DVP": padded(form.value_dim),
            "TAPS": taps,
            "TAPSP": 1 << max(0, taps - 2).bit_length(),
            "BOUNDED": form.lowest != 0,
            "SIGMOID": form.act == "sigmoid",
            "DOUBLED": form.doubled,
        }


def mix_prompts(call: DeltaCall) -> None:
    """Compute the rows of sequences of more than `meta.decode_rows` rows, and update their states."""
    qkv, form, meta, rows = call.qkv, call.form, call.meta, len(call.qkv)
    plan, sizes = planned(meta, rows, meta.decode_rows), call.sizes
    units, x = qkv.new_empty((rows, 2, form.key_heads, form.key_dim)), qkv.new_empty((rows, form.heads, form.value_dim))
    programs, seqs, by_channel = plan.chunk_programs, plan.seq_programs, call.by_channel
    _convolve_kernel[(2 * form.key_heads + form.heads, programs)](
        qkv,
        call.weights.conv,
        *plan[:2],
        *call.places[:3],
        call.state.columns,
        units,
        x,
        call.strides[0],
        call.strides[4],
        **_but(sizes, "TAPSP", "SIGMOID", "BOUNDED", "DOUBLED"),
        CHUNK=CHUNK,
        num_warps=8,
    )
    read, solved, faded, seen = (_solve_channels if by_channel else _solve)(call, plan, units)
    split = min(SPLIT, padded(form.value_dim))
    scan = -(-form.value_dim // split), form.heads, seqs
    forms = {"CHUNK": CHUNK, "PRODUCTS": call.products, "BY_CHANNEL": by_channel}
    _scan_kernel[scan](
        plan.counts,
        plan.sequences,
        *call.places,
        call.state.matrix,
        read,
        x,
        solved,
        faded,
        call.y,
        call.strides[5],
        **_but(sizes, "DVP", "TAPS", "TAPSP", "SIGMOID", "BOUNDED", "DOUBLED"),
        **forms,
        SPLIT=split,
        num_warps=8,
        num_stages=1,
    )
    _states_kernel[scan](
        qkv,
        plan.counts,
        plan.sequences,
        *call.places,
        call.state.columns,
        call.state.matrix,
        units,
        x,
        faded,
        call.strides[0],
        *call.strides[4:],
        **_but(sizes, "DVP", "SIGMOID", "BOUNDED", "DOUBLED"),
        **forms,
        SPLIT=split,
        num_warps=4,
        num_stages=1,
    )
    _outputs_kernel[(form.heads, programs)](
        call.gate,
        call.weights.norm,
        *plan[:2],
        units,
        x,
        faded,
        seen,
        call.y,
        call.strides[1],
        form.eps,
        **_but(sizes, "TAPS", "TAPSP", "BOUNDED", "DOUBLED"),
        **forms,
        num_warps=8 if qkv.dtype == torch.float32 else 4,
        num_stages=1,
    )


def _solve(call: DeltaCall, plan: Chunks, units: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the queries and keys that the scan reads, T, c, and None, where a head has one decay."""
    form, rows, sizes = call.form, len(call.qkv), call.sizes
    solved = units.new_empty((rows, form.heads, CHUNK))
    faded = units.new_empty((rows, form.heads), dtype=torch.float32)
    solve_kernel[(form.heads, plan.chunk_programs)](
        call.decay,
        call.strength,
        *call.weights_of[1:3],
        *plan[:2],
        units,
        solved,
        faded,
        *call.strides[2:4],
        form.lowest,
        **_but(sizes, "DV", "DVP", "TAPS", "TAPSP", "SIGMOID"),
        PART=min(PART, sizes["DKP"]),
        PRODUCTS=call.products,
        num_warps=1,  # products of warpgroups in its loop are compiled wrongly
        num_stages=1,
    )
    return units, solved, faded, None


def _solve_channels(call: DeltaCall, plan: Chunks, units: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same where each channel has a decay, and products of queries and keys, with decays."""
    form, rows, sizes = call.form, len(call.qkv), call.sizes
    solved, seen = (units.new_empty((rows, form.heads, CHUNK)) for _ in range(2))
    faded = units.new_empty((rows, form.heads, form.key_dim), dtype=torch.float32)
    products = units.new_empty((rows, form.heads, CHUNK), dtype=torch.float32)
    decayed = units.new_empty((rows, 3, form.heads, form.key_dim))
    fade_kernel[(form.heads, plan.chunk_programs)](
        call.decay,
        *call.weights_of[1:3],
        *plan[:2],
        units,
        faded,
        decayed,
        seen,
        call.strides[2],
        form.lowest,
        **_but(sizes, "DV", "DVP", "TAPS", "TAPSP", "SIGMOID", "DOUBLED"),
        CHUNK=CHUNK,
        PART=PART_BY_CHANNEL,
        num_warps=1,
        num_stages=1,
    )
    products_kernel[(form.heads, plan.chunk_programs, LEVELS)](
        *plan[:2],
        units,
        faded,
        products,
        seen,
        **_but(sizes, "DV", "DVP", "TAPS", "TAPSP", "SIGMOID", "BOUNDED", "DOUBLED"),
        CHUNK=CHUNK,
        PART=PART_BY_CHANNEL,
        PRODUCTS=call.products,
        num_warps=1,
        num_stages=1,
    )
    solve_channels_kernel[(form.heads, plan.chunk_programs)](
        call.strength,
        *plan[:2],
        products,
        solved,
        call.strides[3],
        H=form.heads,
        DOUBLED=form.doubled,
        PRODUCTS=call.products,
        num_warps=1,  # as in `_solve`
        num_stages=1,
    )
    return decayed, solved, faded, seen


def _but(sizes: dict[str, int | bool], *names: str) -> dict[str, int | bool]:
    """Return the constants without some."""
    return {name: size for name, size in sizes.items() if name not in names}


@jit
def _convolve_kernel(
    qkv,
    conv,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    columns,
    units,
    values,
    qkv_stride,
    columns_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Make q, k and v of chunks: a program those of a key head or a head. Grid (2 G + H, programs).

    units    [T, 2, G, DK] q and k;  values  [T, H, DV]
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    part, i, key, value = tl.program_id(0), tl.arange(0, CHUNK)[:, None], tl.arange(0, DKP), tl.arange(0, DVP)
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        own = columns + tl.load(slots + s).to(tl.int64) * columns_stride
        given, j = qkv + first.to(tl.int64) * qkv_stride, before + i
        if part < 2 * G:
            own_key, keyed = part * DK + key[None, :], (i < rows) & (key < DK)[None, :]
            factor = tl.where(part < G, DK**-0.5, 1.0)
            k = unit(given, own, conv, j, past, own_key, keyed, factor, CHANNELS, TAPS, qkv_stride, False, 1)
            tl.store(
                units + row * (2 * G * DK) + (i * (2 * G * DK) + own_key), k.to(units.dtype.element_ty), mask=keyed
            )
        else:
            own_value, shown = (part - 2 * G) * DV + value[None, :], (i < rows) & (value < DV)[None, :]
            channel = 2 * G * DK + own_value
            v = convolved(given, own, conv, None, j, past, channel, shown, CHANNELS, TAPS, qkv_stride, False)
            tl.store(values + row * (H * DV) + (i * (H * DV) + own_value), v.to(values.dtype.element_ty), mask=shown)


@jit
def _chunk(
    n,
    spans,
    sources,
    head,
    value,
    key,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Return what the scan reads of chunk n of a sequence: q and k, T, values [values, rows], and c.

    spans     the sequence's first row in the step, its length before the step, and after it
    sources   units, x, solved and faded of `_scan_kernel`
    With BY_CHANNEL q and k have the decays since the chunk's first row, and k with those to its last row is in the
    place of c.
    """
    first, past, end = spans
    units, x, solved, faded = sources
    flat = tl.arange(0, CHUNK)
    i, j, in_key = flat[:, None], flat[None, :], key < DK
    start = tl.maximum(past, n * CHUNK)
    rows, row = tl.minimum(end, (n + 1) * CHUNK) - start, first + (start - past)
    live = flat < rows
    keyed = live[:, None] & in_key[None, :]
    SIDES: tl.constexpr = 3 if BY_CHANNEL else 2
    KEYS: tl.constexpr = H if BY_CHANNEL else G
    q_at = units + row * (SIDES * KEYS * DK) + (i * (SIDES * KEYS) + head // (H // KEYS)) * DK + key[None, :]
    q, k = tl.load(q_at, mask=keyed, other=0.0), tl.load(q_at + KEYS * DK, mask=keyed, other=0.0)
    t_at = solved + row * (H * CHUNK) + (i * H + head) * CHUNK + j
    t = tl.load(t_at, mask=live[:, None] & (i >= j), other=0.0)
    v_at = x + row * (H * DV) + (j * H + head) * DV + value[:, None]
    v = tl.load(v_at, mask=(value < DV)[:, None] & live[None, :], other=0.0)
    if BY_CHANNEL:
        c = tl.load(q_at + 2 * KEYS * DK, mask=keyed, other=0.0)
    else:
        c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
    return q, k, t, v, c


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
    solved,
    faded,
    y,
    matrix_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Go through the chunks of sequences, for SPLIT values of a head. Grid (ceil(DV / SPLIT), H, programs).

    x   [T, H, DV] values, become X
    y   [T, H, DV]: becomes the part of O that comes from S
    For the other parameters see `solve_kernel`; with BY_CHANNEL units are `decayed` of `fade_kernel`.

    A copy at a length gets the matrix after the last whole chunk before it, `_states_kernel` goes on from there. The
    chunks come in three runs that end at the copies: Triton 3.6 compiles a condition in the loop of products wrongly.
    It also loses a number that the loop of runs would carry besides the matrix. A chunk is read while the one before is
    computed. Values are the rows of all products, at
    most 32 of them: products of warpgroups, which have 64, read beyond their operands here.
    """
    head = tl.program_id(1)
    value, key, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, DKP), tl.arange(0, CHUNK)
    in_value, in_key, j = value < DV, key < DK, flat[None, :]
    inside, at = in_value[:, None] & in_key[None, :], head * DK * DV + key[None, :] * DV + value[:, None]
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
            spans, sources = (first, past, end), (units, x, solved, faded)
            following = _chunk(since, spans, sources, head, value, key, G, H, DK, DV, CHUNK, BY_CHANNEL)
            for n in range(since, upto):
                q, k, t, v, c = following
                after = tl.minimum(n + 1, upto - 1)
                following = _chunk(after, spans, sources, head, value, key, G, H, DK, DV, CHUNK, BY_CHANNEL)
                start = tl.maximum(past, n * CHUNK)
                rows, row = tl.minimum(end, (n + 1) * CHUNK) - start, first + (start - past)
                live = flat < rows
                shown = in_value[:, None] & live[None, :]
                if BY_CHANNEL:
                    last = tl.load(faded + (row + rows - 1) * (H * DK) + head * DK + key, mask=in_key, other=0.0)
                else:
                    last, fade = tl.load(faded + (row + rows - 1) * H + head), tl.exp(c)[None, :]
                state = held.to(k.dtype)
                known = tl.dot(state, tl.trans(k), input_precision=PRODUCTS)
                if not BY_CHANNEL:
                    known *= fade
                new = tl.dot((v.to(tl.float32) - known).to(k.dtype), tl.trans(t), input_precision=PRODUCTS)
                out = tl.dot(state, tl.trans(q), input_precision=PRODUCTS)
                if not BY_CHANNEL:
                    out *= fade
                x_at = row * (H * DV) + (j * H + head) * DV + value[:, None]
                tl.store(x + x_at, new.to(k.dtype), mask=shown)
                tl.store(y + x_at, out.to(k.dtype), mask=shown)
                if BY_CHANNEL:
                    held = tl.dot(new.to(k.dtype), c, tl.exp(last)[None, :] * held, input_precision=PRODUCTS)
                else:
                    new *= tl.where(live, tl.exp(tl.minimum(last - c, 0.0)), 0.0)[None, :]
                    held = tl.dot(new.to(k.dtype), k, tl.exp(last) * held, input_precision=PRODUCTS)
            if (run < 2) & (upto >= 0) & (one == upto):
                target = tl.load(kept + 2 * slot).to(tl.int64)
                tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
            if (run < 2) & (upto >= 0) & (two == upto):
                target = tl.load(kept + 2 * slot + 1).to(tl.int64)
                tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
        tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)


@jit
def _states_kernel(
    qkv,
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
    qkv_stride,
    columns_stride,
    matrix_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Finish copies of matrices at lengths inside a chunk, from what the scan left there; write all columns.

    Grid as that of `_scan_kernel`. The columns before the step have been read by all kernels that need them.
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(1)
    value, key, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, DKP), tl.arange(0, CHUNK)
    in_value, in_key, i = value < DV, key < DK, flat[:, None]
    inside, at = in_key[:, None] & in_value[None, :], head * DK * DV + key[:, None] * DV + value[None, :]
    channels, shared = 2 * G * DK + head * DV + value, (tl.program_id(0) == 0) & (head % (H // G) == 0)
    asked = head // (H // G) * DK + key
    for p in range(tl.program_id(2), tl.load(counts + 1), tl.num_programs(2)):
        s = tl.load(sequences + 4 * p)
        first, end = tl.load(query_start + s).to(tl.int64), tl.load(seq_lens + s)
        past = end - (tl.load(query_start + s + 1) - first).to(tl.int32)
        slot = tl.load(slots + s).to(tl.int64)
        own, given = columns + slot * columns_stride, qkv + first * qkv_stride
        for copy in range(0, 3):
            length, target = end, slot  # the state itself comes last
            if copy < 2:
                length = tl.load(kept_at + 2 * slot + copy)
                target = tl.load(kept + 2 * slot + copy).to(tl.int64)
            if (length > past) & (length <= end):
                to, upto = columns + target * columns_stride, length - past
                keep_columns(given, own, to, upto, past, channels, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
                if shared:
                    keep_columns(given, own, to, upto, past, asked, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
                    keep_columns(given, own, to, upto, past, G * DK + asked, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
            start = tl.maximum(past, length // CHUNK * CHUNK)
            if (copy < 2) & (length > start) & (length < end):
                row, live = first + (start - past), flat < length - start
                place = matrix + target * matrix_stride
                if BY_CHANNEL:
                    keys = units + (G + head // (H // G)) * DK, x, faded, 2 * G * DK
                    place += head * DK * DV
                    finish_copy(keys, place, row, length - start, head, value, key, H, DK, DV, CHUNK, PRODUCTS)
                else:
                    k_at = units + row * (2 * G * DK) + (i * (2 * G) + G + head // (H // G)) * DK + key[None, :]
                    k = tl.load(k_at, mask=live[:, None] & in_key[None, :], other=0.0)
                    x_at = x + row * (H * DV) + (i * H + head) * DV + value[None, :]
                    part = tl.load(x_at, mask=live[:, None] & in_value[None, :], other=0.0).to(tl.float32)
                    c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
                    then = tl.load(faded + (row + length - start - 1) * H + head)
                    part *= tl.where(live, tl.exp(tl.minimum(then - c, 0.0)), 0.0)[:, None]
                    place += at
                    held = tl.exp(then) * tl.load(place, mask=inside, other=0.0).to(tl.float32)
                    held += tl.dot(tl.trans(k), part.to(k.dtype), input_precision=PRODUCTS)
                    tl.store(place, held.to(matrix.dtype.element_ty), mask=inside)


@jit
def _outputs_kernel(
    gate,
    norm,
    counts,
    chunks,
    units,
    x,
    faded,
    seen,
    y,
    gate_stride,
    eps,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    SIGMOID: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Finish the rows of chunks, for a head: add the part of O within the chunk, normalize, gate. Grid (H, programs).

    x      [T, H, DV] X
    seen   see `products_kernel`; None without BY_CHANNEL
    For the other parameters see `_scan_kernel` and `mix`.
    """
    PER: tl.constexpr = H // G
    head = tl.program_id(0)
    flat, value, key = tl.arange(0, CHUNK), tl.arange(0, DVP), tl.arange(0, DKP)
    i, j, in_value, in_key = flat[:, None], flat[None, :], value < DV, key < DK
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        live = flat < rows
        keyed, shown = live[:, None] & in_key[None, :], live[:, None] & in_value[None, :]
        if BY_CHANNEL:
            within_at = seen + row * (H * CHUNK) + ((i * H + head) * CHUNK + j)
            within = tl.load(within_at, mask=live[:, None] & (i >= j), other=0.0)
        else:
            unit_at = units + row * (2 * G * DK) + (i * (2 * G) + head // PER) * DK + key[None, :]
            q, k = tl.load(unit_at, mask=keyed, other=0.0), tl.load(unit_at + G * DK, mask=keyed, other=0.0)
            c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
            within = tl.dot(q, tl.trans(k), input_precision=PRODUCTS) * tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0))
            within = tl.where(i >= j, within, 0.0).to(q.dtype)
        at = row * (H * DV) + (i * H + head) * DV + value[None, :]
        o = tl.dot(within, tl.load(x + at, mask=shown, other=0.0), input_precision=PRODUCTS)
        o += tl.load(y + at, mask=shown, other=0.0).to(tl.float32)
        z_at = gate + row * gate_stride + (i * gate_stride + head * DV + value[None, :])
        z = tl.load(z_at, mask=shown, other=0.0).to(tl.float32)
        scale = tl.load(norm + value, mask=in_value, other=0.0)
        o *= tl.rsqrt(tl.sum(o * o, 1, keep_dims=True) / DV + eps) * scale[None, :] * opened(z, SIGMOID)
        tl.store(y + at, o.to(y.dtype.element_ty), mask=shown)
