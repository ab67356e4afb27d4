"""Sparse latent attention on a GPU against its references, at the sizes of DeepSeek-V3.2 and GLM-5; graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, sequences
from quire.kernels.attention.inputs import Case
from quire.kernels.index import Chosen, IndexView, ref, triton
from quire.kernels.index.inputs import make
from quire.kernels.latent import LatentView
from quire.kernels.latent import ref as latent_ref
from quire.kernels.latent import triton as latent

from ..support.chosen_rows import as_worker

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOP_K, CLOSE = 2048, 1e-5  # relative difference of scores below which either may be chosen
DECODES = Case((1,) * 9, (1, 2047, 2048, 2049, 4095, 4097, 9000, 30011, 70), (64, 1), 128, 64)
DRAFTS = Case((4, 3, 4), (2050, 5000, 12288), (64, 1), 128, 64)
MIXED = Case((1, 1, 300, 70, 40), (3000, 20000, 2300, 9000, 1500), (32, 1), 128, 128)
STEPS: dict[str, tuple[Case, int]] = {"decodes": (DECODES, 1), "drafts": (DRAFTS, 4), "mixed": (MIXED, 1)}
Given = tuple[Tensor, Tensor, IndexView, AttentionMeta]


def on_gpu(case: Case, dtype: torch.dtype, codes: torch.dtype | None, decode_len: int) -> Given:
    """A step in the memory of the GPU."""
    q, weights, cache, meta = make(case, dtype, codes)
    scales = None if cache.scales is None else cache.scales.cuda()
    tensors: Any = {name: one.cuda() for name, one in vars(meta).items() if isinstance(one, Tensor)}
    meta = as_worker(replace(meta, **tensors), decode_len)
    return q.cuda(), weights.cuda(), IndexView(cache.keys.cuda(), scales), meta


def rows_of(chosen: Chosen) -> list[int]:
    """The rows of the step that `chosen.positions` has."""
    return [*range(chosen.decodes or 0), *(row for first, last, *_ in chosen.sequences for row in range(first, last))]


def check(given: Given, chosen: Chosen, top_k: int = TOP_K) -> int:
    """The sets are those of the scores in float64, except where two scores are CLOSE. Return how often that is so."""
    q, weights, cache, meta = given
    known, places, close = sequences(meta), dict(zip(rows_of(chosen), chosen.positions, strict=True)), 0
    for first, last, s, past in known:
        at = torch.arange(past + last - first, device="cuda")
        block, offset = meta.block_tables[s][at // cache.block_size].long(), at % cache.block_size
        keys = cache.keys[block, 0, offset].double()
        if cache.scales is not None:
            keys *= cache.scales[block, 0, offset]
        for row in range(first, last):
            if row not in places:
                assert len(at) <= top_k
                continue
            count = past + row - first + 1
            scores = weights[row].double() @ (q[row].double() @ keys[:count].T).clamp(min=0)
            found = places[row][places[row] >= 0].long()
            assert len(found) == min(count, top_k) and bool((found.diff() > 0).all()) and int(found[-1]) < count
            assert bool((places[row][len(found) :] == -1).all())
            wanted = torch.sort(scores, descending=True, stable=True).indices[:top_k]
            lost, more = set(wanted.tolist()) - set(found.tolist()), set(found.tolist()) - set(wanted.tolist())
            for one, other in zip(sorted(lost), sorted(more), strict=True):
                assert abs(scores[one] - scores[other]) <= CLOSE * scores.abs().max(), (row, one, other)
            close += len(lost)
    return close


@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_the_best_are_chosen(step: str, dtype: torch.dtype, codes: torch.dtype | None) -> None:
    case, decode_len = STEPS[step]
    given = on_gpu(case, dtype, codes, decode_len)
    close = check(given, triton.choose(*given, TOP_K))
    print(step, dtype, codes, close, "of equal rank")
    assert close <= 20


@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prepare(dtype: torch.dtype, codes: torch.dtype | None) -> None:
    tokens, size = 300, 64
    q, k, norm, angles = (
        torch.randn(*one, device="cuda", generator=_draw())
        for one in ((tokens, 64, 128), (tokens, 128), (2, 128), (tokens, 32))
    )
    q, k = q.to(dtype), k.to(dtype)
    turn = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)
    slots, found = torch.randperm(8 * size, device="cuda", generator=_draw())[:tokens], []
    for op in (ref, triton):
        keys = torch.zeros(8, 1, size, 128, device="cuda").to(codes or dtype)
        cache = IndexView(keys, torch.zeros(8, 1, size, 1, device="cuda") if codes else None)
        found.append((op.prepare(q.clone(), k, norm, 1e-6, *turn, cache, slots), cache))
    (q_ref, wanted), (q_found, cache) = found
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(q_found, q_ref, rtol=bound, atol=bound)
    torch.testing.assert_close(cache.keys.float(), wanted.keys.float(), rtol=0.13 if codes else bound, atol=bound)
    torch.testing.assert_close(cache.scales, wanted.scales, rtol=0, atol=0)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that do not fit the buffer at once give the same positions."""
    given = on_gpu(MIXED, torch.bfloat16, None, 1)
    whole = triton.choose(*given, TOP_K)
    monkeypatch.setattr(triton, "SCORES", 4 * 20000 * 9)
    assert torch.equal(triton.choose(*given, TOP_K).positions, whole.positions)


