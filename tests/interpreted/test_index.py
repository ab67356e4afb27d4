"""Sparse latent attention for GPUs in Triton's interpreter, and compiled for sm_90 without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from quire.kernels import triton_runtime
from quire.kernels.attention.inputs import Case
from quire.kernels.index import IndexView, ref, triton
from quire.kernels.index.inputs import make
from quire.kernels.index.triton_places import places_of
from quire.kernels.latent import inputs as latent_inputs
from quire.kernels.latent import ref as latent_ref
from quire.kernels.latent import triton as latent_triton

from ..support.chosen_rows import as_worker, check_choice, expected
from ..support.full import full_rows

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

DECODES = Case((1, 1, 1), (130, 7, 65), heads=(5, 1), head_dim=24)
MIXED = Case((1, 2, 9, 40, 3), (40, 70, 30, 200, 3), heads=(3, 1))
STEPS = [(DECODES, 8, 1), (MIXED, 8, 2), *full_rows([(MIXED, 1, 0), (MIXED, 64, 1), (DECODES, 64, 1)])]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Contexts have several spans and splits, and memory is NaN until it is written."""
    small = {
        "SPAN": 64,
        "PROMPT_SPAN": 64,
        "SPLIT_FEW": (64, 4),
        "SPLIT_MANY": (128, 8),
        "FULL": 5,
        "ALIGNED": 16,
        "WHOLE_TILE": 32,
    }
    for name, number in small.items():
        monkeypatch.setattr(triton, name, number)
    monkeypatch.setattr(triton, "WHOLE", 128)
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("case", "top_k", "decode_len"), STEPS, ids=str)
def test_the_best_are_chosen(case: Case, top_k: int, decode_len: int) -> None:
    check_choice(triton, make(case, torch.float32), top_k, decode_len)


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, *full_rows([torch.float8_e5m2])])
def test_keys_that_are_codes(codes: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as codes, and as numbers that are made of them once for all rows of prompts."""
    for rows in (0, 1 << 30):
        monkeypatch.setattr(triton, "ROWS", rows)
        check_choice(triton, make(MIXED, torch.float32, codes), 8, 2)


def test_numbers_of_keys_take_memory_that_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More contexts than it holds are read as codes."""
    monkeypatch.setattr(triton, "ROWS", 0)
    given = make(MIXED, torch.float32, torch.float8_e4m3fn)
    prompts = as_worker(given[3], 2).prompts
    assert prompts
    blocks = sum(-(-(past + last - first) // given[2].block_size) for first, last, _, past in prompts)
    for spare, held in ((0, True), (-1, False)):
        monkeypatch.setattr(triton, "NUMBERS", 4 * given[2].keys[0].numel() * blocks + spare)
        cache, _ = triton._plain(given[2], as_worker(given[3], 2), prompts, torch.float32)
        assert (cache.scales is None) == held
        check_choice(triton, given, 8, 2)


def test_scores_that_do_not_fit_the_buffer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "SCORES", 4 * 200 * 7)
    check_choice(triton, make(MIXED, torch.float32), 8, 2)


def test_equal_scores_take_the_first_positions() -> None:
    """Whole numbers, of which many are equal; and all scores 0, with both signs."""
    q, weights, cache, meta = make(MIXED, torch.float32)
    cache = IndexView(cache.keys.round())
    check_choice(triton, (q.round(), weights.round(), cache, meta), 8)
    check_choice(triton, (torch.zeros_like(q), weights, cache, meta), 8)


def test_the_causal_edge() -> None:
    """Scores that grow with the position: a row chooses the last tokens, its own included and none behind it."""
    q, weights, cache, meta = make(MIXED, torch.float32)
    size = cache.block_size
    for s, length in enumerate(MIXED.seq_lens):
        at = torch.arange(length)
        cache.keys[meta.block_tables[s][at // size].long(), 0, at % size] = (1.0 + at)[:, None].expand(
            -1, cache.keys.shape[3]
        )
    check_choice(triton, (torch.ones_like(q), weights.abs(), cache, meta), 8)


def test_a_later_row_attends_to_the_choice_of_the_last_one() -> None:
    """In a pass with padding behind the sequences, as `ref` does; of sequences with few tokens to all of them."""
    q, weights, cache, meta = make(Case((3, 1, 2, 1), (40, 4, 12, 8), heads=(3, 1)), torch.float32)
    chosen = ref.choose(q, weights, cache, meta, 8)
    wanted = ref.keep_last(chosen, meta)
    worker = replace(as_worker(meta, 3), prompts=())
    kept = triton.keep_last(triton.choose(q, weights, cache, worker, 8), worker)
    assert torch.equal(kept, wanted)
    lengths = torch.tensor([41, 5, 13, 9], dtype=torch.int32)
    found = triton.reuse(kept, replace(worker, query_start=torch.arange(5, dtype=torch.int32), seq_lens=lengths))
    wanted[1, 5:] = -1
    assert torch.equal(found.positions, wanted) and found.decodes == 4 and found.sequences == ()


@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn])
def test_prepare(codes: torch.dtype | None) -> None:
    draw = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    tokens, heads, dim, size = 6, 3, 20, 4
    q, k, norm, angles = random(tokens, heads, dim), random(tokens, dim + 3)[:, 3:], random(2, dim), random(tokens, 4)
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)
    slots, found = torch.tensor([3, 9, 4, 11, 8, 1]), []
    for op in (ref, triton):
        keys = torch.zeros(3, 1, size, dim, dtype=codes or torch.float32)
        cache = IndexView(keys, torch.zeros(3, 1, size, 1) if codes else None)
        found.append((op.prepare(q.clone(), k, norm, 1e-6, cos, sin, cache, slots), cache))
    (q_ref, wanted), (q_found, cache) = found
    torch.testing.assert_close(q_found, q_ref, rtol=1e-5, atol=1e-5)
    same = cache.keys.float() == wanted.keys.float()
    keys = cache.keys.clone()
    cache.keys.zero_()
    triton.prepare(k.new_empty(tokens, 0, dim), k, norm, 1e-6, cos, sin, cache, slots)
    assert torch.equal(cache.keys.float(), keys.float()), "without queries the keys are the same"
    assert same.float().mean() > 0.98 or codes is None, "the interpreter rounds a few to another code"
    if codes is None:
        torch.testing.assert_close(cache.keys, wanted.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.scales, wanted.scales, rtol=0, atol=0)


