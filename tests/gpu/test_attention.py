"""Paged attention on a GPU against a reference in float32, over poisoned arenas wider than 2^31 elements."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.step import SharedPrefix
from quire.kernels.attention import AttentionMeta, KVView, SharedBlocks, hopper, triton
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.select import here

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda")
LAYERS = 28  # at most: with long contexts fewer layers make an arena wide enough
WIDE = 2**31  # elements: what the offsets of 32 bits reach
POISON = 1e30  # where no value was written: a kernel may multiply it with 0


class Attention(Protocol):
    """An implementation of `quire.kernels.attention`."""

    __name__: str

    def paged_attention(
        self,
        q: Tensor,
        kv: KVView,
        meta: AttentionMeta,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


EVERY: tuple[Attention, ...] = (triton, hopper)
OPS = [op for op in EVERY if not here(op.__name__.rpartition(".")[2])]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__.rpartition(".")[2])


@dataclass(frozen=True)
class Step:
    """Rows and context length of every sequence; the first `prefix` blocks are the same for all when not 0."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    prefix: int = 0


STEPS = {
    "one": Step((1,), (640,)),
    "one-long": Step((1,), (32_000,)),
    "eight-long": Step((1,) * 8, tuple(range(20_001, 32_002, 1714))),
    "decode-64": Step((1,) * 64, tuple(range(577, 641))),
    "decode-256": Step((1,) * 256, tuple(range(1, 769, 3))),
    "verify": Step((4,) * 32, tuple(range(100, 2020, 60))),
    "prefill": Step((4096, 4096), (4096, 4096)),
    "chunk": Step((2048,), (16_384,)),
    "tail": Step((128,), (32_000,)),
    "tails": Step((1,) * 64 + (200, 37, 300, 9, 64), tuple(range(577, 641)) + (20_000, 9_000, 320, 40_000, 2_100)),
    "prompts": Step((512,) * 8, (512,) * 8),
    "mixed": Step((1,) * 100 + (1500, 7), tuple(range(500, 600)) + (3000, 900)),
    "shared": Step((1,) * 64, tuple(range(4096, 4224, 2)), prefix=4096),
    "shared-mixed": Step((1,) * 20 + (128, 128), tuple(range(1100, 1120)) + (1152, 1153), prefix=1024),
}


