"""Plans the next step: who runs, how many tokens each, which blocks, who is admitted and who has to give way."""

import logging
from dataclasses import dataclass, field

import numpy as np

from quire.config.engine import SchedulerConfig
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.request import BlockReason, NewRequest, Request, RequestState
from quire.contracts.step import I32, POOL, PROMPT_LOGPROBS, SAMPLE, Admission, SharedPrefix, StepPlan
from quire.engine.budget import share_budget
from quire.engine.queue import WaitingQueue
from quire.engine.table import RunningTable
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import KeyChain, Tags
from quire.kv.misses import PrefixHistory
from quire.kv.prefix import PrefixMatch

LOG = logging.getLogger("quire")
SHORT_STEPS = 32  # in which all prompts that wait must be done, or steps are not kept short (docs/log.md)
SHARED_TOKENS = 1024  # reading fewer once instead of for each request saves nothing


@dataclass(kw_only=True)
class InFlight:
    """One submitted step: the plan, and whose slots they were when it was planned."""

    plan: StepPlan
    sampling: I32  # slots that sample, in plan order
    requests: list[Request]  # of `sampling`
    handles: I32
    version: int  # of the table when planned
    admitted: list[Request] = field(default_factory=list)  # for the first time
    scored: list[tuple[int, Request, int]] = field(default_factory=list)  # slot, request, position of its first row
    unsampled: dict[int, Request] = field(default_factory=dict)  # by slot: prompt done, nothing to sample
    num_prefills: int = 0  # slots that are catching up
    num_prefill_tokens: int = 0
    schedule_s: float = 0.0  # seconds of planning
    execute_s: float = 0.0  # seconds in the executor, so far


