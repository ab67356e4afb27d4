"""Steps without drafts of an engine that drafts with layers: launches, and drafts and tokens behind them."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections import Counter
from dataclasses import replace

import pytest
import torch

from quire.kernels import triton_runtime

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.contracts.step import SAMPLE, PlanFeatures

from ..support.compared import LIMITS, runner_of
from ..support.drafters import compare_some_drafts, draft_with_layers
from ..support.full import FULL, full_rows
from ..support.launches import launches
from .test_cuda_worker import admission, cuda_runner, drafting_model, plan  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread", "cuda_runner")
# Launches that keep the states: after the final norm, or, for an EAGLE-3 head, joined.
BEYOND = {"glm": 2, "latent": 2, "model": 1, "eagle3": 3}


@pytest.mark.parametrize("drafter", ["glm", *full_rows(("latent", "model", "eagle3"))])
def test_a_step_without_drafts_launches_hardly_more_than_one_without_a_drafter(drafter: str) -> None:
    """The tenth step completes a block of 16 tokens: it alone has a pass of the layer."""
    args, make = drafting_model(drafter)
    sizes = {"graph_sizes": (1,), "draft_lengths": (1,), "num_drafts": 1}
    counts: list[list[Counter[str]]] = [[], []]
    for drafting, found in enumerate(counts):
        runner = runner_of(make(args, "cuda"), replace(LIMITS, num_slots=2, **sizes), "cuda")
        if drafting:
            draft_with_layers(runner, 1)
        runner.run(plan(1, (0,), (6,), (SAMPLE,), admitted=(admission(0, 6, (1, 2)),)))
        for step in range(2, 14):
            features = PlanFeatures(completes=step == 11)
            with launches() as counted:
                runner.run(plan(step, (0,), (1,), (SAMPLE,), features=features))
            found.append(counted)
    more = [after.total() - before.total() for before, after in zip(*counts, strict=True)]
    assert more[:9] + more[10:] == [BEYOND[drafter]] * 11, counts[1][0] - counts[0][0]
    assert more[9] > 20, "the pass"


@pytest.mark.parametrize("drafter", ["glm", *full_rows(("eagle3", "latent", "model"))])
def test_drafts_behind_steps_without_are_those_of_a_cpu(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In padded steps, against a drafter that makes all entries at once. One step of six has drafts."""
    args, make = drafting_model(drafter)
    sizes = {"graph_sizes": (2, 4), "graph_tokens": (48,), "draft_lengths": (2,)}
    found = []
    for target, more in (("cpu", {}), ("cuda", sizes)):
        runner = runner_of(make(args, target), replace(LIMITS, num_drafts=2, **more), target)
        found.append(draft_with_layers(runner, 2, late=target == "cuda"))
        compare_some_drafts(runner, args, monkeypatch, number=3 if FULL else 2)
    caught_up = [key for key in runner.recorder.ran if key[0] == "late"]  # type: ignore[attr-defined]
    assert len(caught_up) > 3 and len(found[0]) > 8
    assert [place for place, _ in found[0]] == [place for place, _ in found[1]]
    for (_, expected), (_, logits) in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
