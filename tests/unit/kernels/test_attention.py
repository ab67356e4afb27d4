"""Paged attention against its reference, over poisoned caches."""

import itertools
import mmap
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from quire.kernels.attention import AttentionMeta, KVView, cpu, inputs, native, ref
from quire.kernels.attention_cpu import native_plan, plan
from quire.kernels.select import here
from quire.kernels.supports import SUPPORTS

from ...support.full import full_rows

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MISSING = here("native")
NO_TILES = MISSING or native.NO_TILES
FAST = [
    pytest.param(cpu, id="cpu"),
    pytest.param(native, id="native", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", inputs.CASES, ids=str)
@pytest.mark.parametrize("impl", FAST)
def test_matches_reference(impl: ModuleType, case: inputs.Case, dtype: torch.dtype) -> None:
    for seed in range(3):
        q, kv, meta = inputs.make(case, dtype, seed)
        scale = 1.2 * case.head_dim**-0.5
        expected = ref.paged_attention(q, kv, meta, scale)
        actual = impl.paged_attention(q, kv, replace(meta, plans={}), scale)
        assert actual.dtype == dtype and actual.shape == q.shape
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


PROMPTS = (  # more rows than a block has, more tokens than a span, every number of query heads to a KV head
    inputs.Case((450,), (450,), heads=(1, 1), head_dim=64, block_size=16),
    inputs.Case((257, 6, 1), (513, 300, 40), heads=(4, 2), head_dim=128, block_size=32),
    inputs.Case((90, 5), (700, 256), heads=(6, 2), head_dim=20, block_size=16),
    inputs.Case((30, 12), (31, 530), heads=(12, 3), head_dim=129, block_size=16),
    inputs.Case((77,), (290,), heads=(5, 1), head_dim=80),
    inputs.Case((64, 33), (320, 33), heads=(6, 1), head_dim=17, block_size=16),
    inputs.Case((40,), (140,), heads=(14, 2), head_dim=512, block_size=16),
    inputs.Case((100, 8), (400, 264), heads=(16, 2), head_dim=96, block_size=32),
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", PROMPTS, ids=str)
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")
def test_prompts_on_vectors(case: inputs.Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "NO_TILES", "not here")
    q, kv, meta = inputs.make(case, dtype)
    expected = ref.paged_attention(q, kv, meta, scale=case.head_dim**-0.5)
    actual = native.paged_attention(q, kv, meta, scale=case.head_dim**-0.5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")
def test_a_row_of_a_prompt_depends_on_nothing_but_itself(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk or in several, beside other sequences, on any number of threads, bit for bit."""
    monkeypatch.setattr(native, "NO_TILES", "not here")
    case = inputs.Case((470, 9), (470, 300), heads=(6, 2), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, dtype)
    whole = native.paged_attention(q, kv, meta, scale=0.2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert torch.equal(native.paged_attention(q, kv, replace(meta, plans={}), scale=0.2), whole)
    first = 0
    for rows in (101, 5, 250, 114):
        chunk = AttentionMeta([0, rows], [first + rows], meta.block_tables[:1], meta.kv_slots)
        part = native.paged_attention(q[first : first + rows], kv, chunk, scale=0.2)
        assert torch.equal(part, whole[first : first + rows])
        first += rows


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("impl", FAST)
def test_chosen_rows_are_those_of_the_whole_step(
    impl: ModuleType, share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference; in C those of a long chunk bit for bit as without AMX."""
    case = inputs.Case((470, 9, 1), (470, 300, 40), heads=(6, 2), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, dtype)
    chosen, rows = inputs.choose_rows(q, meta, share)
    actual = impl.paged_attention(q[rows], kv, chosen, scale=0.2)
    expected = ref.paged_attention(q, kv, meta, scale=0.2)[rows]
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])
    if impl is cpu:
        return
    monkeypatch.setattr(native, "NO_TILES", "not here")
    whole = native.paged_attention(q, kv, replace(meta, plans={}), scale=0.2)
    long = rows < 470
    assert torch.equal(actual[long], whole[rows[long]])


@pytest.mark.parametrize("impl", [cpu, ref], ids=["cpu", "ref"])
def test_write_then_read_back(impl: ModuleType) -> None:
    arena = torch.full((6, 2, 3, 4, 8), float("nan"))
    kv = KVView(arena[:, 0], arena[:, 1])
    k, v = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    slots = torch.tensor([4, 5, 6, 7, 20])
    impl.write_kv(k, v, kv, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(kv.k[slot // 4, :, slot % 4], k[row])
        assert torch.equal(kv.v[slot // 4, :, slot % 4], v[row])
    assert int(torch.isnan(kv.k[:, 0, :, 0]).sum()) == 24 - 5


@pytest.mark.parametrize("impl", FAST)
def test_strided_query_rows(impl: ModuleType) -> None:
    """q may be a slice of a wider projection."""
    q, kv, meta = inputs.make(inputs.CASES[12], torch.float32)
    wide = torch.randn(q.shape[0], q.shape[1] + 3, q.shape[2])
    wide[:, : q.shape[1]] = q
    expected = ref.paged_attention(q, kv, meta, scale=1.0)
    torch.testing.assert_close(
        impl.paged_attention(wide[:, : q.shape[1]], kv, meta, scale=1.0), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_native_row_depends_on_nothing_but_itself(dtype: torch.dtype) -> None:
    """Alone or among others, bit for bit: parts of a context are cut in the same places."""
    if MISSING:
        pytest.skip(MISSING)
    case = inputs.Case((1, 1, 3, 1), (1100, 30, 513, 512), heads=(4, 2), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, dtype)
    together = native.paged_attention(q, kv, meta, scale=0.2)
    for s, rows in enumerate((slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 6))):
        table, num_rows = meta.block_tables[s : s + 1], rows.stop - rows.start
        one = AttentionMeta([0, num_rows], [case.seq_lens[s]], table, meta.kv_slots)
        assert torch.equal(native.paged_attention(q[rows], kv, one, scale=0.2), together[rows])


BAD, LENGTHS, ROWS, SIDES = ("nan", "inf", "-inf"), (1, 3, 40, 600), (1, 3, 40), ("k", "v")
NOT_FINITE = [
    case
    for case in itertools.product(SIDES, LENGTHS, ROWS, BAD, TOLERANCE)
    if case[2] <= case[1]  # no more rows than tokens
]


def is_usual(side: str, length: int, rows: int, bad: str, dtype: torch.dtype) -> bool:
    """True for one case in six: each side, length and number of rows with a number and a type that take turns."""
    at = LENGTHS.index(length) + ROWS.index(rows)
    return BAD[at % 3] == bad and list(TOLERANCE)[(at + SIDES.index(side)) % 2] == dtype


@pytest.mark.parametrize(
    ("side", "length", "rows", "bad", "dtype"),
    [*(case for case in NOT_FINITE if is_usual(*case)), *full_rows(NOT_FINITE)],
    ids=str,
)
@pytest.mark.parametrize("impl", FAST)
def test_what_is_not_finite_is_neither_hidden_nor_spread(
    impl: ModuleType, side: str, length: int, rows: int, bad: str, dtype: torch.dtype
) -> None:
    """In the same rows and heads as the reference: not in those of earlier tokens, nor in the other sequence's. A score
    that is not finite makes NaN; a value may also make an infinity."""
    case = inputs.Case((rows, 1), (length, 20), heads=(4, 2), head_dim=32, block_size=16)
    for at in ({0}, {length // 2}, {length - 1}, range(length)):
        q, kv, meta = inputs.make(case, dtype)
        for t in at:
            getattr(kv, side)[int(meta.block_tables[0, t // 16]), 0, t % 16, 5] = float(bad)
        expected = ref.paged_attention(q, kv, meta, scale=0.2)
        actual = impl.paged_attention(q, kv, replace(meta, plans={}), scale=0.2)
        sees, found = (out.isnan() if side == "k" else ~out.isfinite() for out in (expected, actual))
        sees = sees.any(-1)
        assert (bad != "nan" and side == "k") or sees.any()
        assert torch.equal(found.any(-1), sees)
        torch.testing.assert_close(actual[~sees], expected[~sees], rtol=0, atol=TOLERANCE[dtype])


HIDDEN = [(past, token, dtype) for past in (0, 1, 17) for token in (0, 31, 32, 100, 137, 139) for dtype in TOLERANCE]


@pytest.mark.parametrize(("past", "token", "dtype"), [*HIDDEN[::3], *full_rows(HIDDEN)], ids=str)
@pytest.mark.parametrize("impl", FAST)
def test_a_value_that_is_not_finite_stays_out_of_every_earlier_row(
    impl: ModuleType, past: int, token: int, dtype: torch.dtype
) -> None:
    """Wherever it lies among the tiles of a chunk; those after it are not finite either, as in all layers but one."""
    case = inputs.Case((140, 40), (past + 140, 90), heads=(4, 2), head_dim=32, block_size=16)
    q, kv, meta = inputs.make(case, dtype)
    sound = impl.paged_attention(q, kv, replace(meta, plans={}), scale=0.2)
    for at in range(past + token, past + 140):
        kv.v[int(meta.block_tables[0, at // 16]), 1, at % 16, 31] = float("nan")
    actual = impl.paged_attention(q, kv, replace(meta, plans={}), scale=0.2)
    assert actual[token:140, 2:].isnan().any(-1).all()
    actual[token:140] = sound[token:140]
    torch.testing.assert_close(actual, sound, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.skipif(bool(NO_TILES), reason=NO_TILES or "runs")
def test_a_value_that_is_not_finite_in_one_layer_of_a_bounded_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever pass over the KV heads meets it; the next layer of the step is as ever."""
    case = inputs.Case((40, 5), (300, 70), heads=(8, 4), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, torch.bfloat16)
    monkeypatch.setattr(native_plan, "SCRATCH", 1000)
    sound = native.paged_attention(q, kv, meta, scale=0.2)
    for head in range(4):
        broken = KVView(kv.k.clone(), kv.v.clone())
        broken.v[int(meta.block_tables[0, 290 // 16]), head, 290 % 16] = float("nan")
        found = native.paged_attention(q, broken, meta, scale=0.2)
        assert found[:30].isfinite().all() and found[30:40, 2 * head].isnan().all()
        torch.testing.assert_close(found[:30], sound[:30], rtol=0, atol=2e-2)
        assert torch.equal(native.paged_attention(q, kv, meta, scale=0.2), sound)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("impl", FAST)
def test_scores_beyond_what_a_float_can_raise_e_to(impl: ModuleType, rows: int, dtype: torch.dtype) -> None:
    """In every part of a long context: weights are merged by their maxima."""
    q, kv, meta = inputs.make(inputs.Case((rows,), (1600,), head_dim=64, block_size=16), dtype)
    for part in meta.block_tables[0, :100].long().split(32):
        assert (kv.k[part, 0].float() @ q[0, 0].float()).max() * 6 > 88
    expected = ref.paged_attention(q, kv, meta, scale=6.0)
    actual = impl.paged_attention(q, kv, replace(meta, plans={}), scale=6.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")
def test_a_part_of_a_context_that_takes_no_weight(part: int, rows: int, dtype: torch.dtype) -> None:
    """Every score of it is minus infinity."""
    q, kv, meta = inputs.make(inputs.Case((rows,), (1600,), head_dim=64, block_size=16), dtype)
    q = q.abs()
    for t in range(part * native_plan.PART, (part + 1) * native_plan.PART):
        kv.k[int(meta.block_tables[0, t // 16]), :, t % 16, 3] = float("-inf")
    expected = ref.paged_attention(q, kv, meta, scale=0.1)
    actual = native.paged_attention(q, kv, replace(meta, plans={}), scale=0.1)
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")
def test_an_arena_of_more_elements_than_32_bits_count(dtype: torch.dtype) -> None:
    page, count, size, dim = 8 << 20, 700, 32, 64
    try:  # pages that are not written take no memory
        mapped = mmap.mmap(-1, count * page * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        arena = torch.frombuffer(mapped, dtype=dtype)
    except OSError as error:
        pytest.skip(str(error))
    k, v = (arena.as_strided((count, 2, size, dim), (page, size * dim, dim, 1), at) for at in (0, 2 * size * dim))
    tables = torch.tensor([[699, 1, 650, 300], [520, 698, 2, 3]], dtype=torch.int32)
    for block in tables.flatten().tolist():
        k[block], v[block] = torch.randn(2, 2, size, dim).to(dtype)
    q, meta = torch.randn(41, 4, dim).to(dtype), AttentionMeta([0, 1, 41], [128, 120], tables, torch.zeros(41))
    expected = ref.paged_attention(q, KVView(k, v), meta, scale=0.125)
    actual = native.paged_attention(q, KVView(k, v), meta, scale=0.125)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")
def test_the_room_for_parts_of_rows_is_bounded(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Rows by and by, bit for bit as all at once."""
    case = inputs.Case((4, 3, 1, 4, 1), (1100, 513, 1600, 30, 700), heads=(4, 2), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, dtype)
    together = native.paged_attention(q, kv, meta, scale=0.2)
    assert len(meta.plans[16, None, native_plan.FEW].rows) == 1
    monkeypatch.setattr(native_plan, "MOST_PARTS", 5)
    bounded = replace(meta, plans={})
    assert torch.equal(native.paged_attention(q, kv, bounded, scale=0.2), together)
    assert sum(len(rows.items) for rows in bounded.plans[16, None, native_plan.FEW].rows) == 13
    assert (
        len(bounded.plans[16, None, native_plan.FEW].partial)
        <= (5 + 4) * 4 * 66
        < len(meta.plans[16, None, native_plan.FEW].partial)
    )
    assert native.rows_only(meta, 16) and not native.rows_only(bounded, 16)


@pytest.mark.skipif(bool(NO_TILES), reason=NO_TILES or "runs")
@pytest.mark.parametrize("parts", [1, 2.5, 8, 1000], ids=str)
def test_the_scratch_of_chunks_is_bounded(parts: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks by and by, and the KV heads of one that alone is too long, bit for bit as all at once."""
    case = inputs.Case((40, 5, 9, 33), (300, 70, 40, 33), heads=(8, 4), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, torch.bfloat16)
    together = native.paged_attention(q, kv, meta, scale=0.2)
    (everything,) = meta.plans[16, None, native_plan.FEW].passes.values()
    assert len(everything) == 1 and everything[0].heads == 4
    budget = int(everything[0].size * 2 / parts)
    monkeypatch.setattr(native_plan, "SCRATCH", budget)
    bounded = replace(meta, plans={})
    assert torch.equal(native.paged_attention(q, kv, bounded, scale=0.2), together)
    one_head = 2 * 320 * 64 * 2
    assert bounded.plans[16, None, native_plan.FEW].scratch.nbytes <= max(budget, one_head)
    assert len(bounded.plans[16, None, native_plan.FEW].passes[4, 64]) == {1: 1, 2.5: 3, 8: 4, 1000: 4}[parts]


def test_the_scratch_of_many_long_chunks() -> None:
    """256 requests that share a prefix of 8,000 tokens took 7.8 GiB."""
    none = torch.zeros(1, dtype=torch.long)
    chunks = tuple(plan.ChunkPlan(s, s * 8, s * 8 + 8, 8000, 8008, none) for s in range(256))
    passes = native_plan.chunk_passes(chunks, 8, 128)
    assert sum(len(one.items) for one in passes) == 256
    assert max(one.size for one in passes) * 2 <= native_plan.SCRATCH


WRONG = {
    "cache dtype": (lambda q, kv, meta: (q, KVView(kv.k.bfloat16(), kv.v.bfloat16()), meta), "bfloat16"),
    "float16": (lambda q, kv, meta: (q.half(), KVView(kv.k.half(), kv.v.half()), meta), "float16"),
    "head dim": (lambda q, kv, meta: (q[..., :8].contiguous(), kv, meta), "head size"),
    "strides": (lambda q, kv, meta: (q.transpose(0, 1).contiguous().transpose(0, 1), kv, meta), "strides"),
    "tables": (lambda q, kv, meta: (q, kv, replace(meta, block_tables=meta.block_tables.long())), "int32"),
    "short tables": (lambda q, kv, meta: (q, kv, replace(meta, block_tables=meta.block_tables[:, :2])), "contexts"),
    "few tables": (lambda q, kv, meta: (q, kv, replace(meta, block_tables=meta.block_tables[:2])), "contexts"),
    "rows": (lambda q, kv, meta: (q[:-1], kv, meta), "q must have a row"),
}


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs")
@pytest.mark.parametrize("name", WRONG)
def test_c_is_handed_no_wrong_memory(name: str) -> None:
    change, said = WRONG[name]
    q, kv, meta = change(*inputs.make(inputs.CASES[12], torch.float32))
    with pytest.raises(ValueError, match=said):
        native.paged_attention(q, kv, meta, scale=1.0)


def test_consecutive_blocks_are_not_copied() -> None:
    case = inputs.Case((1, 1, 1), (64, 64, 64), deal="runs")
    _, kv, meta = inputs.make(case, torch.float32)
    step = plan.plan_step(meta, kv.block_size)
    assert step.decode is not None
    assert [type(call) for call in step.decode.calls] == [plan.Run]
    assert plan.plan_step(meta, kv.block_size) is step


def test_shared_blocks_serve_every_owner() -> None:
    case = inputs.Case((1, 1), (48, 48), deal="shared")
    _, kv, meta = inputs.make(case, torch.float32)
    step = plan.plan_step(meta, kv.block_size)
    assert step.decode is not None
    assert sum(len(call.owners) for call in step.decode.calls if isinstance(call, plan.Run)) >= 12


@pytest.mark.parametrize("extra", [{"window": 5}, {"soft_cap": 2.0}, {"sinks": torch.zeros(4)}], ids=str)
def test_declares_what_it_can(extra: dict) -> None:  # type: ignore[type-arg]
    q, kv, meta = inputs.make(inputs.CASES[2], torch.float32)
    able = SUPPORTS["attention"]
    assert not set(extra) & able["cpu"].features and set(extra) <= able["ref"].features & able["native"].features
    plain = ref.paged_attention(q, kv, meta, scale=0.3)
    assert not torch.allclose(plain, ref.paged_attention(q, kv, meta, scale=0.3, **extra))
    with pytest.raises(AssertionError):
        cpu.paged_attention(q, kv, meta, scale=0.3, **extra)


def test_reference_window_equals_a_shorter_context() -> None:
    """A decode with window w sees exactly its last w tokens: the oracle is plain softmax over them."""
    case = inputs.Case((1,), (21,), heads=(2, 2))
    q, kv, meta = inputs.make(case, torch.float32)
    blocks = meta.block_tables[0, :3].long()
    keys, values = (side[blocks].transpose(1, 2).flatten(0, 1)[14:21] for side in (kv.k, kv.v))
    weights = torch.einsum("hd,lhd->hl", q[0], keys).mul(0.5).softmax(-1)
    expected = torch.einsum("hl,lhd->hd", weights, values)
    actual = ref.paged_attention(q, kv, meta, scale=0.5, window=7)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [inputs.CASES[12], inputs.CASES[-1]], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_chosen_rows_see_what_they_see_among_all_rows(case: inputs.Case, window: int | None) -> None:
    q, kv, meta = inputs.make(case, torch.float32)
    chosen, rows = inputs.choose_rows(q, meta, 0.3)
    assert 0 < len(rows) < len(q)
    expected = ref.paged_attention(q, kv, meta, 0.3, window)[rows]
    assert torch.equal(ref.paged_attention(q[rows], kv, chosen, 0.3, window), expected)
