"""Writer of step plans, and the core's record of a step in flight."""

from dataclasses import dataclass, field

import numpy as np

from quire.contracts.request import Request
from quire.contracts.step import (
    I32,
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    Admission,
    BlendedChunk,
    PlanFeatures,
    SharedPrefix,
    StageRuns,
    StepPlan,
    StepStates,
)
from quire.engine.roster import Roster
from quire.engine.stage_runs import StageRunWriter
from quire.kv.blend import blended_chunk
from quire.kv.states import StateCopy

NO_FEATURES = PlanFeatures()
SHARED_TOKENS = 1024  # saved reads; with fewer, a shared prefix saves no time


@dataclass(kw_only=True)
class InFlight:
    """A submitted step: its plan, and the requests that held its slots when it was planned."""

    plan: StepPlan
    sampling: I32  # slots that sample, in plan order
    requests: list[Request]  # of `sampling`
    handles: I32
    most: I32 | None  # maximum number of tokens for each of `sampling`; None: one each
    version: int  # of the table when planned
    admitted: list[Request] = field(default_factory=list)  # for the first time
    scored: list[tuple[int, Request, int]] = field(default_factory=list)  # slot, request, position of its first row
    unsampled: dict[int, Request] = field(default_factory=dict)  # by slot: prompt done, nothing to sample
    num_prefills: int = 0  # slots that are catching up
    num_prefill_tokens: int = 0
    copies: list[StateCopy] = field(default_factory=list)
    computed: list[Request] = field(default_factory=list)  # requests whose prompt ends in this step
    schedule_s: float = 0.0  # seconds of planning
    execute_s: float = 0.0  # seconds in the executor, so far


