"""Executor without a model, part of the package: scheduler, server and front end are tested and timed with it.

The next token is a pure function of prefix and seed (`next_token`), so each answer is known beforehand. Like a device,
the mock samples from its own state and returns tokens only at `collect`. It has no KV memory; the tests add one.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from quire.contracts.adapters import AdapterLoad, AdapterLoaded
from quire.contracts.errors import ConfigError
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.contracts.step import (
    F32,
    I32,
    NO_MASKS,
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    Admission,
    HostDrafts,
    RowLogprobs,
    StageRuns,
    StepPlan,
    StepResult,
)

MASK = 2**64 - 1
FIRST = 0x9E3779B97F4A7C15
HALVING = math.log(2)
SIZES = {
    "num_slots": 8,
    "num_blocks": 64,
    "block_size": 4,
    "vocab_size": 1000,
    "max_model_len": 128,
    "depth": 1,
    "num_drafts": 0,
}


def chain(previous: int, token: int) -> int:
    """Return the digest of a prefix extended by `token`; `previous` is the digest of the prefix."""
    x = (previous ^ (token + 1) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def next_token(digest: int, seed: int, vocab_size: int) -> int:
    """Return the token that the mock generates after a prefix with this digest, for a request with this seed."""
    return chain(digest, seed & 0xFFFFFFFF) % vocab_size


def first_digest(adapter: str) -> int:
    """Return the digest of no tokens, of a request with the adapter of this content digest; "": the base model."""
    return chain(FIRST, crc32(adapter.encode())) if adapter else FIRST


def mock_hidden(digest: int, width: int) -> F32:
    """Return the mock's hidden state [width] at a position whose prefix has this digest."""
    return np.cos(digest % 9973 * np.arange(1, width + 1, dtype=np.float32))


def allowed_token(token: int, mask: I32 | None, vocab_size: int) -> int:
    """Return the token that the mock samples under a grammar mask: one chosen by `token`; -1 if the mask allows none.

    mask   a row of `Executor.release`; None: `token` itself is returned
    """
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little"))
    return int(allowed[token % len(allowed)]) if len(allowed) else -1


def _drafted(plan: StepPlan, sampling: int) -> I32:
    """Return the number of drafts [sampling] of each slot that samples: all that were planned."""
    drafted = np.zeros(sampling, np.int32)
    drafted[: plan.num_decodes] = plan.num_tokens[: plan.num_decodes] - 1
    return drafted


def _masked(plan: StepPlan, masks: I32) -> dict[int, I32]:
    """Return the masks of each slot with a grammar, a row for each sampled row."""
    decodes = plan.slots[: plan.num_decodes].tolist()
    rows = dict(zip(decodes, plan.num_tokens.tolist(), strict=False))
    ends = np.cumsum([rows.get(slot, 1) for slot in plan.grammar.tolist()], dtype=int)
    assert not len(ends) or ends[-1] == len(masks), "a mask for each row"
    return dict(zip(plan.grammar.tolist(), np.split(masks, ends[:-1]), strict=False))


class _Slot:
    """State of a slot on the mock device."""

    def __init__(self, admission: Admission, first: int = FIRST) -> None:
        self.first, self.adapter = first, admission.adapter
        self.request_id, self.sampler = admission.request_id, admission.sampler
        self.seed, self.num_prompt = admission.sampler.seed, admission.sampler.num_prompt
        self.tokens, self.computed = admission.token_ids.tolist(), admission.num_computed
        self.pool = admission.pool
        self.decodes = False  # True: a token was sampled since the admission
        self.accepted = 0  # correct drafts of this step
        self.told = list(self.tokens)  # tokens that the stages of a pipeline know
        self.ahead: list[int] = []  # drafts that its last stage has made
        self.seen: list[int] = []  # positions whose hidden states are pooled
        self.digests: list[int] = []
        self.extend()

    def extend(self) -> None:
        digest = self.digests[-1] if self.digests else self.first
        for token in self.tokens[len(self.digests) :]:
            digest = chain(digest, token)
            self.digests.append(digest)