def build(
    step: Step, heads: tuple[int, int], dim: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, KVView, AttentionMeta]:
    """Random queries and a cache at the far end of an arena, NaN wherever nothing may be read; a padded step."""
    random = torch.Generator(DEVICE).manual_seed(7)
    counts = [-(-length // size) for length in step.seq_lens]
    part = 2 * heads[1] * size * dim
    layers = min(LAYERS, -(-WIDE // (part * sum(counts))))
    num_blocks = max(2 * sum(counts) + 2, WIDE // (layers * part) + sum(counts) + 2)
    assert (num_blocks - sum(counts)) * layers * part >= WIDE, "every block lies past what 32 bits reach"
    arena = torch.full((num_blocks, layers, 2, heads[1], size, dim), float("nan"), dtype=dtype, device=DEVICE)
    arena[:, :, 1] = POISON if dtype != torch.float16 else 6e4
    kv = KVView(arena[:, -1, 0], arena[:, -1, 1])
    ids = num_blocks - 1 - torch.randperm(sum(counts), generator=random, device=DEVICE).int()
    num_seqs = len(counts)
    tables = torch.full((num_seqs + 3, max(counts) + 1), 2**30, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(num_seqs, 0, -1, device=DEVICE, dtype=torch.int32)
    taken = 0
    for row, count in zip(rows.tolist(), counts, strict=True):
        tables[row, :count] = ids[taken : taken + count]
        taken += count
    shared = None
    if step.prefix:
        blocks = step.prefix // size
        tables[1:, :blocks] = tables[num_seqs, :blocks]
        tables[-2:] = 2**30
        group = SharedPrefix(np.arange(num_seqs, dtype=np.int32), blocks)
        packed = pack_shared(
            (group,),
            np.arange(num_seqs, dtype=np.int32),
            np.array(step.query_lens, np.int32),
            num_groups=4,
            most_seqs=400,
        )
        shared = SharedBlocks.view(torch.from_numpy(packed).to(DEVICE), 4, 400, num_seqs + 2)
    for s, length in enumerate(step.seq_lens):
        for side in (kv.k, kv.v):
            data = torch.randn(counts[s], heads[1], size, dim, generator=random, device=DEVICE).to(dtype)
            past = torch.arange(counts[s] * size, device=DEVICE).view(counts[s], 1, size, 1) >= length
            where = tables[rows[s], : counts[s]].long()
            fresh = (side[where].isnan() | (side[where].abs() > 5e4)) & ~past
            side[where] = torch.where(fresh, data, side[where])
    q = torch.randn(sum(step.query_lens) + 5, heads[0] + 2 * heads[1], dim, generator=random, device=DEVICE).to(dtype)
    starts = torch.tensor([0, *step.query_lens, 0, 0], device=DEVICE).cumsum(0).int()
    longest = max(step.query_lens)
    meta = AttentionMeta(
        query_start=starts,
        seq_lens=torch.tensor([*step.seq_lens, 0, 0], dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        kv_slots=torch.zeros(len(q), dtype=torch.int64, device=DEVICE),
        table_rows=torch.cat((rows, torch.zeros(2, dtype=torch.int32, device=DEVICE))),
        max_query_len=longest,
        decode_len=longest if longest <= 8 else 1,
        shared=shared,
    )
    return q[:, : heads[0]], kv, meta


def reference(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The contract in float32, a thousand rows at a time."""
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor) and meta.table_rows is not None
    group = q.shape[1] // kv.k.shape[1]
    out = torch.zeros_like(q, dtype=torch.float32)
    starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
    for s, length in enumerate(lengths):
        blocks = meta.block_tables[meta.table_rows[s], : -(-length // kv.block_size)].long()
        k, v = (
            x[blocks].transpose(1, 2).flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (kv.k, kv.v)
        )
        for first in range(starts[s], starts[s + 1], 256):
            last = min(first + 256, starts[s + 1])
            position = torch.arange(first, last, device=DEVICE) + length - starts[s + 1]
            columns = torch.arange(length, device=DEVICE)
            scores = torch.einsum("mhd,lhd->hml", q[first:last].float(), k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            hidden = columns[None] > position[:, None]
            if window is not None:
                hidden |= columns[None] <= position[:, None] - window
            scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, last - first, 1)), -1)
            weights = scores.softmax(-1)[..., :length]
            out[first:last] = torch.einsum("hml,lhd->mhd", weights, v)
    return out


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    empty = torch.empty

    def filled(*size: object, **options: object) -> Tensor:
        made: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        return made.fill_(float("nan") if made.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", filled)
    yield
    torch.cuda.empty_cache()


def check(actual: Tensor, expected: Tensor, rows: int, bound: float = 1e-2) -> None:
    actual, expected = actual[:rows].float(), expected[:rows]
    error = (actual - expected).norm() / expected.norm()
    assert error < bound, f"relative error {error}"
    assert (actual - expected).abs().max() < 0.1


@pytest.mark.parametrize(
    "heads, dim, size",
    [((16, 8), 128, 64), ((32, 8), 128, 128), ((32, 8), 64, 64), ((16, 8), 256, 128), ((32, 4), 512, 64)],
    ids=str,
)
@pytest.mark.parametrize("name", STEPS)
@every_op
def test_matches_reference(op: Attention, name: str, heads: tuple[int, int], dim: int, size: int) -> None:
    q, kv, meta = build(STEPS[name], heads, dim, size)
    expected = reference(q, kv, meta, dim**-0.5)
    actual = op.paged_attention(q, kv, meta, dim**-0.5)
    check(actual, expected, sum(STEPS[name].query_lens))
    again = op.paged_attention(q, kv, replace(meta, plans={}), dim**-0.5)
    rows = sum(STEPS[name].query_lens)
    assert torch.equal(actual[:rows], again[:rows]), "the same step twice gives other bits"


@every_op
@pytest.mark.parametrize("name", ["decode-64", "verify", "mixed", "shared", "chunk", "tails"])
@pytest.mark.parametrize(
    "window, soft_cap, sunk, dim",
    [
        (100, None, True, 128),
        (None, 20.0, False, 128),
        (1000, 5.0, True, 128),
        (4000, None, True, 128),
        (1024, None, False, 256),
        (4096, 50.0, True, 256),
        (1000, 5.0, True, 512),
    ],
)
def test_variants(op: Attention, name: str, window: int | None, soft_cap: float | None, sunk: bool, dim: int) -> None:
    q, kv, meta = build(STEPS[name], (16, 8), dim, 64)
    sinks = torch.linspace(-3, 4, 16, device=DEVICE) if sunk else None
    expected = reference(q, kv, meta, 0.3, window, soft_cap, sinks)
    check(op.paged_attention(q, kv, meta, 0.3, window, soft_cap, sinks), expected, sum(STEPS[name].query_lens))


@pytest.mark.parametrize("name", ["verify", "mixed", "shared-mixed", "tails"])
@pytest.mark.parametrize(
    "dtype, dim",
    [(torch.float16, 128), (torch.float32, 64), (torch.bfloat16, 80), (torch.bfloat16, 256), (torch.float32, 512)],
)
def test_other_types_and_widths(name: str, dtype: torch.dtype, dim: int) -> None:
    q, kv, meta = build(STEPS[name], (12, 4), dim, 32, dtype)
    check(triton.paged_attention(q, kv, meta, 0.1), reference(q, kv, meta, 0.1), sum(STEPS[name].query_lens))


@pytest.mark.parametrize(
    "new, past",
    [
        (2, 2047),
        (3, 40_000),
        (16, 4096),
        (17, 4095),
        (31, 8192),
        (32, 8191),
        (33, 8193),
        (64, 2100),
        (100, 0),
        (128, 32_000),
        (129, 1023),
        (200, 9000),
        (255, 1500),
        (300, 40_000),
    ],
)
@every_op
def test_few_rows_behind_a_long_context(op: Attention, new: int, past: int) -> None:
    """Contexts of 2,048 keys and more are divided; every run gives the same bits."""
    q, kv, meta = build(Step((new,), (past + new,)), (32, 8), 128, 128)
    meta = replace(meta, decode_len=1)
    found = op.paged_attention(q, kv, meta, 128**-0.5)
    check(found, reference(q, kv, meta, 128**-0.5), new)
    (plan,) = meta.plans[128].values()  # type: ignore[attr-defined]
    assert (plan.divided >= 0).any().item() == (past + new >= 2048)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(50):
        differ += (op.paged_attention(q, kv, meta, 128**-0.5)[:new] != found[:new]).sum()
    assert differ.item() == 0


@every_op
@pytest.mark.parametrize(
    "heads, dim, size, dtype",
    [
        ((8, 8), 128, 64, torch.bfloat16),
        ((64, 8), 128, 128, torch.bfloat16),
        ((64, 1), 64, 192, torch.bfloat16),
        ((32, 2), 128, 128, torch.float16),
        ((12, 4), 128, 128, torch.bfloat16),
        ((16, 8), 128, 96, torch.bfloat16),
        ((32, 2), 256, 64, torch.float16),
        ((24, 4), 256, 128, torch.bfloat16),
        ((64, 2), 512, 64, torch.bfloat16),
    ],
    ids=str,
)
def test_few_and_many_heads_share_keys(
    op: Attention, heads: tuple[int, int], dim: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's kernel runs if heads are a power of two and blocks whole tiles, else Triton's. Both are right."""
    launched: list[tuple[int, ...]] = []
    kernel = hopper.prefill_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(hopper, "prefill_kernel", Watched())
    step = Step((3000, 3, 777, 1, 128, 65), (3500, 3, 4001, 700, 128, 129))
    q, kv, meta = build(step, heads, dim, size, dtype)
    check(op.paged_attention(q, kv, meta, 0.1), reference(q, kv, meta, 0.1), sum(step.query_lens))
    assert len(launched) == (op is hopper and heads not in ((12, 4), (24, 4)) and size != 96)


@every_op
@pytest.mark.parametrize("name", ["decode-64", "verify", "mixed", "shared", "chunk", "tails"])
def test_a_captured_step_serves_other_lengths(op: Attention, name: str) -> None:
    """Only lengths change between replays; grids were chosen from upper bounds. Two layers share one plan."""
    q, kv, meta = build(STEPS[name], (16, 8), 128, 64)
    op.paged_attention(q, kv, replace(meta, plans={}), 0.1)
    graph, static = torch.cuda.CUDAGraph(), replace(meta, plans={})
    with torch.cuda.graph(graph):
        first = op.paged_attention(q, kv, static, 0.1)
        second = op.paged_attention(-q, kv, static, 0.1)
    assert isinstance(meta.seq_lens, Tensor)
    for shorter in (0, 1, 17):
        if shorter:
            meta.seq_lens[: len(STEPS[name].seq_lens)] -= shorter
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        rows = sum(STEPS[name].query_lens)
        check(first, reference(q, kv, meta, 0.1), rows)
        check(second, reference(-q, kv, meta, 0.1), rows)


@pytest.mark.skipif(hopper not in OPS, reason="needs Hopper")
@pytest.mark.parametrize(
    "heads, dim",
    [((32, 4), 128), ((32, 8), 128), ((16, 8), 128), ((8, 8), 128), ((16, 8), 256), ((32, 4), 256), ((32, 4), 512)],
    ids=str,
)
@pytest.mark.parametrize("length", [100, 300, 4096])
def test_nobody_overwrites_what_is_still_read(length: int, heads: tuple[int, int], dim: int) -> None:
    """The warps that read are ahead of those that compute by whole tiles; every run gives the same, bit for bit."""
    count = 16_384 // length
    q, kv, meta = build(Step((length,) * count, (length,) * count), heads, dim, 128)
    first = hopper.paged_attention(q, kv, meta, 0.1)[: length * count]
    check(first, reference(q, kv, meta, 0.1), length * count)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(100):
        differ += (hopper.paged_attention(q, kv, meta, 0.1)[: length * count] != first).sum()
    assert differ.item() == 0
