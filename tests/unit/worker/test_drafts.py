"""Steps with drafts: whatever a drafter guesses, every token is the one that plain decoding draws."""

import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import SAMPLE, StepPlan
from quire.kernels.index import Chosen
from quire.kernels.ngram import ref
from quire.kernels.sampling import Rows
from quire.kernels.sampling import ref as sampling
from quire.kernels.sampling.rows import Mode, encode_row
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.kernels.step import ref as step_operations
from quire.kernels.step.upload import InPlaceUpload
from quire.plan.as_stored import with_prediction
from quire.spec.layers import LayerDrafter
from quire.spec.ngram import NgramDrafter
from quire.worker.runner import StepRunner
from quire.worker.synthetic import SyntheticAcceptance

from ...support.compared import KINDS, LIMITS, ComparedRunners, compare_requests, make_model, model_args, runner_of
from ...support.drafters import KnownAnswers, draft_with_layers
from ...support.features import drafter_of, set_drafter
from ...support.full import full_rows
from ...support.naive_runner import NaiveRunner

pytestmark = pytest.mark.usefixtures("one_thread")
SOME: Any = ({"temperature": 0.0, "num_drafts": 0}, {"temperature": 0.9, "num_drafts": 1, "num_logprobs": 1}, *KINDS)
NUMBER = 12  # of requests: one of each kind


@functools.cache
def texts(kind: str) -> dict[int, list[int]]:
    """The answers of plain decoding to the requests of `compare_requests`."""
    args = model_args(kind)
    compared = ComparedRunners(runner_of(make_model(args)), NaiveRunner(make_model(args, reference=True)))
    compare_requests(compared, NUMBER, budget=24, kinds=SOME)
    return compared.naive.texts


def compared_drafts(kind: str, guesses: str, *, drafts: int, depth: int, blocks: int = 31) -> ComparedRunners:
    """Run requests of all kinds with drafts; every token is compared with the naive runner's."""
    args = with_prediction(model_args(kind), drafting=int(guesses == "layer"))
    runner = runner_of(make_model(args), replace(LIMITS, depth=depth, num_drafts=drafts))
    set_drafter(runner, NgramDrafter(ref, 1, 3))
    if guesses == "layer":
        seen = draft_with_layers(runner, drafts)
    elif guesses != "ngram":
        set_drafter(runner, KnownAnswers(texts(kind), runner.sampler.table.rows, guesses, args.vocab_size))
    compared = ComparedRunners(runner, NaiveRunner(make_model(args, reference=True)), blocks)
    core = compare_requests(compared, NUMBER, budget=24, kinds=SOME)
    assert (core.scheduler.num_preempted > 0) == (blocks == 5) and not runner._running
    if guesses == "layer":  # entries that were never written are no numbers
        assert len(seen) > 40 and all(logits.isfinite().all() for _, logits in seen)
    return compared


def accepted(compared: ComparedRunners) -> tuple[int, int, int]:
    """Drafts that were planned, made and accepted."""
    planned = made = right = 0
    for plan, result in compared.results:
        rows = plan.num_tokens[: plan.num_decodes]
        if (rows > 1).any():
            planned += int((rows - 1).sum())
            made += int(result.num_drafted.sum())
            right += int((result.num_accepted[: plan.num_decodes] - 1).sum())
    return planned, made, right


def most_rows(compared: ComparedRunners) -> dict[int, int]:
    """Most rows of a step, by the number of drafts that a request allows."""
    owner: dict[int, int] = {}
    seen: dict[int, int] = {}
    for plan, _ in compared.results:
        owner |= {a.slot: SOME[a.sampler.seed % len(SOME)].get("num_drafts", 99) for a in plan.admitted}
        for slot, rows in zip(plan.slots[: plan.num_decodes].tolist(), plan.num_tokens.tolist(), strict=False):
            seen[owner[slot]] = max(seen.get(owner[slot], 0), rows)
    return seen


# Pairwise: model, drafter, number of drafts, depth, blocks. With 5 blocks requests give way.
CASES = [
    ("dense", "right", 3, 1, 31),
    ("dense", "wrong", 3, 2, 31),
    ("dense", "random", 6, 2, 5),
    ("experts", "ngram", 6, 1, 31),
    ("latent", "layer", 3, 2, 31),
    ("glm", "layer", 1, 1, 5),
    *full_rows((("experts", "right", 1, 2, 5), ("latent", "random", 3, 2, 31))),
]


