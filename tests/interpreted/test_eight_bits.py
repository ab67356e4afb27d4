"""A KV cache of 8-bit codes in the kernels for GPUs, interpreted, and compiled for sm_90 without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.step import SharedPrefix
from quire.kernels import triton_runtime
from quire.kernels.attention import AttentionMeta, KVView, SharedBlocks, inputs, sequences
from quire.kernels.attention.inputs import Case
from quire.kernels.attention.triton_plan import pack_shared
from quire.kernels.attention.triton_tiles import LOG2E
from quire.kernels.heads import inputs as heads_inputs
from quire.kernels.heads import ref as heads_ref
from quire.kernels.latent import LatentView
from quire.kernels.latent import ref as latent_ref

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime import interpreter

from quire.kernels.attention import hopper, ref, triton
from quire.kernels.attention.triton_widen import find_pages, widen
from quire.kernels.heads import triton as heads
from quire.kernels.latent import triton as latent
from quire.kernels.latent.inputs import make, steps, weights

from ..support import eight_bit_truth as truth
from ..support.eight_bit_truth import DTYPES, K_SCALE, V_SCALE, near, written
from ..support.full import FULL, full_rows
from ..support.thinned import thinned

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3}
EVERY = [(DTYPES[0], torch.float32), (DTYPES[0], torch.float16), (DTYPES[1], torch.float32)]


@pytest.fixture(autouse=True)
def indexed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the interpreter use a scalar that was loaded as a loop's bound."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    yield


def on_device(meta: AttentionMeta, **changes: object) -> AttentionMeta:
    """The step with the bounds that a GPU's worker knows."""
    assert isinstance(meta.query_start, Tensor)
    longest = int(meta.query_start.diff().max())
    given = replace(meta, max_query_len=longest, decode_len=longest if longest <= 8 else 1, plans={})
    return replace(given, **changes)  # type: ignore[arg-type]


ATTENDED = (
    Case((1, 1, 1), (63, 64, 130), heads=(4, 2), head_dim=64, block_size=64),
    inputs.CASES[12],
    Case((70, 1), (130, 90), heads=(4, 2), head_dim=64, block_size=48),  # float32: values in words in two parts
    Case((9,), (2090,), heads=(4, 2), head_dim=64, block_size=64),  # a divided context
)


@pytest.mark.parametrize(
    ("case", "cache", "dtype", "window", "soft_cap"),
    thinned(ATTENDED, EVERY, ((None, None), (40, None), (None, 2.0))),
    ids=str,
)
def test_decode_and_prefill(
    case: Case, cache: torch.dtype, dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    q, kv, meta = inputs.make(case, dtype)
    kv = truth.coded(kv, cache)
    expected = truth.attention(q, kv, meta, 0.1, window, soft_cap)
    near(triton.paged_attention(q, kv, on_device(meta), 0.1, window, soft_cap), expected, TOLERANCE[dtype])


# Prompts with and without a context before the step, a decode before them and a short prompt, which is no tile's.
WIDENED = Case((1, 200, 1, 150), (90, 200, 33, 700), heads=(8, 2), head_dim=64, block_size=64)


def by_slot(meta: AttentionMeta, **changes: object) -> AttentionMeta:
    """The step with block tables of slots, in another order than its sequences, and an empty sequence at its end."""
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    count = len(meta.seq_lens)
    slots = torch.full((count + 2, meta.block_tables.shape[1]), 2**30, dtype=torch.int32)
    rows = torch.arange(count, 0, -1, dtype=torch.int32)
    slots[rows.long()] = meta.block_tables
    given = on_device(meta, prompts=sequences(meta)[1:], **changes)
    return replace(
        given,
        block_tables=slots,
        table_rows=torch.cat((rows, rows[:1] * 0)),
        query_start=torch.cat((meta.query_start, meta.query_start[-1:])),
        seq_lens=torch.cat((meta.seq_lens, torch.zeros(1, dtype=torch.int32))),
    )


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "pages"), [(None, 4 + 11), (100, 4 + 4)])
def test_pages_are_widened_exactly(cache: torch.dtype, window: int | None, pages: int) -> None:
    """The scratch holds the codes of all pages that a row of a prompt sees, at the places of its block table."""
    _, kv, meta = inputs.make(WIDENED, torch.bfloat16)
    kv, given = truth.coded(kv, cache), by_slot(meta)
    found = find_pages(given, 64, window, 4, 99)
    assert found is not None and len(found.pages) == pages and found.table.stride(0) % 16 == 0
    wide = widen(kv, found, given, torch.bfloat16)
    assert (wide.k_scale, wide.v_scale) == (K_SCALE, V_SCALE)
    for sequence, page in found.pages.tolist():
        block, own = meta.block_tables[sequence, page], found.table[sequence, page]
        for side, coded in ((wide.k, kv.k), (wide.v, kv.v)):
            expected = truth.values(coded[block], 1.0)
            seen = expected.isfinite()  # tests put NaN where no token is
            assert torch.equal(side[own].double()[seen], expected[seen]) and seen.any()


