"""The gated delta rule for prompts on a GPU, in chunks of 64 tokens: products of matrices in place of steps by row.

Chunks are cut at multiples of 64 of the position, so the results of a token depend little on how its prompt was divided
into steps. In a chunk with rows i and j, c the sum of g up to a row, S the matrix before the chunk:

    A = strict-lower(b_i k_i.k_j exp(c_i - c_j));  T = (I + A)^-1;  U = T (b V);  W = T (b exp(c) K)
    X = U - W S;   O = exp(c) Q S + lower(q_i.k_j exp(c_i - c_j)) X;   S = exp(c_m) S + K^T (exp(c_m - c) X)

The last formula with m < 64 gives the matrix after m rows of the chunk: copies may be at any length. No exponent is
above 0. T comes from the inverses of blocks: with D the inverse of the diagonal blocks of n rows, and L those parts of
A that lie inside blocks of 2 n rows and outside of those of n, D - D L D is the inverse of the blocks of 2 n rows.
Powers of A would be shorter, but they overflow the precision when keys are alike.

`_plan_kernel` lists the chunks, once per step. In a layer `_units_kernel` makes q and k of chunks and key heads;
`_solve_kernel` makes c, U and W of chunks and heads; `_scan_kernel` goes through the chunks of a sequence, for a part
of the values of a head, with S in registers: it does what depends on S alone; `_copies_kernel` finishes copies at
lengths inside a chunk; `_outputs_kernel` adds the part of O within the chunk, normalizes, and writes the columns, which
all before have read. Grids depend on the sizes of the step's buffers alone.

Products and scratch have the dtype of qkv, sums and S are float32; T is made of float32 numbers, in TF32. For float32
rows the products have three parts in TF32, which loses next to nothing.

Formulas: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484), sections 3 and 4.

Floor: 6 Dk Dv operations a token and head in `_scan_kernel`. The scratch of a token has 2 G Dk + H (Dk + Dv) numbers of
the dtype of qkv, which are written once; those of q, k and W are read by each part of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.delta.triton_rows import convolved, keep_columns, log_decay, opened, unit
from quire.kernels.states import StateMeta, StateView
from quire.kernels.triton_runtime import jit, tl

CHUNK = 64  # tokens
PART = 64  # numbers of a head that a program makes at once
SPLITS = 64, 32  # most values of a head in a program that goes through a sequence: of many programs, and of few
MULTIPROCESSORS = 132  # of a GPU: fewer programs are few
WIDTHS = (64, 256, 1024, 8192)  # the plan's kernel is compiled for at most so many slots
SOME, SOME_CHUNKS = 32, 64  # programs take sequences and chunks in turn when there may be more than so many


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


def padded(size: int) -> int:
    """Return the next power of two that a product of matrices can have as a size."""
    return max(16, 1 << (size - 1).bit_length())


class Chunks(NamedTuple):
    """Chunks of prompts, on the device.

    counts      [2] int32: chunks, and sequences that have some
    chunks      [., 4] int32: first row, rows, sequence, rows of the sequence before it in the step
    sequences   [., 4] int32: sequence, its first chunk, number of its chunks, 0
    """

    counts: Tensor
    chunks: Tensor
    sequences: Tensor


def mix_prompts(call: DeltaCall) -> None:
    """Compute the rows of sequences of more than `meta.decode_rows` rows, and update their states."""
    qkv, form, meta, rows = call.qkv, call.form, call.meta, len(call.qkv)
    plan, sizes, conv = _planned(meta, rows), call.sizes, call.weights.conv
    units = qkv.new_empty((rows, 2, form.key_heads, form.key_dim))
    u, w = (qkv.new_empty((rows, form.heads, dim)) for dim in (form.value_dim, form.key_dim))
    faded = qkv.new_empty((rows, form.heads), dtype=torch.float32)
    programs, seqs = _programs(len(plan.chunks), SOME_CHUNKS), _programs(len(plan.sequences), SOME)
    exact = qkv.dtype == torch.float32
    products = "tf32x3" if exact else "tf32"
    _units_kernel[(form.key_heads, programs)](
        qkv,
        conv,
        *plan[:2],
        *call.places,
        call.state.columns,
        units,
        call.strides[0],
        call.strides[4],
        **_but(sizes, "DVP", "SIGMOID", "BOUNDED", "DOUBLED"),
        CHUNK=CHUNK,
        num_warps=8,
    )
    part = min(PART, padded(min(form.key_dim, form.value_dim)))
    _solve_kernel[(form.heads, programs)](
        qkv,
        call.decay,
        call.strength,
        *call.weights_of[:3],
        *plan[:2],
        *call.places,
        call.state.columns,
        units,
        u,
        w,
        faded,
        call.strides[0],
        *call.strides[2:5],
        form.lowest,
        **_but(sizes, "DVP", "SIGMOID"),
        CHUNK=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        PART=part,
        PRODUCTS=products,
        num_warps=8,
    )
    few = len(plan.sequences) * form.heads * -(-form.value_dim // SPLITS[0]) < MULTIPROCESSORS
    split = min(SPLITS[few], padded(form.value_dim))
    _scan_kernel[(-(-form.value_dim // split), form.heads, seqs)](
        *plan,
        *call.places,
        call.state.matrix,
        units,
        u,
        w,
        faded,
        call.y,
        call.strides[5],
        **_but(sizes, "DVP", "TAPS", "TAPSP", "SIGMOID", "BOUNDED", "DOUBLED"),
        CHUNK=CHUNK,
        SPLIT=split,
        PRODUCTS=products,
        num_warps=8,
        num_stages=1 if exact else 2,
    )
    _copies_kernel[(-(-form.value_dim // split), form.heads, seqs)](
        plan.counts,
        plan.sequences,
        *call.places,
        call.state.matrix,
        units,
        u,
        faded,
        call.strides[5],
        **_but(sizes, "DVP", "TAPS", "TAPSP", "SIGMOID", "BOUNDED", "DOUBLED"),
        CHUNK=CHUNK,
        SPLIT=split,
        PRODUCTS=products,
        num_warps=4,
        num_stages=1,
    )
    _outputs_kernel[(form.heads, programs)](
        qkv,
        call.gate,
        call.weights.norm,
        *plan[:2],
        *call.places[:3],
        call.state.columns,
        units,
        u,
        faded,
        call.y,
        *call.strides[:2],
        call.strides[4],
        form.eps,
        **_but(sizes, "BOUNDED", "DOUBLED"),
        CHUNK=CHUNK,
        PRODUCTS=products,
        num_warps=8,
    )


def _but(sizes: dict[str, int | bool], *names: str) -> dict[str, int | bool]:
    """Return the constants without some."""
    return {name: size for name, size in sizes.items() if name not in names}


def _programs(most: int, some: int) -> int:
    """Return the number of programs for at most so many units of work, of which most may be empty."""
    return min(most, some + most // 4)


def _planned(meta: StateMeta, rows: int) -> Chunks:
    """Return the chunks of a step of `rows` rows. Its first layer launches the kernel that lists them."""
    key, num_seqs = ("delta chunks", rows), len(meta.slots)
    found = meta.plans.get(key)
    if not isinstance(found, Chunks):
        most = max(1, min(num_seqs, rows // (meta.decode_rows + 1)))
        sizes = (2, 4 * (rows // CHUNK + 2 * most), 4 * most)  # at most rows // CHUNK + 2 chunks of a sequence
        counts, chunks, sequences = (torch.empty(size, dtype=torch.int32, device=meta.slots.device) for size in sizes)
        meta.plans[key] = found = Chunks(counts, chunks.view(-1, 4), sequences.view(-1, 4))
        width = next(one for one in WIDTHS if one >= max(num_seqs, len(meta.kept_at)))  # one kernel for all steps
        _plan_kernel[(1,)](
            meta.query_start, meta.seq_lens, *found, num_seqs, meta.decode_rows, CHUNK=CHUNK, WIDTH=width
        )
    return found


@jit(do_not_specialize=["num_seqs", "limit"])
def _plan_kernel(
    query_start, seq_lens, counts, chunks, sequences, num_seqs, limit, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):
    """List the chunks of the sequences of more than `limit` rows. Grid (1,). WIDTH: at least num_seqs."""
    s = tl.arange(0, WIDTH)
    first = tl.load(query_start + s, mask=s < num_seqs, other=0)
    rows = tl.load(query_start + s + 1, mask=s < num_seqs, other=0) - first
    end = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    past, prompt = end - rows, rows > limit
    before = past // CHUNK
    count = tl.where(prompt, (end + CHUNK - 1) // CHUNK - before, 0)
    at = tl.cumsum(count, 0) - count
    place = sequences + 4 * (tl.cumsum(prompt.to(tl.int32), 0) - 1)
    tl.store(place, s, mask=prompt)
    tl.store(place + 1, at, mask=prompt)
    tl.store(place + 2, count, mask=prompt)
    tl.store(counts, tl.sum(count, 0))
    tl.store(counts + 1, tl.sum(prompt.to(tl.int32), 0))
    for n in range(0, tl.max(count, 0)):
        own, place = n < count, chunks + 4 * (at + n)
        start = tl.maximum(past, (before + n) * CHUNK)
        tl.store(place, first + start - past, mask=own)
        tl.store(place + 1, tl.minimum(end, (before + n + 1) * CHUNK) - start, mask=own)
        tl.store(place + 2, s, mask=own)
        tl.store(place + 3, start - past, mask=own)


@jit
def _units_kernel(
    qkv,
    conv,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    units,
    qkv_stride,
    columns_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Make q and k of the chunks of a key head, and copies of its columns. Grid (G, programs).

    units   [T, 2, G, DK] q and k
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    key_head = tl.program_id(0)
    i, key = tl.arange(0, CHUNK)[:, None], tl.arange(0, DKP)
    in_key = key < DK
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        slot = tl.load(slots + s).to(tl.int64)
        own, given = columns + slot * columns_stride, qkv + first.to(tl.int64) * qkv_stride
        inside = (i < rows) & in_key[None, :]
        for part in range(0, 2):
            channel, factor = (part * G + key_head) * DK + key, tl.where(part == 0, DK**-0.5, 1.0)
            x = unit(
                given,
                own,
                conv,
                before + i,
                past,
                channel[None, :],
                inside,
                factor,
                CHANNELS,
                TAPS,
                qkv_stride,
                False,
                1,
            )
            place = units + row * (2 * G * DK) + (i * (2 * G) + part * G + key_head) * DK + key[None, :]
            tl.store(place, x.to(units.dtype.element_ty), mask=inside)
            for copy in range(0, 2):
                upto = tl.load(kept_at + 2 * slot + copy) - past
                if (upto > before) & (upto <= before + rows):
                    copied = columns + tl.load(kept + 2 * slot + copy).to(tl.int64) * columns_stride
                    keep_columns(given, own, copied, upto, past, channel, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)


@jit
def _solve_kernel(
    qkv,
    decay,
    strength,
    conv,
    rate,
    shift,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    units,
    u,
    w,
    faded,
    qkv_stride,
    decay_stride,
    strength_stride,
    columns_stride,
    lowest,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOUBLED: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PART: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Make c, U and W of the chunks of a head, and copies of the columns of its values. Grid (H, programs).

    faded      [T, H] c;  u  [T, H, DV] and w  [T, H, DK]: a row for each row of a chunk
    LEVELS     CHUNK is 1 << LEVELS;  PART  numbers of U and W at a time
    PRODUCTS   precision of products of float32 numbers
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(0)
    flat, key, part = tl.arange(0, CHUNK), tl.arange(0, DKP), tl.arange(0, PART)
    i, j = flat[:, None], flat[None, :]
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        slot = tl.load(slots + s).to(tl.int64)
        own, given = columns + slot * columns_stride, qkv + first.to(tl.int64) * qkv_stride
        live = flat < rows
        keys = units + row * (2 * G * DK) + (i * (2 * G) + G + head // (H // G)) * DK
        k = tl.load(keys + key[None, :], mask=live[:, None] & (key < DK)[None, :], other=0.0)
        raw = tl.load(decay + row * decay_stride + (flat * decay_stride + head), mask=live, other=0.0).to(tl.float32)
        g = log_decay(raw + tl.load(shift + head), tl.exp(tl.load(rate + head)), lowest, BOUNDED)
        c = tl.cumsum(tl.where(live, g, 0.0), 0)
        tl.store(faded + row * H + (flat * H + head), c, mask=live)
        b = tl.load(strength + row * strength_stride + (flat * strength_stride + head), mask=live, other=0.0)
        b = tl.where(live, tl.sigmoid(b.to(tl.float32)) * (2.0 if DOUBLED else 1.0), 0.0)
        fade = tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0))
        a = tl.where(i > j, tl.dot(k, tl.trans(k), input_precision=PRODUCTS) * fade * b[:, None], 0.0)
        d = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
        for level in range(1, LEVELS):
            lower = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
            left = tl.dot(d, tl.where(lower, a, 0.0), input_precision=PRODUCTS)
            d -= tl.dot(left, d, input_precision=PRODUCTS)
        solved = d.to(u.dtype.element_ty)
        weight = b * tl.exp(c)
        for start in range(0, DK, PART):
            inside = live[:, None] & (start + part < DK)[None, :]
            x = tl.load(keys + start + part[None, :], mask=inside, other=0.0).to(tl.float32) * weight[:, None]
            x = tl.dot(solved, x.to(solved.dtype), input_precision=PRODUCTS)
            place = w + row * (H * DK) + (i * H + head) * DK + start + part[None, :]
            tl.store(place, x.to(solved.dtype), mask=inside)
        for start in range(0, DV, PART):
            in_value = start + part < DV
            inside, channel = live[:, None] & in_value[None, :], 2 * G * DK + head * DV + start + part
            v = convolved(
                given, own, conv, before + i, past, channel[None, :], inside, CHANNELS, TAPS, qkv_stride, False
            )
            v = tl.where(inside, v * b[:, None], 0.0).to(solved.dtype)
            v = tl.dot(solved, v, input_precision=PRODUCTS)
            place = u + row * (H * DV) + (i * H + head) * DV + start + part[None, :]
            tl.store(place, v.to(solved.dtype), mask=inside)
            for copy in range(0, 2):
                upto = tl.load(kept_at + 2 * slot + copy) - past
                if (upto > before) & (upto <= before + rows):
                    copied = columns + tl.load(kept + 2 * slot + copy).to(tl.int64) * columns_stride
                    keep_columns(given, own, copied, upto, past, channel, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)


@jit
def _scan_kernel(
    counts,
    chunks,
    sequences,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    matrix,
    units,
    u,
    w,
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
):
    """Go through the chunks of sequences, for SPLIT values of a head. Grid (ceil(DV / SPLIT), H, programs).

    u   becomes X
    y   [T, H, DV]: becomes the part of O that comes from S. For the other parameters see `_solve_kernel`
    """
    head = tl.program_id(1)
    value, key, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, DKP), tl.arange(0, CHUNK)
    in_value, in_key, i = value < DV, key < DK, flat[:, None]
    inside, at = in_key[:, None] & in_value[None, :], head * DK * DV + key[:, None] * DV + value[None, :]
    for p in range(tl.program_id(2), tl.load(counts + 1), tl.num_programs(2)):
        s = tl.load(sequences + 4 * p)
        first, end = tl.load(query_start + s).to(tl.int64), tl.load(seq_lens + s)
        past = end - (tl.load(query_start + s + 1) - first).to(tl.int32)
        slot = tl.load(slots + s).to(tl.int64)
        keep = tl.load(kept_at + 2 * slot), tl.load(kept_at + 2 * slot + 1)
        held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0)
        for n in range(past // CHUNK, (end + CHUNK - 1) // CHUNK):
            start = tl.maximum(past, n * CHUNK)
            rows, row = tl.minimum(end, (n + 1) * CHUNK) - start, first + (start - past)
            live = flat < rows
            keyed, shown = live[:, None] & in_key[None, :], live[:, None] & in_value[None, :]
            q_at = units + row * (2 * G * DK) + (i * (2 * G) + head // (H // G)) * DK + key[None, :]
            q, k = tl.load(q_at, mask=keyed, other=0.0), tl.load(q_at + G * DK, mask=keyed, other=0.0)
            known = tl.load(w + row * (H * DK) + (i * H + head) * DK + key[None, :], mask=keyed, other=0.0)
            x_at = row * (H * DV) + (i * H + head) * DV + value[None, :]
            wanted = tl.load(u + x_at, mask=shown, other=0.0).to(tl.float32)
            c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
            last = tl.load(faded + (row + rows - 1) * H + head)
            state = held.to(k.dtype)
            x = wanted - tl.dot(known, state, input_precision=PRODUCTS)
            out = tl.exp(c)[:, None] * tl.dot(q, state, input_precision=PRODUCTS)
            tl.store(u + x_at, x.to(k.dtype), mask=shown)
            tl.store(y + x_at, out.to(k.dtype), mask=shown)
            for copy in tl.static_range(2):
                if (keep[copy] > start) & (keep[copy] < start + rows):  # `_copies_kernel` goes on from here
                    target = tl.load(kept + 2 * slot + copy).to(tl.int64)
                    tl.store(matrix + target * matrix_stride + at, held, mask=inside)
            x *= tl.where(live, tl.exp(tl.minimum(last - c, 0.0)), 0.0)[:, None]
            held = tl.dot(tl.trans(k), x.to(k.dtype), tl.exp(last) * held, input_precision=PRODUCTS)
            for copy in tl.static_range(2):
                if keep[copy] == start + rows:
                    target = tl.load(kept + 2 * slot + copy).to(tl.int64)
                    tl.store(matrix + target * matrix_stride + at, held, mask=inside)
        tl.store(matrix + slot * matrix_stride + at, held, mask=inside)


@jit
def _copies_kernel(
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
    matrix_stride,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Finish copies of matrices at lengths inside a chunk, from the matrix before the chunk, which the scan left there.

    Grid as that of `_scan_kernel`, whose loop must not have this product: Triton 3.6 pipelines it wrongly.
    """
    head = tl.program_id(1)
    value, key, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, DKP), tl.arange(0, CHUNK)
    in_value, in_key, i = value < DV, key < DK, flat[:, None]
    inside, at = in_key[:, None] & in_value[None, :], head * DK * DV + key[:, None] * DV + value[None, :]
    for p in range(tl.program_id(2), tl.load(counts + 1), tl.num_programs(2)):
        s = tl.load(sequences + 4 * p)
        first, end = tl.load(query_start + s).to(tl.int64), tl.load(seq_lens + s)
        past = end - (tl.load(query_start + s + 1) - first).to(tl.int32)
        slot = tl.load(slots + s).to(tl.int64)
        for copy in tl.static_range(2):
            length = tl.load(kept_at + 2 * slot + copy)
            chunk = tl.maximum(length - 1, 0) // CHUNK
            start = tl.maximum(past, chunk * CHUNK)
            if (length > past) & (length < tl.minimum(end, (chunk + 1) * CHUNK)):
                row, live = first + (start - past), flat < length - start
                k_at = units + row * (2 * G * DK) + (i * (2 * G) + G + head // (H // G)) * DK + key[None, :]
                k = tl.load(k_at, mask=live[:, None] & in_key[None, :], other=0.0)
                x_at = x + row * (H * DV) + (i * H + head) * DV + value[None, :]
                part = tl.load(x_at, mask=live[:, None] & in_value[None, :], other=0.0).to(tl.float32)
                c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
                then = tl.load(faded + (row + length - start - 1) * H + head)
                part *= tl.where(live, tl.exp(tl.minimum(then - c, 0.0)), 0.0)[:, None]
                target = matrix + tl.load(kept + 2 * slot + copy).to(tl.int64) * matrix_stride + at
                held = tl.exp(then) * tl.load(target, mask=inside, other=0.0)
                held += tl.dot(tl.trans(k), part.to(k.dtype), input_precision=PRODUCTS)
                tl.store(target, held, mask=inside)


@jit
def _outputs_kernel(
    qkv,
    gate,
    norm,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    columns,
    units,
    x,
    faded,
    y,
    qkv_stride,
    gate_stride,
    columns_stride,
    eps,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    SIGMOID: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Finish the rows of chunks, for a head: add the part of O within the chunk, normalize, gate. Grid (H, programs).

    x   [T, H, DV] X
    Writes the columns of a sequence after its last chunk. For the other parameters see `_scan_kernel` and `mix`.
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    PER: tl.constexpr = H // G
    head = tl.program_id(0)
    flat, value, key = tl.arange(0, CHUNK), tl.arange(0, DVP), tl.arange(0, DKP)
    i, j, in_value, in_key = flat[:, None], flat[None, :], value < DV, key < DK
    q_at, k_at, v_at = (head // PER) * DK + key, (G + head // PER) * DK + key, 2 * G * DK + head * DV + value
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        live = flat < rows
        keyed, shown = live[:, None] & in_key[None, :], live[:, None] & in_value[None, :]
        unit_at = units + row * (2 * G * DK) + (i * (2 * G) + head // PER) * DK + key[None, :]
        q, k = tl.load(unit_at, mask=keyed, other=0.0), tl.load(unit_at + G * DK, mask=keyed, other=0.0)
        c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
        seen = tl.dot(q, tl.trans(k), input_precision=PRODUCTS) * tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0))
        seen = tl.where(i >= j, seen, 0.0).to(q.dtype)
        at = row * (H * DV) + (i * H + head) * DV + value[None, :]
        o = tl.dot(seen, tl.load(x + at, mask=shown, other=0.0), input_precision=PRODUCTS)
        o += tl.load(y + at, mask=shown, other=0.0).to(tl.float32)
        z_at = gate + row * gate_stride + (i * gate_stride + head * DV + value[None, :])
        z = tl.load(z_at, mask=shown, other=0.0).to(tl.float32)
        scale = tl.load(norm + value, mask=in_value, other=0.0)
        o *= tl.rsqrt(tl.sum(o * o, 1, keep_dims=True) / DV + eps) * scale[None, :] * opened(z, SIGMOID)
        tl.store(y + at, o.to(y.dtype.element_ty), mask=shown)
        first = tl.load(query_start + s)
        total = tl.load(query_start + s + 1) - first
        if before + rows == total:
            own = columns + tl.load(slots + s).to(tl.int64) * columns_stride
            given, past = qkv + first.to(tl.int64) * qkv_stride, tl.load(seq_lens + s) - total
            keep_columns(given, own, own, total, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
            if head % PER == 0:
                keep_columns(given, own, own, total, past, q_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
                keep_columns(given, own, own, total, past, k_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
