"""Rows of sparse latent attention as kernels of a GPU take them, compared with the reference."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, sequences
from quire.kernels.index import IndexView, ref


def as_worker(meta: AttentionMeta, decode_len: int) -> AttentionMeta:
    """The same step as a worker of a GPU gives it: lengths on the device, prompts on the host."""
    prompts = tuple(one for one in sequences(meta) if one[1] - one[0] > decode_len)
    assert prompts == sequences(meta)[len(sequences(meta)) - len(prompts) :], "decodes come first"
    device = meta.block_tables.device
    starts, lengths = (
        torch.as_tensor(one, dtype=torch.int32, device=device) for one in (meta.query_start, meta.seq_lens)
    )
    return replace(meta, query_start=starts, seq_lens=lengths, decode_len=decode_len, prompts=prompts, plans={})


def expected(q: Tensor, weights: Tensor, cache: IndexView, meta: AttentionMeta, top_k: int) -> dict[int, list[int]]:
    """The positions of each row of a step by the reference, -1 behind them."""
    found = ref.choose(q, weights, cache, replace(meta, prompts=None, plans={}), top_k)
    rows = [row for first, last, *_ in found.sequences for row in range(first, last)]
    each = dict(zip(rows, found.positions.tolist(), strict=True))
    for first, last, _, past in sequences(meta):
        for row in range(first, last):
            count = past + row - first + 1
            each.setdefault(row, [*range(min(count, top_k)), *[-1] * (top_k - count)])
    return each


def check_choice(
    op: ModuleType, given: tuple[Tensor, Tensor, IndexView, AttentionMeta], top_k: int, decode_len: int = 1
) -> None:
    """The kernels choose what the reference chooses: for decodes, then for prompts of more than top_k tokens."""
    q, weights, cache, meta = given
    worker, wanted = as_worker(meta, decode_len), expected(*given, top_k)
    chosen = op.choose(q, weights, cache, worker, top_k)
    assert worker.prompts is not None
    assert chosen.decodes == (worker.prompts[0][0] if worker.prompts else len(q))
    assert chosen.sequences == tuple(one for one in worker.prompts if one[3] + one[1] - one[0] > top_k)
    rows = [*range(chosen.decodes), *(row for first, last, *_ in chosen.sequences for row in range(first, last))]
    assert chosen.positions.tolist() == [wanted[row] for row in rows]
