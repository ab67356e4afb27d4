"""Executor without a model, part of the package: scheduler, server and front end are tested and timed with it.

Its "KV" at a position is a digest of all tokens up to there. So it notices at once when a request reads a block that is
not of its own prefix, or was overwritten. The next token is a pure function of prefix and seed (`mock_tokens`), so each
answer is known beforehand. Like a device, the mock samples from its own state and returns tokens only at `collect`.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from quire.contracts.errors import ConfigError
from quire.contracts.protocols import ExecutorFacts, Wait
from quire.contracts.step import (
    F32,
    I32,
    NO_MASKS,
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    Admission,
    BlendedChunk,
    HostDrafts,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from quire.engine.mock_copies import Memory, MockCopies

MASK = 2**64 - 1
FIRST = 0x9E3779B97F4A7C15
HALVING = math.log(2)
SIZES = {"num_slots": 8, "num_blocks": 64, "block_size": 4, "vocab_size": 1000, "max_model_len": 128, "depth": 1,
         "num_drafts": 0}


def chain(previous: int, token: int) -> int:
    """Return the digest of a prefix extended by `token`; `previous` is the digest of the prefix."""
    x = (previous ^ (token + 1) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def next_token(digest: int, seed: int, vocab_size: int) -> int:
    """Return the token that the mock generates after a prefix with this digest, for a request with this seed."""
    return chain(digest, seed & 0xFFFFFFFF) % vocab_size


def mock_tokens(prompt: Sequence[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """Return the first `count` tokens that the mock generates for a prompt."""
    digest, tokens = FIRST, []
    for token in prompt:
        digest = chain(digest, token)
    for _ in range(count):
        tokens.append(next_token(digest, seed, vocab_size))
        digest = chain(digest, tokens[-1])
    return tokens


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

    def __init__(self, admission: Admission) -> None:
        self.request_id, self.sampler = admission.request_id, admission.sampler
        self.seed, self.num_prompt = admission.sampler.seed, admission.sampler.num_prompt
        self.tokens, self.blocks = admission.token_ids.tolist(), [ids.tolist() for ids in admission.block_ids]
        self.computed = self.began = admission.num_computed  # `began`: the first position of this step
        self.pool = admission.pool
        self.decodes = False  # True: a token was sampled since the admission
        self.accepted = 0  # correct drafts of this step
        self.seen: list[int] = []  # positions whose hidden states are pooled
        self.digests: list[int] = []
        self.num_exact = MASK  # tokens whose KV is that of their prefix; later ones have the request's own
        self.own = chain(FIRST, crc32(self.request_id.encode()))
        self.extend()

    def extend(self) -> None:
        digest = self.digests[-1] if self.digests else FIRST
        for token in self.tokens[len(self.digests) :]:
            digest = chain(digest, token)
            self.digests.append(digest)


class MockExecutor:
    """Runs plans on a simulated KV memory.

    sizes     fields of `ExecutorFacts` (num_slots, num_blocks, ...) that differ from the defaults in `SIZES`
    windows   attention window of each KV group, as in `KVGroup`; reads are checked separately for each group
    accepts   numbers of accepted drafts for one decode after another; the sequence repeats. A decode accepts no draft
              at or after the output at which `fail` makes its request fail. Drafts of `StepPlan.drafts` are accepted
              if they are right
    verify    check every position that a row may attend to (O(length) per step)
    answers   give every request the tokens of `mock_tokens`; without `answers` and `verify` tokens are arbitrary and
              cost nothing per request, for timing the engine
    step_seconds   duration of a step; steps run one after another, as on a device, and `collect` waits for them
    width     size of a hidden state
    tiers     makes the tiers below the device from the mock's memory; None: there are none
    fail      request id -> number of outputs after which the request fails with "nan_logits"; with 0, a pooling request
              fails with "nan_hidden"
    computed  request id -> tokens computed for it so far, over all its admissions; kept with `verify` only
    """

    def __init__(self, *, verify: bool = True, answers: bool = False, step_seconds: float = 0.0, width: int = 8,
                 accepts: Sequence[int] = (0,), windows: Sequence[int | None] = (None,),
                 tiers: Callable[[Memory], MockCopies] | None = None, **sizes: Any) -> None:
        given: dict[str, Any] = SIZES | sizes
        self._facts = ExecutorFacts(decode_lag=given["depth"], **given)
        self.fail: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.num_steps = 0
        self.closed = False
        self._verify, self._answers = verify, verify or answers
        self._step_seconds, self._width = step_seconds, width
        self._accepts, self._windows = itertools.cycle(accepts), windows
        self._memory = np.zeros((given["num_blocks"] + 1, given["block_size"]) if verify else (0, 0), np.uint64)
        self._copies = None if tiers is None else tiers(self._memory)
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
        """Let the step sample under its grammar masks. See `Executor.release`."""
        self._released.add(step)
        if self._waiting is not None:
            assert step == self._waiting.step, "a step is released that does not wait"
            self._sample(masks)

    def _sample(self, masks: I32) -> None:
        assert self._waiting is not None
        plan, self._waiting = self._waiting, None
        by_slot = _masked(plan, masks)
        if self._copies is not None:
            self._copies.begin(plan.copies)
        result = (self._run if self._answers else self._run_fast)(plan, by_slot)
        if self._copies is not None:
            result = msgspec.structs.replace(result, copied=self._copies.end())
        self._results.append((result, self._done))

    def collect(self) -> StepResult:
        """Wait until the oldest step is done and return its result."""
        result, done = self._results.popleft()
        if self._step_seconds:
            time.sleep(max(0.0, done - time.monotonic()))
        self._released.remove(result.step)
        return result

    def ready(self) -> bool:
        """True: a step is computed at once. See `Executor`."""
        return True

    def check_alive(self) -> None:
        """Do nothing. See `Executor`."""

    def facts(self) -> ExecutorFacts:
        """Return the sizes of the mock. See `Executor`."""
        return self._facts

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Refuse every name: the mock has no operations."""
        raise ConfigError(f"unknown control {name!r}.")

    def ask(self, name: str, args: dict[str, Any]) -> Wait:
        """Return a function that runs an operation. See `Executor.ask`."""
        return lambda seconds: self.control(name, args)

    def shutdown(self, *, wait: bool = True) -> None:
        """Record the shutdown for tests; there is nothing to free."""
        self.closed = True

    def _run(self, plan: StepPlan, masks: dict[int, I32]) -> StepResult:
        hosted = {drafts.slot: drafts for drafts in plan.drafts}
        self._enter(plan)
        for moved in plan.blended:
            self._move(moved)
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot is scheduled twice"
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
                    named[slot] = self._alternatives(state, runs[slot], [-HALVING] * len(runs[slot]),
                                                     state.sampler.num_logprobs)
            self._attend(state)  # also with the correct drafts
        counts = np.array([len(run) for run in runs.values()], np.int32)
        width = int(plan.num_tokens[: plan.num_decodes].max(initial=1))
        return StepResult(
            step=plan.step,
            slots=np.array(list(runs), np.int32),
            tokens=np.array([self._padded(run, width) for run in runs.values()], np.int32).reshape(-1, width),
            num_accepted=counts,
            num_drafted=_drafted(plan, len(runs)),
            logprobs=named,
            failed=failed,
            prompt_logprobs=scored,
            pooled=pooled,
            num_computed=int(plan.num_tokens.sum()),
        )

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

    def _run_fast(self, plan: StepPlan, masks: dict[int, I32]) -> StepResult:
        slots = plan.slots[(plan.outputs & SAMPLE) > 0]
        tokens = (slots * 31 + plan.step) % self._facts.vocab_size
        counts, tokens = np.ones(len(slots), np.int32), tokens.astype(np.int32)[:, None]
        if (width := int(plan.num_tokens[: plan.num_decodes].max(initial=1))) > 1:
            drafts = plan.num_tokens[: plan.num_decodes] - 1
            counts[: len(drafts)] += np.minimum(list(itertools.islice(self._accepts, len(drafts))), drafts)
            tokens = np.repeat(tokens, width, 1)
        hosted = {drafts.slot: drafts.tokens.tolist() for drafts in plan.drafts}
        for slot, rows in masks.items():
            i, drafts = int(np.flatnonzero(slots == slot)[0]), hosted.get(slot, [])
            run = [allowed_token(int(tokens[i, 0]), mask, self._facts.vocab_size) for mask in rows]
            right = [token == draft for token, draft in zip(run, drafts, strict=False)]
            tokens[i, : len(run)], counts[i] = run, 1 + (right + [False]).index(False)
        return StepResult(step=plan.step, slots=slots, tokens=tokens, num_accepted=counts,
                          num_drafted=_drafted(plan, len(slots)))

    def _enter(self, plan: StepPlan) -> None:
        for slot in plan.released.tolist():
            del self._slots[slot]
        for a in plan.admitted:
            assert a.slot not in self._slots, "the slot is taken"
            self._slots[a.slot] = _Slot(a)
        for slot, group, block in plan.appended.tolist():
            self._slots[slot].blocks[group].append(block)

    def _write(self, state: _Slot, count: int) -> None:
        """Compute a chunk of a prompt."""
        assert state.computed + count <= len(state.tokens), "computing a token that does not exist yet"
        self._store(state, state.digests[state.computed : state.computed + count])
        state.computed += count

    def _move(self, chunk: BlendedChunk) -> None:
        """Check that the tokens of a chunk reuse KV of the same tokens alone. What follows is the request's own KV."""
        state, memory = self._slots[chunk.slot], self._memory.reshape(-1)
        positions = state.computed + chunk.tokens
        assert 0 <= chunk.num_kept <= len(positions) and positions[-1] < len(state.tokens) - 1, "moved too much"
        state.num_exact = min(state.num_exact, int(positions[0]))
        alone = dict[int, list[int]]()
        for position, source, shift in zip(positions.tolist(), chunk.sources, chunk.shifts.tolist(), strict=True):
            digests = alone.setdefault(shift, [FIRST])
            while len(digests) <= position - shift + 1:
                digests.append(chain(digests[-1], state.tokens[shift + len(digests) - 1]))
            assert not self._verify or memory[source] == digests[position - shift + 1], "moved KV of other tokens"

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
        self._store(state, digests + [digest ^ MASK for digest in range(count - len(digests))])
        state.computed += 1 + state.accepted

    def _store(self, state: _Slot, digests: list[int]) -> None:
        """Write KV, beginning at the first position that is not computed."""
        if not self._verify:
            return
        size, state.began = self._facts.block_size, state.computed
        for group, blocks in enumerate(state.blocks):
            for position, digest in enumerate(digests, state.computed):
                block = blocks[position // size]
                assert block != 0, "the null block is written"
                own = state.own if position >= state.num_exact else 0
                self._memory[block, position % size] = digest ^ group ^ own
        self.computed[state.request_id] = self.computed.get(state.request_id, 0) + len(digests)

    def _attend(self, state: _Slot) -> None:
        if not self._verify:
            return
        size, end = self._facts.block_size, state.computed
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, state.began - window + 1)  # what the first row sees
            blocks = state.blocks[group][first // size : -(-end // size)]
            seen = self._memory[blocks].reshape(-1)[first % size :][: end - first]
            expected = np.array(state.digests[first:end], np.uint64) ^ np.uint64(group)
            expected[max(0, state.num_exact - first) :] ^= np.uint64(state.own)
            assert np.array_equal(seen, expected), f"{state.request_id} attends to KV that is not its own prefix"

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
