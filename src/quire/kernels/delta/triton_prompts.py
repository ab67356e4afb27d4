"""The gated delta rule for prompts on a GPU, in chunks of 64 tokens: products of matrices in place of steps by row.

Chunks are cut at multiples of 64 of the position, so the results of a token depend little on how its prompt was divided
into steps. In a chunk with rows i and j, c the sum of g up to a row, S the matrix before the chunk:

    A = strict-lower(b_i k_i.k_j exp(c_i - c_j));  T = (I + A)^-1;  P = lower(q_i.k_j exp(c_i - c_j))
    X = T (b (v - exp(c) K S));   O = exp(c) Q S + P X;   S = exp(c_m) S + (K exp(c_m - c))^T X

The last line with m < 64 gives the matrix after m rows of the chunk: copies may be at any length. No exponent is above
0. T comes from the inverses of blocks: with D the inverse of the diagonal blocks of n rows, and L those parts of A
that lie inside blocks of 2 n rows and outside of those of n, D - D L D is the inverse of the blocks of 2 n rows.
Powers of A would be shorter, but they overflow the precision when keys are alike.

`_plan_kernel` lists the chunks, once per step. In a layer `_units_kernel` makes q and k of chunks and key heads;
`_solve_kernel` makes c, T and P of chunks and heads; `_scan_kernel` goes through the chunks of a sequence, for a part
of the values of a head, with S in registers; `_outputs_kernel` normalizes, and writes the columns, which all before
have read. Grids depend on the sizes of the step's buffers alone.

Formulas: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484), sections 3 and 4.

Floor: 2 Dv (3 Dk + 2 * 64) operations a token and head in `_scan_kernel`, in TF32: with 32 heads of 128 x 128 it is
0.13 GFLOP for 32 tokens; the scratch of a token is 4 H (64 + 1 + Dv) + 2 (64 H + 2 G Dk) bytes, written and read once.
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
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

CHUNK = 64  # tokens
SPLIT = 64  # most values of a head in a program that goes through a sequence
WIDTHS = (64, 256, 1024, 8192)  # the plan's kernel is compiled for at most so many slots
SOME, SOME_CHUNKS = 32, 64  # programs take sequences and chunks in turn when there may be more than so many


@dataclass(frozen=True)
class Call:
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


def mix_prompts(call: Call) -> None:
    """Compute the rows of sequences of more than `meta.decode_rows` rows, and update their states."""
    qkv, form, meta, rows = call.qkv, call.form, call.meta, len(call.qkv)
    plan, sizes = _planned(meta, rows), call.sizes
    exact = qkv.dtype == torch.float32
    units = qkv.new_empty((rows, 2, form.key_heads, form.key_dim), dtype=torch.float32)
    inverse, within = (qkv.new_empty((rows, form.heads, CHUNK), dtype=torch.float32) for _ in range(2))
    faded = qkv.new_empty((rows, form.heads), dtype=torch.float32)
    o = call.y if exact else torch.empty_like(call.y, dtype=torch.float32)
    scratch = units, inverse, within, faded
    chunk_programs, programs = _programs(len(plan.chunks), SOME_CHUNKS), _programs(len(plan.sequences), SOME)
    _units_kernel[(form.key_heads, chunk_programs)](
        qkv, call.weights.conv, *plan[:2], *call.places, call.state.columns, units, call.strides[0], call.strides[4],
        **_but(sizes, "DVP", "SIGMOID", "BOUNDED", "DOUBLED"), CHUNK=CHUNK, ROUNDED=not exact, num_warps=8,
    )  # fmt: skip
    _solve_kernel[(form.heads, chunk_programs)](
        call.decay, call.strength, *call.weights_of[1:3], *plan[:2], *scratch, *call.strides[2:4], form.lowest,
        **_but(sizes, "DV", "DVP", "TAPS", "TAPSP", "SIGMOID"), CHUNK=CHUNK, LEVELS=CHUNK.bit_length() - 1,
        EXACT="ieee" if exact or INTERPRETED else "bf16x3", PRODUCTS=tl.float32 if exact else tl.float16, num_warps=8,
    )  # fmt: skip
    split = min(SPLIT, padded(form.value_dim))
    _scan_kernel[(-(-form.value_dim // split), form.heads, programs)](
        qkv, call.weights.conv, *plan, *call.places, call.state.columns, call.state.matrix, *scratch, o,
        call.strides[0], *call.strides[4:],
        **_but(sizes, "DVP", "SIGMOID", "BOUNDED", "DOUBLED"), CHUNK=CHUNK, SPLIT=split,
        EXACT="ieee" if exact else "tf32", num_warps=8 if form.key_dim > 64 else 4, num_stages=1,
    )  # fmt: skip
    _outputs_kernel[(form.heads, chunk_programs)](
        qkv, call.gate, call.weights.norm, *plan[:2], *call.places[:3], call.state.columns, o, call.y,
        *call.strides[:2], call.strides[4], form.eps,
        **_but(sizes, "BOUNDED", "DOUBLED"), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


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
    ROUNDED: tl.constexpr,
):
    """Make q and k of the chunks of a key head, and copies of its columns. Grid (G, programs).

    units     [T, 2, G, DK] float32 q and k
    ROUNDED   to numbers that float16 and TF32 have
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
            if ROUNDED:
                x = x.to(tl.float16).to(tl.float32)
            tl.store(
                units + row * (2 * G * DK) + (i * (2 * G) + part * G + key_head) * DK + key[None, :], x, mask=inside
            )
            for copy in range(0, 2):
                upto = tl.load(kept_at + 2 * slot + copy) - past
                if (upto > before) & (upto <= before + rows):
                    copied = columns + tl.load(kept + 2 * slot + copy).to(tl.int64) * columns_stride
                    keep_columns(given, own, copied, upto, past, channel, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)


