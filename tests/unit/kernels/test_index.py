"""The choice of tokens by an indexer: against the formula, at the causal edge, with equal scores, in 8-bit caches."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, as_list, sequences
from quire.kernels.attention.eight_bits import MOST
from quire.kernels.attention.inputs import CASES, Case
from quire.kernels.index import IndexView, native, ref
from quire.kernels.index.inputs import make

OPS = [ref, native]
CLOSE = 1e-6  # relative difference of scores below which either may be chosen
LONG = (Case((70, 1, 5), (300, 513, 33), heads=(9, 1), head_dim=24), Case((1, 2), (2600, 1500), heads=(4, 1)))


STEPS = [  # with several threads, contexts of few rows are divided
    *((case, None, 1) for case in CASES),
    *((case, codes, threads) for case in LONG for codes in (None, *MOST) for threads in (1, 4)),
    *((case, torch.float8_e4m3fn, 4) for case in CASES[::5]),
]


def scores_of(q: Tensor, weights: Tensor, cache: IndexView, meta: AttentionMeta) -> list[Tensor]:
    """Scores [position + 1] of each row, by the formula, in float64."""
    found = []
    for first, last, s, past in sequences(meta):
        places = torch.arange(past + last - first)
        block, offset = meta.block_tables[s][places // cache.block_size].long(), places % cache.block_size
        keys = cache.keys[block, 0, offset].double()
        if cache.scales is not None:
            keys *= cache.scales[block, 0, offset]
        for row in range(first, last):
            products = (q[row].double() @ keys[: past + row - first + 1].T).clamp(min=0)
            found.append(weights[row].double() @ products)
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("case", "codes", "threads"), STEPS, ids=str)
def test_the_best_are_chosen(
    case: Case, codes: torch.dtype | None, threads: int, op: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set of positions is that of the formula. Scores that are CLOSE may change places, and none do."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, weights, cache, meta = make(case, torch.float32, codes)
    every = scores_of(q, weights, cache, meta)
    for top_k in (7, 64):
        chosen = op.choose(q, weights, cache, meta, top_k)
        assert chosen.sequences == tuple(one for one in sequences(meta) if one[3] + one[1] - one[0] > top_k)
        rows = [row for first, last, *_ in chosen.sequences for row in range(first, last)]
        assert chosen.positions.shape == (len(rows), top_k)
        close = 0
        for row, positions in zip(rows, chosen.positions.tolist(), strict=True):
            scores, found = every[row], [one for one in positions if one >= 0]
            assert found == sorted(set(found)) and positions[len(found) :] == [-1] * (top_k - len(found))
            wanted = set(torch.sort(scores, descending=True, stable=True).indices[:top_k].tolist())
            for one, other in zip(sorted(wanted - set(found)), sorted(set(found) - wanted), strict=True):
                assert abs(scores[one] - scores[other]) <= CLOSE * scores.abs().max()
                close += 1
        assert close == 0


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_queries_and_keys(op: ModuleType) -> None:
    q, weights, cache, meta = make(LONG[0], torch.bfloat16)
    wide = IndexView(cache.keys.float())
    assert torch.equal(
        op.choose(q, weights, cache, meta, 32).positions, ref.choose(q.float(), weights, wide, meta, 32).positions
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("top_k", [1, 5, 40])
def test_the_causal_edge(op: ModuleType, top_k: int) -> None:
    """Scores that grow with the position: a row chooses the last tokens, its own included and none behind it."""
    case = Case((70, 1, 3), (300, 41, 50), heads=(3, 1))
    q, weights, cache, meta = make(case, torch.float32)
    for s, length in enumerate(case.seq_lens):
        at = torch.arange(length)
        cache.keys[meta.block_tables[s][at // 8].long(), 0, at % 8] = (1.0 + at)[:, None].expand(-1, 16)
    chosen = op.choose(torch.ones_like(q), weights.abs(), cache, meta, top_k)
    wanted = [
        list(range(max(0, p - top_k + 1), p + 1)) + [-1] * (top_k - p - 1)
        for first, last, _, past in chosen.sequences
        for p in range(past, past + last - first)
    ]
    assert chosen.positions.tolist() == wanted


@pytest.mark.parametrize("op", OPS)
def test_equal_scores_take_the_first_positions(op: ModuleType) -> None:
    """All scores 0, as where no head finds anything; and pairs of equal keys, of which the earlier one comes first."""
    q, weights, cache, meta = make(Case((3, 1), (600, 2500), heads=(4, 1)), torch.float32)
    chosen = op.choose(torch.zeros_like(q), -weights.abs(), cache, meta, 9)
    assert chosen.positions.tolist() == [list(range(9))] * 4
    at, half = torch.arange(2500), 1250
    place = meta.block_tables[1][at // 8].long(), torch.zeros_like(at), at % 8
    cache.keys[place] = cache.keys[place][at % half]
    (row,) = op.choose(q[3:], weights[3:], cache, _last(meta), 101).positions.tolist()
    both = {one % half for one in row}
    assert len(both) == 51 and sum(one < half for one in row) == 51


def _last(meta: AttentionMeta) -> AttentionMeta:
    return replace(meta, query_start=[0, 1], seq_lens=as_list(meta.seq_lens)[1:], block_tables=meta.block_tables[1:])


def test_rows_and_parts_do_not_change_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row alone, divided among threads, chooses what it chooses among other rows."""
    q, weights, cache, meta = make(Case((6,), (3000,), heads=(4, 1)), torch.float32)
    whole = native.choose(q, weights, cache, meta, 300).positions
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    alone = replace(meta, query_start=[0, 1])
    assert torch.equal(native.choose(q[5:], weights[5:], cache, alone, 300).positions[0], whole[5])