class MockExecutor(Executor):
    """An `Executor` without a device.

    sizes     fields of `ExecutorFacts` (num_slots, num_blocks, ...) that differ from the defaults in `SIZES`
    accepts   numbers of accepted drafts for one decode after another; the sequence repeats. A decode accepts no draft
              at or after the output at which `fail` makes its request fail. Drafts of `StepPlan.drafts` are accepted
              if they are right
    step_seconds   duration of a step; steps run one after another, as on a device, and `collect` waits for them
    width     size of a hidden state
    fail      request id -> number of outputs after which the request fails with "nan_logits"; with 0, a pooling request
              fails with "nan_hidden"
    loads     steps that the load of an adapter takes, for one load after another; the sequence repeats
    broken    digests of adapters that cannot be loaded
    """

    def __init__(
        self,
        *,
        step_seconds: float = 0.0,
        width: int = 8,
        accepts: Sequence[int] = (0,),
        loads: Sequence[int] = (1,),
        **sizes: Any,
    ) -> None:
        given: dict[str, Any] = SIZES | sizes
        self._facts = ExecutorFacts(decode_lag=given["depth"], **given)
        self.fail: dict[str, int] = {}
        self.broken: set[str] = set()
        self._loads, self._adapters = itertools.cycle(loads), dict[int, str]()  # digest of each slot's adapter
        self._loading: list[tuple[int, AdapterLoad]] = []  # with the step after which it is there
        self._held: set[str] = set()  # adapters in host memory
        self.num_steps = 0
        self.closed = False
        self._step_seconds, self._width = step_seconds, width
        self._accepts = itertools.cycle(accepts)
        self._slots: dict[int, _Slot] = {}
        self._results: deque[tuple[StepResult, float]] = deque()  # with the time at which the result is ready
        self._done = 0.0  # time at which the last submitted step is done
        self._released: set[int] = set()
        self._waiting: StepPlan | None = None  # for its masks

    def submit(self, plan: StepPlan) -> None:
        """Run the plan: now, or in `release` when it needs grammar masks. `collect` returns its result."""
        assert len(self._results) < self._facts.depth, "more steps in flight than the depth"
        assert plan.step == self.num_steps, "plans out of order"
        assert self._waiting is None, "submitted before the last step was released"
        self.num_steps += 1
        if self._step_seconds:
            self._done = max(self._done, time.monotonic()) + self._step_seconds
        self._waiting = plan
        if not len(plan.grammar):
            self._sample(NO_MASKS)

    def release(self, step: int, masks: I32) -> None:
        self._released.add(step)
        if self._waiting is not None:
            assert step == self._waiting.step, "a step is released that does not wait"
            self._sample(masks)

    def _sample(self, masks: I32) -> None:
        assert self._waiting is not None
        plan, self._waiting = self._waiting, None
        self._results.append((self._run(plan, _masked(plan, masks)), self._done))

    def collect(self) -> StepResult:
        """Wait until the oldest step is done and return its result."""
        result, done = self._results.popleft()
        if self._step_seconds:
            time.sleep(max(0.0, done - time.monotonic()))
        self._released.remove(result.step)
        return result

    def facts(self) -> ExecutorFacts:
        return self._facts

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Return no calls for "trace" and "profile". Refuse every other name: the mock has no operations."""
        if name in ("trace", "profile"):
            return []
        raise ConfigError(f"unknown control {name!r}.")

    def shutdown(self, *, wait: bool = True) -> None:
        """Record the shutdown for tests; there is nothing to free."""
        self.closed = True

    def _run(self, plan: StepPlan, masks: dict[int, I32]) -> StepResult:
        hosted = {drafts.slot: drafts for drafts in plan.drafts}
        self._enter(plan)
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot is scheduled twice"
        if plan.features.runs is not None:
            self._tell(plan, plan.features.runs)
        for i, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)):
            state = self._slots[slot]  # all KV before any row attends
            assert state.decodes == (i < plan.num_decodes), "a prompt is taken for a decode, or a decode for a prompt"
            if state.decodes:
                self._decode(state, count, hosted.get(slot), masks.get(slot))
            else:
                self._write(state, count)
        runs: dict[int, list[int]] = {}
        failed: dict[int, str] = {}
        named: dict[int, RowLogprobs] = {}
        scored: dict[int, RowLogprobs] = {}
        pooled: dict[int, F32] = {}
        for i, slot in enumerate(plan.slots.tolist()):
            state, rows = self._slots[slot], int(plan.num_rows[i])
            if plan.outputs[i] & PROMPT_LOGPROBS:
                scored[slot] = self._score(state, rows)
            if plan.outputs[i] & POOL:
                state.seen += range(state.computed - int(plan.num_tokens[i]), state.computed)
                if state.computed == state.num_prompt:
                    pooled[slot] = self._pool(state)
                    failed |= {slot: "nan_hidden"} if self.fail.get(state.request_id) == 0 else {}
            if plan.outputs[i] & SAMPLE:
                assert rows >= 1 and not state.decodes or rows == plan.num_tokens[i], "a row's logits are not asked for"
                runs[slot] = self._sample_run(state, masks.get(slot), slot, failed)
                if state.sampler.num_logprobs is not None:
                    named[slot] = self._alternatives(
                        state, runs[slot], [-HALVING] * len(runs[slot]), state.sampler.num_logprobs
                    )
            self._attend(state)  # also with the correct drafts
        counts = np.array([len(run) for run in runs.values()], np.int32)
        width = int(plan.num_tokens[: plan.num_decodes].max(initial=1))
        return StepResult(
            step=plan.step,
            loaded=self._load(plan),
            slots=np.array(list(runs), np.int32),
            tokens=np.array([self._padded(run, width) for run in runs.values()], np.int32).reshape(-1, width),
            num_accepted=counts,
            num_drafted=_drafted(plan, len(runs)),
            ahead=self._ahead(list(runs), plan.features.runs),
            logprobs=named,
            failed=failed,
            prompt_logprobs=scored,
            pooled=pooled,
            num_computed=int(plan.num_tokens.sum()),
        )

    def _load(self, plan: StepPlan) -> tuple[AdapterLoaded, ...]:
        """Begin the loads of a plan. Return the reports of those that have ended."""
        for job in plan.features.adapters:
            used = {state.adapter for state in self._slots.values()} | {one.slot for _, one in self._loading}
            assert job.slot not in used, "a load into a slot that is in use"
            self._adapters.pop(job.slot, None)
            self._held -= set(job.forget)
            self._loading.append((plan.step + next(self._loads), job))
        ended = [job for step, job in self._loading if step <= plan.step]
        self._loading = [one for one in self._loading if one[0] > plan.step]
        found = []
        for job in ended:
            digest = job.adapter.digest
            wrong = digest in self.broken
            found.append(AdapterLoaded(id=job.id, error="broken" * wrong, read=digest not in self._held))
            if not wrong:
                self._adapters[job.slot] = digest
                self._held.add(digest)
        return tuple(found)

    def _tell(self, plan: StepPlan, runs: StageRuns) -> None:
        """Check that a plan tells the stages of a pipeline what came of their steps, and the drafts that were made."""
        assert np.array_equal(runs.slots, plan.slots[: plan.num_decodes]), "a decode of which the stages know nothing"
        hosted, ends = {drafts.slot for drafts in plan.drafts}, np.cumsum(runs.counts)
        for i, (slot, length) in enumerate(zip(runs.slots.tolist(), runs.lengths.tolist(), strict=True)):
            state, told = self._slots[slot], runs.tokens[ends[i] - runs.counts[i] : ends[i]].tolist()
            new = state.tokens[len(state.told) :]
            assert runs.begins[i] == len(state.told), "tokens for another place"
            assert length == len(state.tokens) and told[: len(new)] == new, "the stages know other tokens"
            drafts, rows = told[len(new) :], int(plan.num_tokens[i]) - 1
            assert len(drafts) == (0 if slot in hosted else rows) and drafts == state.ahead[: len(drafts)], (
                "no such drafts"
            )
            state.told = list(state.tokens)

    def _ahead(self, slots: list[int], runs: StageRuns | None) -> I32:
        """Return the drafts that the last stage makes for slots that were sampled: any tokens, within their limits."""
        found = np.full((len(slots), 0 if runs is None else runs.most), -1, np.int32)
        for row, slot, limit in zip(found, slots, () if runs is None else runs.limits.tolist(), strict=False):
            state = self._slots[slot]
            assert not limit or limit >= len(state.tokens), "a limit below the tokens of a slot"
            self._reach(state, limit)
            state.ahead = [token % self._facts.vocab_size for token in range(len(state.tokens), limit)][: len(row)]
            row[: len(state.ahead)] = state.ahead
        return found

    def _reach(self, state: _Slot, limit: int) -> None:
        """Do nothing: without KV memory a drafter needs no blocks for tokens before `limit`."""

    def _sample_run(self, state: _Slot, masks: I32 | None, slot: int, failed: dict[int, str]) -> list[int]:
        """Return the tokens of a slot's rows: its correct drafts and one more. masks: of the rows, or None."""
        run, state.decodes = list[int](), True
        for at in range(1 + state.accepted):
            assert state.computed == len(state.tokens) + state.accepted - at, "sampling before the end of the sequence"
            token = self._token(state, state.digests[-1], None if masks is None else masks[at])
            if token < 0:
                failed[slot], token = "no_token", 0
            if self.fail.get(state.request_id, -1) == len(state.tokens) - state.num_prompt:
                failed[slot] = "nan_logits"
            state.tokens.append(token)
            state.extend()
            run.append(token)
        state.accepted = 0
        return run

    def _token(self, state: _Slot, digest: int, mask: I32 | None) -> int:
        """Return the token that a slot samples behind the prefix with this digest, under a grammar mask."""
        vocab = self._facts.vocab_size
        return allowed_token(next_token(digest, state.seed, vocab), mask, vocab)

    def _padded(self, run: list[int], width: int) -> list[int]:
        """Return a row of `StepResult.tokens`. The tokens after the valid ones are meaningless."""
        others = ((run[-1] + 1) % self._facts.vocab_size, -1, self._facts.vocab_size)
        return (run + list(others) * width)[:width]

    def _enter(self, plan: StepPlan) -> None:
        for slot in plan.released.tolist():
            del self._slots[slot]
        for a in plan.admitted:
            assert a.slot not in self._slots, "the slot is taken"
            self._slots[a.slot] = _Slot(a, first_digest("" if a.adapter < 0 else self._adapters[a.adapter]))

    def _write(self, state: _Slot, count: int) -> None:
        """Compute a chunk of a prompt."""
        assert state.computed + count <= len(state.tokens), "computing a token that does not exist yet"
        self._compute(state, state.digests[state.computed : state.computed + count], count)

    def _decode(self, state: _Slot, count: int, hosted: HostDrafts | None, masks: I32 | None) -> None:
        """Compute the last token of a slot and its drafts, some of which are correct.

        hosted, masks   drafts that the host has chosen, and the grammar masks of all rows; None: there are none
        """
        assert state.computed + 1 == len(state.tokens), "a decode that does not begin with the last token"
        assert count <= 1 + self._facts.num_drafts, "more drafts than are verified"
        before_failure = self.fail.get(state.request_id, MASK) - (len(state.tokens) - state.num_prompt) - 1
        most = 0 if count == 1 else count - 1 if hosted is not None else next(self._accepts)
        digests, rows = [state.digests[-1]], [None] * count if masks is None else masks
        if hosted is not None:
            assert hosted.position == len(state.tokens) and len(hosted.tokens) == count - 1, "drafts for another place"
        assert masks is None or len(masks) == count and (hosted is not None or count == 1), "a row without a mask"
        for at in range(max(0, min(most, count - 1, before_failure))):
            token = self._token(state, digests[-1], rows[at])
            if hosted is not None and token != hosted.tokens[at]:
                break
            digests.append(chain(digests[-1], token))
        state.accepted = len(digests) - 1
        self._compute(state, digests + [digest ^ MASK for digest in range(count - len(digests))], len(digests))

    def _compute(self, state: _Slot, digests: list[int], num_valid: int) -> None:
        """Compute the KV of the next positions, of which the first `num_valid` count."""
        state.computed += num_valid

    def _attend(self, state: _Slot) -> None:
        """Do nothing: without KV memory there is nothing to read."""

    def _score(self, state: _Slot, rows: int) -> RowLogprobs:
        """Return rows for the known next tokens. The log-probability of a row is minus its position."""
        first = state.computed - rows
        positions = range(first, min(state.computed, len(state.tokens) - 1))
        tokens = [state.tokens[p + 1] for p in positions]
        return self._alternatives(state, tokens, [-float(p) for p in positions], state.sampler.num_prompt_logprobs or 0)

    def _pool(self, state: _Slot) -> F32:
        """Return the pooled vector of a prompt that has just ended."""
        assert state.pool == "last" or len(state.seen) == state.num_prompt, "pooling over tokens that were not computed"
        seen = {"mean": state.seen, "last": state.seen[-1:], "cls": state.seen[:1]}[state.pool]
        vector: F32 = np.mean([mock_hidden(state.digests[at], self._width) for at in seen], 0, np.float32)
        return vector

    def _alternatives(self, state: _Slot, tokens: list[int], values: list[float], count: int) -> RowLogprobs:
        """Return rows of made-up alternatives: the token itself, then the next ids, each HALVING less likely."""
        vocab, asked = self._facts.vocab_size, state.sampler.logprob_ids
        others = np.arange(len(asked) or (vocab if count < 0 else count))
        own = np.array(tokens, np.int64).reshape(-1, 1)
        ids = np.tile(np.array(asked, np.int64), (len(own), 1)) if asked else (own + others) % vocab
        first = np.array(values, np.float32).reshape(-1, 1)
        logprobs = np.concatenate([first, first - HALVING * others], 1, dtype=np.float32)
        return RowLogprobs(np.concatenate([own, ids], 1).astype(np.int32), logprobs, np.ones(len(own), np.int32))