@pytest.mark.parametrize(("kind", "guesses", "drafts", "depth", "blocks"), CASES)
def test_every_token_is_that_of_plain_decoding(kind: str, guesses: str, drafts: int, depth: int, blocks: int) -> None:
    """Greedy, sampled, filters, penalties, edits, logprobs of both kinds, pooling, chunks, prefixes, preemption."""
    compared = compared_drafts(kind, guesses, drafts=drafts, depth=depth, blocks=blocks)
    planned, made, right = accepted(compared)
    assert planned > 40
    if guesses == "right":
        assert right == made == planned
    elif guesses == "wrong":
        assert right == 0 and made == planned
    elif guesses == "layer":
        assert right < made == planned
    else:
        assert 0.1 * made < right < made < planned
    assert most_rows(compared) == {0: 1, 1: 2, 99: 1 + drafts}
    mixed = [
        plan
        for plan, _ in compared.results
        if 0 < plan.num_decodes < len(plan.slots)
        and (plan.num_tokens[: plan.num_decodes] > 1).any()
        and (plan.outputs[plan.num_decodes :] & SAMPLE).any()
    ]
    assert len(mixed) > 3, "decodes with drafts beside prompts that sample"


@pytest.mark.parametrize(("kind", "guesses"), [("experts", "none"), ("latent", "random")])
def test_no_expert_computes_a_row_without_a_guess(kind: str, guesses: str) -> None:
    args = model_args(kind)
    runner = runner_of(make_model(args), replace(LIMITS, num_drafts=3))
    if guesses == "none":  # looks for whole texts
        set_drafter(runner, NgramDrafter(ref, LIMITS.max_model_len, LIMITS.max_model_len))
    else:
        set_drafter(runner, KnownAnswers(texts(kind), runner.sampler.table.rows, guesses, args.vocab_size))
    live = list[int]()
    runner.model.layers[-1].mlp.on_routing = lambda weights, ids: live.append(int((ids >= 0).all(1).sum()))
    compared = ComparedRunners(runner, NaiveRunner(make_model(args, reference=True)))
    compare_requests(compared, NUMBER, budget=24, kinds=SOME)
    steps = [(plan, result) for plan, result in compared.results if len(plan.slots)]
    lost = [int((plan.num_tokens[: plan.num_decodes] - 1).sum() - result.num_drafted.sum()) for plan, result in steps]
    assert live == [int(plan.num_tokens.sum()) - rows for (plan, _), rows in zip(steps, lost, strict=True)]
    assert sum(map(bool, lost)) > 10 and (guesses == "none") == (accepted(compared)[1] == 0)


def test_rows_and_tokens_of_a_step_have_room() -> None:
    """All slots with all drafts beside a whole budget of prompts."""
    limits = replace(LIMITS, num_drafts=3)
    runner = runner_of(make_model(model_args()), limits)
    assert limits.max_rows == LIMITS.num_slots * 4 == len(runner.state.buffers.sample_rows)
    assert len(runner.state.buffers.token_ids) == LIMITS.max_tokens + 12 and runner.programs.out.shape == (3, 16)
    assert replace(limits, num_slots=2000).max_rows == 2000 + 1024


SYMBOLS, DRAWS = 7, 40_000