def test_steps_that_widen_nothing() -> None:
    """A graph's, whose prompts the host does not know; too many pages; too few rows for them; decodes."""
    _, _, meta = inputs.make(WIDENED, torch.float16)
    given = by_slot(meta)
    assert find_pages(given, 64, None, 4, 15) is not None and find_pages(given, 64, None, 4, 14) is None
    assert find_pages(replace(given, prompts=(), plans={}), 64, None, 4, 99) is None
    assert find_pages(replace(given, plans={}), 64, None, 1, 99) is None
    assert find_pages(replace(given, decode_len=300, plans={}), 64, None, 4, 99) is None
    _, _, short = inputs.make(replace(WIDENED, query_lens=(1, 20, 1, 15)), torch.float16)
    assert find_pages(by_slot(short), 64, None, 4, 99) is None
    assert find_pages(replace(given, prompts=None, plans={}), 64, None, 4, 99) is not None


class Emulated:
    """Hopper's prefill kernel, in PyTorch: what the plan, the descriptors and the other arguments make it do."""

    def __init__(self) -> None:
        self.launched = 0

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
        sinks: None,
        stride_out: int,
        block: int,
        head: int,
        stride: int,
        scale: float,
        cap: float,
        v_scale: float | None,
        **sizes: Any,
    ) -> None:
        self.launched += 1
        assert k.dtype == v.dtype == q.dtype and (block, stride) == (k.stride(0) // q.shape[2], table.stride(0))
        kv, window = KVView(k, v, 1.0, 1.0 if v_scale is None else v_scale), sizes["WINDOW"]
        for record in tiles.tolist():
            (row, rows, position), blocks = record[:3], table[record[sizes["ROW"]]].clone()
            if window:
                blocks[: max(0, position - window + 1) // kv.block_size] = 0  # not read
            if row >= 0:
                meta, end = AttentionMeta([0, rows], [position + rows], blocks[None], torch.empty(0)), row + rows
                out[row:end] = ref.paged_attention(q[row:end], kv, meta, scale / LOG2E, window or None)


@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_the_prefill_of_hopper_reads_the_scratch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None
) -> None:
    """It gets two-byte numbers of every cache, the rows of the right block table, and both scales.

    In a CUDA graph, Triton's kernel reads the codes.
    """
    q, kv, meta = inputs.make(WIDENED, torch.float16)
    kv = truth.coded(kv, dtype) if dtype in DTYPES else KVView(kv.k.nan_to_num(), kv.v.nan_to_num())
    expected = (
        truth.attention(q, kv, meta, 0.1, window)
        if dtype in DTYPES
        else ref.paged_attention(q, kv, meta, 0.1, window).double()
    )
    kernel = Emulated()
    monkeypatch.setattr(hopper, "prefill_kernel", kernel)
    monkeypatch.setattr(hopper, "describe", lambda base, *_: base)
    near(hopper.paged_attention(q, kv, by_slot(meta), 0.1, window), expected, TOLERANCE[torch.float16])
    assert kernel.launched == 1
    if dtype in DTYPES:
        graph = by_slot(meta, max_query_len=400)
        near(hopper.paged_attention(q, kv, replace(graph, prompts=()), 0.1, window), expected, TOLERANCE[torch.float16])
        assert kernel.launched == 1


def shared_by(meta: AttentionMeta, members: tuple[int, ...], blocks: int) -> AttentionMeta:
    """The step whose members begin with the same blocks; the block tables of `meta` change, too."""
    meta.block_tables[list(members), :blocks] = meta.block_tables[members[0], :blocks].clone()
    count = len(meta.seq_lens)
    slots, ones = np.arange(count, dtype=np.int32), np.ones(count, np.int32)
    packed = pack_shared((SharedPrefix(np.array(members, np.int32), blocks),), slots, ones, num_groups=2, most_seqs=5)
    return on_device(meta, shared=SharedBlocks.view(torch.from_numpy(packed), 2, 5, count))


@pytest.mark.parametrize(("cache", "dtype"), EVERY, ids=str)
def test_shared_prefix(cache: torch.dtype, dtype: torch.dtype) -> None:
    """The kernel of the prefix and that of the rest both apply the scales."""
    q, kv, meta = inputs.make(Case((1, 1, 1), (140, 70, 67), heads=(4, 2), head_dim=64, block_size=32), dtype)
    kv, device = truth.coded(kv, cache), shared_by(meta, (2, 0, 1), 2)
    near(triton.paged_attention(q, kv, device, 0.1), truth.attention(q, kv, meta, 0.1), TOLERANCE[dtype])
    ((plan,),) = (plans.values() for plans in device.plans.values())  # type: ignore[attr-defined]
    assert plan.items[0, 3] == 64


@pytest.mark.parametrize(("cache", "dtype"), EVERY, ids=str)
def test_latents(cache: torch.dtype, dtype: torch.dtype) -> None:
    """Decodes, decodes with a shared prefix, and rows of a prompt, absorbed and expanded."""
    for case in steps(
        Case((1, 1, 1), (70, 90, 40), heads=(6, 1), block_size=32), Case((20, 1), (70, 33), heads=(3, 1), block_size=16)
    ):
        q_latent, q_rope, kept, meta = make(case, 8, dtype)
        kept = truth.coded_latents(kept, cache)
        shared = shared_by(meta, (0, 1), 1) if len(meta.seq_lens) == 3 else on_device(meta)
        expected = truth.absorbed(q_latent, q_rope, kept, meta, 0.1)
        for given in (shared, replace(shared, shared=None, plans={})):
            near(latent.absorbed(q_latent, q_rope, kept, given, 0.1), expected, TOLERANCE[dtype])
        rows, count, _ = q_latent.shape
        q, up = torch.randn(rows, count, 24).to(dtype), weights(count, 16, 12, 24, dtype)
        out, wanted = q.new_empty(rows, count, 12), truth.expanded(q, up, kept, meta, 0.1, 12)
        given = on_device(meta, prompts=sequences(meta))
        near(latent.expanded(q, up, kept, given, 0.1, out), wanted, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize("case", heads_inputs.CASES[::2], ids=str)
def test_heads_write_codes(case: heads_inputs.Case, cache: torch.dtype) -> None:
    """The codes of the reference."""
    qkv, norm, cos, sin, kv, slots = heads_inputs.make(case, torch.float32)
    made, wanted = (
        KVView(torch.zeros_like(kv.k, dtype=cache), torch.zeros_like(kv.v, dtype=cache), K_SCALE, V_SCALE)
        for _ in range(2)
    )
    heads.prepare(qkv, norm, 1e-6, cos, sin, made, slots)
    heads_ref.prepare(qkv, norm, 1e-6, cos, sin, wanted, slots)
    written(made.k, wanted.k)
    written(made.v, wanted.v)


@pytest.mark.parametrize("cache", DTYPES, ids=str)
def test_what_is_too_large_becomes_the_largest_number(cache: torch.dtype) -> None:
    """Of a value also what is no number, as kernels multiply whole tiles. A key that is no number stays so (the
    interpreter has no NaN of the type e4m3)."""
    qkv = torch.ones(1, 4, 8)
    qkv[0, 2, 1], qkv[0, 3, 2], qkv[0, 3, 3], qkv[0, 2, 2] = 1e6, -1e6, float("nan"), float("nan")
    kv = KVView(*torch.zeros(2, 2, 1, 8, 8).to(cache).unbind(0))
    heads.prepare(qkv, None, 1e-6, torch.ones(1, 8), torch.zeros(1, 8), kv, torch.tensor([9]))
    most = torch.finfo(cache).max
    k, v = kv.k[1, 0, 1].float(), kv.v[1, 0, 1].float()
    assert k[1] == most and v[2] == -most and v[3] == most and k[0] == v[0] == 1
    assert k[2].isnan() or cache == DTYPES[0]


@pytest.mark.parametrize("cache", DTYPES, ids=str)
def test_latents_are_written_as_codes(cache: torch.dtype) -> None:
    q, kv, norm, slots = torch.randn(5, 3, 24), torch.randn(5, 32), torch.rand(24) + 0.5, torch.tensor([4, 9, 6, 7, 10])
    angles = torch.rand(5, 4)
    cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)
    made, wanted = (
        LatentView(torch.zeros(3, 1, 4, 24).to(cache), torch.zeros(3, 1, 4, 8).to(cache), K_SCALE) for _ in range(2)
    )
    for module, view in ((latent, made), (latent_ref, wanted)):
        module.prepare(q.clone(), kv, norm, 1e-6, cos, sin, view, slots)
    written(made.latent, wanted.latent)
    written(made.rope, wanted.rope)


DENSE = {"_heads_kernel", "_plan_kernel", "decode_kernel", "prefill_kernel", "prefix_kernel"}


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("dense", DENSE | {"_widen_kernel", "hopper.prefill_kernel"}),
        (
            "latents",
            {
                "_prepare_kernel",
                "_plan_kernel",
                "absorbed_kernel",
                "shared_kernel",
                "merge_kernel",
                "hopper._expanded_kernel",
            },
        ),
        *full_rows([("older", DENSE | {"merge_kernel"})]),
    ],
)
def test_compiles(part: str, kernels: set[str], compiled: Callable[..., set[str]]) -> None:
    found = compiled("compile_eight_bits", part)
    assert found == kernels or (FULL and found > kernels)