def test_equal_scores_take_the_first_positions() -> None:
    q, weights, cache, meta = on_gpu(DECODES, torch.bfloat16, None, 1)
    few = q.sign(), weights.sign(), IndexView(cache.keys.nan_to_num().clamp(-1, 1).round()), meta
    assert check(few, triton.choose(*few, TOP_K)) == 0
    none = triton.choose(torch.zeros_like(q), weights, cache, meta, 64).positions
    assert torch.equal(none[1:], torch.arange(64, dtype=torch.int32, device="cuda").expand(8, 64))


@pytest.mark.parametrize("step", STEPS)
def test_runs_give_the_same_bits_also_in_a_graph(step: str) -> None:
    case, decode_len = STEPS[step]
    given = on_gpu(case, torch.bfloat16, torch.float8_e4m3fn, decode_len)
    wanted, graph = triton.choose(*given, TOP_K).positions, torch.cuda.CUDAGraph()
    fresh = *given[:3], replace(given[3], plans={})
    with torch.cuda.graph(graph):
        found = triton.choose(*fresh, TOP_K).positions
    for _ in range(3):
        found.fill_(7)
        graph.replay()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [128, 64, 16, 10])
@pytest.mark.parametrize("step", STEPS)
def test_attention_to_chosen_tokens(step: str, heads: int, dtype: torch.dtype) -> None:
    """Rows are those of the reference; in parts where there are few, else whole."""
    case, decode_len = STEPS[step]
    given = on_gpu(case, torch.float32, None, decode_len)
    chosen, meta = triton.choose(*given, TOP_K), given[3]
    keys = given[2].keys.nan_to_num()
    wide = torch.randn(len(keys), 1, keys.shape[2], 576, device="cuda", generator=_draw())
    cache = LatentView(wide[..., :512].contiguous().to(dtype), wide[..., 512:].contiguous().to(dtype))
    rows = rows_of(chosen)
    queries = torch.randn(len(given[0]), heads, 576, device="cuda", generator=_draw()).to(dtype)
    bound: Any = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    at = 0
    for first, last in ((0, chosen.decodes or 0), *((one[0], one[1]) for one in chosen.sequences)):
        if first == last:
            continue
        positions = chosen.positions[at : at + last - first]
        at += last - first
        parts = queries[first:last, :, :512].contiguous(), queries[first:last, :, 512:]
        found = latent.chosen(*parts, cache, meta, 576**-0.5, positions, first)
        wanted = latent_ref.chosen(*parts, cache, replace(meta, prompts=None), 576**-0.5, positions, first)
        error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
        assert error <= bound, error
    assert at == len(rows)


def _draw() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(3)
