"""Latent attention of decodes in clusters of blocks, beside the kernels in Triton that it replaces."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.cuda_source import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

from quire.kernels.joined import latent_clusters
from quire.kernels.joined.choice import MOST_LATENT_CLUSTERS, JoinedDecodes
from quire.kernels.joined.dispatch import latent_kernel
from quire.kernels.joined.inputs import HeadInputs, LatentInputs
from quire.kernels.joined.latent_clusters import Tiling
from quire.kernels.latent import LatentView, triton

from ..support.late_kernels import LateCopy
from ..support.latent_decodes import ROPE, SCALE, LatentStep, latent_step

EVERY = JoinedDecodes(MOST_LATENT_CLUSTERS, "", range(0), "", latent=True)
ONE = ((640,), (1,), 16, 512, 64)
EDGES = ((1, 2, 15, 16, 17, 33, 129), (1,) * 7, 16, 512, 64)
LONG = ((8192, 641), (1, 1), 16, 512, 128)
ODD = ((700, 48, 5), (1, 1, 1), 20, 512, 48)
FEW = ((1300, 257), (1, 1), 5, 512, 64)
HEADS = ((513,), (1,), 128, 512, 64)  # 8 clusters
DRAFTED = ((66, 9, 700), (2, 1, 2), 16, 512, 64)
LONGER = ((130, 1021), (4, 3), 16, 512, 64)
CASES = [ONE, EDGES, LONG, ODD, FEW, HEADS, DRAFTED, LONGER]
TILINGS = [None, Tiling(16, 8, 64, 1), Tiling(8, 8, 32, 3), Tiling(8, 4, 32, 2), Tiling(16, 16, 32, 2)]


def on_gpu(case: tuple[Any, ...]) -> LatentStep:
    """Return a step of decodes as `latent_step` does, on the GPU."""
    step = latent_step(*case)
    sides = torch.nn.functional.pad(step.inputs.given, (step.inputs.q[0].numel(), 0)).cuda()
    sides[:, : step.inputs.q[0].numel()] = step.inputs.q.flatten(1).cuda()  # in one projection, as in the engine
    q, given = sides.split([step.inputs.q[0].numel(), step.inputs.given.shape[1]], 1)
    tensors: dict[str, Any] = {name: one.cuda() for name, one in vars(step.meta).items() if isinstance(one, Tensor)}
    norm = step.given.norm
    assert norm is not None
    heads = HeadInputs(norm.cuda(), step.given.eps, step.given.cos.cuda(), step.given.sin.cuda())
    kv = LatentView(step.kv.latent.cuda().contiguous(), step.kv.rope.cuda().contiguous())
    inputs = LatentInputs(q.unflatten(1, (step.inputs.q.shape[1], -1)), given)
    return LatentStep(step.absorbed.cuda(), inputs, heads, kv, replace(step.meta, **tensors, plans={}))


def chain(step: LatentStep) -> Tensor:
    """Return what the kernels in Triton return, which write to the step's cache and change its queries."""
    norm = step.given.norm
    assert norm is not None
    angles = step.given.cos, step.given.sin
    given, slots = step.inputs.given, step.meta.kv_slots
    q = triton.prepare(step.inputs.q, given, norm, step.given.eps, *angles, step.kv, slots)
    return triton.absorbed(step.absorbed, q[..., -ROPE:], step.kv, replace(step.meta, plans={}), SCALE)


def joined(step: LatentStep, kv: LatentView, meta: AttentionMeta) -> Tensor:
    return latent_clusters.attention(step.absorbed, step.inputs, step.given, kv, meta, SCALE)


@pytest.mark.parametrize(("case", "tiling"), product(CASES, TILINGS), ids=str)
def test_as_the_chain(case: tuple[Any, ...], tiling: Tiling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is the same, and attention to the rounding of sums; each time the same bits, in a graph, too."""
    if tiling is not None:
        monkeypatch.setattr(latent_clusters, "TILINGS", {MOST_LATENT_CLUSTERS: tiling})
    step = on_gpu(case)
    own = LatentView(step.kv.latent.clone(), step.kv.rope.clone())
    assert latent_clusters.fits(step.inputs, step.given.norm, own, step.meta)  # type: ignore[arg-type]
    first = joined(step, own, step.meta)
    for _ in range(20):  # the step's own tokens in the cache are those of the turn before
        assert torch.equal(joined(step, own, step.meta), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [joined(step, own, meta) for meta in (replace(step.meta, plans={}), step.meta)]
    for _ in range(3):
        for one in replayed:
            one.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, first) for one in replayed)
    expected = chain(step)
    assert first.isfinite().all()
    error = (first.float() - expected.float()).norm() / expected.float().norm()
    assert error < 6e-3, error
    for written, wanted in ((own.latent, step.kv.latent), (own.rope, step.kv.rope)):  # the norm's sums: another order
        torch.testing.assert_close(written, wanted, rtol=8e-3, atol=1e-6, equal_nan=True)


def test_the_first_launch_of_a_step_finds_what_a_kernel_before_the_last_one_writes(tmp_path: Path) -> None:
    """Angles, lengths and slots: their kernels run still when the kernel starts, since no other one waits first."""
    copy, step = LateCopy(tmp_path), on_gpu(ONE)
    expected = joined(step, step.kv, replace(step.meta, plans={}))
    for _ in range(3):
        cos = torch.zeros_like(step.given.cos)
        copy.launch(step.given.cos, cos)
        late = replace(step, given=replace(step.given, cos=cos))
        assert torch.equal(joined(late, step.kv, replace(step.meta, plans={})), expected)


def test_steps_of_other_kernels() -> None:
    """A step is refused whose shape, cache or rows the kernel does not know."""
    step = on_gpu(DRAFTED)
    norm, meta, kv = step.given.norm, step.meta, step.kv
    assert norm is not None

    def fits(meta: AttentionMeta, kv: LatentView = kv, decodes: JoinedDecodes = EVERY) -> bool:
        return latent_kernel(decodes, step.inputs, norm, kv, meta) is latent_clusters

    assert fits(meta)
    assert not fits(meta, LatentView(kv.latent.float(), kv.rope.float()))
    assert not fits(meta, LatentView(kv.latent[:, :, :24], kv.rope[:, :, :24]))
    assert not fits(replace(meta, prompts=((0, 1, 0, 63),)))
    assert not fits(replace(meta, max_query_len=5, decode_len=5))
    assert not fits(meta, decodes=EVERY._replace(sequences=3))
    assert not fits(meta, decodes=EVERY._replace(context=640))
