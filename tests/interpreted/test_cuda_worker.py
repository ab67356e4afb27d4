"""The step runner of a GPU against the naive one on the same plans, its kernels in Triton's interpreter."""

import json
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs
from quire.contracts.parallel import ALONE
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import (
    I32,
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    Admission,
    BlendedChunk,
    PlanFeatures,
    SharedPrefix,
    StepPlan,
    StepResult,
)
from quire.kernels import triton_runtime
from quire.kernels.sampling.rows import Mode
from quire.plan.as_stored import with_prediction
from quire.plan.placement import ranks

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.attention import AttentionMeta
from quire.kernels.ngram import triton as ngram
from quire.kernels.step import triton
from quire.kernels.step.state import Limits
from quire.layers.stack import Model
from quire.procs.wire import Messages, encode
from quire.spec.ngram import NgramDrafter
from quire.worker.graphs import Graphs
from quire.worker.recorder import Key
from quire.worker.runner import StepRunner
from quire.worker.stage_drafts import StageDrafts
from quire.worker.step_drafts import StepDrafts

from ..support import compared as support
from ..support.changed_args import with_layers
from ..support.compared import (
    LIMITS,
    VOCAB,
    ComparedRunners,
    compare_requests,
    make_drafted,
    make_headed,
    make_model,
    model_args,
    runner_of,
)
from ..support.drafters import KnownAnswers, draft_with_layers
from ..support.features import feature, set_drafter
from ..support.forks import Forks
from ..support.full import full_rows
from ..support.logits_tap import LogitsTap
from ..support.naive_runner import NaiveRunner, agree
from . import drafting_ranks, drafting_replicas, ranks_of_gpus, replicas_of_gpus, stages_of_gpus


class Event:
    """Stands for an event of a device that has always done everything."""

    made = 0

    def __init__(self, **_: object) -> None:
        Event.made += 1

    def record(self) -> None:
        """At once."""

    synchronize = record


