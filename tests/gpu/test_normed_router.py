"""Norm, router and choice of experts in one kernel, beside the three kernels in Triton that it replaces."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels import pdl
from quire.kernels.cuda_source import missing

if why := missing():
    pytest.skip(why, allow_module_level=True)

from quire.kernels.linear import cuda
from quire.kernels.norm import triton as norms
from quire.kernels.routing import Scores, normed, triton
from quire.kernels.routing.inputs import QWEN3

from ..support.late_kernels import LateCopy

LITE = Routing(num_experts=64, top_k=6, scoring="softmax")
SIGMOIDS = Routing(num_experts=128, top_k=8, scoring="sigmoid", correction=True, normalize=True, scaling=2.5)
CASES = [
    (QWEN3, 2048, False),
    (LITE, 2048, True),
    (SIGMOIDS, 4096, True),
    (replace(QWEN3, num_experts=32), 2880, False),
]
EPS = 1e-6


def made(
    routing: Routing, inputs: int, rows: int, seed: int, *, exact: bool
) -> tuple[Tensor, tuple[Tensor, float], Scores]:
    """Return rows, a norm, and a router with a bias where it has a correction."""
    torch.manual_seed(seed)
    count = routing.num_experts
    weight = (torch.randn(count, inputs, device="cuda") * inputs**-0.5).bfloat16()
    bias = torch.randn(count, device="cuda").bfloat16() if routing.correction else None
    correction = torch.randn(count, device="cuda") if routing.correction else None
    x, norm = torch.randn(rows, inputs, device="cuda").bfloat16(), torch.rand(inputs, device="cuda").bfloat16() + 0.5
    return x, (norm, EPS), Scores(weight, bias, correction, None, exact)


@pytest.mark.parametrize(("routing", "inputs", "exact"), CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dependent", [False, True])
def test_as_three_kernels(
    routing: Routing, inputs: int, exact: bool, rows: int, dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the same bits. Logits that differ in the last bits may turn near ties, of which there are few."""
    monkeypatch.setattr(pdl, "ENABLED", dependent)
    live = torch.arange(rows, device="cuda") != 1
    turned = 0
    for turn in range(100):
        x, norm, scores = made(routing, inputs, rows, turn, exact=exact)
        assert normed.takes(x, norm[0], scores, routing)
        given = norms.rms_norm(x, *norm)
        run = cuda.run_float if exact else cuda.run
        weights, ids = triton.route(run(given, scores.weight, scores.bias), scores.correction, routing, live)
        actual, (own, chosen) = normed.route(x, norm, scores, routing, live)
        torch.testing.assert_close(actual, given, rtol=8e-3, atol=0)
        same = (chosen == ids).all(1)
        turned += int((~same).sum())
        torch.testing.assert_close(own[same], weights[same], rtol=2e-2, atol=1e-6)
        for _ in range(3):
            again = normed.route(x, norm, scores, routing, live)
            assert torch.equal(again[0], actual) and torch.equal(again[1][0], own) and torch.equal(again[1][1], chosen)
    assert turned <= rows * (1 if exact else 20), turned


def test_nothing_is_read_before_its_kernel_has_ended(tmp_path: Path) -> None:
    """The row comes late, from the kernel before the last one."""
    copy, (x, norm, scores) = LateCopy(tmp_path), made(QWEN3, 2048, 1, 0, exact=False)
    given, (weights, ids) = normed.route(x, norm, scores, QWEN3)
    for _ in range(3):
        late = torch.full_like(x, torch.nan)
        copy.launch(x, late)
        found, (own, chosen) = normed.route(late, norm, scores, QWEN3)
        assert torch.equal(found, given) and torch.equal(own, weights) and torch.equal(chosen, ids)