class Scheduler:
    """Continuous batching over one token budget, with chunked prefill, prefix reuse and preemption by recompute."""

    def __init__(self, facts: ExecutorFacts, config: SchedulerConfig, allocator: KVAllocator, root_key: bytes,
                 history: PrefixHistory) -> None:
        self.by_priority = config.scheduling_policy == "priority"
        self.table = RunningTable(facts.num_slots)
        self.queue = WaitingQueue(self.by_priority, config.max_waiting, facts.num_slots)
        self.allocator = allocator
        self.num_preempted = self.num_blocked = self.prefix_queries = self.prefix_hits = 0
        self._budget, self._chunk = config.token_budget(), facts.prompt_chunk
        self._lag = facts.decode_lag
        self._headroom = int(config.watermark * facts.num_blocks)
        self._root, self._history = root_key, history
        self._chains: dict[int, KeyChain] = {}
        self._children: dict[int, dict[int, Request]] = {}  # parent's handle -> those blocked on its prompt, by handle
        self._compiling: set[int] = set()  # handles of those whose grammar is not there yet
        self._released: list[int] = []
        self._broken: list[Request] = []
        self._arrivals = 0
        self._sampling: tuple[int, I32, list[Request], I32] | None = None
        self._shared: tuple[int, tuple[SharedPrefix, ...]] = (-1, ())

    # --- requests come and go -----------------------------------------------------------------------------------

    def add(self, new: NewRequest, tags: Tags, parent: Request | None, places: int = 1) -> Request:
        """Queue a request. With a parent still before the end of its prompt, it is blocked until that is planned.

        places   as in `EngineCore.add`
        """
        if new.parent is None:
            self.queue.check_room(places, self.num_blocked, self.table.num_free)
        request = Request(new, self._arrivals)
        self._arrivals += 1
        chain = KeyChain(self._root, self.allocator.block_size, request.tokens, tags)
        if new.grammar is not None:
            self._compiling.add(new.handle)
        if parent is not None and not self._prompt_planned(parent):
            request.to(RequestState.BLOCKED, BlockReason.PARENT)
            self._children.setdefault(parent.new.handle, {})[new.handle] = request
            self.num_blocked += 1
        else:
            self._line_up(request)
        self._chains[new.handle] = chain
        return request

    def remove(self, request: Request, *, distrust: bool = False) -> None:
        """End a request in any state and free what it holds; `distrust` also withdraws the blocks it published."""
        before, blocked_on = request.state, request.blocked_on
        if before is RequestState.RUNNING:
            (self.allocator.forget if distrust else self.allocator.free)(request.slot)
            self._released.append(self.table.leave(request))
        request.to(RequestState.FINISHED)
        if before is RequestState.WAITING:
            self.queue.drop(request)
            if distrust:
                self._withdraw(request)
        if before is RequestState.BLOCKED:
            self.num_blocked -= 1
            if blocked_on is BlockReason.PARENT:
                assert request.new.parent is not None
                del self._children[request.new.parent][request.new.handle]
        self._compiling.discard(request.new.handle)
        self._unblock_children(request)
        del self._chains[request.new.handle]

    def compiled(self, request: Request) -> None:
        """Its grammar is there: it may run as soon as nothing else blocks it."""
        self._compiling.remove(request.new.handle)
        if request.blocked_on is BlockReason.GRAMMAR:
            self.num_blocked -= 1
            request.to(RequestState.WAITING)
            self.queue.push(request)

    def _line_up(self, request: Request) -> None:
        """Queue a WAITING request, or block it until its grammar is there."""
        if request.new.handle in self._compiling:
            request.to(RequestState.BLOCKED, BlockReason.GRAMMAR)
            self.num_blocked += 1
        else:
            self.queue.push(request)

    def _withdraw(self, request: Request) -> None:
        """Make the blocks of a preempted request unfindable: it failed in a step that was still in flight."""
        chain, pool = self._chains[request.new.handle], self.allocator.pool
        found = map(pool.lookup, chain.keys(chain.num_hashed))
        pool.forget([block for block in found if block is not None])

    def publish(self, request: Request, num_tokens: int) -> None:
        """Index the full blocks among the first `num_tokens` tokens, which are known and computed."""
        full = num_tokens // self.allocator.block_size
        self.allocator.publish(request.slot, self._chains[request.new.handle], full)

    def fail(self, request: Request) -> None:
        """End a request alone whose bookkeeping met an exception (call this while it is handled); see `take_broken`.

        What it has published may never be computed, so nobody may find it any more.
        """
        LOG.exception("request %s failed; the others go on", request.new.request_id)
        if request.state is RequestState.WAITING and request.slot >= 0:  # its admission broke off: no device knows it
            if self.allocator.num_blocks(request.slot):
                self.allocator.forget(request.slot)
            self.table.leave(request)
        self.remove(request, distrust=request.state is RequestState.RUNNING)
        self._broken.append(request)

    def take_broken(self) -> list[Request]:
        """The requests that `fail` has ended since the last call."""
        broken, self._broken = self._broken, []
        return broken

    # --- planning -----------------------------------------------------------------------------------------------

    def plan(self, step: int) -> InFlight | None:
        """The next step, or None when nothing can run before more results arrive."""
        preempted = self.num_preempted
        budget = self._step_budget()
        slots, num_tokens = share_budget(self.table, budget, self._lag)
        slots, num_tokens, appended = self._grow(slots, num_tokens)
        if self._offer_chunks(slots, num_tokens):
            slots, num_tokens, appended = self._still_running(slots, num_tokens, appended)
        admitted: list[Admission] = []
        if self.num_preempted == preempted and len(self.queue):
            slots, num_tokens = self._admit(slots, num_tokens, admitted, budget)
        if not len(slots):
            return None
        in_flight = self._record(step, slots, num_tokens, admitted, appended)
        self._released.clear()
        return in_flight

    def _step_budget(self) -> int:
        """Tokens of the next step. Few prompts beside many answers come in chunks that about double a step's time, so
        that no answer stalls. Many prompts come first: a step takes nearly as long with few answers as with many; and
        long ones, the ends of which would read all that is before them with too few rows to keep a GPU busy."""
        if not self._chunk:
            return self._budget
        order = self.table.order()
        goal = self.table.goal[order]
        pending = np.maximum(goal - self.table.planned[order], 0)
        decoding = len(order) - int(np.count_nonzero(pending))
        chunk = max(self._chunk, decoding)
        most = SHORT_STEPS * chunk
        short = most - int(pending.sum())
        if not decoding or short < 0 or goal[pending > 0].max(initial=0) > most or self.queue.backlog(short) > short:
            return self._budget
        return min(self._budget, decoding + chunk)

    def _grow(self, slots: I32, num_tokens: I32) -> tuple[I32, I32, I32]:
        """Give every slot the blocks for its tokens; take them from the last in order when the pool is short."""
        needed = self.table.planned[slots] + num_tokens
        try:
            rows = self.allocator.grow_many(slots, needed)
        except Exception:  # whose fault it is shows below, where they grow one by one
            LOG.exception("the slots could not grow together")
            rows = None
        if rows is not None:
            return slots, num_tokens, rows
        short = np.flatnonzero(needed > self.allocator.capacity[slots])
        appended: list[tuple[int, int, int]] = []
        for i in short.tolist():
            slot = int(slots[i])
            while (request := self.table.requests[slot]) is not None:
                try:
                    blocks = self.allocator.grow(slot, int(needed[i]))
                except Exception:
                    self.fail(request)
                    break
                if blocks is not None:
                    appended.extend((slot, 0, block) for block in blocks)
                    break
                self._preempt_last()
        return self._still_running(slots, num_tokens, np.array(appended, np.int32).reshape(-1, 3))

    def _still_running(self, slots: I32, num_tokens: I32, appended: I32) -> tuple[I32, I32, I32]:
        """Leave out the slots whose requests have just been preempted or have failed."""
        running = np.array([request is not None for request in self.table.requests], bool)
        kept = running[slots]
        return slots[kept], num_tokens[kept], appended[running[appended[:, 0]]]

    def _preempt_last(self) -> None:
        """Send the running request that comes last in order back to the queue, to be recomputed later."""
        request = self.table.requests[int(self.table.order()[-1])]
        assert request is not None
        self.allocator.free(request.slot)
        self._released.append(self.table.leave(request))
        request.to(RequestState.WAITING)
        request.num_preemptions += 1
        self.num_preempted += 1
        self.queue.push(request)

    def _admit(self, slots: I32, num_tokens: I32, admitted: list[Admission], budget: int) -> tuple[I32, I32]:
        """Admit waiting requests in order while tokens, slots and blocks last; never past one that does not fit."""
        room = budget - int(num_tokens.sum())
        new_slots: list[int] = []
        new_tokens: list[int] = []
        while room > 0 and self.table.num_free and (request := self.queue.peek()) is not None:
            if request.in_flight:
                break  # preempted, and its last result is still to come
            try:
                admission = self._enter(request, room)
            except Exception:
                self.fail(request)
                continue
            if admission is None:
                break
            self.queue.pop()
            request.to(RequestState.RUNNING)
            admitted.append(admission)
            count = min(len(request.tokens) - admission.num_computed, room)
            new_slots.append(request.slot)
            new_tokens.append(count)
            room -= count
            if admission.num_computed + count == len(request.tokens):
                self._unblock_children(request)
        if not new_slots:
            return slots, num_tokens
        return (np.concatenate([slots, np.array(new_slots, np.int32)]),
                np.concatenate([num_tokens, np.array(new_tokens, np.int32)]))  # fmt: skip

    def _match(self, request: Request) -> PrefixMatch:
        """Blocks to reuse; at least the last token is computed, and every prompt row that is still to be scored."""
        limit = len(request.tokens) - 1
        if request.new.sampler.num_prompt_logprobs is not None:
            limit = min(limit, request.prompt_scored)
        elif not request.new.read_prefix_cache and (request.num_preemptions == 0 or request.new.pool):
            limit = 0
        return self.allocator.match(self._chains[request.new.handle], limit)

    def _enter(self, request: Request, room: int) -> Admission | None:
        """Give a waiting request a slot, blocks and up to `room` planned tokens; None when it does not fit.

        Until the caller moves it to RUNNING it still stands in the queue, and `fail` can undo all of this.
        """
        new, match = request.new, self._match(request)
        headroom = self._headroom if len(self.table) else 0
        if not self.allocator.can_admit(match, len(request.tokens), headroom):
            return None
        if request.num_cached < 0 and new.parent is None:
            request.prefix = self._history.admit(new.request_id, self._chains[new.handle], match, request.num_prompt,
                                                 reads=new.read_prefix_cache)  # fmt: skip
        slot = self.table.enter(request, match.num_tokens, self.by_priority)
        blocks = self.allocator.admit(slot, match, len(request.tokens))
        self._publish_planned(request, min(len(request.tokens), match.num_tokens + room))
        admission = Admission(
            slot=slot, request_id=new.request_id, token_ids=np.array(request.tokens, np.int32), block_ids=(blocks,),
            num_computed=match.num_tokens, sampler=new.sampler, pool=new.pool,
        )  # fmt: skip
        if request.num_cached < 0:
            request.num_cached = match.num_tokens
            self.prefix_queries += request.num_prompt
            self.prefix_hits += match.num_tokens
        return admission

    def _offer_chunks(self, slots: I32, num_tokens: I32) -> bool:
        """Let the requests admitted next share what running prompts are about to compute. True when one failed."""
        planned = self.table.planned[slots]
        failed = False
        for i in np.flatnonzero(planned < self.table.goal[slots]).tolist():
            request = self.table.requests[int(slots[i])]
            assert request is not None
            try:
                self._publish_planned(request, int(planned[i] + num_tokens[i]))
            except Exception:
                self.fail(request)
                failed = True
                continue
            if planned[i] + num_tokens[i] == len(request.tokens):
                self._unblock_children(request)
        return failed

    def _publish_planned(self, request: Request, num_tokens: int) -> None:
        # Valid in the same step: each layer writes all KV before any row attends (a kernel contract).
        self.publish(request, min(num_tokens, len(request.tokens)))

    def _record(self, step: int, slots: I32, num_tokens: I32, admitted: list[Admission], appended: I32) -> InFlight:
        """Advance the table by the chosen tokens and write the plan."""
        table = self.table
        before = table.planned[slots]
        table.planned[slots] = after = before + num_tokens
        catching_up = before < table.goal[slots]
        total = table.known[slots] + table.in_flight[slots]
        samples = (after == total) & (total < table.end[slots])
        outputs = np.where(samples, SAMPLE, 0).astype(np.uint8)
        num_rows = samples.astype(np.int32)
        scored: list[tuple[int, Request, int]] = []
        unsampled: dict[int, Request] = {}
        prefills = np.flatnonzero(catching_up)
        for i in prefills.tolist():
            request = table.requests[int(slots[i])]
            assert request is not None
            if after[i] == total[i] and not samples[i]:
                unsampled[int(slots[i])] = request
            if request.new.pool:
                outputs[i] |= POOL
            if request.new.sampler.num_prompt_logprobs is not None and before[i] < request.num_prompt - 1:
                outputs[i] |= PROMPT_LOGPROBS
                num_rows[i] = num_tokens[i]
                scored.append((int(slots[i]), request, int(before[i])))
        sampling = slots[samples]
        table.in_flight[sampling] += 1
        plan = StepPlan(
            step=step, slots=slots, num_tokens=num_tokens, num_rows=num_rows, outputs=outputs,
            num_decodes=len(slots) - len(prefills), admitted=tuple(admitted), appended=appended,
            released=np.array(self._released, np.int32), shared=self._shared_prefixes(),
            grammar=sampling[table.masked[sampling]],
        )  # fmt: skip
        requests, handles = self._who(sampling)
        newly = [r for r in (table.requests[a.slot] for a in admitted) if r is not None and r.num_preemptions == 0]
        return InFlight(
            plan=plan, sampling=sampling, requests=requests, handles=handles, version=table.version, admitted=newly,
            scored=scored, unsampled=unsampled, num_prefills=len(prefills),
            num_prefill_tokens=int(num_tokens[prefills].sum()) if len(prefills) else 0,
        )  # fmt: skip

    def _shared_prefixes(self) -> tuple[SharedPrefix, ...]:
        """Running requests whose contexts begin with the same blocks; remembered until requests come or go."""
        if self._shared[0] != self.table.version:
            groups = self.allocator.shared_prefixes(self.table.order().tolist(), SHARED_TOKENS)
            self._shared = (self.table.version, tuple(SharedPrefix(np.array(s, np.int32), n) for s, n in groups))
        return self._shared[1]

    def _who(self, sampling: I32) -> tuple[list[Request], I32]:
        """The requests and handles of the sampling slots; remembered, since a decoding batch rarely changes."""
        last = self._sampling
        if last is not None and last[0] == self.table.version and np.array_equal(last[1], sampling):
            return last[2], last[3]
        requests = [r for r in (self.table.requests[s] for s in sampling.tolist()) if r is not None]
        handles = self.table.handle[sampling]
        self._sampling = (self.table.version, sampling, requests, handles)
        return requests, handles

    # --- children of n > 1 --------------------------------------------------------------------------------------

    def _prompt_planned(self, parent: Request) -> bool:
        if parent.state is RequestState.RUNNING:
            return bool(self.table.planned[parent.slot] >= parent.num_prompt)
        return parent.state is RequestState.FINISHED or len(parent.tokens) > parent.num_prompt

    def _unblock_children(self, parent: Request) -> None:
        for child in self._children.pop(parent.new.handle, {}).values():
            self.num_blocked -= 1
            child.to(RequestState.WAITING)
            self._line_up(child)

    # --- self-check ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the table and the pool, and that only running requests hold slots and blocks."""
        self.table.check()
        self.allocator.check()
        for request in self.table.active():
            assert request.state is RequestState.RUNNING
            assert self.allocator.capacity[request.slot] >= self.table.planned[request.slot]
        idle = [s for s in range(self.table.num_slots) if self.table.requests[s] is None]
        assert not self.allocator.capacity[idle].any()