@jit
def _solve_kernel(
    decay,
    strength,
    rate,
    shift,
    counts,
    chunks,
    units,
    inverse,
    within,
    faded,
    decay_stride,
    strength_stride,
    lowest,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOUBLED: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    EXACT: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Make c, T b and P of the chunks of a head. Grid (H, programs).

    faded             [T, H] c
    inverse, within   [T, H, CHUNK] T b and P, a row for each row of a chunk
    LEVELS            CHUNK is 1 << LEVELS
    EXACT             precision of the products for T;  PRODUCTS  type of q and k in products
    """
    head = tl.program_id(0)
    flat, key = tl.arange(0, CHUNK), tl.arange(0, DKP)
    i, j = flat[:, None], flat[None, :]
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        live = flat < rows
        place = units + row * (2 * G * DK) + (i * (2 * G) + head // (H // G)) * DK + key[None, :]
        inside = live[:, None] & (key < DK)[None, :]
        k = tl.load(place + G * DK, mask=inside, other=0.0).to(PRODUCTS)
        raw = tl.load(decay + row * decay_stride + (flat * decay_stride + head), mask=live, other=0.0).to(tl.float32)
        g = log_decay(raw + tl.load(shift + head), tl.exp(tl.load(rate + head)), lowest, BOUNDED)
        c = tl.cumsum(tl.where(live, g, 0.0), 0)
        tl.store(faded + row * H + (flat * H + head), c, mask=live)
        b = tl.load(strength + row * strength_stride + (flat * strength_stride + head), mask=live, other=0.0).to(
            tl.float32
        )
        b = tl.where(live, tl.sigmoid(b) * (2.0 if DOUBLED else 1.0), 0.0)
        fade = tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0))
        a = tl.where(i > j, tl.dot(k, tl.trans(k), input_precision="ieee") * fade * b[:, None], 0.0)
        d = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
        for level in range(1, LEVELS):
            lower = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
            left = tl.dot(d, tl.where(lower, a, 0.0), input_precision=EXACT)
            d -= tl.dot(left, d, input_precision=EXACT)
        square = (i * H + head) * CHUNK + j
        tl.store(inverse + row * (H * CHUNK) + square, d * b[None, :], mask=live[:, None])
        q = tl.load(place, mask=inside, other=0.0).to(PRODUCTS)
        seen = tl.dot(q, tl.trans(k), input_precision="ieee") * fade
        tl.store(within + row * (H * CHUNK) + square, tl.where(i >= j, seen, 0.0), mask=live[:, None])


@jit
def _scan_kernel(
    qkv,
    conv,
    counts,
    chunks,
    sequences,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    matrix,
    units,
    inverse,
    within,
    faded,
    o,
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
    EXACT: tl.constexpr,
):
    """Go through the chunks of sequences, for SPLIT values of a head. Grid (ceil(DV / SPLIT), H, programs).

    o   [T, H * DV] float32: the results before norm and gate. For the other parameters see `_solve_kernel`
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    head = tl.program_id(1)
    value, key, flat = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT), tl.arange(0, DKP), tl.arange(0, CHUNK)
    i, j, in_value, in_key = flat[:, None], flat[None, :], value < DV, key < DK
    v_at, inside = 2 * G * DK + head * DV + value, in_key[:, None] & in_value[None, :]
    at = head * DK * DV + key[:, None] * DV + value[None, :]
    for p in range(tl.program_id(2), tl.load(counts + 1), tl.num_programs(2)):
        s, start, count = tl.load(sequences + 4 * p), tl.load(sequences + 4 * p + 1), tl.load(sequences + 4 * p + 2)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        slot = tl.load(slots + s).to(tl.int64)
        own, given = columns + slot * columns_stride, qkv + first.to(tl.int64) * qkv_stride
        held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0)
        for n in range(start, start + count):
            row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
            before = tl.load(chunks + 4 * n + 3)
            live = flat < rows
            in_row, place = live[:, None], units + ((row + i) * (2 * G) + head // (H // G)) * DK + key[None, :]
            q = tl.load(place, mask=in_row & in_key[None, :], other=0.0)
            k = tl.load(place + G * DK, mask=in_row & in_key[None, :], other=0.0)
            c = tl.load(faded + row * H + (flat * H + head), mask=live, other=0.0)
            square = (i * H + head) * CHUNK + j
            solved = tl.load(inverse + row * (H * CHUNK) + square, mask=in_row, other=0.0)
            seen = tl.load(within + row * (H * CHUNK) + square, mask=in_row, other=0.0)
            fade = tl.exp(c)
            shown = in_row & in_value[None, :]
            v = convolved(given, own, conv, before + i, past, v_at[None, :], shown, CHANNELS, TAPS, qkv_stride, False)
            v -= fade[:, None] * tl.dot(k, held, input_precision=EXACT)
            x = tl.dot(solved, tl.where(shown, v, 0.0), input_precision=EXACT)
            out = fade[:, None] * tl.dot(q, held, input_precision=EXACT)
            out += tl.dot(seen, x, input_precision=EXACT)
            tl.store(o + row * (H * DV) + (i * (H * DV) + head * DV + value[None, :]), out, mask=shown)
            for copy in range(0, 2):
                upto = tl.load(kept_at + 2 * slot + copy) - past
                if (upto > before) & (upto <= before + rows):
                    target = tl.load(kept + 2 * slot + copy).to(tl.int64)
                    then = tl.load(faded + (row + upto - before - 1) * H + head)
                    weight = tl.where(flat < upto - before, tl.exp(tl.minimum(then - c, 0.0)), 0.0)
                    after = tl.dot(tl.trans(k * weight[:, None]), x, input_precision=EXACT) + tl.exp(then) * held
                    tl.store(matrix + target * matrix_stride + at, after, mask=inside)
                    copied = columns + target * columns_stride
                    keep_columns(given, own, copied, upto, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
            then = tl.load(faded + (row + rows - 1) * H + head)
            weight = tl.where(live, tl.exp(tl.minimum(then - c, 0.0)), 0.0)
            held = tl.dot(tl.trans(k * weight[:, None]), x, input_precision=EXACT) + tl.exp(then) * held
        tl.store(matrix + slot * matrix_stride + at, held, mask=inside)


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
    o,
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
):
    """Normalize and gate the rows of chunks, for a head; after a sequence's last chunk write its columns.

    Grid (H, programs). y may be o. For the parameters see `_scan_kernel` and `quire.kernels.delta`.
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    PER: tl.constexpr = H // G
    head = tl.program_id(0)
    i, value, key = tl.arange(0, CHUNK)[:, None], tl.arange(0, DVP), tl.arange(0, DKP)
    in_value, in_key = value < DV, key < DK
    q_at, k_at, v_at = (head // PER) * DK + key, (G + head // PER) * DK + key, 2 * G * DK + head * DV + value
    scale = tl.load(norm + value, mask=in_value, other=0.0)
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        shown, at = (i < rows) & in_value[None, :], head * DV + value[None, :]
        x = tl.load(o + row * (H * DV) + (i * (H * DV) + at), mask=shown, other=0.0).to(tl.float32)
        z = tl.load(gate + row * gate_stride + (i * gate_stride + at), mask=shown, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / DV + eps) * scale[None, :] * opened(z, SIGMOID)
        tl.store(y + row * (H * DV) + (i * (H * DV) + at), x.to(y.dtype.element_ty), mask=shown)
        first = tl.load(query_start + s)
        total = tl.load(query_start + s + 1) - first
        if before + rows == total:
            own = columns + tl.load(slots + s).to(tl.int64) * columns_stride
            given, past = qkv + first.to(tl.int64) * qkv_stride, tl.load(seq_lens + s) - total
            keep_columns(given, own, own, total, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
            if head % PER == 0:
                keep_columns(given, own, own, total, past, q_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
                keep_columns(given, own, own, total, past, k_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