@pytest.mark.parametrize("op", OPS)
def test_a_key_that_is_not_a_number_is_chosen(op: ModuleType) -> None:
    q, weights, cache, meta = make(Case((2,), (200,), heads=(3, 1)), torch.float32)
    cache.keys[meta.block_tables[0, 5].long(), 0, 3, 1] = torch.nan
    assert (op.choose(q, weights, cache, meta, 4).positions == 43).any(1).all()


@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn])
def test_prepare(codes: torch.dtype | None) -> None:
    """By the formulas: keys are normalized, the first numbers turned in pairs of halves, codes near the numbers."""
    torch.manual_seed(3)
    tokens, heads, dim, rotated, size = 6, 3, 20, 8, 4
    q, k, norm = torch.randn(tokens, heads, dim), torch.randn(tokens, dim), torch.randn(2, dim)
    angles = torch.randn(tokens, rotated // 2)
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : rotated // 2], x[..., rotated // 2 : rotated])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles).view(-1, *[1] * (x.dim() - 2), rotated // 2)
        return torch.cat((pairs.real, pairs.imag, x[..., rotated:]), -1)

    key = (k - k.mean(1, keepdim=True)) / (k.var(1, correction=0, keepdim=True) + 1e-6).sqrt() * norm[0] + norm[1]
    keys = torch.zeros(3, 1, size, dim, dtype=codes or torch.float32)
    cache = IndexView(keys, None if codes is None else torch.zeros(3, 1, size, 1))
    wanted, slots = turned(q), torch.tensor([4, 5, 6, 7, 8, 11])
    found = ref.prepare(q, k, norm, 1e-6, cos, sin, cache, slots)
    assert found is q
    torch.testing.assert_close(found, wanted)
    written = keys.flatten(0, 2)[slots].float()
    keys.zero_()
    ref.prepare(q[:, :0], k, norm, 1e-6, cos, sin, cache, slots)
    assert torch.equal(keys.flatten(0, 2)[slots].float(), written), "without queries the keys are the same"
    if cache.scales is None:
        torch.testing.assert_close(written, turned(key))
        assert not keys.flatten(0, 2)[[0, 9, 10]].any()
        return
    scales = cache.scales.flatten()[slots]
    assert torch.equal(scales, torch.exp2((turned(key).abs().amax(1) / 448).log2().ceil()))
    assert ((written * scales[:, None] - turned(key)).abs() <= turned(key).abs() / 16 + scales[:, None] / 1024).all()


@pytest.mark.parametrize("op", OPS)
def test_a_later_row_attends_to_the_choice_of_the_last_one(op: ModuleType) -> None:
    """Of sequences that had more tokens than a choice; of others to the first tokens that there are."""
    q, weights, cache, meta = make(Case((3, 1, 2, 1), (40, 4, 12, 8), heads=(3, 1)), torch.float32)
    chosen = op.choose(q, weights, cache, meta, 8)
    kept = op.keep_last(chosen, meta)
    assert kept.tolist() == [chosen.positions[2].tolist(), [*range(8)], chosen.positions[4].tolist(), [*range(8)]]
    later = replace(meta, query_start=[0, 1, 2, 2, 3], seq_lens=[41, 5, 12, 9])
    found = op.reuse(kept, later)
    assert found.sequences == ((0, 1, 0, 40), (2, 3, 3, 8)) and found.decodes is None
    assert torch.equal(found.positions, kept[[0, 3]])
    none = op.reuse(kept[1:2], replace(meta, query_start=[0, 1], seq_lens=[5]))
    assert none.sequences == () and none.positions.shape == (0, 8)


def test_what_c_cannot_take_is_refused() -> None:
    q, weights, cache, meta = make(LONG[0], torch.float32)
    with pytest.raises(ValueError, match="weights float32"):
        native.choose(q, weights.double(), cache, meta, 8)
    with pytest.raises(ValueError, match="codes with scales"):
        native.choose(q, weights, IndexView(cache.keys.to(torch.float8_e4m3fn)), meta, 8)
    with pytest.raises(ValueError, match="contiguous inside a block"):
        native.choose(q, weights, IndexView(cache.keys.transpose(2, 3).contiguous().transpose(2, 3)), meta, 8)
    with pytest.raises(ValueError, match="block tables must be int32"):
        native.choose(q, weights, cache, replace(meta, block_tables=meta.block_tables.long()), 8)
