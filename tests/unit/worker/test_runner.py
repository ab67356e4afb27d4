"""The step runner with PyTorch's operations against the naive one, step by step; and what it does without rows."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import SAMPLE, Admission, StepPlan
from quire.kernels.attention import AttentionMeta
from quire.kernels.native.library import missing
from quire.worker import programs
from quire.worker.taps import HiddenTap

from ...support.compared import BLOCK, LIMITS, ComparedRunners, compare_requests, make_model, model_args, runner_of
from ...support.full import full_rows
from ...support.naive_runner import NaiveRunner

NONE = np.empty(0, np.int32)


pytestmark = pytest.mark.usefixtures("one_thread")


def empty_plan(step: int, **more: Any) -> StepPlan:
    return StepPlan(
        step=step, slots=NONE, num_decodes=0, num_tokens=NONE, num_rows=NONE, outputs=np.empty(0, np.uint8), **more
    )


@pytest.mark.parametrize(
    ("kind", "blocks", "depth"),
    [
        ("dense", 31, 2),
        ("experts", 5, 1),
        ("latent", 5, 2),
        *full_rows(itertools.product(("dense", "experts", "latent"), (31, 5), (1, 2))),
    ],
)
def test_every_step_is_the_naive_one_s(kind: str, blocks: int, depth: int) -> None:
    """Greedy, sampled, penalties, edits, log-probabilities of both kinds, pooling, chunks, prefixes, preemption."""
    args = model_args(kind)
    runner = runner_of(make_model(args), replace(LIMITS, depth=depth))
    compared = ComparedRunners(runner, NaiveRunner(make_model(args, reference=True)), blocks)
    core = compare_requests(compared, 14, budget=24)
    assert compared.num_steps > 45 and (core.scheduler.num_preempted > 0) == (blocks == 5)
    assert not runner._running


@pytest.mark.parametrize(
    ("blocks", "depth", "sizes"),
    [
        (12, 2, (1, 2)),
        (15, 2, (2, 1)),
        *full_rows(((12, 2, (1, 1)), (12, 1, (1, 1)), (40, 1, (1, 4)), (40, 2, (4, 1)), (40, 2, (1, 1)))),
    ],
)
def test_two_groups_of_layers_keep_what_their_windows_see(blocks: int, depth: int, sizes: tuple[int, int]) -> None:
    """Every other layer sees 20 tokens, in a KV group of its own, whose blocks behind the window others get.

    sizes   of their blocks, as multiples of `BLOCK`
    """
    args, window = model_args(num_hidden_layers=4), 20
    limits = replace(LIMITS, depth=depth, windows=(None, window), block_sizes=tuple(BLOCK * many for many in sizes))
    runner = runner_of(make_model(args, window=window), limits, num_blocks=blocks + 1)
    naive = NaiveRunner(make_model(args, reference=True, window=window), num_groups=2)
    compared = ComparedRunners(runner, naive, blocks)
    core = compare_requests(compared, 14, budget=24)
    assert compared.num_steps > 45 and (core.scheduler.num_preempted > 0) == (blocks < 40)
    assert (runner.programs.recorder.counts["replayed"] > 30) == (not missing())


def test_steps_without_rows_run_and_leave_what_they_bring() -> None:
    args = model_args()
    runner, naive = runner_of(make_model(args)), NaiveRunner(make_model(args, reference=True))
    ids = np.arange(7, 19, dtype=np.int32)
    admitted = Admission(
        slot=2,
        request_id="",
        token_ids=ids,
        block_ids=(np.array([3], np.int32),),
        num_computed=0,
        sampler=SamplerSpec(seed=1, num_prompt=12),
    )
    two = np.array([2], np.int32)
    plans = [
        empty_plan(1),
        empty_plan(2, admitted=(admitted,)),
        StepPlan(step=3, slots=two, num_decodes=0, num_tokens=two * 4, num_rows=two * 0, outputs=np.zeros(1, np.uint8)),
        StepPlan(
            step=4,
            slots=two,
            num_decodes=0,
            num_tokens=two * 2,
            num_rows=two // 2,
            outputs=np.full(1, SAMPLE, np.uint8),
        ),
        empty_plan(5, released=two),
    ]
    for plan in plans:
        found, expected = runner.run(plan), naive.run(plan)
        assert found.tokens.shape == (len(found.slots), 1) and found.tokens.tolist() == expected.tokens.tolist()
        assert found.step == plan.step and found.failed == {} and found.num_computed == expected.num_computed
    assert not naive.requests


def test_attention_knows_the_prompts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host tells every model's attention the chunks that are no decodes, with the context before them."""
    told, runner, one = list[object](), runner_of(make_model(model_args())), np.array([1], np.int32)

    def tell(**given: Any) -> AttentionMeta:
        told.append(given["prompts"])
        return AttentionMeta(**given)

    monkeypatch.setattr(programs, "AttentionMeta", tell)
    admitted = tuple(
        Admission(
            slot=slot,
            request_id="",
            token_ids=np.arange(12, dtype=np.int32),
            num_computed=past,
            block_ids=(np.array([3 + slot], np.int32),),
            sampler=SamplerSpec(seed=1, num_prompt=12),
        )
        for slot, past in ((0, 11), (1, 0))
    )
    sampled, both = np.array([SAMPLE, 0], np.uint8), np.array([0, 1], np.int32)
    runner.run(empty_plan(1, admitted=admitted))
    for step, chunk in ((2, 4), (3, 6)):
        runner.run(
            StepPlan(
                step=step,
                slots=both,
                num_decodes=1,
                outputs=sampled,
                num_rows=both[::-1].copy(),
                num_tokens=np.array([1, chunk], np.int32),
            )
        )
    runner.run(StepPlan(step=4, slots=0 * one, num_decodes=1, num_tokens=one, num_rows=one, outputs=sampled[:1]))
    assert told == [((1, 5, 1, 0),), ((1, 7, 1, 4),), ()]


