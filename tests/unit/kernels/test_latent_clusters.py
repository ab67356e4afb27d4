"""The kernel of latent decodes in clusters of blocks: the steps that it takes, and what it asks of a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels import nvrtc
from quire.kernels.joined import MOST_DRAFTED, MOST_LANES, latent_clusters
from quire.kernels.joined.choice import LATENT_DIM, MOST_LATENT_CLUSTERS, JoinedDecodes, latent_group
from quire.kernels.joined.dispatch import latent_kernel
from quire.kernels.joined.inputs import LatentInputs
from quire.kernels.joined.latent_clusters import TILINGS, Tiling, kernel_of, shared_bytes
from quire.kernels.latent import LatentView

from ...support.cubins import resources
from ...support.latent_decodes import LatentStep, latent_step

SHARED = 227 * 1024  # bytes that a block of Hopper can have
EVERY = JoinedDecodes(MOST_LATENT_CLUSTERS, "", range(0), "", latent=True)


@pytest.fixture(scope="module")
def step() -> LatentStep:
    return latent_step((20, 5), (2, 1), 16, 512, 16)


@pytest.mark.parametrize(
    ("decodes", "changes", "taken"),
    [
        ({}, {}, True),
        ({"sequences": 0}, {}, False),
        ({"sequences": 2}, {}, False),  # there are three, one of them padded
        ({"context": 4096}, {}, False),
        ({"context": 4096}, {"most_context": 4096}, True),
        ({"context": 4096}, {"most_context": 4097}, False),
        ({}, {"prompts": ((0, 2, 0, 18),)}, False),
        ({}, {"row_positions": torch.arange(3)}, False),
        ({}, {"max_query_len": 5, "decode_len": 5}, False),
        ({}, {"max_query_len": 2, "decode_len": 1}, False),
        ({}, {"seq_lens": torch.ones(MOST_LATENT_CLUSTERS // 2 + 1)}, False),  # with two rows two clusters each
    ],
)
def test_steps(step: LatentStep, decodes: dict[str, Any], changes: dict[str, Any], taken: bool) -> None:
    chosen, meta = EVERY._replace(**decodes), replace(step.meta, **changes)
    assert step.given.norm is not None
    found = latent_kernel(chosen, step.inputs, step.given.norm, step.kv, meta)
    assert found is (latent_clusters if taken else None)


def test_tensors_of_other_kernels(step: LatentStep) -> None:
    """Types, sizes and layouts that the kernel does not know."""
    inputs, kv, norm = step.inputs, step.kv, step.given.norm
    assert norm is not None
    codes = LatentView(kv.latent.to(torch.float8_e4m3fn), kv.rope.to(torch.float8_e4m3fn))
    blocks = LatentView(kv.latent[:, :, :8], kv.rope[:, :, :8])
    narrow = LatentView(kv.latent, kv.rope[..., :32])
    strange: list[tuple[LatentInputs, torch.Tensor, LatentView]] = [
        *((inputs, norm, one) for one in (codes, blocks, narrow, replace(kv, scales=kv.rope))),
        (inputs, norm.float(), kv),
        (LatentInputs(inputs.q.transpose(0, 1), inputs.given), norm, kv),
        (LatentInputs(inputs.q, inputs.given[:, 1:]), norm, kv),
    ]
    assert latent_clusters.fits(inputs, norm, kv, step.meta)
    for one in strange:
        assert not latent_clusters.fits(*one, step.meta)


def test_groups_of_heads() -> None:
    assert [latent_group(16, rows) for rows in (1, 2, 3, 4)] == [16, 8, 4, 4]
    assert [latent_group(heads, 1) for heads in (5, 20, 128, 17)] == [5, 10, 16, 1]


def test_shared_memory_is_enough() -> None:
    lanes = range(1, MOST_LANES + 1)
    for most, tiling in TILINGS.items():
        assert max(shared_bytes(LATENT_DIM, n, tiling) for n in lanes) <= SHARED
        assert most * tiling.blocks <= 132, "no more blocks than an H200 has multiprocessors"
    assert max(TILINGS) == MOST_LATENT_CLUSTERS


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize(
    ("group", "rows", "tiling"),
    [
        *((group, 1, one) for one in TILINGS.values() for group in (5, 16)),
        *((MOST_LANES // rows, rows, TILINGS[4]) for rows in (2, MOST_DRAFTED)),
        (16, 1, Tiling(16, 8, 64, 1)),
        (16, 1, Tiling(8, 4, 32, 2)),
        (16, 1, Tiling(16, 16, 16, 4)),
    ],
)
def test_it_compiles_without_a_stack(
    group: int, rows: int, tiling: Tiling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    told = resources(kernel_of((LATENT_DIM, group, rows, 64), tiling).source, tmp_path)
    assert "STACK:0 " in told and "LOCAL:0 " in told, told
