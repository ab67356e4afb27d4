"""Attention for GPUs in Triton's interpreter, over poisoned caches, and compiled for sm_90 without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.step import SharedPrefix
from quire.kernels import triton_runtime
from quire.kernels.attention import AttentionMeta, SharedBlocks, inputs, ref

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.attention import hopper, hopper_prefill, triton, triton_plan
from quire.kernels.attention.inputs import Case
from quire.kernels.attention.triton_plan import Plan, pack_shared
from quire.kernels.attention.triton_tiles import LOG2E
from quire.kernels.heads import triton as heads

from ..support.full import FULL, full_rows
from ..support.thinned import thinned

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
CASES = (
    *inputs.CASES,
    Case((1, 1, 1), (63, 64, 65), heads=(4, 2), head_dim=64, block_size=64),
    Case((1, 1), (700, 3), heads=(4, 1), head_dim=64, block_size=128, deal="runs"),
    Case((130, 1, 70), (260, 129, 70), heads=(4, 2), head_dim=64, block_size=64),
    Case((64, 1), (128, 256), heads=(2, 2), head_dim=128, block_size=128),
    Case((4, 1, 3), (300, 129, 64), heads=(4, 1), head_dim=64, block_size=256),
    Case((1,) * 20, tuple(range(1, 400, 20)), heads=(2, 1), head_dim=16, block_size=16),
    Case((70, 1, 1), (200, 97, 130), heads=(4, 2), head_dim=64, block_size=48),
    Case((70, 1, 1), (200, 97, 230), heads=(4, 2), head_dim=64, block_size=80),
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and scratch are NaN (lists: -1) before a kernel writes them."""
    empty = torch.empty

    def filled(*size: object, **options: object) -> Tensor:
        made = empty(*size, **options)  # type: ignore[call-overload]
        return made.fill_(float("nan") if made.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", filled)
    yield


def on_device(meta: AttentionMeta, **changes: object) -> AttentionMeta:
    """The same step as a worker on a GPU gives it: a table of all slots, upper bounds, padded sequences."""
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    tables, num_seqs = meta.block_tables, len(meta.seq_lens)
    slots = torch.full((num_seqs + 2, tables.shape[1]), 2**30, dtype=torch.int32)
    rows = torch.arange(num_seqs, 0, -1, dtype=torch.int32)
    slots[rows.long()] = tables
    longest = int(meta.query_start.diff().max())
    made = AttentionMeta(
        query_start=torch.cat((meta.query_start, meta.query_start[-1:].expand(2))),
        seq_lens=torch.cat((meta.seq_lens, torch.zeros(2, dtype=torch.int32))),
        block_tables=slots,
        kv_slots=meta.kv_slots,
        table_rows=torch.cat((rows, torch.zeros(2, dtype=torch.int32))),
        max_query_len=longest,
        decode_len=longest if longest <= 8 else 1,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[actual.dtype])


@pytest.mark.parametrize(
    "case, dtype",
    [
        *((case, torch.float32) for case in CASES[3::2]),
        (CASES[12], torch.float16),
        *full_rows((case, torch.float32) for case in (*CASES[:3], *CASES[4::2])),
        *full_rows((case, torch.float16) for case in CASES),
    ],
    ids=str,
)
def test_matches_reference(case: Case, dtype: torch.dtype) -> None:
    q, kv, meta = inputs.make(case, dtype)
    scale = 1.2 * case.head_dim**-0.5
    expected = ref.paged_attention(q, kv, meta, scale)
    given = on_device(meta) if dtype == torch.float32 else meta
    check(triton.paged_attention(q, kv, given, scale), expected)


@pytest.mark.parametrize(
    ("case", "window", "soft_cap", "sunk"),
    thinned(
        (CASES[12], CASES[-2], Case((40, 1), (130, 64), heads=(2, 1), head_dim=32, block_size=64)),
        ((5, None, False), (70, 3.0, True), (None, 0.5, False), (None, None, True)),
        every=2,
    ),
    ids=str,
)
def test_window_soft_cap_and_sinks(case: Case, window: int | None, soft_cap: float | None, sunk: bool) -> None:
    q, kv, meta = inputs.make(case, torch.float32)
    sinks = torch.linspace(-2, 6, case.heads[0]) if sunk else None
    expected = ref.paged_attention(q, kv, meta, 0.3, window, soft_cap, sinks)
    check(triton.paged_attention(q, kv, on_device(meta), 0.3, window, soft_cap, sinks), expected)


# Chunks end before, at and behind the rows of decodes, inside tiles of queries, and at borders of blocks or not.
EDGES = Case((1, 1, 1, 3, 3, 3), (64, 65, 66, 65, 66, 129), heads=(4, 2), head_dim=32, block_size=16)
PROMPTS = Case((70, 33, 40, 1), (134, 64, 105, 65), heads=(4, 2), head_dim=32, block_size=64)


@pytest.mark.parametrize("chunk", [5, 32, 64, 65, 1000])
@pytest.mark.parametrize("case", [EDGES, PROMPTS], ids=["decodes", "prompts"])
def test_attention_in_chunks(case: Case, chunk: int) -> None:
    """Also of rows that do not follow each other."""
    q, kv, meta = inputs.make(case, torch.float32)
    expected = ref.paged_attention(q, kv, meta, 0.3, -chunk)
    check(triton.paged_attention(q, kv, on_device(meta), 0.3, -chunk), expected)
    chosen, rows = inputs.choose_rows(q, meta, 0.5)
    given = on_device(chosen, decode_len=0, row_positions=chosen.row_positions)
    check(triton.paged_attention(q[rows], kv, given, 0.3, -chunk), expected[rows])


@pytest.mark.parametrize(
    ("case", "window", "soft_cap"),
    [
        (Case((40, 1), (150, 90), heads=(4, 2), head_dim=256, block_size=64), 33, 50.0),
        (Case((20, 1), (100, 70), heads=(8, 1), head_dim=512, block_size=64), None, None),
        (Case((3, 1), (70, 45), heads=(2, 1), head_dim=512, block_size=16), 33, 50.0),
        *full_rows([(Case((40, 1), (150, 90), heads=(16, 1), head_dim=512, block_size=64), 33, None)]),
    ],
    ids=str,
)
def test_wide_heads(case: Case, window: int | None, soft_cap: float | None) -> None:
    """Heads of 256 (Gemma 2 and 3) and of 512 (whole layers of Gemma 4), in prompts and decodes."""
    q, kv, meta = inputs.make(case, torch.float32)
    scale = case.head_dim**-0.5
    expected = ref.paged_attention(q, kv, meta, scale, window, soft_cap)
    check(triton.paged_attention(q, kv, on_device(meta), scale, window, soft_cap), expected)


@pytest.mark.parametrize(("held", "rows", "keys", "stages"), [(227, 64, 32, 2), (163, 64, 16, 2), (99, 32, 16, 2)])
def test_tiles_of_wide_heads_fit_into_shared_memory(
    held: int, rows: int, keys: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 512 take 1 KiB a row: keys are halved first, then rows. A Hopper GPU, an A100, and a smaller GPU."""
    monkeypatch.setattr(triton, "shared_memory", lambda: held << 10)
    q, kv, meta = inputs.make(Case((20,), (40,), heads=(8, 1), head_dim=512, block_size=64), torch.float16)
    call = triton.AttentionCall(q, kv, meta, 1.0, None, None, None)
    found = call._fit(triton.PREFILL[512])
    assert (found.rows, found.keys, found.stages, found.warps) == (rows, keys, stages, 8)
    decode = call._fit(triton.DECODE_FEW[512], 64)
    assert (decode.rows, decode.warps) == (64, 8) and decode.keys >= 16, "rows that a decode has are never cut"


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_chosen_rows(share: float, window: int | None) -> None:
    """Rows that do not follow each other, of sequences with and without a context before the step."""
    case = Case((70, 33, 90, 1), (90, 33, 150, 40), heads=(4, 2), head_dim=32, block_size=16)
    q, kv, meta = inputs.make(case, torch.float32)
    chosen, rows = inputs.choose_rows(q, meta, share)
    expected = ref.paged_attention(q, kv, meta, 0.2, window)[rows]
    given = on_device(chosen, decode_len=0, row_positions=chosen.row_positions)
    check(triton.paged_attention(q[rows], kv, given, 0.2, window), expected)


@pytest.mark.parametrize("decode_len", [0, 1, 3])
def test_wherever_decodes_end(decode_len: int) -> None:
    """Rows are right whether a sequence is decoded or cut into tiles. 0 promises that there are no decodes."""
    lens = (12, 40, 20, 9) if decode_len == 0 else (1, 3, 20, 9)
    case = Case(lens, (64, 130, 20, 100), heads=(2, 1), head_dim=32, block_size=64)
    q, kv, meta = inputs.make(case, torch.float32)
    expected = ref.paged_attention(q, kv, meta, 0.1)
    check(triton.paged_attention(q, kv, on_device(meta, decode_len=decode_len), 0.1), expected)


def test_a_plan_serves_every_layer_of_its_step() -> None:
    """Layers share lists and scratch: counters are zero again, and what one layer leaves does not reach the next."""
    q, kv, meta = inputs.make(CASES[18], torch.float32)
    device = on_device(meta)
    for seed in range(3):
        turned = q.roll(seed, -1)
        check(triton.paged_attention(turned, kv, device, 0.2), ref.paged_attention(turned, kv, meta, 0.2))
        check(triton.paged_attention(turned, kv, device, 0.2, 40), ref.paged_attention(turned, kv, meta, 0.2, 40))
    (plans,) = device.plans.values()
    assert isinstance(plans, dict) and len(plans) == 2
    for plan in plans.values():
        assert plan.stats.shape[0] > 1 and not plan.counters.any()


@pytest.mark.parametrize("num_seqs", [1, 3, 40, 300])
def test_items_cover_every_context_once(num_seqs: int) -> None:
    random = torch.Generator().manual_seed(num_seqs)
    lens = torch.randint(0, 3000, (num_seqs,), generator=random, dtype=torch.int32)
    rows = (lens > 0).int()
    meta = AttentionMeta(
        torch.cat((torch.zeros(1, dtype=torch.int32), rows.cumsum(0).int())),
        lens,
        torch.zeros(num_seqs, 9, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        None,
        1,
    )
    shape = triton_plan.Shape(4, 2, 64, 64, 0, 64, 64)
    items = triton_plan.plan_step(meta, shape, int(rows.sum())).items
    spans: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, record in enumerate(items.tolist()):
        if record[0] >= 0:
            spans.setdefault(record[7], []).append((record[3], record[4], record[5], index - record[6]))
    for s, length in enumerate(lens.tolist()):
        found = spans.get(s, [])
        assert [part for *_, part in found] == list(range(len(found)))
        assert all(parts == len(found) <= triton_plan.MAX_PARTS for _, _, parts, _ in found)
        edges = [0] + [end for _, end, _, _ in found]
        assert [start for start, *_ in found] == edges[:-1] and edges[-1] == length
    if num_seqs < 4:
        assert sum(map(len, spans.values())) > num_seqs, "few sequences share a GPU among their parts"


@pytest.mark.parametrize(
    ("block_size", "query_lens"),
    thinned((16, 64), ([1, 1, 1, 1, 1, 1], [1, 3, 1, 2, 1, 1], [1, 20, 1, 1, 9, 1]), every=2),
    ids=str,
)
def test_shared_prefixes(block_size: int, query_lens: list[int]) -> None:
    """Two groups, a member whose rows lie inside the prefix, one that ends with it, and a sequence of no group."""
    size = block_size
    lens = (5 * size + 3, 6 * size, 4 * size, 3 * size - 1, 2 * size + 7, 2 * size)
    case = Case(tuple(query_lens), lens, heads=(4, 2), head_dim=64, block_size=size)
    q, kv, meta = inputs.make(case, torch.float32)
    tables = meta.block_tables.clone()
    tables[1, :4] = tables[0, :4]
    tables[2, :4] = tables[0, :4]
    tables[5, :2] = tables[4, :2]
    meta = replace(meta, block_tables=tables)
    groups = (SharedPrefix(np.array([31, 20, 99, 10], np.int32), 4), SharedPrefix(np.array([60, 50], np.int32), 2))
    slots = np.array([10, 20, 31, 40, 50, 60], np.int32)
    limit = max(query_lens) if max(query_lens) <= 8 else 1
    packed = pack_shared(groups, slots, np.array(query_lens), num_groups=3, most_seqs=21, decode_len=limit)
    shared = SharedBlocks.view(torch.from_numpy(packed), 3, 21, 8)
    assert shared.starts.tolist() == ([0, 3, 5, 5] if max(query_lens) < 9 else [0, 2, 2, 2])
    expected = ref.paged_attention(q, kv, meta, 0.15)
    check(triton.paged_attention(q, kv, on_device(meta, shared=shared), 0.15), expected)
    windowed = ref.paged_attention(q, kv, meta, 0.15, window=size + 3)
    check(triton.paged_attention(q, kv, on_device(meta, shared=shared), 0.15, size + 3), windowed)


def test_a_shared_prefix_is_read_once() -> None:
    """The items of members read from the end of the prefix on."""
    case = Case((1, 1, 1), (300, 260, 270), heads=(4, 2), head_dim=64, block_size=64, deal="shared")
    q, kv, meta = inputs.make(case, torch.float32)
    slots, ones = np.arange(3, dtype=np.int32), np.ones(3, np.int32)
    packed = pack_shared((SharedPrefix(slots, 4),), slots, ones, num_groups=1, most_seqs=5)
    device = on_device(meta, shared=SharedBlocks.view(torch.from_numpy(packed), 1, 5, 5))
    check(triton.paged_attention(q, kv, device, 0.15), ref.paged_attention(q, kv, meta, 0.15))
    (plan,) = device.plans[64].values()  # type: ignore[attr-defined]
    assert min(record[3] for record in plan.items.tolist() if record[0] >= 0) == 256


def test_tiles_that_see_most_come_first() -> None:
    """Each tile of each sequence once, in the order of where they end."""
    query_lens, seq_lens = (70, 1, 130, 64, 33), (70, 90, 400, 134, 400)
    case = Case(query_lens, seq_lens, heads=(4, 2), head_dim=64, block_size=64)
    _, _, meta = inputs.make(case, torch.float32)
    shape = triton_plan.Shape(4, 2, 64, 64, 0, 64, 64)
    tiles = triton_plan.plan_step(on_device(meta), shape, sum(query_lens)).tiles.tolist()
    starts = [0, *np.cumsum(query_lens).tolist()]
    expected = [
        (min(at + 32, rows) + length - rows, s, starts[s] + at, min(rows - at, 32))
        for s, (rows, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        if rows > 1
        for at in range(0, rows, 32)
    ]
    live = [record for record in tiles if record[0] >= 0]
    assert [(record[2] + record[1], record[0], record[1]) for record in live] == [
        (end, row, rows) for end, _, row, rows in sorted(expected, key=lambda tile: (-tile[0], tile[1]))
    ]
    assert tiles[: len(live)] == live and {record[5] for record in live} == {len(live)}


# Few rows behind long contexts, beside a decode, a short prompt, and a context with its last key at a border of tiles.
TAILS = Case((33, 1, 20, 3, 9), (1733, 90, 20, 1344, 1024), heads=(4, 2), head_dim=64, block_size=64)


def plan_of(meta: AttentionMeta) -> Plan:
    """Return the only plan of a step."""
    ((plan,),) = (plans.values() for plans in meta.plans.values())  # type: ignore[attr-defined]
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("dtype", [torch.float32, *full_rows([torch.float16])], ids=str)
@pytest.mark.parametrize(
    "case, window, soft_cap, sunk",
    [
        (TAILS, None, None, True),
        (TAILS, 400, 3.0, False),
        (TAILS, -448, None, True),  # of whole tiles of keys
        (TAILS, -400, 3.0, False),
        (Case((20, 7), (1500, 1400), heads=(3, 1), head_dim=40, block_size=48), 1000, None, True),
    ],
    ids=str,
)
def test_divided_contexts(
    case: Case,
    window: int | None,
    soft_cap: float | None,
    sunk: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several programs compute a tile of queries, each for a part of the keys."""
    monkeypatch.setattr(triton_plan, "LEAST_KEYS", 64)
    q, kv, meta = inputs.make(case, dtype)
    sinks = torch.linspace(-2, 6, case.heads[0]) if sunk else None
    device = on_device(meta, decode_len=1)
    expected = ref.paged_attention(q, kv, meta, 0.2, window, soft_cap, sinks)
    check(triton.paged_attention(q, kv, device, 0.2, window, soft_cap, sinks), expected)
    assert (plan_of(device).divided >= 0).sum() > 8


def test_parts_of_tiles() -> None:
    """Every part of every tile once, in order; only contexts of at least twice the least number of keys are divided."""
    case = Case((33, 1, 20, 40, 50), (9000, 90, 20, 2047, 8000), heads=(4, 2), head_dim=64, block_size=64)
    starts = np.cumsum((0, *case.query_lens))
    counts = torch.tensor([-(-length // 64) for length in case.seq_lens])
    meta = AttentionMeta(
        torch.from_numpy(starts).int(),
        torch.tensor(case.seq_lens, dtype=torch.int32),
        torch.zeros(5, int(counts.max()), dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        None,
        50,
    )
    shape = triton_plan.Shape(4, 2, 64, 64, 0, 64, 64, dividing=2)
    plan = triton_plan.plan_step(meta, shape, sum(case.query_lens))
    records = [record for record in plan.tiles.tolist() if record[0] >= 0]
    assert {record[5] for record in records} == {len(records)} and plan.tiles[: len(records)].tolist() == records
    found: dict[int, list[tuple[int, int]]] = {}
    for index, (row, *_, part, parts, place) in enumerate((*r[:2], *r[6:9]) for r in records):
        found.setdefault(row, []).append((part, parts))
        assert (place >= 0) == (parts > 1) and (place < 0 or plan.divided[place] == index)
        assert part == 0 or records[index - 1][0] == row
    assert [len(found[row]) for row in (34, 54, 86)] == [1, 1, 1] and len(found) == 7
    assert len(found[0]) == len(found[32]) > 1 and len(found[94]) == len(found[126]) > 1
    assert all(parts == [(part, len(parts)) for part in range(len(parts))] for parts in found.values())
    assert (plan.divided >= 0).sum() == sum(len(parts) for parts in found.values() if len(parts) > 1)
    other = replace(meta, plans={}, seq_lens=meta.seq_lens - 1)  # type: ignore[operator]
    again = triton_plan.plan_step(other, replace(shape, dividing=0), sum(case.query_lens))
    assert not len(again.divided) and not len(again.tile_sums)


@pytest.mark.parametrize("rows, programs", [(128, 132), (1024, 132), (64, 16)])
def test_parts_fill_the_programs_and_the_scratch_holds_them(
    rows: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long context is divided so that a round of programs is used well; never into more parts than there is room."""
    monkeypatch.setattr(triton_plan, "multiprocessors", lambda: programs)
    starts, lengths = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([32_000], dtype=torch.int32)
    blocks, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    meta = AttentionMeta(starts, lengths, blocks, slots, None, rows)
    plan = triton_plan.plan_step(meta, triton_plan.Shape(32, 4, 128, 128, 0, 64, 128, dividing=1), rows)
    parts = int(plan.tiles[0, 7])
    tiles = -(-rows // 32) * 8
    rounds = -(-tiles * parts // programs)
    assert tiles / programs / (rounds / parts) > 0.85, "share of the programs' time that is used"
    assert (plan.divided >= 0).sum() == tiles // 8 * parts * (parts > 1) <= len(plan.divided)


class Whole:
    """`gl`, for functions that compute with whole numbers alone. A pointer is a list and an index."""

    minimum, maximum, cdiv = min, max, staticmethod(lambda a, b: -(-a // b))

    @staticmethod
    def load(pointer: "At") -> int:
        return pointer.words[pointer.index]


class At(SimpleNamespace):
    """A pointer into a list."""

    words: list[int]
    index: int

    def __add__(self, offset: int) -> "At":
        return At(words=self.words, index=self.index + offset)


@pytest.mark.parametrize("window", [0, 700, 5000])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_parts_on_hopper_cover_every_tile_of_keys(tile: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are the tiles of the whole context, in order, and each tile is masked unless every row sees it whole."""
    monkeypatch.setattr(hopper_prefill, "gl", Whole)
    random = np.random.default_rng(tile + window)
    for _ in range(300):
        rows, position = int(random.integers(1, 33)), int(random.integers(0, 9000))
        record = [0, rows, position, 0, 0, 1, 0, 1, -1]
        *_, first, whole, whole_end, last = hopper_prefill._span(At(words=record, index=0), tile, window, False)
        assert first <= whole <= whole_end <= last
        parts, end = int(random.integers(1, last - first + 2)), first
        for part in range(parts):
            record[6:8] = part, parts
            row, count, at, *span = hopper_prefill._span(At(words=record, index=0), tile, window, True)
            begin, seen, seen_end, stop = span
            assert (row, count, at, begin) == (0, rows, position, end) and begin <= seen <= seen_end <= stop
            assert all(whole <= one < whole_end for one in range(seen, seen_end))
            end = stop + 1
        assert end == last + 1


class Divided:
    """Hopper's prefill kernel, in PyTorch: the parts that the plan and the other arguments make it compute."""

    def __init__(self) -> None:
        self.parts = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self

    def __call__(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        tiles: Tensor,
        sinks: Tensor | None,
        stride_out: int,
        block: int,
        head: int,
        stride: int,
        scale: float,
        cap: float,
        v_scale: None,
        **given: Any,
    ) -> None:
        size, tile, group = given["SIZE"], given["TILE"], given["GROUP"]
        for record in tiles.tolist():
            if record[0] < 0:
                continue
            row, rows, position, first, *_, last = hopper_prefill._span(
                At(words=record, index=0), tile, given["WINDOW"], given["DIVIDED"]
            )
            places = torch.arange(first * tile, min((last + 1) * tile, position + rows))
            blocks = table[record[given["ROW"]], places // size].long()
            for h in range(q.shape[1]):
                keys, values = (side[blocks, h // group, places % size].double() for side in (k, v))
                scores = q[row : row + rows, h].double() @ keys.T * scale
                at = position + torch.arange(rows)[:, None]
                hidden = (places > at) | (places <= at - (given["WINDOW"] or 2**30))
                scores.masked_fill_(hidden, float("-inf"))
                top = scores.amax(1).clamp_min(-1e30)
                weights = torch.exp2(scores - top[:, None])
                if record[7] == 1:
                    sink = 0 if sinks is None else torch.exp2(sinks[h] * LOG2E - top)
                    out[row : row + rows, h] = (weights @ values / (weights.sum(1) + sink)[:, None]).to(out.dtype)
                    continue
                self.parts += 1
                lanes = torch.arange(rows) * group + h % group
                given["sums_at"][record[8], h // group, lanes] = (weights @ values).float()
                given["stats_at"][record[8], h // group, lanes] = torch.stack((top, weights.sum(1)), 1).float()


@pytest.mark.parametrize(
    ("case", "window"), [(TAILS, None), (TAILS, 1000), (replace(TAILS, head_dim=512), 1000)], ids=str
)
def test_the_parts_of_hopper_are_added(case: Case, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that its kernel writes, at the places of the plan, are added by Triton's; sinks count once."""
    monkeypatch.setattr(hopper_prefill, "gl", Whole)
    monkeypatch.setattr(triton_plan, "LEAST_KEYS", 128)
    monkeypatch.setattr(hopper, "describe", lambda base, *_: base)
    monkeypatch.setattr(triton, "shared_memory", lambda: 227 << 10)
    for module in (triton_plan, triton):
        monkeypatch.setattr(module, "multiprocessors", lambda: 32)
    kernel = Divided()
    monkeypatch.setattr(hopper, "prefill_kernel", kernel)
    q, kv, meta = inputs.make(case, torch.float16)
    sinks, device = torch.linspace(-2, 6, 4), on_device(meta, decode_len=1)
    expected = ref.paged_attention(q, kv, meta, 0.2, window, None, sinks)
    check(hopper.paged_attention(q, kv, device, 0.2, window, None, sinks), expected)
    assert kernel.parts > 8 and plan_of(device).tile_sums.shape[2] == hopper.TILINGS[case.head_dim].rows
    kernel.parts, chunked = 0, ref.paged_attention(q, kv, meta, 0.2, -500, None, sinks)
    check(hopper.paged_attention(q, kv, on_device(meta, decode_len=1), 0.2, -500, None, sinks), chunked)
    assert not kernel.parts, "Triton's prefill runs attention in chunks"


@pytest.mark.parametrize("rows, bad", [(1, "nan"), (1, "inf"), (3, "-inf"), (40, "nan"), (40, "-inf")])
def test_what_is_not_finite_in_a_key_is_not_hidden(rows: int, bad: str) -> None:
    """NaN in the same rows and heads as the reference; the other sequence as if nothing had been there."""
    case = Case((rows, rows), (200, 129), heads=(4, 2), head_dim=64, block_size=64)
    q, kv, meta = inputs.make(case, torch.float32)
    kv.k[int(meta.block_tables[0, 1]), 1, 5, 7] = float(bad)
    expected = ref.paged_attention(q, kv, meta, 0.2)
    actual = triton.paged_attention(q, kv, on_device(meta), 0.2)
    assert torch.equal(actual.isnan().any(-1), expected.isnan().any(-1))
    check(actual.nan_to_num(), torch.where(expected.isnan().any(-1, keepdim=True), actual.nan_to_num(), expected))


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_value_that_is_not_finite_stays_with_the_rows_that_see_it(bad: str) -> None:
    """Rows before it are as if it were not there, and so is who gets the rest of the block later."""
    case = Case((40,), (40,), heads=(2, 2), head_dim=64, block_size=64)
    q, kv, meta = inputs.make(case, torch.float32)
    k, v = (side[meta.kv_slots // 64, :, meta.kv_slots % 64] for side in (kv.k, kv.v))
    expected = ref.paged_attention(q, kv, meta, 0.2)
    v[30, 1, 5] = float(bad)
    cos, sin = torch.ones(40, 64), torch.zeros(40, 64)
    assert torch.equal(heads.prepare(torch.cat((q, k, v), 1), None, 1e-6, cos, sin, kv, meta.kv_slots), q)
    actual = triton.paged_attention(q, kv, on_device(meta), 0.2)
    assert kv.v[int(meta.block_tables[0, 0]), :, :40].isfinite().all()
    check(actual[:30], expected[:30])
    assert (actual[30:, 1, 5].abs() > 1e30).all()


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("decodes", {"decode_kernel", "prefix_kernel", "_plan_kernel", "_headed_kernel"}),
        ("prompts", {"decode_kernel", "prefill_kernel", "hopper.prefill_kernel", "_plan_kernel"}),
        ("small", {"decode_kernel", "prefill_kernel", "prefix_kernel", "_plan_kernel", "merge_kernel"}),
        ("wide", {"decode_kernel", "prefill_kernel", "hopper.prefill_kernel", "_plan_kernel"}),
    ],
)
def test_compiles(part: str, kernels: set[str], compiled: Callable[..., set[str]]) -> None:
    """The configurations of production; with --full all."""
    found = compiled("compile_attention", part)
    assert found == kernels or (FULL and found > kernels)
