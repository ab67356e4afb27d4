"""The engine loop: plan a step, submit it, and confirm the step before while it runs."""

import heapq
import time
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from time import perf_counter

import msgspec

from quire.answers.grammar import GrammarCompiler
from quire.config.engine import SchedulerConfig
from quire.contracts.adapters import NO_ADAPTERS
from quire.contracts.adapters import TAG as ADAPTER
from quire.contracts.errors import EngineDead, InvalidParameter, PromptTooLong
from quire.contracts.output import NO_TOKENS, Finish, StepOutputs
from quire.contracts.protocols import Executor
from quire.contracts.request import FinishReason, NewRequest, Request, RequestState
from quire.contracts.step import I32, NO_MASKS, StepCopies, StepPlan, StepResult, StepSync
from quire.engine.finish import Finisher
from quire.engine.grammar import Grammars
from quire.engine.live_recorder import LiveRecorder
from quire.engine.plan_writer import InFlight
from quire.engine.queue import SLACK
from quire.engine.scheduler import Scheduler
from quire.kv.allocator import KVAllocator
from quire.kv.events import EventLog
from quire.kv.hashing import TENANT, Tags
from quire.kv.miss_reasons import PrefixHistory
from quire.kv.store import KVStore


class EngineCore:
    """The engine core: a scheduler over an executor.

    The core plans step N+1 while step N runs, as deep as the executor allows. Only `collect` waits for the device. Not
    thread-safe: one thread calls `add`, `abort` and `step`.

    in_flight     steps that are submitted and not confirmed, oldest first
    needs_masks   True: the step that was submitted last cannot sample before `send_masks`
    events        tells which blocks the prefix cache gets and loses; None: nobody wants to know
    recorder      records steps and requests for the live view; None: nobody watches
    held          True: no step with tokens is planned, and requests stay as they are
    torn          True after a step raised: the engine cannot run another step
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        allocator: KVAllocator,
        *,
        root_key: bytes,
        prefix_caching: bool = True,
        compiler: GrammarCompiler | None = None,
        store: KVStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.facts = executor.facts()
        per_hit = allocator.hit_size // allocator.block_size
        history = PrefixHistory(
            allocator.pool, enabled=prefix_caching, per_hit=per_hit, states=allocator.states, clock=clock
        )
        self.scheduler = Scheduler(self.facts, config, allocator, root_key, history, store)
        self._roster, self._store = self.scheduler.roster, store
        if store is not None:
            allocator.on_withdraw.append(store.distrust)
        self._grammars = Grammars(compiler, clock)
        if self.facts.num_drafts:
            self.scheduler.guess = self._grammars.guess
        self._finisher = Finisher(self.scheduler, self._grammars, self.facts.vocab_size)
        self._requests: dict[int, Request] = {}
        self.in_flight: deque[InFlight] = deque()
        self.needs_masks = False
        self.events: EventLog | None = None
        self.recorder: LiveRecorder | None = None
        self._finished: list[Finish] = []  # ended between steps; reported with the next outputs
        self._deadlines: list[tuple[float, int]] = []
        self._prefix_caching = prefix_caching
        drafts, lag = self.facts.num_drafts, self.facts.decode_lag
        again = drafts if self.facts.drafts_cached else 0  # `Growth.redrafted`, and the blocks of `StageRuns.limits`
        again *= 1 + (self.facts.num_stages > 1)
        self._most_in_flight = max(config.token_budget(), 1 + lag * (1 + drafts) + again)
        self._clock = clock
        self._step = 0
        self.torn = False
        self.held = False
        self.moved = 0  # see `StepResult.moved`; of the last result
        self.flushing = False  # True: the engine is being closed, and its copies are to end

    @property
    def has_work(self) -> bool:
        """True when a request is live, a step, a copy or a load of an adapter is in flight, or an ended request is not
        reported yet.

        Writes of KV blocks to a disk count once a second, and while `flushing`.
        """
        return bool(self._plannable or self.in_flight or self._finished or self._copying)

    @property
    def _plannable(self) -> bool:
        closed = self.held or (not self.scheduler.admits and not len(self.scheduler.table))
        return bool(self._requests) and not closed

    @property
    def _copying(self) -> bool:
        loading = self._roster.adapters is not None and self._roster.adapters.busy
        return loading or (self._store is not None and self._store.busy(writes=self.flushing))

    @property
    def handles(self) -> list[int]:
        """Handles (`NewRequest.handle`) of the live requests."""
        return list(self._requests)

    def add(self, new: NewRequest, *, places: int = 1, beside: int = 0) -> None:
        """Accept a request. Raises a `RequestError` with the reason when the engine refuses it; nothing is kept then.

        places   number of completions that must fit into queue and free slots now: this one and, with n > 1, its
                 later siblings, which are then never refused. 0: accept the request even when the queue is full
        beside   number of requests that wait elsewhere and count against the limit of this queue
        """
        num_prompt = len(new.token_ids) // 4
        end = num_prompt + new.max_tokens
        if num_prompt == 0:
            raise InvalidParameter("the prompt is empty: give at least one token.", param="prompt")
        if end > self.facts.max_model_len:
            raise PromptTooLong(
                f"prompt ({num_prompt}) + max_tokens ({new.max_tokens}) = {end} tokens exceed the "
                f"context of {self.facts.max_model_len}: shorten the prompt or lower max_tokens."
            )
        if self.scheduler.allocator.most_blocks(end, self._most_in_flight) > self.facts.num_blocks:
            raise PromptTooLong(
                f"{end} tokens need more than the {self.facts.num_blocks} KV blocks of "
                f"{self.facts.block_size} tokens: shorten the prompt, lower max_tokens, or start the engine with a "
                "higher gpu_memory_utilization or kv_cache_memory_bytes."
            )
        if new.adapter is not None and self._roster.adapters is None:
            raise InvalidParameter(NO_ADAPTERS, param="model")
        assert new.handle not in self._requests, f"handle {new.handle} is live"
        parent = self._requests.get(new.parent) if new.parent is not None else None
        request = self._roster.add(new, self._tags(new), parent, places, beside)
        try:
            if new.grammar is not None:
                self._grammars.start(new, bounded=places > 0)
            self._finisher.watch(request)
        except Exception:
            self._grammars.drop(new.handle)
            self._roster.remove(request)
            raise
        self._requests[new.handle] = request
        if self.recorder is not None:
            self.recorder.arrived(request)
        if new.deadline is not None:
            heapq.heappush(self._deadlines, (new.deadline, new.handle))
            if len(self._deadlines) > 2 * len(self._requests) + SLACK:  # most of their requests have ended
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
                heapq.heapify(self._deadlines)

    def abort(self, handle: int, cause: str = "") -> None:
        """End a request in any state. Unknown handles (already finished) are ignored. cause: a word for the records"""
        request = self._requests.pop(handle, None)
        if request is not None:
            self._finished.append(self._finisher.end(request, FinishReason.ABORT, error=cause or None))

    def step(self) -> StepOutputs:
        """Plan and submit a step if the pipeline has room. Confirm the oldest step if the pipeline is full or drained.

        A step that raises is final: plan and computation may differ, so every later call raises `EngineDead`.
        """
        if self.torn:
            raise EngineDead("an earlier step of this engine failed: make a new engine.")
        self.torn = True
        outputs = self._advance()
        self.torn = False
        return outputs

    def _advance(self) -> StepOutputs:
        planned, outputs = self.begin_step(), None
        if planned is not None:
            self.submit(planned)
            outputs = self.send_masks() if self.needs_masks else None
        if outputs is None and self.in_flight and (planned is None or not self.has_room):
            outputs = self.confirm()
        return outputs or self.state(wait=planned is None)

    # --- the parts of `step`, which `Replicas` calls by themselves --------------------------------------------------

    @property
    def has_room(self) -> bool:
        """True when another step can be submitted before one is confirmed."""
        depth = min(self.facts.depth, 2) if self._grammars else self.facts.depth  # a mask needs all tokens before it
        return len(self.in_flight) < depth and not self.needs_masks

    def begin_step(self) -> InFlight | None:
        """End requests whose time is over, take compiled grammars, and plan a step if there is room.

        Returns None when no request can run before more results arrive.
        """
        self._expire()
        self._take_grammars()
        if not self.has_room or not (self._plannable or self._copying):
            return None
        started = perf_counter()
        planned = self.scheduler.plan(self._step) if self._plannable else None
        if planned is None and self._copying and not self.in_flight:
            planned = self.scheduler.plan_idle(self._step)  # carries jobs, and brings reports
        self._report_broken()
        if planned is not None:
            planned.schedule_s = perf_counter() - started
        return planned

    def submit(self, planned: InFlight | None, sync: StepSync | None = None) -> None:
        """Submit a step, and let it sample unless it `needs_masks`.

        planned   None: submit a step without tokens, in which this replica takes part in the exchanges of the others
        sync      of replicas in lock-step
        """
        planned = planned or self.scheduler.plan_idle(self._step)
        self._step += 1
        if sync is not None:
            planned.plan = msgspec.structs.replace(planned.plan, sync=sync)
        if self._roster.adapters is not None and (jobs := self._roster.adapters.take_jobs()):
            features = msgspec.structs.replace(planned.plan.features, adapters=jobs)
            planned.plan = msgspec.structs.replace(planned.plan, features=features)
        if self._store is not None:
            idle = not len(planned.plan.slots) and not (sync is not None and any(sync.rows))
            copies = self._store.take_copies() or (StepCopies() if idle else None)
            if copies is not None:
                copies = msgspec.structs.replace(copies, wait=idle)
                planned.plan = msgspec.structs.replace(planned.plan, copies=copies)
        started = perf_counter()
        if self.recorder is not None:
            self.recorder.submitted(planned, started)
        self.executor.submit(planned.plan)
        self.in_flight.append(planned)
        self.needs_masks = len(planned.plan.grammar) > 0
        if not self.needs_masks:
            self.executor.release(planned.plan.step, NO_MASKS)
        planned.execute_s += perf_counter() - started

    def send_masks(self) -> StepOutputs | None:
        """Let the step that was submitted last sample, with its grammar masks.

        They need all tokens before them: the step before is confirmed first. Returns the outputs of that step.
        """
        outputs = self.confirm() if len(self.in_flight) > 1 else None
        (planned,) = self.in_flight
        started = perf_counter()
        masks = self._masks(planned.plan)
        planned.schedule_s += perf_counter() - started
        started = perf_counter()
        self.executor.release(planned.plan.step, masks)
        planned.execute_s += perf_counter() - started
        self.needs_masks = False
        return outputs

    def _masks(self, plan: StepPlan) -> I32:
        """Return the grammar masks of a step.

        A request ends here when no token can follow its output; its sampled token is dropped later.
        """
        drafts = {each.slot: each.tokens.tolist() for each in plan.drafts}
        running = self.scheduler.table.requests
        masks, ended = self._grammars.masks([(running[slot], drafts.get(slot, ())) for slot in plan.grammar.tolist()])
        for request, failure in ended:
            del self._requests[request.new.handle]
            reason = FinishReason.STOP if failure is None else FinishReason.ERROR
            self._finished.append(self._finisher.end(request, reason, error=failure))
        return masks

    def _take_grammars(self) -> None:
        """Unblock requests whose grammar is compiled; end requests whose grammar cannot be compiled."""
        for handle, failure in self._grammars.settled():
            if failure is None:
                self._roster.compiled(self._requests[handle])
            else:
                request = self._requests.pop(handle)
                self._finished.append(self._finisher.end(request, FinishReason.ERROR, error=failure))

    def watch(self, on: bool) -> None:
        """Begin to record steps and requests, or end it and drop the records."""
        self.recorder = LiveRecorder(self.scheduler, self._requests) if on else None
        self._roster.on_move = [] if self.recorder is None else [self.recorder.moved]
        self._finisher.on_end = [] if self.recorder is None else [self.recorder.ended]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, in all tiers; running requests keep their blocks.

        Returns True when no request was running.
        """
        allocator = self.scheduler.allocator
        allocator.pool.reset()
        if allocator.states is not None:
            allocator.states.pool.reset()
        if self._store is not None:
            self._store.reset()
        if self.events is not None:
            self.events.flush()
        return len(self.scheduler.table) == 0

    def shutdown(self, *, wait: bool = True) -> None:
        """Drop the steps in flight and stop the executor. wait: see `Executor.shutdown`."""
        self.in_flight.clear()
        self._grammars.close()
        if self.events is not None:
            self.events.close()
        for close in self._store.on_close if self._store is not None else ():
            close()
        self.executor.shutdown(wait=wait)

    def check(self) -> None:
        """Assert every invariant of the bookkeeping; when idle, also that no block is held."""
        self._roster.check()
        if self._roster.adapters is not None:
            self._roster.adapters.check_slots(self._requests.values())
        running = [r for r in self._requests.values() if r.state is RequestState.RUNNING]
        assert len(running) == len(self.scheduler.table)
        assert len(self._grammars) == sum(r.new.grammar is not None for r in self._requests.values())
        if not self._requests:
            assert len(self.scheduler.queue) == 0 and self._roster.num_blocked == 0
            pool = self.scheduler.allocator.pool
            held = len(set(self._store.held())) if self._store is not None else 0
            leaked = self.facts.num_blocks - pool.num_free - held
            assert not leaked, f"{leaked} blocks leaked"
            if (states := self.scheduler.allocator.states) is not None:
                held = len(set(self._store.held_states())) if self._store is not None else 0
                coming = 0 if self.in_flight else states.pool.num_blocks - states.pool.num_free - held
                assert not coming, f"{coming} checkpoints of states leaked"

    def state(self, *, wait: bool = False) -> StepOutputs:
        """Return outputs without a step: the requests that ended between steps, and counters.

        wait   if there is nothing else to do, wait a moment for a grammar that is being compiled
        """
        if wait and not self.in_flight and not self._finished:
            self._grammars.wait()
        return self._report(StepOutputs(handles=NO_TOKENS, tokens=NO_TOKENS, stats=self._finisher.state()))

    def confirm(self) -> StepOutputs:
        """Wait for the oldest step in flight, and apply its result. Returns its outputs."""
        step, started = self.in_flight.popleft(), perf_counter()
        launch_s = step.execute_s
        result = self.executor.collect()
        self.moved = result.moved
        step.execute_s += perf_counter() - started
        self._note_copies(result)
        self._note_adapters(result)
        outputs, ended = self._finisher.apply(step, result)
        if self.recorder is not None:
            self.recorder.confirmed(step, outputs, launch_s)
        for request in ended:
            self._requests.pop(request.new.handle, None)
        self._report_broken()
        return self._report(outputs)

    def _note_copies(self, result: StepResult) -> None:
        """Apply the reports of copies, and queue the requests that waited for them."""
        if self._store is None:
            return
        self._store.finished(result.copied, result.files)
        came, late = self._store.take_ready()
        for handle in came + late:
            self._roster.came(self._requests[handle], again=handle in came)

    def _note_adapters(self, result: StepResult) -> None:
        """Apply the reports of loads: queue the requests that waited for an adapter, or end them if it cannot come."""
        if self._roster.adapters is None or not result.loaded:
            return
        ready, failed = self._roster.adapters.finished(result.loaded)
        for request in ready:
            self._roster.came(request)
        for request, error in failed:
            del self._requests[request.new.handle]
            self._finished.append(self._finisher.end(request, FinishReason.ERROR, error=error))

    def _report_broken(self) -> None:
        """End the requests whose bookkeeping raised an exception; the others go on."""
        for request in self._roster.take_broken():
            self._requests.pop(request.new.handle, None)
            self._finished.append(self._finisher.end(request, FinishReason.ERROR, error="internal"))

    def _report(self, outputs: StepOutputs) -> StepOutputs:
        if self.events is not None:
            self.events.flush()
        adapters = None if self._roster.adapters is None else self._roster.adapters.stats()
        if not self._finished and adapters is None:
            return outputs
        finished, self._finished = tuple(self._finished), []
        return msgspec.structs.replace(outputs, finished=finished + outputs.finished, adapters=adapters)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            deadline, handle = heapq.heappop(self._deadlines)
            request = self._requests.get(handle)
            if request is not None and request.new.deadline == deadline:  # else the entry is of an earlier request
                del self._requests[handle]
                self._finished.append(self._finisher.end(request, FinishReason.ERROR, error="deadline"))

    def _tags(self, new: NewRequest) -> Tags:
        """Return the tags of a request's block keys.

        Without prefix caching, a tag per prompt makes its blocks findable only by its own completions.
        """
        adapter = "" if new.adapter is None else new.adapter.digest
        if new.adapter is not None and self.events is not None:
            self.events.adapters[adapter] = new.adapter.name
        named = ("salt", new.cache_salt), (TENANT, new.account.tenant), (ADAPTER, adapter)
        tags = [(domain, value) for domain, value in named if value]
        if new.embeds:
            tags.append(("embeds", sha256(new.embeds).hexdigest()))
        if not self._prefix_caching:
            tags.append(("request", str(new.handle if new.parent is None else new.parent)))
        return tags
