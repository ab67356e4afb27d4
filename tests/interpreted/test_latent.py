"""Latent attention for GPUs in Triton's interpreter, over poisoned caches, and compiled for sm_90 without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.step import SharedPrefix
from quire.kernels import triton_runtime
from quire.kernels.attention import AttentionMeta, SharedBlocks, inputs, sequences
from quire.kernels.attention.inputs import Case
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.latent import LatentView, ref, triton, triton_expanded
from quire.kernels.latent.inputs import make, steps, weights
from quire.kernels.latent.parts import packed_parts
from quire.kernels.latent.triton_absorbed import merge_kernel
from quire.layers.latent import split

from ..support.compared import LIMITS, make_model, runner_of
from ..support.full import FULL, full_rows
from ..support.naive_runner import NaiveRunner, agree
from .test_cuda_worker import PLANS, StepRunner, cuda_runner, run_ahead

__all__ = ["cuda_runner"]

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

R, P, V = 8, 16, 12
CONFIG = {
    "model_type": "deepseek_v2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": P,
    "qk_rope_head_dim": R, "v_head_dim": V, "max_position_embeddings": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 2,
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
CASES = (
    *steps(*inputs.CASES),
    *steps(
        Case((1, 1, 1), (700, 64, 65), heads=(16, 1), block_size=64),
        Case((130, 1, 70), (260, 129, 70), heads=(3, 1), block_size=64),
        Case((1, 1), (300, 129), heads=(128, 1), block_size=128, deal="runs"),
        Case((3, 2), (300, 129), heads=(40, 1), block_size=48),
        latent=32,
        rope=16,
    ),
)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all()
    torch.manual_seed(4)
    yield
    torch.set_deterministic_debug_mode("default")


def on_device(meta: AttentionMeta, decode_len: int | None = None) -> AttentionMeta:
    """The same step as a worker on a GPU gives it: a table of all slots, upper bounds, padded sequences."""
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    tables, num_seqs = meta.block_tables, len(meta.seq_lens)
    slots = torch.full((num_seqs + 2, tables.shape[1]), 2**30, dtype=torch.int32)
    rows = torch.arange(num_seqs, 0, -1, dtype=torch.int32)
    slots[rows.long()] = tables
    longest = int(meta.query_start.diff().max())
    return replace(
        meta,
        query_start=torch.cat((meta.query_start, meta.query_start[-1:].expand(2))),
        seq_lens=torch.cat((meta.seq_lens, torch.zeros(2, dtype=torch.int32))),
        block_tables=slots,
        table_rows=torch.cat((rows, torch.zeros(2, dtype=torch.int32))),
        max_query_len=longest,
        decode_len=(longest if longest <= 8 else 1) if decode_len is None else decode_len,
        plans={},
    )


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[actual.dtype])


@pytest.mark.parametrize(
    "case, dtype",
    [
        *((case, torch.float32) for case in (*CASES[5:21:6], *CASES[-3:])),
        (CASES[12], torch.float16),
        *full_rows((case, dtype) for case in CASES for dtype in TOLERANCE),
    ],
    ids=str,
)
def test_absorbed(case: Case, dtype: torch.dtype) -> None:
    q_latent, q_rope, cache, meta = make(case, R, dtype)
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)
    given = on_device(meta) if dtype == torch.float32 else meta
    check(triton.absorbed(q_latent, q_rope, cache, given, 0.2), expected)


@pytest.mark.parametrize(
    ("rows", "heads", "deep", "width", "dtype"),
    [
        (1, 16, 128, 512, torch.float16),
        (1, 3, 12, 20, torch.float32),
        (2, 3, 20, 12, torch.float32),
        (3, 2, 96, 40, torch.float32),
        (4, 2, 512, 128, torch.float16),
        (5, 3, 12, 20, torch.float32),
        (70, 2, 130, 70, torch.float32),
        (256, 1, 16, 24, torch.float32),
        (257, 1, 16, 24, torch.float32),
    ],
)
@pytest.mark.parametrize("across", [True, False])
def test_project(rows: int, heads: int, deep: int, width: int, dtype: torch.dtype, across: bool) -> None:
    """Heads are parts of longer rows, matrices parts of larger ones; inputs or outputs are neighbours in memory."""
    x = torch.randn(rows, heads * (deep + 8) + 24).to(dtype)[:, :-24].unflatten(1, (heads, -1))[..., :deep]
    up = torch.randn(heads, 3 + (deep if across else width), width if across else deep).to(dtype)[:, 3:]
    weights, out = up if across else up.transpose(1, 2), torch.empty(rows, heads, width, dtype=dtype)
    assert triton.project(x, weights, out) is out
    expected = torch.einsum("thk,hkn->thn", x.double(), weights.double()).to(dtype)
    rtol, atol = (1e-3, 2e-2) if dtype == torch.float16 else (1e-5, 1e-4)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("decode_len", [0, 1, 3])
def test_wherever_decodes_end(decode_len: int) -> None:
    """Rows are right whether a sequence is decoded or cut into tiles. 0 promises that there are no decodes."""
    lens = (12, 40, 20, 9) if decode_len == 0 else (1, 3, 20, 9)
    case = steps(Case(lens, (64, 130, 20, 100), heads=(6, 1), block_size=64))[0]
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)
    check(triton.absorbed(q_latent, q_rope, cache, on_device(meta, decode_len), 0.2), expected)


def share(meta: AttentionMeta, *groups: tuple[tuple[int, ...], int]) -> AttentionMeta:
    """A step whose groups, the sequences and how many blocks each, begin alike; as `on_device` gives it."""
    tables, num_seqs = meta.block_tables.clone(), len(meta.seq_lens)
    assert isinstance(meta.query_start, Tensor)
    for members, blocks in groups:
        tables[list(members), :blocks] = tables[members[0], :blocks]
    device = on_device(replace(meta, block_tables=tables))
    packed = pack_shared(
        [SharedPrefix(np.array(members, np.int32), blocks) for members, blocks in groups],
        np.arange(num_seqs, dtype=np.int32),
        meta.query_start.diff().numpy(),
        num_groups=3,
        most_seqs=21,
        decode_len=device.decode_len,
    )
    meta.block_tables.copy_(tables)
    return replace(device, shared=SharedBlocks.view(torch.from_numpy(packed), 3, 21, num_seqs + 2))


@pytest.mark.parametrize(
    ("query_lens", "heads", "size", "dtype", "cuts"),
    [
        ((1, 1, 1, 1, 1, 1), 16, 64, torch.float32, 2),
        ((1, 1, 1, 1, 1, 1), 16, 16, torch.float16, 4),
        ((1, 1, 1, 1, 1, 1), 128, 16, torch.float32, 1),
        ((1, 3, 2, 2, 1, 1), 6, 48, torch.float32, 1),
        ((1, 3, 2, 2, 1, 1), 40, 16, torch.float32, 1),
        ((1, 20, 1, 1, 9, 1), 4, 64, torch.float32, 8),
    ],
)
def test_shared_prefixes(query_lens: tuple[int, ...], heads: int, size: int, dtype: torch.dtype, cuts: int) -> None:
    """Two groups, members that end with the prefix or whose first row is before its end, a sequence of no group; tiles
    that are not full and cuts in which there is nothing. A prompt is no member."""
    lens = (5 * size + 3, 6 * size, 4 * size, 3 * size - 1, 2 * size + 7, 2 * size)
    q_latent, q_rope, cache, meta = make(steps(Case(query_lens, lens, heads=(heads, 1), block_size=size))[0], R, dtype)
    device = share(meta, ((2, 1, 0), 4), ((5, 4), 2))
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)
    check(triton.absorbed(q_latent, q_rope, cache, device, 0.2), expected)
    ((plan,),) = (plans.values() for plans in device.plans.values())  # type: ignore[attr-defined]
    assert plan.items[0, 3] == 4 * size and plan.prefix_parts == cuts
    again = triton.absorbed(q_latent, q_rope, cache, replace(device, plans={}), 0.2)
    assert torch.equal(again, triton.absorbed(q_latent, q_rope, cache, device, 0.2))


def test_what_is_not_finite_in_a_shared_prefix_reaches_its_group_alone() -> None:
    case = steps(Case((1, 1, 1), (150, 130, 160), heads=(4, 1), block_size=64))[0]
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    device = share(meta, ((0, 2), 2))
    cache.rope[int(meta.block_tables[0, 1]), 0, 5, 3] = float("nan")
    assert triton.absorbed(q_latent, q_rope, cache, device, 0.2).isnan().all(-1).all(-1).tolist() == [True, False, True]


def test_a_member_behind_a_prompt_that_is_expanded_takes_no_part() -> None:
    """The absorbed form has the first two sequences alone; its queries end with theirs."""
    case = steps(Case((1, 1, 9, 1), (70, 66, 9, 80), heads=(4, 1), block_size=16))[0]
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    device = share(meta, ((3, 0, 1), 4))
    few, naive = split(replace(device, prompts=sequences(meta)[2:]), 4)
    assert [prompt[2] for prompt in naive] == [2, 3] and few.shared is not None
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)[:2]
    check(triton.absorbed(q_latent[:2].clone(), q_rope[:2], cache, few, 0.2), expected)
    (plan,) = few.plans[16].values()  # type: ignore[attr-defined]
    sums = plan.stats[len(plan.items) :, ..., 1].view(-1, plan.prefix_parts, 4).sum(1)  # of weights, by member
    assert (sums[0] == 64).all() and not (sums[1:3] == 64).any(), "a query of zeros weighs 64 tokens alike"


def test_many_sequences_are_added_up_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program takes several sequences; some have one part and are left alone."""
    monkeypatch.setattr(triton, "MERGING", 1)
    lens = (300, 20, 290, 31, 280, 270)
    q_latent, q_rope, cache, meta = make(steps(Case((1,) * 6, lens, heads=(16, 1), block_size=64))[0], R, torch.float32)
    device = on_device(meta)
    check(triton.absorbed(q_latent, q_rope, cache, device, 0.2), ref.absorbed(q_latent, q_rope, cache, meta, 0.2))
    (plan,) = device.plans[64].values()  # type: ignore[attr-defined]
    records = plan.items.tolist()
    assert sorted({record[5] for record in records if record[0] >= 0})[0] == 1
    firsts = [next((at for at, other in enumerate(records) if other[0] == s and other[5] > 1), -1) for s in range(6)]
    assert [record[10] for record in records[:8]] == [*firsts, -1, -1] and max(firsts) > 6


