"""Norm, router and choice of experts in one kernel, on a CPU: what it computes, and what it reads before its wait."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels import nvrtc
from quire.kernels.norm import ref as norms
from quire.kernels.routing import Scores, normed, ref
from quire.kernels.routing.inputs import DEEPSEEK_V2, DEEPSEEK_V3, QWEN3
from quire.kernels.routing_plan import MOST_ROWS

from ...support.cubins import resources
from ...support.cuda_emulated import EmulatedKernel

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
EPS, ROWS = 1e-5, (True, False, True)  # rows that are live
PLAIN = Routing(num_experts=64, top_k=6, scoring="softmax", scaling=2.0)
SIGMOIDS = Routing(num_experts=36, top_k=5, scoring="sigmoid", normalize=True, normalize_eps=1e-3)
CORRECTED = replace(SIGMOIDS, correction=True, scaling=2.5)


def router(routing: Routing, inputs: int, *, exact: bool, bias: bool = False, factors: bool = False) -> Scores:
    """Return a router with numbers that are drawn."""
    count = routing.num_experts
    return Scores(
        (torch.randn(count, inputs) * (2 / inputs**0.5)).bfloat16(),
        torch.randn(count).bfloat16() if bias else None,
        torch.randn(count) if routing.correction else None,
        torch.rand(count) + 0.5 if factors else None,
        exact,
    )


def chain(x: Tensor, weight: Tensor, scores: Scores, routing: Routing, live: Tensor | None) -> tuple[Tensor, ...]:
    """Return what three operations return: the norm, weights and ids; and the logits."""
    given = norms.rms_norm(x, weight, EPS)
    logits = given.double() @ scores.weight.double().T
    logits = (logits if scores.bias is None else logits + scores.bias.double()).float()
    logits = logits if scores.exact else logits.bfloat16()
    return given, *ref.route(logits, scores.correction, routing, live, scores.factors), logits


@needs_compiler
@pytest.mark.parametrize(
    ("routing", "inputs", "exact", "more"),
    [
        (QWEN3, 256, False, {}),
        (PLAIN, 520, True, {"factors": True}),  # no whole number of chunks for the lanes
        (SIGMOIDS, 72, True, {"bias": True}),  # experts that no warp has
        (CORRECTED, 264, False, {"factors": True}),
        (replace(CORRECTED, scoring="softmax", num_experts=70, normalize_eps=0), 264, True, {}),
        (replace(PLAIN, num_experts=300, top_k=32), 64, False, {"bias": True}),  # three experts of a warp
        (Routing(num_experts=1, top_k=1, scoring="sigmoid"), 8, True, {}),
    ],
    ids=str,
)
def test_as_three_operations(
    routing: Routing, inputs: int, exact: bool, more: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows, one of which may choose none, in three orders of threads. There is no near tie, which may turn."""
    defines = normed.kernel_of(inputs, routing, exact).source.defines
    kernel = EmulatedKernel(normed.SOURCE, dict(defines), "normed_router", tmp_path)
    monkeypatch.setattr(normed, "kernel_of", lambda *_: kernel)
    torch.manual_seed(inputs)
    scores, weight = router(routing, inputs, exact=exact, **more), (torch.rand(inputs) + 0.5).bfloat16()
    x = torch.randn(len(ROWS), inputs + 8).bfloat16()[:, :inputs]
    x[2] *= 1e-3
    for live in (None, torch.tensor(ROWS)):
        given, weights, ids, _ = chain(x, weight, scores, routing, live)
        for early in (0, 1, 2):
            kernel.early, kernel.released = early, _hide(x, live)
            actual, (own, chosen) = normed.route(x, (weight, EPS), scores, routing, live)
            torch.testing.assert_close(actual, given, rtol=8e-3, atol=0)
            assert torch.equal(chosen, ids)
            torch.testing.assert_close(own, weights, rtol=1e-2, atol=1e-6)