class Recording(Graphs):
    """Stands for the graphs: work runs as it comes, and its keys are kept."""

    def __init__(self, *sizes: object, **more: bool) -> None:
        super().__init__(*sizes, **more)  # type: ignore[arg-type]
        self.ran: list[Key] = []
        self.captured: list[Key] = []

    def run(self, key: Key, work: Callable[[], None]) -> None:
        self.ran.append(key)
        work()

    def capture(self, key: Key, work: Callable[[], None]) -> None:
        self.captured.append(key)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cuda_runner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepRunner]:
    """Return a function that makes runners with the kernels of a GPU, interpreted."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    monkeypatch.setattr("quire.worker.construct.Graphs", Recording)

    def make(limits: Limits = LIMITS, kind: str = "dense", **more: object) -> StepRunner:
        return runner_of(make_model(model_args(kind, **more), "cuda"), limits, "cuda")

    return make


def naive(kind: str = "dense", **more: object) -> NaiveRunner:
    return NaiveRunner(make_model(model_args(kind, **more), reference=True))


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def admission(slot: int, num_tokens: int, blocks: tuple[int, ...], **spec: object) -> Admission:
    ids = np.arange(7, 7 + num_tokens, dtype=np.int32) % VOCAB
    return Admission(
        slot=slot,
        request_id=str(slot),
        token_ids=ids,
        block_ids=(i32(*blocks),),
        num_computed=0,
        sampler=SamplerSpec(num_prompt=num_tokens, **{"seed": 0, "temperature": 0.0} | spec),
    )  # type: ignore[arg-type]


def plan(step: int, slots: tuple[int, ...], tokens: tuple[int, ...], outputs: tuple[int, ...], **more: Any) -> StepPlan:
    """Slots of one token decode, but those that are admitted, or pool."""
    fresh = {a.slot for a in more.get("admitted", ())}
    decodes = [
        count == 1 and out == SAMPLE and slot not in fresh
        for slot, count, out in zip(slots, tokens, outputs, strict=True)
    ]
    assert decodes == sorted(decodes, reverse=True), "decodes come first"
    rows = [count if out & PROMPT_LOGPROBS else 1 for count, out in zip(tokens, outputs, strict=True)]
    return StepPlan(
        step=step,
        slots=i32(*slots),
        num_decodes=sum(decodes),
        num_tokens=i32(*tokens),
        num_rows=i32(*rows),
        outputs=np.array(outputs, np.uint8),
        **more,
    )


# Chunks, decodes beside a chunk, sampling of every mode, logprobs of both kinds, a slot that is given to another.
PLANS = (
    plan(
        1,
        (2,),
        (30,),
        (PROMPT_LOGPROBS,),
        admitted=(admission(2, 33, (1, 2, 3), seed=5, temperature=0.9, num_prompt_logprobs=2),),
    ),
    plan(
        2,
        (2, 0),
        (3, 5),
        (SAMPLE | PROMPT_LOGPROBS, SAMPLE),
        admitted=(admission(0, 5, (4,), seed=6, temperature=0.7, top_p=0.9, num_logprobs=2),),
    ),
    plan(3, (0, 2), (1, 1), (SAMPLE, SAMPLE)),
    plan(4, (0, 2, 1), (1, 1, 20), (SAMPLE, SAMPLE, 0), admitted=(admission(1, 24, (5, 6), repetition_penalty=1.5),)),
    plan(5, (2, 1), (1, 4), (SAMPLE, SAMPLE)),
    plan(6, (1, 3), (1, 7), (SAMPLE, SAMPLE), released=i32(0, 2), admitted=(admission(3, 7, (1,), seed=9),)),
    plan(7, (1, 3), (1, 1), (SAMPLE, SAMPLE)),
    plan(8, (1, 3), (1, 1), (SAMPLE, SAMPLE)),
)


@pytest.mark.parametrize("kind", ["dense", *full_rows(("experts", "latent", "divided"))])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, interpreted: Forks, kind: str) -> None:
    """With the kernels of a GPU, padded steps, sliced logits and sums through shared memory; see ranks_of_gpus.py."""
    for rank in range(2):
        (tmp_path / f"buffer{rank}").write_bytes(bytes(ranks_of_gpus.ROOM * 3))
        (tmp_path / f"signal{rank}").write_bytes(bytes(1 << 10))
    calls = [(rank, kind, tmp_path) for rank in range(2)]
    codes, said = interpreted.run(tmp_path / "said", "tests.interpreted.ranks_of_gpus", calls)
    assert codes == [0, 0], said
    oracle = NaiveRunner(ranks_of_gpus.reference(kind))
    for one in PLANS:
        expected = oracle.run(one)
        for rank in range(2):
            agree(Messages(StepResult).decode((tmp_path / f"result{rank}-{one.step}").read_bytes()), expected)


@pytest.mark.parametrize("kind", ["experts", *full_rows(("latent", "experts even", "latent even"))])
def test_two_replicas_that_share_experts_give_the_tokens_of_one(tmp_path: Path, interpreted: Forks, kind: str) -> None:
    """With the kernels of a GPU, padded steps, steps without tokens, and rows through shared memory.

    Or by an all-gather: then decodes of both are in recordings of one size, and steps with prompts are in none.
    """
    family, *even = kind.split()
    for rank in range(2):
        size = replicas_of_gpus.layout(ranks_of_gpus.small(family)).num_bytes
        (tmp_path / f"buffer{rank}").write_bytes(b"\xff" * size)  # NaN
        (tmp_path / f"signal{rank}").write_bytes(bytes(1 << 10))
    calls = [(rank, kind, tmp_path) for rank in range(2)]
    codes, said = interpreted.run(tmp_path / "said", "tests.interpreted.replicas_of_gpus", calls)
    assert codes == [0, 0], said
    oracle = NaiveRunner(ranks_of_gpus.reference(family))
    for one in PLANS if even else PLANS[:7]:
        expected = oracle.run(one)
        for rank in range(2):
            agree(Messages(StepResult).decode((tmp_path / f"result{rank}-{one.step}").read_bytes()), expected)
    for rank in range(2):
        kinds = (tmp_path / f"kinds{rank}").read_text().split()
        # The second replica has no tokens in a step in which the first has more than any captured one. In its last
        # step, of two decodes, the first one has none.
        own = {"beyond"} if rank else {"join"}
        assert set(kinds) == ({"decode"} | own - {"beyond"} if even else {"decode", "mixed"} | own)


def drafting_plan(
    step: int, slots: tuple[int, ...], tokens: tuple[int, ...], outputs: tuple[int, ...], num_decodes: int, **more: Any
) -> StepPlan:
    """The first `num_decodes` slots decode, with a row for each token."""
    rows = [count if at < num_decodes else 1 for at, count in enumerate(tokens)]
    return StepPlan(
        step=step,
        slots=i32(*slots),
        num_decodes=num_decodes,
        num_tokens=i32(*tokens),
        num_rows=i32(*rows),
        outputs=np.array(outputs, np.uint8),
        **more,
    )


@pytest.mark.parametrize("method", ["mtp", *full_rows(["draft_model", "mtp even", "draft_model even"])])
def test_replicas_that_share_experts_of_a_drafter_make_the_same_passes(
    tmp_path: Path, interpreted: Forks, method: str
) -> None:
    """Tokens, accepted drafts and the drafts of the layers are those of one rank; both replicas make equal exchanges,
    and a recording would make those that it was captured with. See drafting_replicas.py."""
    own, *even = method.split()
    plans, oracle = drafting_replicas.drafting_plans(drafting_plan, admission), drafting_replicas.reference(own)
    texts = answers_of(oracle, [one for each in plans for one in each.admitted])
    (tmp_path / "texts").write_text(json.dumps(texts))
    drafting_replicas.make_memory(tmp_path, own)
    calls = [(rank, method, tmp_path) for rank in range(2)]
    codes, said = interpreted.run(tmp_path / "said", "tests.interpreted.drafting_replicas", calls)
    assert codes == [0, 0], said
    alone = runner_of(oracle, replace(LIMITS, num_drafts=drafting_replicas.DRAFTS))
    draft_with_layers(alone, drafting_replicas.DRAFTS)
    check_drafts(tmp_path, plans, alone, drafting_replicas.watch(alone, texts))
    bounds = [json.loads((tmp_path / f"exchanges{rank}").read_text()) for rank in range(2)]
    assert bounds[0] == bounds[1] and all(bounds[0])
    assert (tmp_path / "kinds0").read_text() == f"decode join{' mixed' * (not even)} sample"


def check_drafts(
    folder: Path, plans: tuple[StepPlan, ...], alone: StepRunner, expected: list[tuple[int, Tensor]]
) -> None:
    """Two ranks got the tokens of one, accepted as many drafts, and their layers drafted the same, by their slices of
    the vocabulary. expected: of that one rank, as it runs the plans"""
    accepted = 0
    for one in plans:
        right = alone.run(one)
        accepted += int((right.num_accepted - 1).sum())
        assert one.step != 7 or right.num_accepted.sum() > 4
        for rank in range(2):
            found = Messages(StepResult).decode((folder / f"result{rank}-{one.step}").read_bytes())
            assert found.tokens.tolist() == right.tokens.tolist()
            assert found.num_accepted.tolist() == right.num_accepted.tolist()
    assert accepted > 3 and len(expected) > 10
    for rank in range(2):
        seen = torch.load(folder / f"drafts{rank}")
        assert [place for place, _ in seen] == [place for place, _ in expected]
        for (_, logits), (_, other) in zip(seen, expected, strict=True):
            width = len(logits)
            whole = other if width == VOCAB else other[rank * width :][:width]
            torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("whole", [False, *full_rows([True])])
def test_two_ranks_with_a_draft_model_draft_as_one(tmp_path: Path, interpreted: Forks, whole: bool) -> None:
    """With slices of the draft model, or the whole on each rank. See drafting_ranks.py."""
    alone = drafting_ranks.drafting_runner(0, ALONE, drafting_ranks.DRAFTED, "")
    plans = drafting_replicas.drafting_plans(drafting_plan, admission)
    texts = answers_of(ranks_of_gpus.reference("dense"), [one for each in plans for one in each.admitted])
    (tmp_path / "texts").write_text(json.dumps(texts))
    for rank in range(2):
        (tmp_path / f"buffer{rank}").write_bytes(bytes(ranks_of_gpus.ROOM * 3))
        (tmp_path / f"signal{rank}").write_bytes(bytes(1 << 10))
    calls = [(rank, whole, tmp_path) for rank in range(2)]
    codes, said = interpreted.run(tmp_path / "said", "tests.interpreted.drafting_ranks", calls)
    assert codes == [0, 0], said
    check_drafts(tmp_path, plans, alone, drafting_replicas.watch(alone, texts))


class OfStages(ComparedRunners):
    """An executor of one rank whose engine plans as for a pipeline."""

    def facts(self) -> ExecutorFacts:
        return msgspec.structs.replace(super().facts(), num_stages=stages_of_gpus.SIZE, decode_lag=1)


def test_stages_that_draft_and_share_an_indexer_give_the_tokens_of_one_rank(tmp_path: Path, interpreted: Forks) -> None:
    """The tokens that an indexer has chosen go to the second stage, in captured steps, too. Tokens and drafts are those
    of one rank that drafts at the end of a step. See stages_of_gpus.py."""
    args = stages_of_gpus.arguments()
    runner = stages_of_gpus.runner_of_rank(next(ranks(args, ALONE)), stages_of_gpus.DRAFTED, "")
    own = feature(runner, StepDrafts)
    runner.features.detach(own)
    runner.features.attach(StageDrafts(own.drafter, runner.state.tables, stages_of_gpus.DRAFTS))
    alone = OfStages(runner, NaiveRunner(stages_of_gpus.reference()))
    compare_requests(alone, 3, budget=24, kinds=support.KINDS[:2], answers=10)
    for number, (each, _) in enumerate(alone.results):
        (tmp_path / f"plan{number:03}").write_bytes(encode(each))
    calls = [(rank, tmp_path) for rank in range(2)]
    codes, said = interpreted.run(tmp_path / "said", "tests.interpreted.stages_of_gpus", calls)
    assert codes == [0, 0], said
    for each, expected in alone.results:
        found = Messages(StepResult).decode((tmp_path / f"result1-{each.step}").read_bytes())
        agree(found, expected)
        assert found.ahead.tolist() == expected.ahead.tolist()
    assert sum((one.ahead >= 0).sum() for _, one in alone.results) > 10
    assert (tmp_path / "kinds1").read_text() == "decode mixed sample"


def answers_of(model: Model, admitted: list[Admission]) -> dict[int, list[int]]:
    """The tokens of requests, by seed: each alone, by plain decoding."""
    naive_runner, texts = NaiveRunner(model), dict[int, list[int]]()
    for one in admitted:
        own, count = msgspec.structs.replace(one, slot=0), len(one.token_ids)
        tokens = list(map(int, one.token_ids))
        for step in range(1, 24):
            each = plan(step, (0,), (1 if step > 1 else count,), (SAMPLE,), admitted=(own,) * (step == 1))
            tokens.append(int(naive_runner.run(each).tokens[0, 0]))
        texts[one.sampler.seed] = tokens
        naive_runner.run(plan(24, (), (), (), released=i32(0)))
    return texts


def run_ahead(runner: StepRunner, plans: tuple[StepPlan, ...]) -> list[StepResult]:
    """Every step is launched before the one before it is collected."""
    found = []
    for number, each in enumerate(plans):
        runner.submit(each)
        if number:
            found.append(runner.collect())
    return [*found, runner.collect()]


@pytest.mark.parametrize(
    ("model", "sizes", "steps"),
    [
        ("dense", (), len(PLANS)),
        ("experts", (2, 4), 5),
        ("latent", (2, 4), 4),
        *full_rows((model, sizes, len(PLANS)) for model in ("dense", "experts", "latent") for sizes in ((2, 4), ())),
    ],
)
def test_the_same_tokens_as_the_naive_runner_s(
    cuda_runner: Callable[..., StepRunner],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    model: str,
    steps: int,
) -> None:
    """With graph sizes, decodes, samples and mixed steps of up to 48 tokens are padded, to 2 or to 4 sequences.

    Models with experts have one layer, with experts, in fewer steps.
    """
    monkeypatch.setattr("quire.worker.graphs.NARROW", 2)
    layers = {"num_hidden_layers": 1, "first_k_dense_replace": 0} if steps < len(PLANS) else {}
    oracle, plans = naive(model, **layers), PLANS[:steps]
    runner = cuda_runner(replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ()), model, **layers)
    for expected, found in zip(map(oracle.run, plans), run_ahead(runner, plans), strict=True):
        agree(found, expected)
    held = sorted(oracle.requests)
    assert runner.state.tables.computed[held].tolist() == [oracle.requests[slot].computed for slot in held]
    assert not sizes or {key[0] for key in runner.recorder.ran} >= {"decode", "mixed"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [(), (2, 4)], ids=["eager", "graphs"])
def test_short_prompts_beside_longer_ones(cuda_runner: Callable[..., StepRunner], sizes: tuple[int, ...]) -> None:
    """Sparse latent attention: prompts of up to 8 tokens attend to all of them, wherever they are in the step."""
    layers = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    limits = replace(LIMITS, graph_sizes=sizes, graph_tokens=(24,) if sizes else ())
    oracle, runner = naive("sparse latent", **layers), cuda_runner(limits, "sparse latent", **layers)
    slots, counts, blocks = (0, 1, 2, 3), (3, 17, 8, 20), ((1,), (2, 3), (4,), (5, 6))
    first = tuple(admission(*each, num_logprobs=2) for each in zip(slots, counts, blocks, strict=True))
    again = admission(0, 5, (7,), num_logprobs=2), admission(2, 20, (8, 9), num_logprobs=2)
    plans = (
        plan(1, slots, counts, (SAMPLE,) * 4, admitted=first),
        plan(2, slots, (1,) * 4, (SAMPLE,) * 4),
        plan(3, (1, 3, 2), (1, 1, 4), (SAMPLE, SAMPLE, 0), released=i32(0, 2), admitted=again[1:]),
        plan(4, (1, 3, 2, 0), (1, 1, 16, 5), (SAMPLE,) * 4, admitted=again[:1]),
        plan(5, (1, 3, 2, 0), (1,) * 4, (SAMPLE,) * 4),
    )
    for expected, found in zip(map(oracle.run, plans), run_ahead(runner, plans), strict=True):
        agree(found, expected)


def test_the_longest_context_counts_no_drafts_that_had_no_room(cuda_runner: Callable[..., StepRunner]) -> None:
    """Verified drafts that were wrong leave a bound of lengths behind, which blocks do not have."""
    state = cuda_runner(replace(LIMITS, num_drafts=3)).state
    state.apply(plan(1, (0,), (6,), (SAMPLE,), admitted=(admission(0, 6, (1,)),)))
    assert state.longest(i32(0)) == 6
    for step in range(2, 9):
        state.apply(plan(step, (0,), (4,), (SAMPLE,)))
    assert state.lengths[0] == 34 and state.longest(i32(0)) == support.BLOCK


def test_decodes_of_short_contexts_have_launches_of_their_own(
    cuda_runner: Callable[..., StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels get the bound of the recorded step: of one sequence of at most 8 tokens; two have no such step."""
    bounds = list[int | None]()

    def made(**fields: Any) -> AttentionMeta:
        bounds.append(fields["most_context"])
        return AttentionMeta(**fields)

    monkeypatch.setattr("quire.worker.programs.AttentionMeta", made)
    layers = {"num_hidden_layers": 1}
    oracle, limits = naive(**layers), replace(LIMITS, graph_sizes=(1, 2), short=(1, 8))
    runner = cuda_runner(limits, **layers)
    plans = [
        plan(1, (0,), (6,), (SAMPLE,), admitted=(admission(0, 6, (1,)),)),
        *(plan(step, (0,), (1,), (SAMPLE,)) for step in (2, 3, 4)),
        plan(5, (1,), (3,), (SAMPLE,), admitted=(admission(1, 3, (2,)),), released=i32(0)),
        plan(6, (1,), (1,), (SAMPLE,)),
        plan(7, (1, 2), (1, 2), (SAMPLE, SAMPLE), admitted=(admission(2, 2, (3,)),)),
        plan(8, (1, 2), (1, 1), (SAMPLE, SAMPLE)),
    ]
    for expected, found in zip(map(oracle.run, plans), run_ahead(runner, plans), strict=True):
        agree(found, expected)
    assert bounds == [None, 8, 8, None, None, 8, None, None]
    ran = [key for key in runner.recorder.ran if key[0].startswith("decode")]  # type: ignore[attr-defined]
    assert [key[0] for key in ran] == ["decode of short contexts"] * 2 + [
        "decode",
        "decode of short contexts",
        "decode",
    ]
    assert {key for key in ran} <= {key for key, _ in runner.programs.recordings(runner.recorder.shapes())}