def test_a_plan_serves_every_layer_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that a layer leaves in the scratch do not reach the next layer. Many programs share a long context."""
    q_latent, q_rope, cache, meta = make(CASES[len(inputs.CASES)], R, torch.float32)
    device, up = on_device(meta), weights(16, P, V, q_latent.shape[2], torch.float32)
    monkeypatch.setattr(triton, "WORKSPACE", 1)
    for seed in range(2):
        turned = q_latent.roll(seed, -1)
        check(triton.absorbed(turned, q_rope, cache, device, 0.2), ref.absorbed(turned, q_rope, cache, meta, 0.2))
        q = torch.randn(3, 16, P + R)
        out, expected = torch.empty(2, 3, 16, V)
        ref.expanded(q, up, cache, meta, 0.2, expected)
        check(triton.expanded(q, up, cache, device, 0.2, out), expected)
    plans = device.plans.pop(64)
    assert isinstance(plans, dict) and len(plans) == 1 and len(device.plans) == 1
    assert max(record[5] for plan in plans.values() for record in plan.items.tolist()) > 4
    (pieces,) = device.plans.values()
    assert isinstance(pieces, list) and len(pieces) == 8


@pytest.mark.parametrize(
    ("case", "workspace"),
    [
        *((case, 1) for case in (CASES[9], CASES[-1])),
        *((case, 100_000) for case in (CASES[17], CASES[-3])),
        *full_rows((case, workspace) for case in (*CASES[9:21:4], *CASES[-4:]) for workspace in (1, 100_000, 1 << 28)),
    ],
    ids=str,
)
def test_expanded(case: Case, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in many, which end and begin inside of sequences; the first sequence is another's."""
    monkeypatch.setattr(triton, "WORKSPACE", workspace)
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    q = torch.randn(len(q_latent), case.heads[0], P + R)
    up = weights(case.heads[0], P, V, q_latent.shape[2], torch.float32)
    device = on_device(meta)
    if len(meta.seq_lens) > 1:
        device = replace(device, prompts=(meta.prompts or ())[1:])
    expected, out = torch.full((2, len(q), case.heads[0], V), float("nan"))
    ref.expanded(q, up, cache, replace(meta, prompts=device.prompts), 0.2, expected)
    triton.expanded(q, up, cache, device, 0.2, out)
    assert torch.equal(out.isnan(), expected.isnan())
    check(out.nan_to_num(), expected.nan_to_num())


