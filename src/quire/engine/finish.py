"""What becomes of a step's result: tokens are confirmed, requests end, blocks are indexed, outputs are written."""

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


class Finisher:
    """Applies results to the scheduler's state. Tokens of requests that ended meanwhile are dropped."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars, vocab_size: int) -> None:
        self._scheduler, self._roster, self._grammars = scheduler, scheduler.roster, grammars
        self._vocab_size = vocab_size
        self._num_stopping = np.zeros(vocab_size, np.int32)  # live requests that each id may stop

    def watch(self, request: Request) -> None:
        """Start looking for the request's stop ids."""
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
        """End a request in any state and free what it holds; `distrust`: nobody may reuse what it computed."""
        self._num_stopping[np.fromiter(request.stop_ids, np.int64)] -= 1
        if request.new.grammar is not None:
            self._grammars.drop(request.new.handle)
        if request.state is not FINISHED:  # else the roster has ended it already
            self._roster.remove(request, distrust=distrust)
        code, message = (error.code, str(error)) if isinstance(error, RequestFailed) else (error, None)
        return Finish(handle=request.new.handle, reason=reason, stop_id=stop_id, error=code, message=message,
                      vector=vector)  # fmt: skip

    def apply(self, step: InFlight, result: StepResult) -> tuple[StepOutputs, list[Request]]:
        """Confirm one step. Returns the outputs and the requests that ended in it."""
        started = perf_counter()
        assert result.step == step.plan.step and np.array_equal(result.slots, step.sampling), "results out of order"
        tokens = result.tokens[:, 0]
        failed = self._failures(step, result)
        scored, (cached, prefixes) = self._score_prompts(step, result), self._reused(step)
        live, slots = self._confirm(step, tokens, failed)
        ended, finished = self._finish(step, tokens, live, slots)
        for request, code in failed.items():
            if request.state is not FINISHED:
                finished.append(self.end(request, FinishReason.ERROR, error=code, distrust=True))
                ended.append(request)
        for slot, request in step.unsampled.items():
            if request.state is not FINISHED:
                reason = FinishReason.STOP if request.new.pool else FinishReason.LENGTH
                finished.append(self.end(request, reason, vector=result.pooled.get(slot)))
                ended.append(request)
        logprobs = {r.new.handle: result.logprobs[s] for r, s in self._with_logprobs(step, live, result)}
        all_live = len(live) == len(step.requests)
        outputs = StepOutputs(
            handles=step.handles if all_live else step.handles[live],
            tokens=tokens if all_live else tokens[live],
            finished=tuple(finished),
            cached=cached,
            prefixes=prefixes,
            logprobs=logprobs,
            prompt_logprobs=scored,
            stats=self.state(step, perf_counter() - started),
        )
        return outputs, ended

    def _failures(self, step: InFlight, result: StepResult) -> dict[Request, str]:
        """Requests that the device, or a token outside the vocabulary, has failed."""
        failed: dict[Request, str] = {}
        tokens = result.tokens[:, 0]
        bad = (tokens < 0) | (tokens >= self._vocab_size)
        if not result.failed and not bad.any():
            return failed
        owner = dict(zip(step.sampling.tolist(), step.requests, strict=True))
        owner.update({slot: request for slot, request, _ in step.scored} | step.unsampled)
        for slot, code in result.failed.items():
            failed[owner[slot]] = code
        for i in np.flatnonzero(bad).tolist():
            failed.setdefault(step.requests[i], "bad_token")
        return failed

    def _confirm(self, step: InFlight, tokens: I32, failed: dict[Request, str]) -> tuple[list[int], I32]:
        """Append the tokens to their requests. Returns the rows that count and the slots of those still running."""
        table = self._roster.table
        if step.version == table.version and not failed:
            table.known[step.sampling] += 1
            table.in_flight[step.sampling] -= 1
            for request, token in zip(step.requests, tokens.tolist(), strict=True):
                request.tokens.append(token)
            return list(range(len(step.requests))), step.sampling
        slots = np.array([r.slot for r in step.requests], np.int32)
        running = slots >= 0
        table.in_flight[slots[running]] -= 1
        for i in np.flatnonzero(~running).tolist():
            step.requests[i].in_flight -= 1
        counts = np.array([r.state is not FINISHED and r not in failed for r in step.requests], bool)
        live = np.flatnonzero(counts).tolist()
        values = tokens.tolist()
        for i in live:
            step.requests[i].tokens.append(values[i])
        table.known[slots[counts & running]] += 1
        return live, slots[counts]

    def _finish(self, step: InFlight, tokens: I32, live: list[int], slots: I32) -> tuple[list[Request], list[Finish]]:
        """End the requests that met a stop id or their length; index the blocks that the others completed."""
        roster, table = self._roster, self._roster.table
        size = roster.allocator.block_size
        mine = tokens if len(live) == len(step.requests) else tokens[live]
        held = slots >= 0
        computed = table.known[slots] - 1  # the newest token's own KV comes with the next step
        for j in np.flatnonzero(held & (computed % size == 0)).tolist():
            try:
                roster.publish(step.requests[live[j]], int(computed[j]))
            except Exception:
                roster.fail(step.requests[live[j]])
        ended: list[Request] = []
        finished: list[Finish] = []
        suspects = (self._num_stopping[mine] > 0) | (table.known[slots] >= table.end[slots]) | ~held
        if len(step.plan.grammar):
            suspects |= np.isin(slots, step.plan.grammar)
        for j in np.flatnonzero(suspects).tolist():
            request, token = step.requests[live[j]], int(mine[j])
            if request.state is FINISHED:
                continue
            finish = self._ending(request, token)
            if finish is not None:
                finished.append(finish)
                ended.append(request)
        return ended, finished

    def _ending(self, request: Request, token: int) -> Finish | None:
        """The end of a request, if this token is its last."""
        num_outputs = len(request.tokens) - request.num_prompt
        if token in request.stop_ids and num_outputs > request.new.min_tokens:
            return self.end(request, FinishReason.STOP, stop_id=token)
        try:
            if request.new.grammar is not None and self._grammars.advance(request.new.handle, token):
                return self.end(request, FinishReason.STOP)
        except RequestFailed as failure:
            return self.end(request, FinishReason.ERROR, error=failure)
        return self.end(request, FinishReason.LENGTH) if len(request.tokens) >= request.end else None

    def _score_prompts(self, step: InFlight, result: StepResult) -> dict[int, RowLogprobs]:
        """New prompt rows by handle; rows past the prompt's end, or already delivered, are cut."""
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
        new = slice(request.prompt_scored - start, request.num_prompt - 1 - start)
        return RowLogprobs(rows.ids[new], rows.logprobs[new], rows.ranks[new])

    @staticmethod
    def _with_logprobs(step: InFlight, live: list[int], result: StepResult) -> list[tuple[Request, int]]:
        if not result.logprobs:
            return []
        slots = step.sampling.tolist()
        return [(step.requests[i], slots[i]) for i in live if slots[i] in result.logprobs]

    @staticmethod
    def _reused(step: InFlight) -> tuple[dict[int, int], dict[int, PrefixReport]]:
        live = [r for r in step.admitted if r.state is not FINISHED]
        reports = {r.new.handle: r.prefix for r in live if r.prefix is not None}
        return {r.new.handle: r.num_cached for r in live}, reports

    def state(self, step: InFlight | None = None, finish_s: float = 0.0) -> StepStats:
        """How things stand now and, after a step, what it did."""
        s, roster, pool = self._scheduler, self._roster, self._roster.allocator.pool
        did: dict[str, Any] = {} if step is None else {
            "step": step.plan.step, "num_tokens": int(step.plan.num_tokens.sum()),
            "num_prefill_tokens": step.num_prefill_tokens, "num_scheduled": len(step.plan.slots),
            "num_prefills": step.num_prefills, "schedule_s": step.schedule_s, "execute_s": step.execute_s}
        return StepStats(
            num_running=len(roster.table),
            num_waiting=len(roster.queue) + roster.num_blocked,
            num_blocked=roster.num_blocked,
            num_preempted=s.num_preempted,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            prefix_queries=s.admitter.prefix_queries,
            prefix_hits=s.admitter.prefix_hits,
            finish_s=finish_s,
            **did,
        )
