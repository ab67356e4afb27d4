"""The kernel of decodes in clusters of blocks, on a CPU: what it computes, and what it reads before its wait."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import KVView, ref
from quire.kernels.attention.inputs import Case
from quire.kernels.heads import ref as heads
from quire.kernels.joined import decode_clusters
from quire.kernels.joined.decode_clusters import SOURCE, Tiling

from ...support.cuda_emulated import EmulatedKernel
from ...support.decodes import decode_step

if not shutil.which("g++") or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
    pytest.skip("needs a compiler, and a CPU that rounds to float16", allow_module_level=True)

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 97, 130, 193)  # about pieces of 16, and 4 of them for the 4 warps of a cluster
PLAIN = Case((1,) * len(LENGTHS), LENGTHS, heads=(4, 2), head_dim=128, block_size=48)
DRAFTED = Case((3, 1, 2), (3, 52, 140), heads=(5, 1), head_dim=64, block_size=16)  # 15 lanes
ALONE = Case((1, 1), (45, 18), heads=(2, 2), head_dim=64, block_size=16)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("case", "tiling", "dtype", "norm", "windows"),
    [
        (PLAIN, Tiling(2, 2, 2), torch.bfloat16, torch.bfloat16, (None, 2, 40)),
        (DRAFTED, Tiling(2, 2, 3), torch.bfloat16, torch.float32, (None, 17)),
        (ALONE, Tiling(8, 1, 1), torch.float16, None, (None,)),
    ],
)
def test_as_the_reference(
    case: Case,
    tiling: Tiling,
    dtype: torch.dtype,
    norm: torch.dtype | None,
    windows: tuple[int | None, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each window in two orders of threads. Of two launches of a step the first finds no input before its wait."""
    (num_heads, kv_heads), rows = case.heads, max(case.query_lens)
    shape = case.head_dim, num_heads // kv_heads, rows, case.block_size
    defines = decode_clusters.kernel_of(shape, tiling, dtype, norm == torch.float32).source.defines
    kernel = EmulatedKernel(SOURCE, dict(defines), "decode_clusters", tmp_path)
    monkeypatch.setattr(decode_clusters, "kernel_of", lambda *_: kernel)
    monkeypatch.setattr(decode_clusters, "TILING", tiling)
    qkv, given, kv, meta = decode_step(case, dtype, normed=norm is not None)
    if given.norm is not None and norm is not None:
        given = replace(given, norm=given.norm.to(norm))
    order = torch.arange(len(meta.block_tables)).flip(0)
    tables = torch.where(meta.block_tables < len(kv.k), meta.block_tables, 0)[order]  # block 0 is nobody's, all NaN
    sinks = torch.linspace(-2, 6, num_heads)
    exact = _double(kv)
    wide = (None if given.norm is None else given.norm.double()), given.eps, given.cos.double(), given.sin.double()
    q = heads.prepare(qkv.double(), *wide, exact, meta.kv_slots).to(dtype)
    rounded = KVView(exact.k.to(dtype), exact.v.to(dtype))
    for window in windows:
        expected = ref.paged_attention(q.double(), _double(rounded), meta, 0.1, window, None, sinks)
        for early in (False, True):
            own = KVView(*torch.stack((kv.k, kv.v)))
            step = replace(meta, block_tables=tables, table_rows=order.int(), prompts=(), plans={})
            inputs = [one for one in vars(step).values() if isinstance(one, Tensor)]
            for hidden in ([qkv, given.cos, given.sin, *inputs], [qkv]):
                kernel.early, kernel.released = early, _hide(hidden)
                actual = decode_clusters.attention(qkv, given, own, step, 0.1, window, None, sinks)
                errors = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert (errors < 1.5e-2).all(), (window, early, errors)
                for written, wanted in ((own.k, rounded.k), (own.v, rounded.v)):
                    torch.testing.assert_close(written, wanted, rtol=8e-3, atol=1e-6, equal_nan=True)


def _double(kv: KVView) -> KVView:
    return KVView(kv.k.double(), kv.v.double())


def _hide(tensors: Sequence[Tensor]) -> Callable[[], object]:
    """Clear tensors. Return a function that brings their numbers back."""
    kept = [one.clone() for one in tensors]
    for one in tensors:
        one.zero_() if one.dtype in (torch.int32, torch.int64) else one.fill_(float("nan"))
    return lambda: [one.copy_(before) for one, before in zip(tensors, kept, strict=True)]
