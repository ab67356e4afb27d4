"""Random steps over a paged cache, for tests and measurements of the attention kernels."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView


@dataclass(frozen=True)
class Case:
    """A test case: a step of sequences with random queries, keys and values.

    query_lens   number of query rows (tokens of the step) of each sequence
    seq_lens     context length of each sequence, its query rows included
    heads        (Hq, Hkv)
    deal         block ids of a sequence: "apart": random; "runs": consecutive; "shared": all sequences have the same
                 first blocks
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    block_size: int = 8
    deal: str = "apart"


CASES = (
    Case((1,), (1,)),
    Case((1,), (8,)),
    Case((1,), (9,)),
    Case((1,), (100,), deal="runs"),
    Case((1,), (96,), deal="runs"),
    Case((1, 1, 1), (1, 8, 50), heads=(3, 3)),
    Case((1, 1, 1, 1), (17, 64, 65, 7), deal="runs"),
    Case((1, 1, 1), (40, 45, 47), deal="shared"),
    Case((5,), (5,), heads=(6, 1)),
    Case((5,), (12,)),
    Case((16,), (16,)),
    Case((7,), (64,), heads=(5, 5), head_dim=20, block_size=16),
    Case((3, 1, 9, 1), (3, 30, 25, 1), heads=(6, 2)),
    Case((1, 4, 1), (33, 36, 129), heads=(7, 1), block_size=16, deal="runs"),
    Case((2, 40), (80, 40), heads=(8, 4), head_dim=32, deal="shared"),
    Case((1, 1, 1), (200, 16, 33), heads=(16, 8), head_dim=128, block_size=16),
    Case((1, 3, 1), (70, 66, 5), heads=(9, 3), head_dim=64, block_size=32),
    Case((1, 2), (45, 31), heads=(20, 1), head_dim=256, block_size=16),
    Case((1, 1), (1030, 512), heads=(4, 2), head_dim=32, block_size=32),
    Case((4, 1), (600, 513), heads=(3, 1), head_dim=80),
    Case((70, 1), (300, 20), heads=(4, 2), head_dim=64, block_size=16),
)


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, KVView, AttentionMeta]:
    """Return random q, a KV cache and the metadata of a step.

    The cache is a strided view of a larger tensor. Every slot that a kernel must not read holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    size, kv_heads = case.block_size, case.heads[1]
    counts = [-(-length // size) for length in case.seq_lens]
    tables, num_blocks = _deal(case, counts, generator)
    arena = torch.full((num_blocks, 3, 2, kv_heads, size, case.head_dim), float("nan"), dtype=dtype)
    kv = KVView(arena[:, 1, 0], arena[:, 1, 1])
    for s, length in enumerate(case.seq_lens):
        for position in range(length):
            block, offset = int(tables[s, position // size]), position % size
            if torch.isnan(kv.k[block, 0, offset, 0]):
                kv.k[block, :, offset] = torch.randn(kv_heads, case.head_dim, generator=generator).to(dtype)
                kv.v[block, :, offset] = torch.randn(kv_heads, case.head_dim, generator=generator).to(dtype)
    starts = [0, *torch.tensor(case.query_lens).cumsum(0).tolist()]
    q = torch.randn(starts[-1], case.heads[0], case.head_dim, generator=generator).to(dtype)
    slots = torch.cat(
        [
            torch.tensor([int(tables[s, p // size]) * size + p % size for p in range(length - rows, length)])
            for s, (rows, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True))
        ]
    )
    meta = AttentionMeta(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        block_tables=tables,
        kv_slots=slots,
    )
    return q, kv, meta


def choose_rows(q: Tensor, meta: AttentionMeta, share: float, seed: int = 0) -> tuple[AttentionMeta, Tensor]:
    """Choose a random `share` (0 to 1) of the query rows; the last row of each sequence is always chosen.

    Return `meta` for the chosen rows alone, and their indices in q.
    """
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    kept = torch.rand(len(q), generator=generator).to(q.device) < share
    kept[meta.query_start[1:].long() - 1] = True
    rows, counts = kept.nonzero()[:, 0], meta.query_start.diff()
    ends = meta.seq_lens.repeat_interleave(counts) - meta.query_start[1:].repeat_interleave(counts)
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    return replace(
        meta,
        query_start=before[meta.query_start.long()].int(),
        kv_slots=meta.kv_slots[rows],
        decode_len=0,
        row_positions=(ends + torch.arange(len(q), device=q.device))[rows],
    ), rows


def _deal(case: Case, counts: list[int], generator: torch.Generator) -> tuple[Tensor, int]:
    """Return block tables [S, max] int32 and the number of blocks of the arena; unread entries are huge."""
    total = sum(counts)
    num_blocks = 2 * total + 2
    if case.deal == "apart":
        ids = (torch.randperm(num_blocks - 1, generator=generator)[:total] + 1).tolist()
    else:  # consecutive ids, with a small gap between sequences
        ids = [1 + i for i in range(total)]
    tables = torch.full((len(counts), max(counts) + 1), 2**30, dtype=torch.int32)
    taken = 0
    for s, count in enumerate(counts):
        gap = s if case.deal == "runs" else 0
        tables[s, :count] = torch.tensor(ids[taken : taken + count], dtype=torch.int32) + gap
        taken += count
    if case.deal == "shared":  # full blocks at the front belong to everyone
        common = min(min(counts) - 1, 4)
        tables[:, :common] = tables[0, :common]
    return tables, num_blocks + len(counts)