# Chosen rows: sequences with and without a context before the step; a decode with a long context.
CHOSEN = steps(Case((70, 33, 90, 1, 9), (190, 33, 150, 700, 40), heads=(6, 1), block_size=16))[0]


@pytest.mark.parametrize(("share", "back"), [(0.1, 0), (0.0, 4), *full_rows([(0.6, 0), (0.0, 0)])])
def test_chosen_rows_absorbed(share: float, back: int) -> None:
    """Rows that do not follow each other. With a share of 0 each sequence has one row, `back` before its last one; the
    contexts of such rows are divided among programs, some of which have no token that the row sees."""
    q_latent, q_rope, cache, meta = make(CHOSEN, R, torch.float32)
    chosen, rows = inputs.choose_rows(q_latent, meta, share)
    assert chosen.row_positions is not None
    back = torch.tensor(CHOSEN.query_lens).sub(1).clamp(max=back) if share == 0 else 0
    rows, chosen = rows - back, replace(chosen, row_positions=chosen.row_positions - back)
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)[rows]
    given = on_device(chosen, 0)
    check(triton.absorbed(q_latent[rows], q_rope[rows], cache, given, 0.2), expected)
    (plan,) = given.plans[16].values()  # type: ignore[attr-defined]
    assert max(record[5] for record in plan.items.tolist() if record[0] >= 0) > 4
    assert bool(len(plan.tiles)) == (share > 0)