@needs_compiler
def test_ties_and_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal logits the lower experts are chosen, and of NaN different ones."""
    routing = replace(QWEN3, num_experts=70)
    source = normed.kernel_of(64, routing, False).source
    kernel = EmulatedKernel(normed.SOURCE, dict(source.defines), "normed_router", tmp_path)
    monkeypatch.setattr(normed, "kernel_of", lambda *_: kernel)
    scores = router(routing, 64, exact=False)
    scores.weight[:] = scores.weight[0]
    scores.weight[::3] *= 2
    x, weight = torch.randn(1, 64).bfloat16(), torch.ones(64).bfloat16()
    _, _, expected, logits = chain(x, weight, scores, routing, None)
    assert len(logits.unique()) == 2
    _, (_, ids) = normed.route(x, (weight, EPS), scores, routing)
    assert torch.equal(ids, expected)
    for wrong in (torch.nan, -torch.nan, torch.inf):
        x[0, 3] = wrong
        _, (_, ids) = normed.route(x, (weight, EPS), scores, routing)
        assert len(set(ids[0].tolist())) == routing.top_k and 0 <= ids.min() and ids.max() < 70


def _hide(*tensors: Tensor | None) -> Callable[[], object]:
    """Clear tensors. Return a function that brings their numbers back."""
    found = [(one, one.clone()) for one in tensors if one is not None]
    for one, _ in found:
        one.zero_()
    return lambda: [one.copy_(before) for one, before in found]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, True),
        ({"rows": MOST_ROWS}, True),
        ({"rows": MOST_ROWS + 1}, False),
        ({"rows": 0}, False),
        ({"dtype": torch.float32}, False),
        ({"norm": torch.float32}, False),
        ({"router": torch.float32}, False),
        ({"routing": DEEPSEEK_V2}, False),
        ({"routing": DEEPSEEK_V3}, False),
        ({"inputs": 4096}, True),
        ({"inputs": 4104}, False),  # no room in registers
        ({"inputs": 260}, False),
        ({"routing": replace(QWEN3, num_experts=256)}, True),
        ({"routing": replace(QWEN3, num_experts=257)}, False),
        ({"routing": replace(QWEN3, top_k=33)}, False),
        ({"first": 8}, True),
        ({"first": 4}, False),  # loads have 16 bytes
        ({"here": False}, False),
    ],
    ids=str,
)
def test_which_steps_it_takes(given: dict[str, object], taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normed, "runs_on_hopper", lambda _: given.get("here", True))
    routing = given.get("routing", QWEN3)
    rows, inputs, first = (given.get(name, value) for name, value in (("rows", 1), ("inputs", 2048), ("first", 0)))
    assert isinstance(routing, Routing) and isinstance(rows, int) and isinstance(inputs, int) and isinstance(first, int)
    dtype, of_norm, of_router = (given.get(name, torch.bfloat16) for name in ("dtype", "norm", "router"))
    assert all(isinstance(one, torch.dtype) for one in (dtype, of_norm, of_router))
    x = torch.zeros(rows, inputs + first, dtype=dtype)[:, first:]
    scores = Scores(torch.zeros(routing.num_experts, inputs, dtype=of_router), None, None, None, False)
    assert normed.takes(x, torch.zeros(inputs, dtype=of_norm), scores, routing) == taken
    monkeypatch.setattr(normed, "ENABLED", False)
    assert not normed.takes(x, torch.zeros(inputs, dtype=of_norm), scores, routing)


@pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
@pytest.mark.parametrize(
    ("routing", "inputs", "exact"),
    [
        (QWEN3, 2048, False),
        (CORRECTED, 4096, True),
        (replace(QWEN3, num_experts=8, top_k=2), 4096, False),  # Mixtral
        (replace(PLAIN, num_experts=256, normalize=True), 2048, True),
    ],
    ids=str,
)
def test_it_compiles_without_a_stack(
    routing: Routing, inputs: int, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    told = resources(normed.kernel_of(inputs, routing, exact).source, tmp_path)
    assert "STACK:0 " in told and "LOCAL:0 " in told, told
