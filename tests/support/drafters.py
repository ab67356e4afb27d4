"""Constructed drafters for tests: they know the answers, and guess right, wrong, or as chance will have it.

A `Drafter` for the device, and `guess` for the drafts that the host makes under a grammar.
"""

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs
from quire.contracts.request import Request
from quire.contracts.speculation import Speculation
from quire.contracts.step import Admission
from quire.engine.drafts import DraftLength
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.layers.context import StepContext
from quire.spec.choose import make_drafter
from quire.spec.drafter import Changes, Drafter
from quire.spec.layers import LayerDrafter
from quire.worker.runner import StepRunner

from .compared import ComparedRunners, compare_requests, make_model
from .features import set_drafter
from .naive_runner import NaiveRunner

NO_DRAFT = -1


def draft_with_layers(
    runner: StepRunner, num_drafts: int, build: Any = None, *, late: bool = True
) -> list[tuple[int, Tensor]]:
    """Let a runner draft with its model's prediction layer, EAGLE head or draft model. Returns the (positions, logits)
    of drafts as they come.

    build   builds the inputs of padded passes; None: the runner's operations
    late    small steps without drafts leave their rows to a later pass
    """
    step: Any = runner.programs.operations
    name, seen = runner.parts[0].name, list[tuple[int, Tensor]]()
    if build is not None:
        name, others = "padded", {"gather_blocks": step.gather_blocks, "keep_states": step.keep_states}
        step = SimpleNamespace(build_inputs=build, **others)
    draft = runner.model.draft
    method = "mtp" if draft is None else "draft_model" if draft.args.eagle is None else draft.args.eagle.method
    drafter = make_drafter(
        Speculation(method=method, num_drafts=num_drafts),
        name,
        model=runner.model,
        kv=runner.programs.kv,
        operations=step,
        tables=runner.state.tables,
        sampling=(runner.sampler.operations, runner.sampler.rows),
        windows=runner.limits.windows if late else None,
    )
    assert isinstance(drafter, LayerDrafter)
    drafter.on_logits = lambda slots, places, logits: seen.extend(zip(places.tolist(), logits.clone(), strict=True))
    set_drafter(runner, drafter)
    return seen


def compare_some_drafts(
    runner: StepRunner, args: ModelArgs, monkeypatch: pytest.MonkeyPatch, *, number: int, blocks: int = 31
) -> ComparedRunners:
    """Run `number` requests of which one step of six has drafts. Every token is compared with the naive runner's."""
    steps = itertools.count()
    monkeypatch.setattr(DraftLength, "choose", lambda self, decodes: 0 if next(steps) % 6 else self.most)
    compared = ComparedRunners(runner, NaiveRunner(make_model(args, reference=True)), blocks)
    compare_requests(compared, number, budget=24, kinds=({"temperature": 0.0}, {"temperature": 0.9}), answers=50)
    return compared


class KnownAnswers:
    """A `Drafter` that knows the text of every request.

    texts    seed of a request -> its tokens, prompt and output, as plain decoding made them
    params   [slots, words] int32, `SamplingTable.rows`, in which the seed of a slot is
    kind     "right": every draft is the next token; "wrong": none is; "random": right, any token or no draft by chance;
             a number: the chance of each draft to be right, else it is wrong
    inner    drafter whose drafts are written over; it goes on to keep its cache. None: there is none
    """

    def __init__(
        self,
        texts: Mapping[int, Sequence[int]],
        params: Tensor,
        kind: str | float,
        vocab: int,
        inner: Drafter | None = None,
    ) -> None:
        self._texts, self._params, self._kind, self._vocab = texts, params, kind, vocab
        self._random, self._inner = np.random.default_rng(0), inner
        self.late = None if inner is None else inner.late

    def admit(self, admitted: tuple[Admission, ...]) -> Changes:
        return [] if self._inner is None else self._inner.admit(admitted)

    def follow(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, *, decode: bool) -> None:
        if self._inner is not None:
            self._inner.follow(step, buffers, hidden, ctx, decode=decode)

    def keep(self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext) -> None:
        assert self._inner is not None
        self._inner.keep(step, buffers, hidden, ctx)

    def catch_up(self, step: StepWords, tables: Tables, begin: int, seqs: int) -> None:
        assert self._inner is not None
        self._inner.catch_up(step, tables, begin, seqs)

    def draft(self, step: StepWords, tables: Tables, seqs: int, count: int) -> None:
        """Write the drafts of a step's decodes. See `Drafter`."""
        if self._inner is not None:
            self._inner.draft(step, tables, seqs, count)
        starts = step.starts[: (step.num_decodes if count else 0) + 1].tolist()
        for i, slot in enumerate(step.slots[: len(starts) - 1].tolist()):
            known, count = int(tables.computed[slot]) + 1, starts[i + 1] - starts[i] - 1
            if tables.hosted[slot]:
                continue
            seed = int(self._params[slot].view(torch.int64)[2]) % 2**64
            drafts = torch.tensor(self._drafts(seed, known, count), dtype=torch.int32)
            tables.history[slot, known : known + count] = drafts

    def guess(self, request: Request, skip: int, count: int, lookup: tuple[int, int]) -> list[int]:
        """Return drafts of a request with a grammar. See `Scheduler.guess`."""
        drafts = self._drafts(request.new.sampler.seed, len(request.tokens) + skip, count)
        return drafts[: drafts.index(NO_DRAFT)] if NO_DRAFT in drafts else drafts

    def _drafts(self, seed: int, known: int, count: int) -> list[int]:
        right = [*self._texts[seed][known : known + count], *[0] * count][:count]
        return [self._draft(token) for token in right]

    def _draft(self, token: int) -> int:
        chance = self._random.random()
        if isinstance(self._kind, float):
            return token if chance < self._kind else (token + 1) % self._vocab
        if self._kind == "right" or self._kind == "random" and chance < 0.6:
            return token
        return (token + 1) % self._vocab if self._kind == "wrong" or chance < 0.9 else NO_DRAFT