def test_three_tokens_are_drawn_with_the_model_s_joint_probability() -> None:
    """Of a chain with random transitions, by drafts that are often right: chi-square over all 343 triples."""
    random = torch.Generator().manual_seed(5)
    transitions = 0.9 * torch.randn(SYMBOLS, SYMBOLS, generator=random)
    tables = Tables(
        block_tables=torch.ones(1, DRAWS + 1, 1, dtype=torch.int32),
        computed=torch.zeros(DRAWS + 1).long(),
        history=torch.zeros(DRAWS + 1, 8, dtype=torch.int32),
        block_sizes=(8,),
        hosted=torch.zeros(DRAWS + 1, dtype=torch.int32),
    )
    spec = [encode_row(SamplerSpec(seed=seed * 7919, num_prompt=1, temperature=1.0), 0) for seed in range(DRAWS)]
    params, operations = torch.from_numpy(np.stack([*spec, spec[0]])), sampling.operations(0, 0, torch.device("cpu"))
    upload, out = InPlaceUpload(DRAWS, DRAWS, torch.device("cpu")), torch.zeros(3, 3 * DRAWS, dtype=torch.int32)
    for number in range(3):
        left = (3 - tables.computed[:DRAWS]).numpy()  # tokens that are still wanted
        slots = np.flatnonzero(left > 0).astype(np.int32)
        counts = left[slots].astype(np.int32)
        plan = StepPlan(
            step=number,
            slots=slots,
            num_decodes=len(slots),
            num_tokens=counts,
            num_rows=counts,
            outputs=np.full(len(slots), SAMPLE, np.uint8),
        )
        upload.send(plan, [])
        total = int(counts.sum())
        for ahead in (1, 2):  # drafts: often the likeliest token, else any
            at = torch.from_numpy(slots[counts > ahead]).long()
            place = tables.computed[at] + ahead
            likely = transitions[tables.history[at, place - 1].long()].argmax(1)
            guess = torch.where(
                torch.rand(len(at), generator=random) < 0.8,
                likely,
                torch.randint(SYMBOLS, (len(at),), generator=random),
            )
            tables.history[at, place] = guess.int()
        ints = {
            name: torch.zeros(total, dtype=torch.int64)
            for name in ("token_ids", "positions", "sample_rows", "sample_slots", "sample_positions")
        }
        buffers = StepBuffers(
            kv_slots=torch.zeros(1, total, dtype=torch.int64),
            drafts=torch.zeros(total).int(),
            live=torch.zeros(total).bool(),
            seq_lens=torch.zeros(len(slots)).int(),
            **ints,
        )
        step_operations.build_inputs(upload.step, tables, buffers)
        rows = Rows(buffers.sample_slots, buffers.sample_positions, params, tables.history, {})
        operations.sample(transitions[buffers.token_ids], rows, Mode.UNFILTERED)
        step_operations.finish_step(upload.step, tables, buffers, operations.tokens, operations.codes, out[:, :total])
    assert (tables.computed[:DRAWS] == 3).all() and number == 2 and len(slots) < DRAWS
    triples = tables.history[:DRAWS, 1:4].long() @ torch.tensor([SYMBOLS**2, SYMBOLS, 1])
    p = transitions.double().softmax(1)
    expected = DRAWS * (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    found = torch.bincount(triples, minlength=SYMBOLS**3)
    common = expected >= 5
    chi = float(((found - expected) ** 2 / expected)[common].sum())
    rare = (float(found[~common].sum()), float(expected[~common].sum()))
    freedom = int(common.sum())
    assert freedom > 200 and chi < freedom + 4 * (2 * freedom) ** 0.5 and abs(rare[0] - rare[1]) < 4 * rare[1] ** 0.5


def test_synthetic_acceptance_changes_the_rows_with_a_draft_and_no_others() -> None:
    """Beside a prompt, a slot whose drafts come from the host, and padding."""
    device, slots = torch.device("cpu"), 8
    upload, rows = InPlaceUpload(slots, slots, device), 16
    tables = Tables(
        block_tables=torch.ones(1, slots + 1, 1, dtype=torch.int32),
        computed=torch.zeros(slots + 1).long(),
        history=torch.zeros(slots + 1, 8, dtype=torch.int32),
        block_sizes=(8,),
        hosted=torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0], dtype=torch.int32),
    )
    counts = np.array([4, 1, 3, 4, 5], np.int32)  # the last: a chunk of a prompt, with one row
    plan = StepPlan(
        step=0,
        slots=np.array([2, 0, 1, 3, 5], np.int32),
        num_decodes=4,
        num_tokens=counts,
        num_rows=np.array([4, 1, 3, 4, 1], np.int32),
        outputs=np.full(5, SAMPLE, np.uint8),
    )
    upload.send(plan, [])
    owner = torch.tensor([2] * 4 + [0] + [1] * 3 + [3] * 4 + [5] + [slots] * 3)
    ints = {name: torch.zeros(rows).long() for name in ("token_ids", "positions", "sample_rows", "sample_positions")}
    buffers = StepBuffers(
        kv_slots=torch.zeros(1, rows).long(),
        seq_lens=torch.zeros(slots).int(),
        sample_slots=owner,
        live=torch.zeros(rows).bool(),
        drafts=torch.zeros(rows).int(),
        **ints,
    )
    synthetic, tokens = SyntheticAcceptance((1.0, 0.5, 0.0), rows, device), torch.arange(100, 100 + rows)
    right = torch.zeros(rows)
    for _ in range(200):
        buffers.drafts.fill_(-1)
        synthetic.sampled(upload.step, tables, buffers, tokens, rows)
        right += buffers.drafts == tokens
    drafted = [0, 1, 2, 5, 6]
    assert (buffers.drafts != -1).nonzero().flatten().tolist() == drafted
    assert right[drafted].tolist() == pytest.approx([200, 100, 0, 200, 100], abs=2)