class PlanWriter:
    """Writes step plans. Caches the parts of a plan that depend only on which requests run.

    runs     writes the drafts of a pipeline; None: there are no stages, or no drafts
    cached   True: the drafter has KV in the blocks
    """

    def __init__(
        self, roster: Roster, num_drafts: int, runs: StageRunWriter | None = None, *, cached: bool = False
    ) -> None:
        self._num_drafts, self._runs, self._cached = num_drafts, runs, cached
        self._roster, self._table, self._allocator = roster, roster.table, roster.allocator
        self._sampling: tuple[int, I32, list[Request], I32] | None = None
        self._shared: tuple[int, tuple[SharedPrefix, ...]] = (-1, ())

    def write(self, step: int, slots: I32, num_tokens: I32, admitted: list[Admission], appended: I32) -> InFlight:
        """Return step number `step` with its plan, and mark `num_tokens` [S] of `slots` [S] as planned."""
        table = self._table
        before = table.planned[slots]
        table.planned[slots] = after = before + num_tokens
        bound = table.upper_bound[slots]
        samples = (after >= bound) & (bound < table.end[slots])  # drafts put `after` beyond the bound
        outputs = np.where(samples, SAMPLE, 0).astype(np.uint8)
        num_rows, unsampled = samples.astype(np.int32), dict[int, Request]()
        scored: list[tuple[int, Request, int]] = []
        prefills = np.flatnonzero(before < table.goal[slots])
        for i in prefills.tolist():
            request = table.requests[int(slots[i])]
            assert request is not None
            if after[i] == bound[i] and not samples[i]:
                unsampled[int(slots[i])] = request
            outputs[i] |= _asked(request, int(before[i]))
            if outputs[i] & PROMPT_LOGPROBS:
                num_rows[i] = num_tokens[i]
                scored.append((int(slots[i]), request, int(before[i])))
        sampling, num_decodes = slots[samples], len(slots) - len(prefills)
        most = self._most(num_tokens[:num_decodes], len(sampling))
        if most is not None:
            num_rows[:num_decodes] = num_tokens[:num_decodes]
        copies = self._state_copies(slots, before, after)
        completes = self._cached and self._completes(slots[:num_decodes], before[:num_decodes])
        runs, appended = self._staged(slots[:num_decodes], num_tokens[:num_decodes], sampling, after[samples], appended)
        table.in_flight[sampling] += 1
        table.upper_bound[sampling] += 1 if most is None else most
        plan = StepPlan(
            step=step,
            slots=slots,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            num_rows=num_rows,
            outputs=outputs,
            admitted=tuple(admitted),
            appended=appended,
            released=np.array(self._roster.released, np.int32),
            shared=self._shared_prefixes(),
            grammar=sampling[table.masked[sampling]],
            features=self._features(slots[prefills], before[prefills], after[prefills], copies, runs, completes),
        )
        self._roster.released.clear()
        requests, handles = self._who(sampling)
        return InFlight(
            plan=plan,
            sampling=sampling,
            requests=requests,
            handles=handles,
            most=most,
            version=table.version,
            admitted=self._newly(admitted),
            scored=scored,
            unsampled=unsampled,
            copies=copies,
            computed=self._computed(slots[prefills], after[prefills]),
            num_prefills=len(prefills),
            num_prefill_tokens=int(num_tokens[prefills].sum()) if len(prefills) else 0,
        )

    def _staged(
        self, decodes: I32, rows: I32, sampling: I32, after: I32, appended: I32
    ) -> tuple[StageRuns | None, I32]:
        """Return the drafts of a pipeline and the appended blocks. See `StageRunWriter.write`."""
        if self._runs is None or not len(decodes) + len(sampling):
            return None, appended
        return self._runs.write(decodes, rows, sampling, after, appended)

    def _newly(self, admitted: list[Admission]) -> list[Request]:
        """Return the requests that are admitted for the first time."""
        found = (self._table.requests[one.slot] for one in admitted)
        return [request for request in found if request is not None and request.num_preemptions == 0]

    def _features(
        self, prompts: I32, before: I32, after: I32, copies: list[StateCopy], runs: StageRuns | None, completes: bool
    ) -> PlanFeatures:
        """Return what features do in a step that computes tokens before [P] .. after [P] - 1 of `prompts` [P]."""
        blended, states = self._blended(prompts, before, after), self._step_states(copies)
        if not (blended or states or runs or completes):
            return NO_FEATURES
        return PlanFeatures(blended=blended, states=states, runs=runs, completes=completes)

    def _completes(self, decodes: I32, most: I32) -> bool:
        """Return True if the first token that a step computes of a decode may be the last one of a block.

        most   [D] upper bound of the tokens that were computed before
        """
        table, size = self._table, self._allocator.block_size
        least = table.confirmed[decodes] + table.in_flight[decodes] - 1  # each step in flight brings a token
        return bool(((most + 1) // size > least // size).any())

    def _state_copies(self, slots: I32, before: I32, after: I32) -> list[StateCopy]:
        """Return the copies of states in a step that computes tokens before [S] .. after [S] - 1 of `slots` [S]."""
        states, table = self._allocator.states, self._table
        if states is None:
            return []
        copies, catching_up = list[StateCopy](), before < table.goal[slots]
        least = table.confirmed[slots] + table.in_flight[slots] - 1  # each step in flight brings a token
        passes = after - after % states.every > least
        for i in np.flatnonzero(catching_up | passes).tolist():
            slot = int(slots[i])
            request = table.requests[slot]
            assert request is not None
            own, chain = (slot, request.new.handle), self._roster.chain(request)
            if catching_up[i]:
                copies += states.of_prompt(*own, chain, int(before[i]), int(after[i]), int(table.goal[slot]))
            else:
                copies += states.of_decode(*own, chain, int(least[i]), int(before[i]), int(after[i]))
        return copies

    def _step_states(self, copies: list[StateCopy]) -> StepStates | None:
        """Return the copies of states of a plan, to checkpoints and from them."""
        states = self._allocator.states
        if states is None or not (copies or states.restored):
            return None
        kept = np.array([(one.slot, one.length, one.checkpoint) for one in copies], np.int32).reshape(-1, 3)
        restored = np.array(states.take_restored(), np.int32).reshape(-1, 2)
        return StepStates(restored, kept)

    def _computed(self, prompts: I32, after: I32) -> list[Request]:
        """Return the requests with states, among `prompts` [P], whose prompt a step computes to its end."""
        if self._allocator.states is None:
            return []
        done = prompts[after >= self._table.goal[prompts]].tolist()
        return [request for slot in done if (request := self._table.requests[slot]) is not None]

    def _blended(self, slots: I32, first: I32, last: I32) -> tuple[BlendedChunk, ...]:
        """Return the moved tokens of prompts in `slots` [P], among tokens first .. last - 1. Ends loans after them."""
        found = []
        for slot, begin, end in zip(slots.tolist(), first.tolist(), last.tolist(), strict=True):
            request = self._table.requests[slot]
            if request is None or not request.moved:
                continue
            ratio, sizes = request.new.reused.ratio, self._allocator.block_sizes
            if (chunk := blended_chunk(request.moved, slot, begin, end, ratio, sizes)) is not None:
                found.append(chunk)
            if end >= request.moved[-1].last:
                self._allocator.loans.end(slot)
        return tuple(found)

    def _most(self, rows: I32, num_sampling: int) -> I32 | None:
        """Return the most tokens that each sampling slot may get: its number of rows, one after a prompt.

        Returns None when no slot has drafts: one token each.
        """
        if not self._num_drafts or not (rows > 1).any():
            return None
        most = np.ones(num_sampling, np.int32)
        most[: len(rows)] = rows
        return most

    def _shared_prefixes(self) -> tuple[SharedPrefix, ...]:
        """Return the slots whose contexts begin with the same blocks; kept until requests come or go."""
        if self._shared[0] != self._table.version:
            groups = self._allocator.shared_prefixes(self._table.order().tolist(), SHARED_TOKENS)
            self._shared = (self._table.version, tuple(SharedPrefix(np.array(s, np.int32), n) for s, n in groups))
        return self._shared[1]

    def _who(self, sampling: I32) -> tuple[list[Request], I32]:
        """Return the requests and handles of the sampling slots; kept, because a decoding batch rarely changes."""
        last = self._sampling
        if last is not None and last[0] == self._table.version and np.array_equal(last[1], sampling):
            return last[2], last[3]
        running = self._table.requests
        requests = [request for slot in sampling.tolist() if (request := running[slot]) is not None]
        handles = self._table.handle[sampling]
        self._sampling = (self._table.version, sampling, requests, handles)
        return requests, handles


def _asked(request: Request, before: int) -> int:
    """Return the bits of `StepPlan.outputs` that a request asks for in a chunk of its prompt. before: first position"""
    scored = request.new.sampler.num_prompt_logprobs is not None and before < request.num_prompt - 1
    return POOL * bool(request.new.pool) | PROMPT_LOGPROBS * scored
