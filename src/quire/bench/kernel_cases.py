"""What `quire bench kernels` measures: operations with the shapes of a model, and what the vendor's library offers.

A new operation is one generator here and a name in `OPERATIONS`. Bytes are those that must move (inputs once, outputs
once), flops those that must be done; a time below the floor that they give would be a mistake in this file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from quire.config.checkpoint import ModelArgs
from quire.config.resolve import resolve_geometry
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.select import Kernels
from quire.kvstore.arena import KVArena
from quire.models.registry import kv_components

ROWS = (1, 8, 64, 256, 2048, 8192)
# (sequences, new tokens of each, context of each with them)
STEPS = ((1, 1, 768), (64, 1, 768), (256, 1, 512), (16, 1, 16384), (1, 4096, 4096), (4, 2048, 2048), (1, 2048, 32768))
EPS = 1e-6


@dataclass(frozen=True)
class Pair:
    """Our operation and the library's on the same inputs; both return what is compared."""

    run: Callable[[], Tensor]
    baseline: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape. `make(n)` gives n pairs on inputs of their own; `num_bytes` and `flops` of one."""

    op: str
    shape: str
    num_bytes: int
    flops: int
    baseline: str
    make: Callable[[int], list[Pair]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model's arguments, where and in what it is computed, and the kernels that were chosen for it.

    rows, steps   the shapes that are measured (`ROWS`, `STEPS`)
    """

    args: ModelArgs
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    block_size: int
    rows: tuple[int, ...] = ROWS
    steps: tuple[tuple[int, int, int], ...] = STEPS

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random values; never zeros, which run faster than real data."""
        return torch.randn(shape, dtype=torch.float32, device=self.device).mul_(scale).to(self.dtype)

    def arena(self, num_layers: int, num_blocks: int) -> list[KVView]:
        """The caches of that many layers in one arena, as a model has them, filled."""
        geometry = resolve_geometry(kv_components(self.args, str(self.dtype).removeprefix("torch.")), num_layers, None,
                                    self.block_size)
        arena = KVArena(geometry, num_blocks, self.device)
        views = [KVView(*arena.views(layer)) for layer in range(num_layers)]
        for view in views:
            for part in (view.k, view.v):
                part.copy_(self.randn(1, *part.shape[1:]).expand(part.shape))
                part.mul_(self.randn(part.shape[0], 1, 1, 1))
        return views


def norm_cases(setup: Setup) -> Iterator[Case]:
    """RMS norm of the hidden states."""
    dim = setup.args.hidden_size

    def pair(rows: int) -> Pair:
        x, weight = setup.randn(rows, dim), setup.randn(dim)
        return Pair(lambda: setup.kernels.norm.rms_norm(x, weight, EPS), lambda: F.rms_norm(x, (dim,), weight, EPS))

    for rows in setup.rows:
        yield Case(op="norm", shape=f"{rows} x {dim}", num_bytes=(2 * rows + 1) * dim * setup.item,
                   flops=4 * rows * dim, baseline="F.rms_norm", make=_made(pair, rows))


def activation_cases(setup: Setup) -> Iterator[Case]:
    """silu(gate) * up."""
    size = setup.args.intermediate_size

    def pair(rows: int) -> Pair:
        x = setup.randn(rows, 2 * size)
        return Pair(lambda: setup.kernels.activation.silu_mul(x), lambda: F.silu(x[:, :size]) * x[:, size:])

    for rows in setup.rows:
        yield Case(op="activation", shape=f"{rows} x {size}", num_bytes=3 * rows * size * setup.item,
                   flops=4 * rows * size, baseline="F.silu, mul", make=_made(pair, rows))


def heads_cases(setup: Setup) -> Iterator[Case]:
    """Norm and rotation of the heads, and their keys and values into the cache."""
    args = setup.args
    heads, kv_heads, dim = args.num_heads, args.num_kv_heads, args.head_dim
    turned = heads + kv_heads

    def make(rows: int) -> Callable[[int], list[Pair]]:
        def pairs(count: int) -> list[Pair]:
            size, blocks = setup.block_size, -(-rows // setup.block_size) + 1
            slots = torch.randperm((blocks - 1) * size, device=setup.device)[:rows] + size
            weight = setup.randn(turned, dim) if args.qk_norm else None
            cos, sin = setup.randn(rows, dim), setup.randn(rows, dim)

            def pair(kv: KVView) -> Pair:
                qkv = setup.randn(rows, turned + kv_heads, dim)

                def library() -> Tensor:
                    x = qkv[:, :turned]
                    if weight is not None:
                        x = F.rms_norm(x, (dim,), None, EPS) * weight
                    x = x * cos[:, None] + x.roll(dim // 2, -1) * sin[:, None]
                    kv.k[slots // size, :, slots % size] = x[:, heads:]
                    kv.v[slots // size, :, slots % size] = qkv[:, turned:]
                    return x[:, :heads]

                return Pair(lambda: setup.kernels.heads.prepare(qkv, weight, EPS, cos, sin, kv, slots), library)

            return [pair(kv) for kv in setup.arena(count, blocks)]

        return pairs

    for rows in setup.rows:
        moved = rows * dim * (2 * (turned + kv_heads) + 2) * setup.item + 8 * rows
        yield Case(op="heads", shape=f"{rows} x {heads}+{kv_heads}x{dim}", num_bytes=moved, flops=10 * rows * turned
                   * dim, baseline="PyTorch, 10 calls", make=make(rows))


def linear_cases(setup: Setup) -> Iterator[Case]:
    """Every projection of a layer, and the head."""
    args, kernel = setup.args, setup.kernels.linear
    hidden, inner = args.hidden_size, args.intermediate_size
    q, kv = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    shapes = {"qkv": (q + 2 * kv, hidden), "o": (hidden, q), "gate_up": (2 * inner, hidden), "down": (hidden, inner),
              "head": (args.vocab_size, hidden)}

    def make(name: str, rows: int) -> Callable[[int], list[Pair]]:
        n, k = shapes[name]

        def pair(rows: int) -> Pair:
            x, weight = setup.randn(rows, k), setup.randn(n, k, scale=k**-0.5)
            packed = kernel.pack(weight.clone())
            run = kernel.run_float if name == "head" else kernel.run
            return Pair(lambda: run(x, packed, None), lambda: F.linear(x, weight))

        return _made(pair, rows)

    for name, (n, k) in shapes.items():
        for rows in setup.rows:
            if name == "head" and rows > 512:
                continue  # logits are computed of rows that are sampled
            out = 4 if name == "head" else setup.item
            yield Case(op="linear", shape=f"{name} {rows} x {k} -> {n}", num_bytes=(n * k + rows * k) * setup.item
                       + rows * n * out, flops=2 * rows * n * k, baseline="F.linear", make=make(name, rows))


def attention_cases(setup: Setup) -> Iterator[Case]:
    """Decodes, prompts and a chunk of a long prompt; the library reads keys and values that are not paged."""
    args = setup.args
    heads, kv_heads, dim = args.num_heads, args.num_kv_heads, args.head_dim

    def make(seqs: int, new: int, context: int) -> Callable[[int], list[Pair]]:
        def pairs(count: int) -> list[Pair]:
            each = -(-context // setup.block_size)
            tables = torch.randperm(seqs * each, device=setup.device).add_(1).view(seqs, each).int()
            meta = AttentionMeta(
                query_start=torch.arange(0, seqs * new + 1, new, dtype=torch.int32, device=setup.device),
                seq_lens=torch.full((seqs,), context, dtype=torch.int32, device=setup.device),
                block_tables=tables,
                kv_slots=torch.zeros(seqs * new, dtype=torch.int64, device=setup.device),
                table_rows=torch.arange(seqs, dtype=torch.int32, device=setup.device),
                max_query_len=new,
                max_seq_len=context,
            )
            return [_attention_pair(setup, kv, meta, (seqs, new, context))
                    for kv in setup.arena(count, seqs * each + 1)]

        return pairs

    for seqs, new, context in setup.steps:
        seen = new * context - new * (new - 1) // 2  # positions that the rows of one sequence attend to
        moved = seqs * (2 * kv_heads * context + 2 * heads * new) * dim * setup.item
        yield Case(op="attention", shape=f"{seqs} x {new} of {context}, {heads}/{kv_heads}x{dim}", num_bytes=moved,
                   flops=4 * seqs * heads * dim * seen, baseline="SDPA, unpaged", make=make(seqs, new, context))


def _attention_pair(setup: Setup, kv: KVView, meta: AttentionMeta, sizes: tuple[int, int, int]) -> Pair:
    seqs, new, context = sizes
    heads, kv_heads, dim = setup.args.num_heads, setup.args.num_kv_heads, setup.args.head_dim
    q = setup.randn(seqs * new, heads, dim)
    k, v = (part[meta.block_tables.long()].transpose(1, 2).reshape(seqs, kv_heads, -1, dim)[:, :, :context].contiguous()
            for part in (kv.k, kv.v))
    rows = q.view(seqs, new, heads, dim).transpose(1, 2)
    mask = causal_lower_right(new, context) if 1 < new < context else None

    def library() -> Tensor:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, is_causal=new == context > 1,
                                             scale=dim**-0.5, enable_gqa=True)
        return out.transpose(1, 2).reshape(seqs * new, heads, dim)

    return Pair(lambda: setup.kernels.attention.paged_attention(q, kv, meta, dim**-0.5), library)


def _made(pair: Callable[[int], Pair], rows: int) -> Callable[[int], list[Pair]]:
    return lambda count: [pair(rows) for _ in range(count)]


OPERATIONS: dict[str, Callable[[Setup], Iterator[Case]]] = {
    "norm": norm_cases, "heads": heads_cases, "activation": activation_cases, "linear": linear_cases,
    "attention": attention_cases}