class Watched:
    """The draft layer of a runner: how often its indexer writes keys and scores them, and to which tokens each pass of
    a step attends: a sequence's length and last row by slot, where the sequence has more tokens than a choice."""

    def __init__(self, runner: StepRunner) -> None:
        drafter, indexer = drafter_of(runner), runner.model.drafts[0].block.attention.indexer
        assert isinstance(drafter, LayerDrafter)
        self.calls, self.steps = Counter[str](), list[list[dict[int, tuple[int, list[int]]]]]()
        names = ("prepare", "choose")
        indexer.kernel = SimpleNamespace(**{name: self._counted(getattr(indexer.kernel, name), name) for name in names})
        draft, run, layer, step = drafter.draft, drafter._run, drafter._pass, drafter._step

        def drafted(*given: Any) -> None:
            self.steps.append([])
            draft(*given)

        def passed(*given: Any, **named: Any) -> Tensor:
            plain = layer.run
            layer.run = lambda *of_pass: self._noted(plain(*of_pass), of_pass[-1].chosen, step)  # type: ignore
            out = run(*given, **named)
            layer.run = plain  # type: ignore[method-assign]
            return out

        drafter.draft, drafter._run = drafted, passed  # type: ignore[method-assign]

    def _counted(self, work: Any, name: str) -> Any:
        return lambda *given: (self.calls.update((name,)), work(*given))[1]

    def _noted(self, out: Tensor, chosen: Chosen, step: StepWords) -> Tensor:
        found, end = dict[int, tuple[int, list[int]]](), 0
        for first, last, s, past in chosen.sequences:
            end += last - first
            found[int(step.slots[s])] = past + last - first, chosen.positions[end - 1].tolist()
        self.steps[-1].append(found)
        return out


@pytest.mark.parametrize("shares", [True, False])
def test_later_passes_attend_to_the_choice_of_the_first(shares: bool) -> None:
    """With `index_share_for_mtp_iteration`: all write keys, the first alone scores them. A sequence that becomes longer
    than a choice attends to its first tokens. Answers are those of plain decoding."""
    given = model_args("sparse latent", index_share_for_mtp_iteration=shares, index_topk=24)
    args = with_prediction(given, drafting=1)
    runner = runner_of(make_model(args), replace(LIMITS, num_drafts=3))
    seen, watched = draft_with_layers(runner, 3, late=False), Watched(runner)
    compare_requests(ComparedRunners(runner, NaiveRunner(make_model(args, reference=True))), 6, budget=24, kinds=SOME)
    assert len(seen) > 40 and all(logits.isfinite().all() for _, logits in seen)
    steps = [found for found in watched.steps if len(found) > 1]
    later = [(first, slot, one) for first, *others in steps for each in others for slot, one in each.items()]
    chosen = [(first[slot], one) for first, slot, one in later if slot in first]
    crossing = [positions for first, slot, (_, positions) in later if slot not in first]
    assert len(chosen) > 20 and len(crossing) > 1 and any(length > before for (before, _), (length, _) in chosen)
    same = [positions == kept for (_, kept), (_, positions) in chosen] + [one == [*range(24)] for one in crossing]
    assert all(same) == shares
    unscored = watched.calls["prepare"] - watched.calls["choose"]
    assert unscored == (sum(len(found) - 1 for found in steps) if shares else 0)
