"""Window, soft cap and sinks of the C attention against the reference. Nothing behind a window is read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.blocks import first_seen
from quire.kernels.attention import AttentionMeta, KVView, as_list, inputs, native, ref
from quire.kernels.attention_cpu import native_plan
from quire.kernels.attention_cpu.native_plan import PART, plan_native
from quire.kernels.select import here

from ...support.full import full_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES = {
    "native decodes": inputs.Case((1, 1, 1), (1540, 700, 9), heads=(8, 2), head_dim=64, block_size=16),
    "native short chunks": inputs.Case((3, 4, 1), (600, 45, 513), heads=(3, 1), head_dim=80, block_size=8),
    "native chunk": inputs.Case((70,), (300,), heads=(4, 2), head_dim=64, block_size=16),
    "native chunks and decode": inputs.Case((257, 6, 1), (513, 300, 40), heads=(4, 2), head_dim=128, block_size=32),
    "native odd heads": inputs.Case((30, 12), (31, 530), heads=(12, 3), head_dim=129, block_size=16),
    "native heads of 256": inputs.Case((40, 1), (140, 33), heads=(4, 2), head_dim=256, block_size=16),
    "native heads of 512": inputs.Case((40, 1), (140, 600), heads=(14, 2), head_dim=512, block_size=16),
}
WINDOWS = (1, 5, 16, 100, PART, PART + 1, 5000, None)  # 16: a block of most cases; 5000: more than any context
CHUNKS = (-1, -7, -16, -30, -100, -256, -300, -PART, -(PART + 1), -5000)  # 300: of a context that ends with its chunk
ROWS = [(name, window, dtype) for name in CASES for window in (*WINDOWS, *CHUNKS) for dtype in TOLERANCE]
USUAL = [row for i, row in enumerate(ROWS) if i % 7 == 0]  # every case, window and type
needs_native = pytest.mark.skipif(bool(here("native")), reason=here("native") or "runs")
pytestmark = needs_native


@pytest.fixture(params=["native tiles", "native vectors"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks on AMX tiles where the CPU has them, and on vectors."""
    if request.param == "native vectors":
        monkeypatch.setattr(native, "NO_TILES", "not here")
    elif native.NO_TILES:
        pytest.skip(native.NO_TILES)


def sinks_of(heads: int) -> Tensor:
    """Small, large and absent ones."""
    return torch.tensor([(0.5, float("-inf"), 1e4, -2.0, 3.0)[head % 5] for head in range(heads)])


def scores_of(heads: int) -> Iterator[dict[str, Any]]:
    """Arguments beside the window: none, each alone, both."""
    for soft_cap, sunk in ((None, False), (None, True), (30.0, False), (0.7, True)):
        yield {"soft_cap": soft_cap, "sinks": sinks_of(heads) if sunk else None}


def given_back(meta: AttentionMeta, kv: KVView, window: int | None) -> AttentionMeta:
    """The step when the blocks that the window or the chunks have passed are given back.

    In their place, where an engine has NULL_BLOCK, stands a number that no memory has: a kernel that reads it crashes.
    """
    tables, starts = meta.block_tables.clone(), as_list(meta.query_start)
    for s, length in enumerate(as_list(meta.seq_lens)):
        position = length - starts[s + 1] + starts[s]
        tables[s, : first_seen(position, window) // kv.block_size] = 2**30
    return replace(meta, block_tables=tables, plans={})


@pytest.mark.parametrize(("name", "window", "dtype"), [*USUAL, *full_rows(ROWS)], ids=str)
def test_matches_reference(tiles: None, name: str, window: int | None, dtype: torch.dtype) -> None:
    q, kv, meta = inputs.make(CASES[name], dtype)
    scale = 1.2 * q.shape[2] ** -0.5
    for scores in scores_of(q.shape[1]):
        expected = ref.paged_attention(q, kv, meta, scale, window, **scores)
        actual = native.paged_attention(q, kv, given_back(meta, kv, window), scale, window, **scores)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [20, 513, None, -150, -513])
def test_a_native_row_depends_on_nothing_but_itself(tiles: None, window: int | None, dtype: torch.dtype) -> None:
    """In one chunk or in several, bit for bit: parts and spans are cut in the same places."""
    scores = {"soft_cap": 2.0, "sinks": sinks_of(6)}
    q, kv, meta = inputs.make(inputs.Case((700, 1), (700, 530), heads=(6, 2), head_dim=64, block_size=16), dtype)
    whole, first = native.paged_attention(q, kv, meta, 0.2, window, **scores), 0
    for rows in (101, 5, 450, 144):
        chunk = AttentionMeta([0, rows], [first + rows], meta.block_tables[:1], meta.kv_slots)
        alone = given_back(chunk, kv, window)
        part = native.paged_attention(q[first : first + rows], kv, alone, 0.2, window, **scores)
        assert torch.equal(part, whole[first : first + rows])
        first += rows
    one = given_back(AttentionMeta([0, 1], [530], meta.block_tables[1:], meta.kv_slots), kv, window)
    assert torch.equal(native.paged_attention(q[700:], kv, one, 0.2, window, **scores), whole[700:])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("window", [33, -33])
