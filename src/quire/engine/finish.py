"""Application of a step's result: confirms tokens, ends requests, indexes blocks and writes outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from time import perf_counter
from typing import Any

import numpy as np

from quire.contracts.errors import RequestFailed
from quire.contracts.output import Finish, StepOutputs, StepStats
from quire.contracts.prefix import PrefixReport
from quire.contracts.request import FinishReason, Request, RequestState
from quire.contracts.step import F32, I32, RowLogprobs, StepResult
from quire.engine.grammar import Grammars
from quire.engine.plan_writer import InFlight
from quire.engine.scheduler import Scheduler

FINISHED = RequestState.FINISHED
Ending = tuple[Request, Callable[[], Finish]]  # the function ends the request
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(kw_only=True, slots=True)
class ResultRows:
    """Results of a step in columns: a row for each of the L sampled requests that have neither ended nor failed.

    planned  [L] slot of the request when the step was planned
    slots    [L] slot of the request now; -1: it was preempted
    tokens   [L, 1+k] sampled tokens
    counts   [L] number of valid tokens in each row; None: each row has one
    most     [L] upper bound of `counts` when the step was planned; None: each row has one
    held     [L] False: the request was preempted and holds no slot; None: every request holds its slot
    """

    requests: list[Request]
    handles: I32
    planned: I32
    slots: I32
    tokens: I32
    counts: I32 | None
    most: I32 | None
    held: Bools | None = None


class Finisher:
    """Applies results to the scheduler's state. Tokens of requests that ended meanwhile are dropped.

    on_end   functions to call with every request that ended, the reason, and the code of its error or ""
    """

    def __init__(self, scheduler: Scheduler, grammars: Grammars, vocab_size: int) -> None:
        self._scheduler, self._roster, self._grammars = scheduler, scheduler.roster, grammars
        self._vocab_size = vocab_size
        self._num_stopping = np.zeros(vocab_size, np.int32)  # token id -> live requests that it stops
        self.on_end: list[Callable[[Request, FinishReason, str], None]] = []

    def watch(self, request: Request) -> None:
        """Check sampled tokens for the stop ids of this request, too, until `end`."""
        self._num_stopping[np.fromiter(request.stop_ids, np.int64)] += 1  # all of them, or an IndexError and none

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_id: int | None = None,
        error: str | RequestFailed | None = None,
        vector: F32 | None = None,
        distrust: bool = False,
    ) -> Finish:
        """End a request, whether it waits or runs, and free its slot, blocks and grammar. Returns its `Finish`.

        distrust   True: its blocks may hold wrong KV and are removed from the prefix cache
        """
        self._num_stopping[np.fromiter(request.stop_ids, np.int64)] -= 1
        if request.new.grammar is not None:
            self._grammars.drop(request.new.handle)
        if request.state is not FINISHED:  # else the roster has ended it already
            self._roster.remove(request, distrust=distrust, whole=reason in (FinishReason.STOP, FinishReason.LENGTH))
        code, message = (error.code, str(error)) if isinstance(error, RequestFailed) else (error, None)
        for tell in self.on_end:
            tell(request, reason, code or "")
        return Finish(
            handle=request.new.handle,
            reason=reason,
            stop_id=stop_id,
            error=code,
            message=message,
            vector=vector,
            drafts=request.drafts,
        )

    def apply(self, step: InFlight, result: StepResult) -> tuple[StepOutputs, list[Request]]:
        """Confirm `step` by its result: append tokens, end requests. Returns the outputs and the ended requests."""
        started = perf_counter()
        assert result.step == step.plan.step and np.array_equal(result.slots, step.sampling), "results out of order"
        failed = self._failures(step, result)
        if self._roster.allocator.states is not None:
            slots = frozenset(result.failed) | {request.slot for request in failed}
            self._roster.states_came(step.copies, slots, step.computed)
        scored, (cached, prefixes) = self._score_prompts(step, result), self._reused(step)
        origins = {r.new.handle: r.origins for r in step.admitted if r.origins and r.state is not FINISHED}
        if self._scheduler.drafts.most:
            self._learn(step, result)
        if result.ahead.size:
            self._keep_ahead(step, result)
        rows = self._arrive(step, result, failed)
        endings = self._confirm(step, rows)
        going = [(request, end) for request, end in endings if request.state is not FINISHED]
        ended, finished = [request for request, _ in going], [end() for _, end in going]
        for request, code in failed.items():
            if request.state is not FINISHED:
                finished.append(self.end(request, FinishReason.ERROR, error=code, distrust=True))
                ended.append(request)
        for slot, request in step.unsampled.items():
            if request.state is not FINISHED:
                reason = FinishReason.STOP if request.new.pool else FinishReason.LENGTH
                finished.append(self.end(request, reason, vector=result.pooled.get(slot)))
                ended.append(request)
        preempted, self._scheduler.roster.preempted = tuple(self._scheduler.roster.preempted), []
        outputs = StepOutputs(
            handles=rows.handles if rows.counts is None else np.repeat(rows.handles, rows.counts),
            tokens=rows.tokens[:, 0] if rows.counts is None else rows.tokens[_counting(rows.tokens, rows.counts)],
            finished=tuple(finished),
            preempted=preempted,
            cached=cached,
            prefixes=prefixes,
            origins=origins,
            logprobs=self._logprobs(rows, result) if result.logprobs else {},
            prompt_logprobs=scored,
            stats=self.state(step, perf_counter() - started),
        )
        return outputs, ended

    def _failures(self, step: InFlight, result: StepResult) -> dict[Request, str]:
        """Return the requests that failed on the device or got an invalid token, with the code of the failure."""
        failed: dict[Request, str] = {}
        tokens, counts = result.tokens, result.num_accepted
        outside = (tokens < 0) | (tokens >= self._vocab_size)
        if step.most is None:
            bad = outside[:, 0]
        else:
            bad = (outside & _counting(tokens, counts)).any(1) | (counts < 1) | (counts > step.most)
        if not result.failed and not bad.any():
            return failed
        owner = dict(zip(step.sampling.tolist(), step.requests, strict=True))
        owner.update({slot: request for slot, request, _ in step.scored} | step.unsampled)
        for slot, code in result.failed.items():
            failed[owner[slot]] = code
        for i in np.flatnonzero(bad).tolist():
            failed.setdefault(step.requests[i], "bad_token")
        return failed

    def _arrive(self, step: InFlight, result: StepResult, failed: dict[Request, str]) -> ResultRows:
        """Count the step as no longer in flight. Returns its valid rows."""
        table, requests, handles, planned = self._roster.table, step.requests, step.handles, step.sampling
        tokens, most = result.tokens, step.most
        counts = None if most is None else result.num_accepted.copy()
        if step.version == table.version and not failed:
            table.in_flight[planned] -= 1
            return ResultRows(
                requests=requests,
                handles=handles,
                planned=planned,
                slots=planned,
                tokens=tokens,
                counts=counts,
                most=most,
            )
        slots = np.array([request.slot for request in requests], np.int32)
        running = slots >= 0
        table.in_flight[slots[running]] -= 1
        live = running.copy()
        for i in np.flatnonzero(~running).tolist():
            requests[i].in_flight -= 1
            live[i] = requests[i].state is not FINISHED
        if failed:
            live &= np.array([request not in failed for request in requests], bool)
        return ResultRows(
            requests=list(compress(requests, live.tolist())),
            handles=handles[live],
            planned=planned[live],
            slots=slots[live],
            tokens=tokens[live],
            counts=None if counts is None else counts[live],
            most=None if most is None else most[live],
            held=None if running[live].all() else running[live],
        )

    def _learn(self, step: InFlight, result: StepResult) -> None:
        """Count the drafts of the step, in all and for each request that still runs; learn how many are worth while."""
        decodes = step.plan.num_decodes
        self._scheduler.drafts.observe(
            step.plan.num_tokens[:decodes], result.num_accepted[:decodes], alone=not step.num_prefills
        )
        if step.most is None or not len(result.num_drafted):
            return
        found = self._scheduler.drafts.count(result.num_drafted, result.num_accepted)
        slots = np.array([request.slot for request in step.requests], np.int32)
        self._roster.table.drafts[slots[slots >= 0]] += found[slots >= 0]

    def _keep_ahead(self, step: InFlight, result: StepResult) -> None:
        """Keep the drafts that the last stage of a pipeline has made for later steps of the slots."""
        table, most = self._roster.table, result.ahead.shape[1]
        slots = np.array([request.slot for request in step.requests], np.int32)
        held = slots >= 0
        made = np.logical_and.accumulate(result.ahead >= 0, 1).sum(1, dtype=np.int32)
        table.ahead[slots[held], :most], table.num_ahead[slots[held]] = result.ahead[held], made[held]

    def _confirm(self, step: InFlight, rows: ResultRows) -> list[Ending]:
        """Append the tokens to their requests and index completed blocks. Returns the requests that must be ended.

        `rows.counts` is reduced in place when a request ends earlier.
        """
        table, endings = self._roster.table, list[Ending]()
        requests, slots, tokens, counts = rows.requests, rows.slots, rows.tokens, rows.counts
        now = table.confirmed[slots] + (1 if counts is None else counts)
        suspects = self._may_stop(tokens, counts) | (now >= table.end[slots])
        if rows.held is not None:
            suspects |= ~rows.held
        if len(step.plan.grammar):
            suspects |= np.isin(slots, step.plan.grammar)
        for j in np.flatnonzero(suspects).tolist():
            run = tokens[j, : 1 if counts is None else counts[j]].tolist()
            count, end = self._ending(requests[j], run)
            if end is not None:
                endings.append((requests[j], end))
            if counts is not None and count < len(run):
                now[j] -= len(run) - count
                counts[j] = count
        if counts is None:
            for request, token in zip(requests, tokens[:, 0].tolist(), strict=True):
                request.tokens.append(token)
        else:
            for request, run, count in zip(requests, tokens.tolist(), counts.tolist(), strict=True):
                request.tokens.extend(run[:count])
        self._advance(rows, now)
        return endings

    def _advance(self, rows: ResultRows, now: I32) -> None:
        """Set the table to `now` [L] confirmed tokens, and index the blocks that are full."""
        table, allocator, requests, slots = self._roster.table, self._roster.allocator, rows.requests, rows.slots
        unused = None if rows.counts is None or rows.most is None else rows.most - rows.counts
        new = 1 if rows.counts is None or not self._scheduler.drafts.cached else rows.counts
        if rows.held is not None:
            requests = list(compress(requests, rows.held.tolist()))
            slots, now = slots[rows.held], now[rows.held]
            unused = None if unused is None else unused[rows.held]
            new = new if isinstance(new, int) else new[rows.held]
        table.confirmed[slots] = now
        if unused is not None:
            table.upper_bound[slots] -= unused
            table.planned[slots] -= unused
        computed = now - new  # the newest token's own KV comes with the next step, that of drafters for all new ones
        full = computed // allocator.block_size > allocator.published[slots]
        for j in np.flatnonzero(full).tolist():
            try:
                self._roster.publish(requests[j], int(computed[j]))
            except Exception:
                self._roster.fail(requests[j])

    def _may_stop(self, tokens: I32, counts: I32 | None) -> Bools:
        """Return True for each row with a token that stops any request."""
        if counts is None:
            return self._num_stopping[tokens[:, 0]] > 0
        counting = _counting(tokens, counts)
        stopping: Bools = np.logical_or.reduce((self._num_stopping[np.where(counting, tokens, 0)] > 0) & counting, 1)
        return stopping

    def _ending(self, request: Request, run: list[int]) -> tuple[int, Callable[[], Finish] | None]:
        """Return the number of valid tokens of the run, and the function that ends the request, or None."""
        length = len(request.tokens)
        for count, token in enumerate(run, 1):
            if token in request.stop_ids and length + count > request.new.sampler.min_length:
                return count, partial(self.end, request, FinishReason.STOP, stop_id=token)
            try:
                if request.new.grammar is not None and self._grammars.advance(request.new.handle, token):
                    return count, partial(self.end, request, FinishReason.STOP)
            except RequestFailed as failure:
                return count, partial(self.end, request, FinishReason.ERROR, error=failure)
            if length + count >= request.end:
                return count, partial(self.end, request, FinishReason.LENGTH)
        return len(run), None

    def _score_prompts(self, step: InFlight, result: StepResult) -> dict[int, RowLogprobs]:
        """Return new prompt rows by handle, without rows past the prompt's end and rows already delivered."""
        scored: dict[int, RowLogprobs] = {}
        for slot, request, start in step.scored:
            rows = result.prompt_logprobs.get(slot)
            if rows is None or request.state is FINISHED:
                continue
            try:
                new = self._new_rows(request, rows, start)
            except Exception:
                self._roster.fail(request)
                continue
            if len(new.ranks):
                scored[request.new.handle] = new
                request.prompt_scored += len(new.ranks)
        return scored

    @staticmethod
    def _new_rows(request: Request, rows: RowLogprobs, start: int) -> RowLogprobs:
        return rows.part(slice(request.prompt_scored - start, request.num_prompt - 1 - start))

    @staticmethod
    def _logprobs(rows: ResultRows, result: StepResult) -> dict[int, RowLogprobs]:
        """Return the log-probabilities of the valid tokens, by handle."""
        named, counts = {}, rows.counts
        for j, (slot, request) in enumerate(zip(rows.planned.tolist(), rows.requests, strict=True)):
            if (found := result.logprobs.get(slot)) is None:
                continue
            if counts is not None and counts[j] < len(found.ranks):
                found = found.part(slice(counts[j]))
            named[request.new.handle] = found
        return named

    @staticmethod
    def _reused(step: InFlight) -> tuple[dict[int, int], dict[int, PrefixReport]]:
        live = [r for r in step.admitted if r.state is not FINISHED]
        reports = {r.new.handle: r.prefix for r in live if r.prefix is not None}
        return {r.new.handle: r.num_cached for r in live}, reports

    def state(self, step: InFlight | None = None, finish_s: float = 0.0) -> StepStats:
        """Return the engine's state and, after a step, the counters of the step."""
        s, roster, pool = self._scheduler, self._roster, self._roster.allocator.pool
        did: dict[str, Any] = (
            {}
            if step is None
            else {
                "step": step.plan.step,
                "num_tokens": int(step.plan.num_tokens.sum()),
                "num_prefill_tokens": step.num_prefill_tokens,
                "num_scheduled": len(step.plan.slots),
                "num_prefills": step.num_prefills,
                "schedule_s": step.schedule_s,
                "execute_s": step.execute_s,
            }
        )
        return StepStats(
            num_running=len(roster.table),
            num_waiting=len(roster.queue) + roster.num_blocked,
            num_blocked=roster.num_blocked,
            num_preempted=s.num_preempted,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            prefix=s.admitter.stats(),
            drafts=s.drafts.totals,
            finish_s=finish_s,
            tiers=roster.store.counters() if roster.store is not None else {},
            **did,
        )


def _counting(tokens: I32, counts: I32) -> Bools:
    """Return a mask [N, 1+k]: True for the first `counts` [N] tokens of each row."""
    counting: Bools = np.arange(tokens.shape[1]) < counts[:, None]
    return counting
