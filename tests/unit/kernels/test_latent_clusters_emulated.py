"""The kernel of latent decodes in clusters, on a CPU: what it computes, and what it reads before its wait."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import sequences
from quire.kernels.joined import latent_clusters
from quire.kernels.joined.choice import latent_group
from quire.kernels.joined.latent_clusters import SOURCE, Tiling
from quire.kernels.latent import LatentView, ref

from ...support.cuda_emulated import EmulatedKernel
from ...support.latent_decodes import ROPE, SCALE, LatentStep, latent_step

if not shutil.which("g++"):
    pytest.skip("needs a compiler", allow_module_level=True)

ONE, SHORT = (1, 2, 16, 17, 18), (1, 1, 1, 1, 1)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("lengths", "rows", "heads", "latent", "size", "tiling"),
    [
        (ONE, SHORT, 16, 256, 16, Tiling(8, 4, 16, 2)),
        ((101, 701), (1, 1), 16, 512, 64, Tiling(8, 8, 32, 2)),
        ((333,), (1,), 16, 512, 48, Tiling(16, 8, 16, 1)),
        ((33, 131), (1, 1), 8, 256, 32, Tiling(4, 4, 64, 1)),
        ((70, 4), (1, 1), 5, 256, 16, Tiling(2, 8, 48, 1)),
        ((66, 34, 3, 161), (2, 1, 2, 2), 16, 256, 16, Tiling(2, 4, 32, 3)),
        ((130, 18), (4, 3), 6, 256, 32, Tiling(4, 4, 32, 1)),
    ],
)
def test_as_the_reference(
    lengths: tuple[int, ...],
    rows: tuple[int, ...],
    heads: int,
    latent: int,
    size: int,
    tiling: Tiling,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two orders of threads. Of two launches of a step the first finds no input before its wait, the second angles
    and tables."""
    shape = latent, latent_group(heads, max(rows)), max(rows), size
    defines = latent_clusters.kernel_of(shape, tiling).source.defines
    kernel = EmulatedKernel(SOURCE, dict(defines), "latent_clusters", tmp_path)
    monkeypatch.setattr(latent_clusters, "kernel_of", lambda *_: kernel)
    monkeypatch.setattr(latent_clusters, "tiling_of", lambda _: tiling)
    step = latent_step(lengths, rows, heads, latent, size)
    expected, written = computed(step)
    order = torch.arange(len(step.meta.block_tables)).flip(0)
    tables = torch.where(step.meta.block_tables < len(step.kv.latent), step.meta.block_tables, 0)[order]
    found = []
    for early in (False, True):
        kv = LatentView(*(one.clone() for one in (step.kv.latent, step.kv.rope)))
        no_rows = torch.cat((step.meta.seq_lens[:-1], torch.tensor([40], dtype=torch.int32)))  # the last sequence
        meta = replace(step.meta, block_tables=tables, table_rows=order.int(), seq_lens=no_rows, plans={})
        own = LatentStep(step.absorbed, step.inputs, step.given, kv, meta)
        for hidden in (own.tensors(), [own.absorbed, own.inputs.q, own.inputs.given]):
            kernel.early, kernel.released = early, hide(hidden)
            found.append(latent_clusters.attention(own.absorbed, own.inputs, own.given, kv, meta, SCALE))
            for actual, wanted in ((kv.latent, written.latent), (kv.rope, written.rope)):
                torch.testing.assert_close(actual, wanted, rtol=8e-3, atol=1e-6, equal_nan=True)
    errors = (found[0].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (errors < 1e-2).all(), errors
    assert all(torch.equal(one, found[0]) for one in found)


def computed(step: LatentStep) -> tuple[Tensor, LatentView]:
    """Return the sums of a step in float64, and the cache that it leaves."""
    kv = LatentView(*(one.double() for one in (step.kv.latent, step.kv.rope)))
    cos, sin, norm = (one.double() for one in (step.given.cos, step.given.sin, step.given.norm) if one is not None)
    q, given = step.inputs.q.double().contiguous(), step.inputs.given.double().contiguous()
    q = ref.prepare(q, given, norm, step.given.eps, cos, sin, kv, step.meta.kv_slots)
    kv = LatentView(*(one.to(torch.bfloat16) for one in (kv.latent, kv.rope)))
    q = q[..., -ROPE:].bfloat16().double()
    out = torch.empty(step.absorbed.shape, dtype=torch.float64)
    for first, last, sequence, past in sequences(step.meta):
        table = step.meta.block_tables[sequence, : -(-(past + last - first) // kv.block_size)].long()
        latent, rope = (one[table].double().flatten(0, 2) for one in (kv.latent, kv.rope))
        for row in range(first, last):
            seen = past + row - first + 1
            scores = step.absorbed[row].double() @ latent[:seen].T + q[row] @ rope[:seen].T
            out[row] = (scores * SCALE).softmax(-1) @ latent[:seen]
    return out, kv


def hide(tensors: Sequence[Tensor]) -> Callable[[], object]:
    """Clear tensors. Return a function that brings their numbers back."""
    kept = [one.clone() for one in tensors]
    for one in tensors:
        one.zero_() if one.dtype in (torch.int32, torch.int64) else one.fill_(float("nan"))
    return lambda: [one.copy_(before) for one, before in zip(tensors, kept, strict=True)]