@pytest.mark.parametrize("token", [0, 32, 77, 120, 131, 150])
def test_what_is_not_finite_stays_in_the_rows_that_see_it(
    tiles: None, token: int, window: int, side: str, dtype: torch.dtype
) -> None:
    """Out of earlier rows, and out of rows whose window or chunk has passed it: by native rows, tiles and vectors."""
    past = 17
    q, kv, meta = inputs.make(inputs.Case((140, 3), (past + 140, 157), heads=(4, 2), head_dim=32, block_size=16), dtype)
    meta.block_tables[1, :10] = meta.block_tables[0, :10]  # rows one by one of the same context
    sound = ref.paged_attention(q, kv, meta, 0.2, window)
    getattr(kv, side)[int(meta.block_tables[0, token // 16]), 1, token % 16, 31] = float("nan")
    found = native.paged_attention(q, kv, meta, 0.2, window)
    positions = torch.cat((torch.arange(past, past + 140), torch.arange(154, 157)))
    ends = token + window if window > 0 else (token // -window + 1) * -window
    sees = (positions >= token) & (positions < ends)
    assert torch.equal(found[:, 2:].isnan().any(-1).all(-1), sees)
    assert found[:, :2].isfinite().all()
    torch.testing.assert_close(found[~sees], sound[~sees], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 40, PART + 9])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_chosen_rows_in_native_have_the_windows_of_their_positions(share: float, window: int | None) -> None:
    case = inputs.Case((470, 9, 1), (700, 300, 40), heads=(6, 2), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, torch.float32)
    chosen, rows = inputs.choose_rows(q, meta, share)
    expected = ref.paged_attention(q, kv, meta, 0.2, window)[rows]
    actual = native.paged_attention(q[rows], kv, chosen, 0.2, window)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_native_sinks_at_their_limits(tiles: None, rows: int) -> None:
    """A sink of minus infinity is none, bit for bit; a sink that is larger than every score leaves nothing."""
    q, kv, meta = inputs.make(inputs.Case((rows,), (1100,), head_dim=64, block_size=16), torch.bfloat16)
    plain = native.paged_attention(q, kv, meta, 0.2)
    none, all_of_it = torch.full((4,), float("-inf")), torch.full((4,), 1e4)
    assert torch.equal(native.paged_attention(q, kv, meta, 0.2, sinks=none), plain)
    assert not native.paged_attention(q, kv, meta, 0.2, sinks=all_of_it).any()
    some = native.paged_attention(q, kv, meta, 0.2, sinks=sinks_of(8).bfloat16()[::2])  # other types and strides
    assert torch.equal(some, native.paged_attention(q, kv, meta, 0.2, sinks=sinks_of(8)[::2].clone()))


@pytest.mark.parametrize("rows", [1, 40])
def test_native_scores_without_weight_beside_a_sink(tiles: None, rows: int) -> None:
    """Every score is minus infinity: the sink takes all, as in the reference."""
    q, kv, meta = inputs.make(inputs.Case((rows,), (600,), head_dim=64, block_size=16), torch.bfloat16)
    q = q.abs() + 0.1
    kv.k[..., 3] = torch.where(kv.k[..., 3].isnan(), kv.k[..., 3], float("-inf"))
    found = native.paged_attention(q, kv, meta, 0.2, 30, sinks=torch.zeros(4))
    assert torch.equal(found, ref.paged_attention(q, kv, meta, 0.2, 30, sinks=torch.zeros(4))) and not found.any()


@pytest.mark.skipif(bool(native.NO_TILES), reason=native.NO_TILES or "runs")
def test_native_sinks_of_a_bounded_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that are computed by and by have their own sinks."""
    q, kv, meta = inputs.make(inputs.Case((40,), (300,), heads=(8, 4), head_dim=64, block_size=16), torch.bfloat16)
    together = native.paged_attention(q, kv, meta, 0.2, 70, 3.0, sinks_of(8))
    monkeypatch.setattr(native_plan, "SCRATCH", 1000)
    bounded = given_back(meta, kv, 70)
    assert torch.equal(native.paged_attention(q, kv, bounded, 0.2, 70, 3.0, sinks_of(8)), together)
    (passes,) = bounded.plans[16, 70].passes.values()
    assert passes[0].heads == 1


def test_native_work_ends_with_the_window() -> None:
    meta = AttentionMeta([0, 1, 2, 42], [9000, 40, 9000], torch.zeros(3, 600, dtype=torch.int32), torch.zeros(42))
    rows, whole = plan_native(meta, 16, 600).rows[0], plan_native(meta, 16).rows[0]
    assert rows.items[:, 4].tolist() == [8400, 0] and rows.part_item.tolist() == [0, 0, 1]
    assert len(whole.part_item) == 18 + 1
    chunks = plan_native(meta, 16, 600).chunks
    (some,), (every,) = (native_plan.chunk_passes(chunks, 2, 64, window) for window in (600, None))
    assert some.items[0, 6] == 8961 - 600 and some.size == 2 * 2 * 64 * (9024 - 8352)
    assert every.size == 2 * 2 * 64 * 9024
    assert plan_native(meta, 16, 600) is not plan_native(meta, 16, 599)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": 0}, "a window of 0 tokens"),
    "cap of 0": ({"soft_cap": 0.0}, "soft cap must be above 0 and finite; it is 0.0"),
    "negative cap": ({"soft_cap": -30.0}, "soft cap must be"),
    "infinite cap": ({"soft_cap": float("inf")}, "soft cap must be"),
    "few sinks": ({"sinks": torch.zeros(2)}, r"sinks must be \[6\]"),
    "sinks of rows": ({"sinks": torch.zeros(1, 4)}, r"sinks must be \[6\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_native_is_handed_no_wrong_scores(name: str) -> None:
    extra, said = WRONG[name]
    q, kv, meta = inputs.make(inputs.CASES[12], torch.float32)
    with pytest.raises(ValueError, match=said):
        native.paged_attention(q, kv, meta, 1.0, **extra)