@pytest.mark.parametrize(
    ("share", "workspace", "tile"), [(0.1, 100_000, 128), (0.6, 1, 16), *full_rows([(0.1, 1, 128), (0.6, 40_000, 16)])]
)
def test_chosen_rows_expanded(share: float, workspace: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of which some rows of a tile, or all, see nothing. tile: rows of one"""
    monkeypatch.setattr(triton, "WORKSPACE", workspace)
    monkeypatch.setattr(triton, "MANY", ((tile, 64, 8, 2),))
    q_latent, _, cache, meta = make(CHOSEN, R, torch.float32)
    q, up = torch.randn(len(q_latent), 6, P + R), weights(6, P, V, q_latent.shape[2], torch.float32)
    expected, out = torch.full((2, len(q), 6, V), float("nan"))
    ref.expanded(q, up, cache, meta, 0.2, expected)
    chosen, rows = inputs.choose_rows(q, meta, share)
    given = replace(on_device(chosen, 0), prompts=sequences(chosen))
    check(triton.expanded(q[rows], up, cache, given, 0.2, out[: len(rows)]), expected[rows])


@pytest.mark.parametrize("width", [6, 8, 16])
def test_tokens_of_pages_that_are_whole_rows_or_not(width: int) -> None:
    """Pages of 3 layers of 4 tokens and 24 numbers each: this side is the end of the last; then pages one shorter."""
    arena = torch.arange(5 * 3 * 4 * 24.0).view(5, 3, 96)
    side = arena[:, -1, 96 - 4 * width :].unflatten(1, (1, 4, width))
    odd = arena.flatten()[: 5 * 287].view(5, 287)[:, 11 : 11 + 4 * width].unflatten(1, (1, 4, width))
    blocks, offsets = torch.tensor([4, 0, 4, 2, 3]), torch.tensor([3, 0, 0, 1, 3])
    for given in (side, odd):
        assert torch.equal(triton_expanded._gather(given, blocks, offsets), given[blocks, 0, offsets])


def test_what_is_no_number_in_one_prompt_stays_there() -> None:
    """Contexts lie side by side, and a tile's tail reads the next one's values: of the largest number, which stands for
    NaN in the cache, the projection makes infinities, and a weight of 0 must make nothing of them."""
    case = steps(Case((10, 10), (10, 10), heads=(4, 1), block_size=64))[0]
    q_latent, _, cache, meta = make(case, R, torch.float32)
    q, up = torch.randn(20, 4, P + R), weights(4, P, V, q_latent.shape[2], torch.float32)
    expected, actual = torch.full((2, 20, 4, V), float("nan"))
    triton.expanded(q, up, cache, on_device(meta), 0.2, expected)
    cache.latent[int(meta.block_tables[1, 0]), 0, 3] = 3.38e38
    triton.expanded(q, up, cache, on_device(meta), 0.2, actual)
    assert torch.equal(actual[:13], expected[:13])  # of the other one too, what comes before
    assert not torch.equal(actual[13:], expected[13:])


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_key_that_is_not_finite_is_not_hidden(decode: bool, bad: str) -> None:
    """NaN in the same rows and heads as the reference; the other sequence as if nothing had been there."""
    rows = 1 if decode else 20
    case = steps(Case((rows, rows), (200, 129), heads=(4, 1), block_size=64))[0]
    q_latent, q_rope, cache, meta = make(case, R, torch.float32)
    cache.rope[int(meta.block_tables[0, 1]), 0, 5, 3] = float(bad)
    expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)
    actual = triton.absorbed(q_latent, q_rope, cache, on_device(meta), 0.2)
    assert torch.equal(actual.isnan().any(-1), expected.isnan().any(-1)) and expected.isnan().any()
    check(actual[rows:], expected[rows:])


@pytest.mark.parametrize("dtype", [torch.float32, *full_rows([torch.float16])], ids=str)
def test_parts_of_contexts_on_several_ranks(dtype: torch.dtype) -> None:
    """Ranks have every second block; one has nothing of a short context, and nobody has anything of padding."""
    case, parts = Case((1, 1, 1), (100, 17, 1), heads=(4, 1), head_dim=24 + R, block_size=8), 2
    q_latent, q_rope, cache, meta = make(case, R, dtype)
    found, empty = [], []
    for part in range(parts):
        whole, rest = torch.tensor(case.seq_lens) // (8 * parts), torch.tensor(case.seq_lens) % (8 * parts)
        own = (whole * 8 + (rest - 8 * part).clamp(0, 8)).int()
        given = replace(meta, seq_lens=own, block_tables=meta.block_tables[:, part::parts].contiguous(), prompts=None)
        lse, expected = torch.empty(2, 3, 4)
        sums = triton.absorbed(q_latent, q_rope, cache, replace(given, max_query_len=1, plans={}), 0.2, lse)
        right = ref.absorbed(q_latent, q_rope, cache, given, 0.2, expected)
        torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)
        check(sums[own > 0], right[own > 0])
        found.append(packed_parts(sums, lse, 2))
        empty.append(packed_parts(sums, torch.full_like(lse, -torch.inf), 2))
    for rank in range(2):
        mine = torch.stack([one[rank] for one in found])
        expected = ref.absorbed(q_latent, q_rope, cache, meta, 0.2)[:, 2 * rank : 2 * rank + 2]
        check(triton.join(mine), expected)
        check(ref.join(mine), expected)
    for module in (triton, ref):
        assert not module.join(torch.stack([one[0] for one in empty])).any()
    found[1][0][1, 1] = float("nan")
    for module in (triton, ref):
        assert module.join(torch.stack([one[0] for one in found])).isnan().any(2).nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_any_number_of_parts_is_added_up(lanes: int) -> None:
    """Some saw nothing, and lanes beyond a sequence's are NaN. A sequence of one part is left alone."""
    counts, group, heads, width = (1, 2, 15, 16, 17, 33, 128), 3, 2, 20
    sums, stats = torch.randn(sum(counts), heads, 6, width), torch.randn(sum(counts), heads, 6, 2).abs()
    items = torch.full((sum(counts), 16), -1, dtype=torch.int32)
    out, expected = (torch.full((2 * len(counts), group * heads, width), float("nan")) for _ in range(2))
    first = 0
    for s, count in enumerate(counts):
        mine, rows = slice(first, first + count), 1 + s % 2
        items[mine, :7] = torch.tensor([2 * s, rows, 0, 0, 0, count, first], dtype=torch.int32)
        stats[mine, ..., 0] *= 10
        blind = torch.arange(count) % 5 == 3
        sums[mine][blind], stats[mine][blind] = 0.0, torch.tensor([-1e30, 0.0])
        if count > 1:
            items[s, 10] = first
            shares = (stats[mine, ..., 0] - stats[mine, ..., 0].amax(0)).exp2()
            whole = (sums[mine] * shares[..., None]).sum(0) / (stats[mine, ..., 1] * shares).sum(0)[..., None]
            expected[2 * s : 2 * s + rows] = whole.view(heads, 2, group, width).transpose(0, 1).flatten(1, 2)[:rows]
        sums[mine, :, rows * group :], stats[mine, :, rows * group :] = float("nan"), float("nan")
        first += count
    merge_kernel[(3,)](
        out,
        items,
        sums,
        stats,
        None,
        len(counts),
        out.stride(0),
        L=width,
        LP=32,
        GROUP=group,
        ROWS=6,
        LANES=lanes,
        HEADS=heads,
        PARTS=128,
        WORDS=16,
        SHARED=False,
        PDL=False,
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "tokens, heads, plain, latent, rope, size",
    [(2, 16, 128, 512, 64, 64), (5, 3, 16, 24, 8, 8), (9, 20, 20, 40, 20, 48)],
)
def test_prepare(tokens: int, heads: int, plain: int, latent: int, rope: int, size: int, dtype: torch.dtype) -> None:
    """q, and the whole cache: what was not written is NaN as before. A latent that is no number is a large one."""
    wide = torch.randn(tokens, heads * (plain + rope) + latent + rope).mul_(2).to(dtype)
    norm, angles = (torch.rand(latent) + 0.5).to(dtype), torch.rand(tokens, rope // 2) * 6
    cos = torch.cat((angles.cos(),) * 2, 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    slots = torch.randperm(3 * size)[:tokens] + size
    found = []
    for op in (ref, triton):
        given = wide.clone()
        q, kv = given[:, : -latent - rope].unflatten(1, (heads, -1)), given[:, -latent - rope :]
        arena = [torch.full((4, 3, 1, size, n), float("nan"), dtype=dtype) for n in (latent, rope)]
        cache = LatentView(arena[0][:, 1], arena[1][:, 1])
        assert op.prepare(q, kv, norm, 1e-3, cos, sin, cache, slots).data_ptr() == q.data_ptr()
        found.append((given, *arena))
        kv[0, 0] = float("nan")
        op.prepare(q, kv, norm, 1e-3, cos, sin, cache, slots)
    assert found[1][1][slots[0] // size, 1, 0, slots[0] % size].float().abs().min() > 1e17
    found[0][1][slots[0] // size, 1, 0, slots[0] % size] = found[1][1][slots[0] // size, 1, 0, slots[0] % size]
    for expected, actual in zip(*found, strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        bound = 1.6e-2 if dtype == torch.bfloat16 else 2e-6
        where = expected.abs() < 1e30
        most = expected[where].abs().max().item()
        torch.testing.assert_close(actual[where], expected[where], rtol=0, atol=bound * most)


def test_prepare_takes_no_strange_strides() -> None:
    cache = LatentView(torch.zeros(2, 1, 8, 16), torch.zeros(2, 1, 8, 16).transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(ValueError, match="strides"):
        triton.prepare(
            torch.zeros(1, 2, 24),
            torch.zeros(1, 32),
            torch.ones(16),
            1e-6,
            torch.zeros(1, 16),
            torch.zeros(1, 16),
            cache,
            torch.zeros(1, dtype=torch.int64),
        )


@pytest.mark.parametrize("most", [4, *full_rows((0, 100))])
def test_a_runner_of_a_gpu_gives_the_naive_one_s_tokens(
    cuda_runner: Callable[..., StepRunner], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Steps of every kind, launched ahead; everything is expanded, prompts of more than 4 rows, or nothing."""
    torch.set_deterministic_debug_mode("default")
    args = parse_checkpoint_config(CONFIG | {"num_hidden_layers": 1})
    models = make_model(args, "cuda"), make_model(args, reference=True)
    for block in [block for model in models for block in model.layers]:
        block.attention.most_absorbed = most  # type: ignore[attr-defined]
    ran, expanded = [], triton.expanded
    monkeypatch.setattr(triton, "expanded", lambda *given: ran.append(given[3].prompts) or expanded(*given))
    runner, oracle = runner_of(models[0], LIMITS, "cuda"), NaiveRunner(models[1])
    for expected, found in zip(map(oracle.run, PLANS), run_ahead(runner, PLANS), strict=True):
        agree(found, expected)
    firsts = {0: [0, 0, 2, 1, 1], 4: [0, 1, 2, 1], 100: []}[most]
    assert [prompts[0][2] for prompts in ran] == firsts


ABSORBED = {"_prepare_kernel", "_plan_kernel", "absorbed_kernel", "shared_kernel", "merge_kernel"}


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("mixed", ABSORBED | {"_few_kernel", "_some_kernel"}),
        ("prompts", {"_prepare_kernel", "expanded_kernel", "hopper._expanded_kernel"}),
        ("decodes", ABSORBED | {"_join_kernel"}),
    ],
)
def test_compiles(part: str, kernels: set[str], compiled: Callable[..., set[str]]) -> None:
    found = compiled("compile_latent", part)
    assert found == kernels or (FULL and found > kernels)
