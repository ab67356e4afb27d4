"""The kernel of decodes in clusters of blocks: it compiles for every shape that the plan gives it, and fits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels import nvrtc
from quire.kernels.attention import KVView
from quire.kernels.joined import MOST_DRAFTED, MOST_LANES, decode_clusters
from quire.kernels.joined.choice import CLUSTER_DIM, CLUSTER_QUERIES, MOST_CLUSTERS, JoinedDecodes
from quire.kernels.joined.decode_clusters import TILING, Tiling, kernel_of, shared_bytes
from quire.kernels.joined.dispatch import joined_kernel

from ...support.cubins import resources

SHARED = 227 * 1024  # bytes that a block of Hopper can have


@pytest.mark.parametrize(
    ("most", "known", "taken"), [(0, None, True), (4096, None, False), (4096, 4096, True), (4096, 4097, False)]
)
def test_long_contexts_are_left_to_others(
    most: int, known: int | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has the kernel if the host knows that no context of it is long."""
    monkeypatch.setattr(decode_clusters, "fits", lambda *_: True)
    meta: Any = SimpleNamespace(seq_lens=[7], most_context=known)
    qkv, kv = torch.empty(1, 4, 128), KVView(torch.empty(0), torch.empty(0))
    found = joined_kernel(JoinedDecodes(2, "", range(0), "", most), qkv, kv, meta)
    assert found is (decode_clusters if taken else None)


def test_shared_memory_is_enough() -> None:
    lanes = range(1, MOST_LANES + 1)
    assert max(shared_bytes(CLUSTER_DIM, n, TILING) for n in lanes) <= SHARED
    assert MOST_CLUSTERS * TILING.blocks <= 132, "no more blocks than an H200 has multiprocessors"


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize(
    ("group", "rows", "tiling", "dtype", "wide"),
    [
        *((group, 1, TILING, torch.bfloat16, False) for group in (2, 8)),
        (CLUSTER_QUERIES, MOST_LANES // CLUSTER_QUERIES, TILING, torch.bfloat16, True),
        (2, MOST_DRAFTED, Tiling(2, 8, 1), torch.float16, False),
    ],
)
def test_it_compiles_without_a_stack(
    group: int,
    rows: int,
    tiling: Tiling,
    dtype: torch.dtype,
    wide: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    told = resources(kernel_of((CLUSTER_DIM, group, rows, 128), tiling, dtype, wide).source, tmp_path)
    assert "STACK:0 " in told and "LOCAL:0 " in told, told
