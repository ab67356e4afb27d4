"""Paged attention against its reference, over poisoned caches."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from quire.kernels.attention import AttentionMeta, KVView, cpu, inputs, native, plan, ref

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MISSING = native.SUPPORT.missing
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
    if native.SUPPORT.missing:
        pytest.skip(native.SUPPORT.missing)
    case = inputs.Case((1, 1, 3, 1), (1100, 30, 513, 512), heads=(4, 2), head_dim=64, block_size=16)
    q, kv, meta = inputs.make(case, dtype)
    together = native.paged_attention(q, kv, meta, scale=0.2)
    for s, rows in enumerate((slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 6))):
        table, num_rows = meta.block_tables[s : s + 1], rows.stop - rows.start
        one = AttentionMeta([0, num_rows], [case.seq_lens[s]], table, meta.kv_slots)
        assert torch.equal(native.paged_attention(q[rows], kv, one, scale=0.2), together[rows])


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
@pytest.mark.parametrize("impl", FAST)
def test_declares_what_it_cannot(impl: ModuleType, extra: dict) -> None:  # type: ignore[type-arg]
    q, kv, meta = inputs.make(inputs.CASES[2], torch.float32)
    assert not set(extra) & impl.SUPPORT.features and set(extra) <= ref.SUPPORT.features
    plain = ref.paged_attention(q, kv, meta, scale=0.3)
    assert not torch.allclose(plain, ref.paged_attention(q, kv, meta, scale=0.3, **extra))
    with pytest.raises(AssertionError):
        impl.paged_attention(q, kv, meta, scale=0.3, **extra)


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
