"""Norm, rotation and cache write in one pass over the projection.

A program takes ROWS rows (heads of tokens), each as two halves, which the rotation combines.

Floor: qkv read once, q and the cache written once. 8192 tokens of 16 + 2 x 8 heads of 128 in bfloat16 are 134 MB, 31 us
at 4.3 TB/s; few tokens are one wave of small programs, and latency.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import KVView
from quire.kernels.attention.eight_bits import is_coded
from quire.kernels.attention.triton_tiles import coded, finite
from quire.kernels.heads import num_heads
from quire.kernels.triton_runtime import jit, tl

FEW = 4096  # up to so many rows (heads of tokens) a program takes fewer rows: more programs hide latency


def prepare(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: KVView,
    kv_slots: Tensor,
    values: str = "",
) -> Tensor:
    """Normalize and rotate q and k, write k and v to the cache, and return q. See `quire.kernels.heads`."""
    block = 1 << (qkv.shape[2] // 2 - 1).bit_length()
    rows = qkv.shape[0] * (qkv.shape[1] + (kv.k.shape[1] if values == "keys" else 0))
    return launch((qkv, norm, eps, cos, sin), kv, kv_slots, values, row_block(rows, block))


def launch(
    given: tuple[Tensor, Tensor | None, float, Tensor, Tensor],
    kv: KVView,
    kv_slots: Tensor,
    values: str,
    cut: tuple[int, int],
) -> Tensor:
    """Do the work of `prepare`, whose first arguments are `given`. cut: rows and warps of a program."""
    qkv, norm, eps, cos, sin = given
    tokens, _, dim = qkv.shape
    k, v = kv.k, kv.v
    block_size = k.shape[2]
    own_heads, kv_heads = num_heads(qkv, k.shape[1], values)
    if qkv.stride()[1:] != (dim, 1) or k.stride()[2:] != (dim, 1) or v.stride() != k.stride():
        raise ValueError(
            f"heads: qkv must be contiguous inside a token, the cache inside a head of a block, and K and "
            f"V must have the same strides; the strides of qkv, K and V are {qkv.stride()}, "
            f"{k.stride()}, {v.stride()}"
        )
    q = qkv.new_empty(tokens, own_heads, dim)
    rows = tokens * (own_heads + 2 * kv_heads)
    if not rows:
        return q
    block = 1 << (dim // 2 - 1).bit_length()
    at_once, warps = cut
    in_pdl = pdl.in_use()
    inverse = (1.0 / kv.k_scale, 1.0 / kv.v_scale) if is_coded(k) else (None, None)
    _heads_kernel[(-(-rows // at_once),)](
        qkv,
        norm,
        cos,
        sin,
        q,
        k,
        v,
        kv_slots,
        rows,
        qkv.stride(0),
        k.stride(0),
        k.stride(1),
        eps,
        *inverse,
        own_heads,
        kv_heads,
        values in ("normed", "keys"),
        values == "keys",
        dim // 2,
        block_size,
        block,
        at_once,
        in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
    )
    return q


def row_block(rows: int, half: int) -> tuple[int, int]:
    """Return the number of rows and of warps of a program, for `rows` rows in all. A row is a head of a token.

    Few rows: 1 warp, and 8 numbers of each half of a head per thread. Many rows: 4 warps and 16 numbers.

    half   elements of half a head, padded to a power of two
    """
    warps = 1 if rows <= FEW else 4
    return max(1, warps * (256 if rows <= FEW else 512) // half), warps


@jit(do_not_specialize=["rows"])
def _heads_kernel(
    qkv,
    norm,
    cos,
    sin,
    q,
    k,
    v,
    kv_slots,
    rows,
    qkv_stride,
    block_stride,
    head_stride,
    eps,
    k_inverse,
    v_inverse,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize and rotate q and k heads, and write k and v to the cache. Grid (ceil(rows / ROWS),).

    A row is a pair (token, head); per token come HEADS query heads, then KV_HEADS of k, then KV_HEADS of v.

    qkv                         [T, HEADS + 2 KV_HEADS, 2 HALF]; qkv_stride  elements from token to token. KEYS: it has
                                no v, whose rows read those of k
    NORMED                      v is divided by its root mean square
    norm                        [HEADS + KV_HEADS, 2 HALF], or None: no norm;  eps  of the norm
    cos, sin                    [T, 2 HALF] contiguous; sin is signed, and only its second half is read
    q                           [T, HEADS, 2 HALF] contiguous, output
    k, v                        cache [blocks, KV_HEADS, BLOCK_SIZE, 2 HALF]; block_stride, head_stride  in elements
    k_inverse, v_inverse        1 / scale of the codes of an 8-bit cache, else None
    kv_slots                    [T] int64: block * BLOCK_SIZE + offset
    rows                        T * (HEADS + 2 KV_HEADS)
    HALF, BLOCK                 half a head's size; padded to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    token, head = (row // ALL).to(tl.int64), row % ALL
    live = row < rows
    inside = live & (col < HALF)
    turned = inside & (head < HEADS + KV_HEADS)
    read = tl.where(head < HEADS + KV_HEADS, head, head - KV_HEADS) if KEYS else head
    if norm is not None:
        scale = norm + head * (2 * HALF) + col
        scale_first = tl.load(scale, mask=turned, other=0.0)
        scale_second = tl.load(scale + HALF, mask=turned, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    given = qkv + token * qkv_stride + read * (2 * HALF) + col
    first = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(kv_slots + token, mask=live & (head >= HEADS), other=0)
    angle = token * (2 * HALF) + col
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle + HALF, mask=turned, other=0.0).to(tl.float32)
    if (norm is not None) or NORMED:
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        inverse = tl.rsqrt(squares / (2 * HALF) + eps)
    if NORMED:
        first = tl.where(head < HEADS + KV_HEADS, first, first * inverse)
        second = tl.where(head < HEADS + KV_HEADS, second, second * inverse)
    if norm is not None:
        first = tl.where(turned, first * inverse * scale_first.to(tl.float32), first)
        second = tl.where(turned, second * inverse * scale_second.to(tl.float32), second)
    left = tl.where(turned, first * c - second * s, first).to(q.dtype.element_ty)
    right = tl.where(turned, second * c + first * s, second).to(q.dtype.element_ty)
    to_q = q + (token * HEADS + head) * (2 * HALF) + col
    is_q = inside & (head < HEADS)
    tl.store(to_q, left, mask=is_q)
    tl.store(to_q + HALF, right, mask=is_q)
    is_v = head >= HEADS + KV_HEADS
    kv_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
    place = slot // BLOCK_SIZE * block_stride + kv_head * head_stride + slot % BLOCK_SIZE * (2 * HALF) + col
    is_k = turned & (head >= HEADS)
    is_v = inside & is_v
    if k_inverse is None:
        tl.store(k + place, left, mask=is_k)
        tl.store(k + place + HALF, right, mask=is_k)
        tl.store(v + place, finite(left), mask=is_v)
        tl.store(v + place + HALF, finite(right), mask=is_v)
    else:
        tl.store(k + place, coded(left, k_inverse, k.dtype.element_ty), mask=is_k)
        tl.store(k + place + HALF, coded(right, k_inverse, k.dtype.element_ty), mask=is_k)
        tl.store(v + place, coded(finite(left), v_inverse, v.dtype.element_ty), mask=is_v)
        tl.store(v + place + HALF, coded(finite(right), v_inverse, v.dtype.element_ty), mask=is_v)
