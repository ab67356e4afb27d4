"""Decodes from the projection on in clusters of blocks, beside the two kernels in Triton that they replace."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention.inputs import Case
from quire.kernels.cuda_source import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

from quire.kernels.attention import triton
from quire.kernels.heads import triton as heads
from quire.kernels.joined import decode_clusters
from quire.kernels.joined.decode_clusters import Tiling
from quire.kernels.joined.inputs import HeadInputs

from ..support.decodes import decode_step
from ..support.late_kernels import LateCopy

ONE = Case((1,), (640,), heads=(32, 4), head_dim=128, block_size=128)
EDGES = Case((1,) * 7, (1, 2, 15, 16, 17, 33, 129), heads=(16, 8), head_dim=128, block_size=64)
LONG = Case((1, 1, 1), (9000, 641, 130), heads=(32, 8), head_dim=128, block_size=128, deal="runs")
ODD = Case((1, 1), (700, 48), heads=(14, 2), head_dim=64, block_size=48)
DRAFTED = Case((3, 1, 4), (66, 9, 700), heads=(16, 8), head_dim=128, block_size=64)
WIDE = Case((2, 1, 2), (1300, 3, 17), heads=(16, 2), head_dim=64, block_size=16)  # 16 lanes
MANY = Case((1,) * 16, tuple(range(90, 2490, 150)), heads=(8, 8), head_dim=64, block_size=128)
CASES = [ONE, EDGES, LONG, ODD, DRAFTED, WIDE, MANY]


def on_gpu(case: Case, dtype: torch.dtype, *, normed: bool) -> tuple[Tensor, HeadInputs, KVView, AttentionMeta]:
    """Return a step of decodes as `decode_step` does, on the GPU."""
    qkv, given, kv, meta = decode_step(case, dtype, normed=normed)
    arena = torch.stack((kv.k, kv.v), 1).cuda()  # keys and values lie in one block, as in the engine
    norm = None if given.norm is None else given.norm.cuda()
    tensors: dict[str, Any] = {name: one.cuda() for name, one in vars(meta).items() if isinstance(one, Tensor)}
    wide = torch.nn.functional.pad(qkv.flatten(1), (64, 0)).cuda()[:, 64:].view(qkv.shape)
    given = replace(given, norm=norm, cos=given.cos.cuda(), sin=given.sin.cuda())
    return wide, given, KVView(arena[:, 0], arena[:, 1]), replace(meta, **tensors, prompts=(), plans={})


@pytest.mark.parametrize(
    ("case", "dtype", "normed", "window", "sunk"),
    [
        *product(CASES, [torch.bfloat16], [True], [None], [False]),
        *product([ONE, DRAFTED], [torch.float16], [False], [None], [True]),
        *product([LONG, ODD, DRAFTED], [torch.bfloat16], [True], [2, 70], [True]),
    ],
)
@pytest.mark.parametrize("tiling", [None, Tiling(8, 4, 3), Tiling(2, 8, 1)], ids=str)
def test_as_the_two_kernels(
    case: Case,
    dtype: torch.dtype,
    normed: bool,
    window: int | None,
    sunk: bool,
    tiling: Tiling | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache is the same, and attention to the rounding of sums; each time the same bits."""
    if tiling is not None:
        monkeypatch.setattr(decode_clusters, "TILING", tiling)
    qkv, given, kv, meta = on_gpu(case, dtype, normed=normed)
    sinks = torch.linspace(-2, 6, case.heads[0]).cuda() if sunk else None
    own = KVView(kv.k.clone(), kv.v.clone())
    q = heads.prepare(qkv, given.norm, given.eps, given.cos, given.sin, kv, meta.kv_slots)
    expected = triton.paged_attention(q, kv, meta, 0.1, window, None, sinks)
    assert decode_clusters.fits(qkv, own, meta)
    first = decode_clusters.attention(qkv, given, own, meta, 0.1, window, None, sinks)
    for _ in range(20):  # the step's own tokens in the cache are those of the turn before
        again = decode_clusters.attention(qkv, given, own, meta, 0.1, window, None, sinks)
        assert torch.equal(again, first)
    assert first.isfinite().all()
    error = (first.float() - expected.float()).norm() / expected.float().norm()
    assert error < 6e-3, error
    for written, wanted in ((own.k, kv.k), (own.v, kv.v)):  # sums of the norm have another order
        torch.testing.assert_close(written, wanted, rtol=8e-3, atol=1e-6, equal_nan=True)


def test_the_first_launch_of_a_step_finds_what_a_kernel_before_the_last_one_writes(tmp_path: Path) -> None:
    """Angles, lengths and slots: their kernels run still when the kernel starts, since no other one waits first."""
    copy = LateCopy(tmp_path)
    qkv, given, kv, meta = on_gpu(ONE, torch.bfloat16, normed=True)
    expected = decode_clusters.attention(qkv, given, kv, replace(meta, plans={}), 0.1)
    for _ in range(3):
        cos = torch.zeros_like(given.cos)
        copy.launch(given.cos, cos)
        actual = decode_clusters.attention(qkv, replace(given, cos=cos), kv, replace(meta, plans={}), 0.1)
        assert torch.equal(actual, expected)


def test_steps_of_other_kernels() -> None:
    """A step is refused whose shape, cache or rows the kernel does not know."""
    qkv, _, kv, meta = on_gpu(DRAFTED, torch.bfloat16, normed=True)
    assert decode_clusters.fits(qkv, kv, meta)
    assert not decode_clusters.fits(qkv.float(), KVView(kv.k.float(), kv.v.float()), meta)
    assert not decode_clusters.fits(qkv, kv, replace(meta, prompts=((0, 1, 0, 63),)))
    assert not decode_clusters.fits(qkv, KVView(kv.k[:, :, :24], kv.v[:, :, :24]), meta)
    assert not decode_clusters.fits(qkv, kv, replace(meta, max_query_len=5, decode_len=5))