@pytest.mark.parametrize(("case", "top_k"), [(MIXED, 8), (DECODES, 40), *full_rows([(MIXED, 100)])], ids=str)
def test_attention_to_chosen_tokens(case: Case, top_k: int) -> None:
    """In one part and in several; rows from any one of the step on."""
    (case,) = latent_inputs.steps(case)
    q, q_rope, cache, meta = latent_inputs.make(case, 8, torch.float32)
    keys = make(replace(case, head_dim=16), torch.float32)
    chosen = expected(*keys[:3], keys[3], top_k)
    positions = torch.tensor([chosen[row] for row in range(len(q))], dtype=torch.int32)
    wanted = latent_ref.chosen(q, q_rope, cache, replace(meta, prompts=None), 0.3, positions)
    for first in (0, 2):
        rows = q[first:].contiguous(), q_rope[first:], cache, as_worker(meta, 2), 0.3, positions[first:], first
        torch.testing.assert_close(latent_triton.chosen(*rows), wanted[first:], rtol=1e-5, atol=1e-5)


def test_a_rehearsal_finds_sequences_of_a_larger_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written behind the places of the rows that there are."""
    q, _, _, meta = make(MIXED, torch.float32)
    memory = torch.full((len(q), 2), -1, dtype=torch.int32)
    monkeypatch.setattr(torch, "full", lambda size, *_, **__: memory[: size[0]])
    found = places_of(as_worker(meta, 0), 7)
    assert found[:, 0].tolist() == [39, 68, 69, *range(21, 25)] and (memory[7:] == -1).all()


def test_compiles(compiled: Callable[..., set[str]]) -> None:
    kinds = ("places", "prepare", "score", "whole", "level", "write", "slots", "chosen", "join")
    found = {name.removeprefix("_") for name in compiled("compile_index")}
    assert found == {f"{kind}_kernel" for kind in kinds}


def test_numbers_of_rows_and_of_decodes_before_them_need_no_other_kernels(compiled: Callable[..., set[str]]) -> None:
    assert compiled("compile_index", "rows") >= {"score_kernel", "whole_kernel", "chosen_kernel"}