@pytest.mark.parametrize("graphs", [True, *full_rows([False])])
def test_groups_with_blocks_of_other_sizes_give_the_same_tokens(
    cuda_runner: Callable[..., StepRunner], graphs: bool
) -> None:
    """Every other layer has a window, and blocks of twice the tokens in a KV group of its own."""
    args, window = model_args(num_hidden_layers=2), 20
    limits = replace(LIMITS, windows=(None, window), block_sizes=(support.BLOCK, 2 * support.BLOCK))
    if graphs:
        limits = replace(limits, graph_sizes=(2, 4), graph_tokens=(48,))
    runner = runner_of(make_model(args, "cuda", window=window), limits, "cuda")
    oracle = NaiveRunner(make_model(args, reference=True, window=window), num_groups=2)

    def grouped(one: Admission) -> Admission:
        (own,) = one.block_ids
        return msgspec.structs.replace(one, block_ids=(own, 10 + own[: -(-len(own) // 2)]))

    plans = [msgspec.structs.replace(one, admitted=tuple(map(grouped, one.admitted))) for one in PLANS[:6]]
    for expected, found in zip(map(oracle.run, plans), run_ahead(runner, plans), strict=True):
        agree(found, expected)


@pytest.mark.parametrize(
    ("guesses", "lengths", "model", "blocks"),
    [
        ("random", (1, 3), "dense", 5),
        *full_rows(
            (
                ("random", (1, 3), "dense", 31),
                ("right", (), "experts", 31),
                ("random", (3,), "latent", 31),
                ("ngram", (3,), "dense", 31),
            )
        ),
    ],
)
def test_steps_with_drafts_draw_the_tokens_of_plain_decoding(
    cuda_runner: Callable[..., StepRunner], guesses: str, lengths: tuple[int, ...], model: str, blocks: int
) -> None:
    """Requests of all kinds, whose steps are captured for decodes with no, some and all drafts, and beside prompts;
    padded in sequences and in drafts. With few blocks requests give way."""
    layers = {} if model == "latent" else {"num_hidden_layers": 1}
    kinds = MIXED if blocks == 5 else support.KINDS
    asked: Any = {"number": len(MIXED), "budget": 24, "kinds": kinds}
    if blocks == 5:
        asked |= {"prompts": 20, "answers": 14}
    plain = ComparedRunners(runner_of(make_model(model_args(model, **layers))), naive(model, **layers))
    compare_requests(plain, **asked)
    graphs = {"graph_sizes": (2, 4), "graph_tokens": (48,), "draft_lengths": lengths} if lengths else {}
    runner = cuda_runner(replace(LIMITS, num_drafts=3, **graphs), model, **layers)
    known = KnownAnswers(plain.naive.texts, runner.sampler.table.rows, guesses, VOCAB)
    set_drafter(runner, NgramDrafter(ngram, 1, 3) if guesses == "ngram" else known)
    compared = ComparedRunners(runner, naive(model, **layers), blocks)
    core = compare_requests(compared, **asked)
    assert (core.scheduler.num_preempted > 0) == (blocks == 5)
    runs = [rows for each, _ in compared.results if (rows := each.num_tokens[: each.num_decodes].tolist())]
    assert sum(max(rows) > 1 for rows in runs) > 5
    if lengths:
        decodes = {key[1:] for key in runner.recorder.ran if key[0] == "decode"}  # type: ignore[attr-defined]
        assert (4 * (1 + max(lengths)), 2 * max(lengths)) in decodes
        captured = {shape.key[1:] for shape in runner.recorder.shapes() if shape.decode}
        assert decodes <= captured


# Sampling of every mode, edits, logprobs of both kinds, and a prompt without an answer.
MIXED = (
    {"temperature": 0.0, "repetition_penalty": 1.4, "num_prompt_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "num_logprobs": 2},
    {"temperature": 0.7, "logit_bias": ((4, 3.0), (9, -100.0)), "bad_words": ((3, 4), (7,))},
    {"pool": "mean"},
    {"temperature": 1.0, "allowed_ids": tuple(range(10, 40)), "logprob_ids": (12, 50)},
)


def drafting_model(drafter: str) -> tuple[ModelArgs, Callable[..., Model]]:
    """The arguments of a model, and a function that makes it with its drafter: a prediction layer ("glm", "latent"; of
    "sparse latent" the passes share a choice), an EAGLE-3 head that knows some ids ("eagle3"), or a draft model
    ("model")."""
    if drafter in ("eagle3", "model"):
        args = replace(model_args("dense"), tie_word_embeddings=False)
        return args, make_headed if drafter == "eagle3" else make_drafted
    return with_prediction(model_args(drafter), drafting=1, shares=True), make_model


@pytest.mark.parametrize(
    ("graphs", "drafter"),
    [
        (False, "glm"),
        (False, "eagle3"),
        *full_rows((True, each) for each in ("glm", "eagle3", "latent", "sparse latent", "model")),
    ],
)
def test_layers_draft_in_padded_steps_what_they_draft_on_a_cpu(
    cuda_runner: Callable[..., StepRunner], graphs: bool, drafter: str
) -> None:
    """Both runners plan the same steps as long as they draft the same tokens, which filters would change: a GPU drafts
    without them. Without graphs the layers are a CPU's."""
    (args, make), limits = drafting_model(drafter), replace(LIMITS, num_drafts=2)
    runners = [runner_of(make(args), limits), runner_of(make(args), limits)]
    if graphs:
        sizes = {"graph_sizes": (2, 4), "graph_tokens": (48,), "draft_lengths": (2,)}
        runners[1] = runner_of(make(args, "cuda"), replace(limits, **sizes), "cuda")
    build = None if graphs else triton.build_inputs
    found = [draft_with_layers(runner, 2, each) for runner, each in zip(runners, (None, build), strict=True)]
    for runner in runners:
        compare_requests(
            ComparedRunners(runner, NaiveRunner(make_model(args, reference=True))),
            3,
            budget=24,
            kinds=support.KINDS[:2],
        )
    assert not graphs or {key[0] for key in runner.recorder.ran} >= {"decode", "mixed"}  # type: ignore[attr-defined]
    assert len(found[0]) > 20 and [place for place, _ in found[0]] == [place for place, _ in found[1]]
    for (_, expected), (_, logits) in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["eagle3", *full_rows(("latent", "model"))])
def test_layers_that_draft_run_in_a_rehearsal(cuda_runner: Callable[..., StepRunner], drafter: str) -> None:
    """Only one layer of each kind of the model runs, and all that an EAGLE-3 head reads. Nothing is written where a
    request could see it: afterwards the drafts are those of a runner that has rehearsed nothing."""
    args, make = drafting_model(drafter)
    sizes = {"graph_sizes": (1,), "graph_tokens": (16,), "draft_lengths": (1,), "num_drafts": 1}
    limits, found = replace(LIMITS, num_slots=2, **sizes), []
    for rehearsed in (True, False):
        runner = runner_of(make(args, "cuda"), limits, "cuda")
        seen = draft_with_layers(runner, 1)
        if rehearsed:
            first = plan(0, (0,), (7,), (SAMPLE,), admitted=(admission(0, 7, (1,)),), released=i32(0))
            runner.rehearse([first])
            runner.warm_up()
            seen.clear()
        runner.run(plan(1, (0,), (6,), (SAMPLE,), admitted=(admission(0, 6, (1,)),)))
        for step in (2, 3):
            decode = StepPlan(
                step=step,
                slots=i32(0),
                num_decodes=1,
                num_tokens=i32(2),
                num_rows=i32(2),
                outputs=np.array([SAMPLE], np.uint8),
            )
            runner.run(decode)
        found.append(list(seen))
    assert len(found[1]) == 2 and [place for place, _ in found[0]] == [place for place, _ in found[1]]
    for (_, logits), (_, expected) in zip(*found, strict=True):
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("forced", [{"sampling": "ref"}, {"step": "ref"}], ids=str)
def test_parts_go_together_as_they_are_chosen(forced: dict[str, str], cuda_runner: Callable[..., StepRunner]) -> None:
    runner = runner_of(make_model(model_args(num_hidden_layers=1), "cuda"), LIMITS, "cuda", **forced)
    chosen = {"step": "triton", "sampling": "triton"} | forced
    assert {choice.op: choice.name for choice in runner.parts[:2]} == chosen
    oracle = naive(num_hidden_layers=1)
    for each in PLANS[:4]:
        agree(runner.run(each), oracle.run(each))


def test_a_step_without_rows(cuda_runner: Callable[..., StepRunner]) -> None:
    """The next step sees the requests that such a step admits."""
    limits = replace(LIMITS, graph_sizes=(2, 4), graph_tokens=(48,))
    runner, oracle = cuda_runner(limits, num_hidden_layers=1), naive(num_hidden_layers=1)
    admitted = (admission(2, 12, (3,)),)
    plans = (
        plan(1, (), (), ()),
        plan(2, (), (), (), admitted=admitted),
        plan(3, (2,), (12,), (SAMPLE,)),
        plan(4, (), (), (), released=i32(2)),
    )
    for found, expected in zip(run_ahead(runner, plans), map(oracle.run, plans), strict=True):
        agree(found, expected)


def pooled(slot: int, num_tokens: int, blocks: tuple[int, ...], pool: str) -> Admission:
    return msgspec.structs.replace(admission(slot, num_tokens, blocks), pool=pool)


# A prompt in three chunks, one in two and whole ones, beside an answer; then a slot is given to another in the middle.
POOLED = (
    plan(1, (2, 0), (30, 5), (POOL, SAMPLE), admitted=(pooled(2, 40, (1, 2, 3), "mean"), admission(0, 5, (4,)))),
    plan(2, (0, 2, 1), (1, 3, 20), (SAMPLE, POOL, POOL), admitted=(pooled(1, 24, (5, 6), "cls"),)),
    plan(3, (0, 2, 1, 3), (1, 7, 4, 1), (SAMPLE, POOL, POOL, POOL), admitted=(pooled(3, 1, (7,), "last"),)),
    plan(
        4,
        (0, 1, 2),
        (1, 9, 30),
        (SAMPLE, POOL, POOL),
        released=i32(1, 2, 3),
        admitted=(pooled(1, 9, (5,), "last"), pooled(2, 40, (1, 2, 3), "mean")),
    ),
    plan(5, (2,), (9,), (POOL,), released=i32(1, 2), admitted=(pooled(2, 9, (1,), "mean"),)),
    plan(6, (0,), (1,), (SAMPLE,), released=i32(2)),
)


@pytest.mark.parametrize("sizes", [(2, 4), *full_rows(((),))])
def test_the_same_vectors_as_the_naive_runner_s(cuda_runner: Callable[..., StepRunner], sizes: tuple[int, ...]) -> None:
    oracle, seen = naive(num_hidden_layers=1), dict[int, np.ndarray]()
    limits = replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ())
    runner = cuda_runner(limits, num_hidden_layers=1)
    for expected, found in zip(map(oracle.run, POOLED), run_ahead(runner, POOLED), strict=True):
        agree(found, expected)
        seen |= {10 * found.step + slot: vector for slot, vector in found.pooled.items()}
    assert sorted(seen) == [31, 32, 33, 41, 52]
    assert all(not feature._prompts for feature in runner.features.computed)  # type: ignore[attr-defined]


def test_a_vector_that_is_not_a_number_fails_alone(cuda_runner: Callable[..., StepRunner]) -> None:
    runner = cuda_runner(num_hidden_layers=1)
    admitted = (pooled(0, 9, (1,), "mean"), pooled(1, 9, (2,), "mean"))
    runner.submit(plan(1, (0, 1), (5, 6), (POOL, POOL), admitted=admitted))
    runner.collect()
    for view in runner.programs.kv:
        view.k[2] = float("nan")
    runner.submit(plan(2, (0, 1), (4, 3), (POOL, POOL)))
    found = runner.collect()
    assert found.failed == {1: "nan_hidden"} and np.isfinite(found.pooled[0]).all()


def test_what_runs_is_what_was_captured(cuda_runner: Callable[..., StepRunner]) -> None:
    """A step launches a graph for its layers and one for the work after the logits; without a sampled row there is no
    draw. `warm_up` runs the smallest graph of each kind."""
    runner = cuda_runner(replace(LIMITS, graph_sizes=(2, 4), graph_tokens=(48,)))
    runner.programs.some = []  # no layers, which are no part of what is recorded here
    runner.warm_up()
    graphs = runner.recorder
    assert isinstance(graphs, Recording) and len(set(graphs.captured)) == len(graphs.captured) == 2 + 2 * (2 + 4)
    assert graphs.ran == [key for key in graphs.captured if key[1] in (2, 48)]  # type: ignore[index]
    graphs.ran.clear()
    run_ahead(runner, PLANS[:4])
    assert len(graphs.ran) == 2 * 4 and set(graphs.ran) - set(graphs.captured) == {("sample", 0, 0)}


def test_steps_with_prompts_are_captured_for_few_and_for_many(
    cuda_runner: Callable[..., StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.graphs.NARROW", 2)
    runner = cuda_runner(replace(LIMITS, graph_sizes=(2, 4), graph_tokens=(48,)))
    runner.programs.some = []  # no layers, which are no part of what is recorded here
    runner.warm_up()
    graphs = runner.recorder
    assert isinstance(graphs, Recording)
    graphs.ran.clear()
    run_ahead(runner, PLANS[:5])
    mixed = [key for key in graphs.ran if key[0] == "mixed"]  # type: ignore[index]
    assert mixed == [("mixed", 48, 4), ("mixed", 48, 4), ("mixed", 48, 8), ("mixed", 48, 4)]
    assert set(mixed) <= set(graphs.captured)


def test_rehearsing_leaves_no_result_and_does_what_is_captured(cuda_runner: Callable[..., StepRunner]) -> None:
    runner, did = cuda_runner(replace(LIMITS, graph_sizes=(2,), graph_tokens=(16,))), []
    for name in ("mixed", "decode"):
        setattr(runner.programs, name, lambda shape: did.append(shape.key))
    runner.programs.sample = lambda *args: did.append(args)  # type: ignore[method-assign, assignment]
    runner.rehearse([PLANS[2]])
    layers = [("mixed", 16, 8), ("mixed", 16, 9), ("decode", 2, 0), ("decode", 2, 1)]
    assert did[2:] == [*layers, *((2, mode) for mode in range(4))]
    assert not runner._running


@pytest.mark.parametrize("model", ["latent", *full_rows(("dense",))])
def test_a_shared_prefix_changes_no_token(cuda_runner: Callable[..., StepRunner], model: str) -> None:
    prompts = tuple(admission(slot, 40, (1, 2, 3 + slot), seed=slot, temperature=1.0) for slot in (0, 1))
    plans = (
        plan(1, (0,), (40,), (SAMPLE,), admitted=prompts[:1]),
        plan(2, (1,), (8,), (SAMPLE,), admitted=(msgspec.structs.replace(prompts[1], num_computed=32),)),
        *(plan(n, (0, 1), (1, 1), (SAMPLE, SAMPLE)) for n in (3, 4)),
    )
    together = tuple(
        each
        if each.step < 3
        else plan(each.step, (0, 1), (1, 1), (SAMPLE, SAMPLE), shared=(SharedPrefix(i32(0, 1), 2),))
        for each in plans
    )
    layers = {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    limits, oracle = replace(LIMITS, graph_sizes=(2, 4), graph_tokens=(48,)), naive(model, **layers)
    alone, shared = (run_ahead(cuda_runner(limits, model, **layers), each) for each in (plans, together))
    for expected, found in zip(map(oracle.run, plans), alone, strict=True):
        agree(found, expected)
    assert [each.tokens.tolist() for each in alone] == [each.tokens.tolist() for each in shared]


@pytest.mark.parametrize(
    "sizes, tokens, model",
    [
        ((4, 16), (48,), "dense"),
        *full_rows(
            (sizes, tokens, model)
            for sizes, tokens in (((4, 16), (48,)), ((4, 16), ()), ((), ()))
            for model in ("dense", "latent")
        ),
    ],
)
def test_a_shared_prefix_beside_prompts_changes_no_logit(
    cuda_runner: Callable[..., StepRunner], sizes: tuple[int, ...], tokens: tuple[int, ...], model: str
) -> None:
    """Five decodes share a prefix; then, in the same buffer, two of them, one who shares nothing and a prompt."""
    limits = replace(LIMITS, num_slots=16, graph_sizes=sizes, graph_tokens=tokens)
    first = [admission(slot, 36, (1, 2, 3 + slot)) for slot in range(5)]
    members = [first[0], *(msgspec.structs.replace(each, num_computed=32) for each in first[1:])]
    ids = np.arange(20, dtype=np.int32) * 13 % VOCAB
    outsider = msgspec.structs.replace(admission(13, 20, (28, 29)), token_ids=ids)

    def plans(shared: bool) -> list[StepPlan]:
        def together(*slots: int) -> dict[str, object]:
            return {"shared": (SharedPrefix(i32(*slots), 2),)} if shared else {}

        later = (*members[1:], outsider)
        return [
            plan(1, (0,), (36,), (SAMPLE,), admitted=(members[0],)),
            plan(2, (1, 2, 3, 4, 13), (4, 4, 4, 4, 20), (SAMPLE,) * 5, admitted=later),
            plan(6, (0, 1, 2, 3, 4), (1,) * 5, (SAMPLE,) * 5, **together(0, 1, 2, 3, 4)),
            *(plan(n, (13,), (1,), (SAMPLE,)) for n in (7, 8, 9)),
            plan(
                10, (13, 4, 2, 12), (1, 1, 1, 5), (SAMPLE,) * 4, admitted=(admission(12, 5, (20,)),), **together(4, 2)
            ),
        ]

    def logits(shared: bool) -> torch.Tensor:
        runner, found = cuda_runner(limits, model, num_hidden_layers=1), []
        for each in plans(shared):
            runner.run(each)
            found.append(runner.programs.logits(len(each.slots)).clone())
        return torch.cat(found)

    torch.testing.assert_close(logits(True), logits(False), rtol=0, atol=1e-5)


def test_a_batch_goes_through_what_its_rows_need(cuda_runner: Callable[..., StepRunner]) -> None:
    table = cuda_runner().state.sampling
    specs = ({"temperature": 0.0}, {}, {"top_k": 3}, {"temperature": 0.0, "logit_bias": ((1, 2.0),)})
    for slot, spec in enumerate(specs):
        table.admit(slot, SamplerSpec(seed=0, num_prompt=1, **spec))  # type: ignore[arg-type]
        assert table.mode(i32(0, slot)) == Mode(slot)
    table.admit(0, SamplerSpec(seed=0, num_prompt=1, temperature=0.0, presence_penalty=0.5))
    assert table.mode(i32(0, 2)) == Mode.FULL
    table.release(0)
    assert table.mode(i32(0, 1)) == Mode.UNFILTERED and table.mode(i32()) == Mode.GREEDY


@pytest.mark.parametrize("sizes", [(2, 4), *full_rows(((),))])
def test_a_step_with_a_grammar_samples_when_its_masks_are_there(
    cuda_runner: Callable[..., StepRunner], sizes: tuple[int, ...]
) -> None:
    """The layers run when it is submitted, and the step before is collected in between; beside a row that is free."""
    oracle = naive(num_hidden_layers=1)
    limits = replace(LIMITS, graph_sizes=sizes, graph_tokens=(48,) if sizes else ())
    runner = cuda_runner(limits, num_hidden_layers=1)
    admitted = (
        admission(2, 33, (1, 2, 3), grammar=True),
        admission(0, 5, (4,), seed=6, temperature=0.7),
        admission(1, 5, (5,), seed=7, temperature=0.9, top_k=20, grammar=True),
    )
    plans = (
        plan(1, (2, 0, 1), (30, 5, 5), (0, SAMPLE, SAMPLE), admitted=admitted, grammar=i32(1)),
        plan(2, (0, 1, 2), (1, 1, 3), (SAMPLE, SAMPLE, SAMPLE), grammar=i32(1, 2)),
        plan(3, (0, 1), (1, 1), (SAMPLE, SAMPLE), grammar=i32(1)),
        plan(4, (0,), (1,), (SAMPLE,), released=i32(1)),
        plan(5, (0, 2), (1, 1), (SAMPLE, SAMPLE), grammar=i32(2)),
    )
    bits = np.random.default_rng(0).random((5, 3, VOCAB)) < 0.1
    masks_of_plans = [
        np.packbits(bits[i, : len(p.grammar)], axis=1, bitorder="little").view(np.int32) for i, p in enumerate(plans)
    ]
    found: list[StepResult] = []
    for number, (each, masks) in enumerate(zip(plans, masks_of_plans, strict=True)):
        runner.submit(each)
        assert len(runner._running) == (number > 0) + (not len(each.grammar))
        if number:
            found.append(runner.collect())
        if len(masks):
            runner.release(masks)
    found.append(runner.collect())
    for i, (each, masks, result) in enumerate(zip(plans, masks_of_plans, found, strict=True)):
        expected = oracle.run(each, lambda masks=masks: masks)
        agree(result, expected)
        for slot, token in zip(result.slots.tolist(), result.tokens[:, 0].tolist(), strict=True):
            masked = each.grammar.tolist()
            assert slot not in masked or bits[i, masked.index(slot), token]
    graphs = runner.recorder
    assert isinstance(graphs, Recording) and [key[0] for key in graphs.ran[:4]].count("sample") == (2 if sizes else 4)


def test_steps_make_no_events(cuda_runner: Callable[..., StepRunner]) -> None:
    runner = cuda_runner()
    runner.programs.some = []  # no layers, which make no events
    before = Event.made
    run_ahead(runner, PLANS[:3])
    assert Event.made == before


def test_a_row_that_is_not_a_number_fails_alone(cuda_runner: Callable[..., StepRunner]) -> None:
    runner = cuda_runner(num_hidden_layers=1)
    runner.submit(plan(1, (0, 1), (5, 6), (SAMPLE, SAMPLE), admitted=(admission(0, 5, (1,)), admission(1, 6, (2,)))))
    runner.collect()
    for view in runner.programs.kv:
        view.k[2] = float("nan")
    runner.submit(plan(2, (0, 1), (1, 1), (SAMPLE, SAMPLE)))
    assert runner.collect().failed == {1: "nan_logits"}


@pytest.mark.parametrize(
    ("model", "drafts"),
    [("dense", 2), ("latent", 0), *full_rows((("dense", 0), ("experts", 0), ("latent", 2)))],
)
def test_moved_tokens_are_those_of_the_cpu(cuda_runner: Callable[..., StepRunner], model: str, drafts: int) -> None:
    """Beside a decode, with captured sizes: attention to chosen rows, moves and deviations, and the head after them.
    With drafts, those of a draft model are equal too; it computes all tokens."""
    spread = np.arange(16, dtype=np.int32)
    moved = BlendedChunk(
        slot=1, tokens=5 + spread, sources=16 + spread[None], shifts=np.full(16, 5, np.int32), num_kept=9
    )
    both = {"num_decodes": 2, "num_tokens": i32(1 + drafts, 1 + drafts), "num_rows": i32(1 + drafts, 1 + drafts)}
    plans = (
        plan(1, (0,), (17,), (SAMPLE,), admitted=(admission(0, 17, (1, 2)),)),
        plan(
            2,
            (0, 1),
            (1, 24),
            (SAMPLE, SAMPLE),
            admitted=(admission(1, 24, (4, 5)),),
            features=PlanFeatures(blended=(moved,)),
        ),
        msgspec.structs.replace(plan(3, (0, 1), (1, 1), (SAMPLE, SAMPLE)), **both),
    )
    found: dict[str, list[torch.Tensor]] = {"cpu": [], "cuda": []}
    sizes = {"graph_sizes": (2,), "graph_tokens": (48,), "draft_lengths": (drafts,) * (drafts > 0)}
    for target, logits in found.items():
        args = model_args(model, num_hidden_layers=4, first_k_dense_replace=4)  # two behind the choice
        made = make_model(args, target, more=("blend",))
        for layer in made.layers if model == "latent" else ():
            layer.attention.most_absorbed = 4  # the prompt is expanded beside the decode
        made.draft = make_model(with_layers(args, 1), target) if drafts else None
        runner = runner_of(made, replace(LIMITS, num_drafts=drafts, **(sizes if target == "cuda" else {})), target)
        if drafts:
            seen = draft_with_layers(runner, drafts)
        runner.features.attach(LogitsTap(lambda slots, positions, rows, to=logits: to.append(rows.clone())))
        for one in plans:
            runner.run(one)
        logits += [logits_of_draft for _, logits_of_draft in seen] if drafts else []
    assert len(found["cpu"]) == len(found["cuda"]) == 3 + 2 * drafts
    for cpu, cuda in zip(*found.values(), strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=0, atol=1e-4)