def test_parts_are_printed_with_their_reasons() -> None:
    """A CPU holds no logits of all slots, and what is not recorded is named."""
    runner = runner_of(make_model(model_args(), reference=True))
    said = runner.describe()
    words = " ".join(map(str, said["parts"]))  # type: ignore[call-overload]
    for part in ("step: ref", "sampling: ref", "upload: in place", "not packed:", "recorder: none", "not recordings:"):
        assert part in words
    assert said["not recorded"] == {"every step": runner.parts[-1].reason}
    held = [
        value
        for part in (runner.programs, runner.state, runner.state.buffers, runner.sampler.operations)
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    ]
    assert held and all(value.numel() <= 2 * LIMITS.max_tokens for value in held)


needs_native = pytest.mark.skipif(bool(missing()), reason=missing() or "runs")


@needs_native
def test_recorded_steps_are_the_naive_one_s_up_to_ties() -> None:
    args = model_args(head_dim=32, hidden_size=64, intermediate_size=96)
    runner = runner_of(make_model(args, dtype="bfloat16"))
    compared = ComparedRunners(runner, NaiveRunner(make_model(args, reference=True, dtype="bfloat16"), tie=0.2))
    compare_requests(compared, 20, budget=24, kinds=({"temperature": 0.0},))
    assert runner.recorder.counts["replayed"] > 30


@needs_native
def test_recorded_steps_are_those_of_the_same_kernels_without_a_recording() -> None:
    """Token by token."""
    args = model_args(head_dim=32, hidden_size=64, intermediate_size=96)
    model = make_model(args, dtype="bfloat16")
    recorded, plain = runner_of(model), runner_of(model)
    assert recorded.parts[-1].name == "recordings"
    plain.features.attach(HiddenTap(plain.model, lambda where, hidden: None))  # who looks on gets nothing recorded
    compared = ComparedRunners(recorded, _Same(plain))  # type: ignore[arg-type]
    compare_requests(compared, 20, budget=24)
    counts = recorded.recorder.counts
    assert counts["replayed"] > 30 and 0 < counts["recorded"] <= 16 and plain.recorder.counts["recorded"] == 0


class _Same:
    """Stands for the naive runner."""

    def __init__(self, runner: Any) -> None:
        self.run = lambda plan, get_masks, given: runner.run(plan, get_masks)


def test_layers_that_somebody_looks_at_run_their_operations_one_by_one() -> None:
    model, apart = make_model(model_args()), list[bool]()
    runner = runner_of(model)
    model.layers[0].register_forward_hook(lambda layer, given, result: apart.append(given[2].apart))
    runner.features.attach(HiddenTap(model, lambda where, hidden: None))
    compare_requests(ComparedRunners(runner, _Same(runner_of(make_model(model_args())))), 1, budget=24)  # type: ignore[arg-type]
    assert apart and all(apart)
