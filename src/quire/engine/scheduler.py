"""The scheduler: plans the next step, with its token budget and the requests that share the budget."""

from collections.abc import Callable

import msgspec
import numpy as np

from quire.config.engine import SchedulerConfig
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.request import Request
from quire.contracts.step import I32, Admission, HostDrafts
from quire.engine.admission import Admitter
from quire.engine.budget import share_budget
from quire.engine.drafts import DraftLength
from quire.engine.growth import Growth
from quire.engine.plan_writer import InFlight, PlanWriter
from quire.engine.queue import WaitingQueue
from quire.engine.roster import Roster
from quire.engine.stage_runs import StageRunWriter
from quire.engine.table import RunningTable
from quire.kv.allocator import KVAllocator
from quire.kv.blend import ChunkIndex
from quire.kv.miss_reasons import PrefixHistory
from quire.kv.store import KVStore

# (request, tokens in flight, most drafts, shortest and longest n-gram) -> drafts behind these tokens
Guess = Callable[[Request, int, int, tuple[int, int]], list[int]]
TRIED = 8  # runs of drafts, after which n-grams under a grammar must have been worth the waiting
SHORT_STEPS = 32  # steps that must be enough for all waiting prompts; else chunks are not kept short (docs/log.md)


class Scheduler:
    """Continuous batching over one token budget, with chunked prefill, prefix reuse and preemption by recompute.

    guess    makes drafts for requests with a grammar; None: they have none
    admits   False: no waiting request is admitted
    """

    def __init__(
        self,
        facts: ExecutorFacts,
        config: SchedulerConfig,
        allocator: KVAllocator,
        root_key: bytes,
        history: PrefixHistory,
        store: KVStore | None = None,
    ) -> None:
        by_priority = config.scheduling_policy == "priority"
        self.table = RunningTable(facts.num_slots, facts.num_drafts)
        self.queue = WaitingQueue(by_priority, config.max_waiting, facts.num_slots)
        self.allocator = allocator
        self._chunks = ChunkIndex(allocator, root_key) if facts.blends else None
        self.roster = Roster(
            self.table, self.queue, allocator, root_key, store, chunks=self._chunks, keeps=history.enabled
        )
        self.growth = Growth(self.roster, facts.num_drafts if facts.drafts_cached else 0)
        self.admitter = Admitter(
            self.roster, history, by_priority=by_priority, headroom=int(config.watermark * facts.num_blocks)
        )
        self._budget, self._chunk = config.token_budget(), facts.prompt_chunk
        self._lag, self._stages = facts.decode_lag, facts.num_stages
        self.drafts = DraftLength(
            facts.num_drafts, facts.drafts_by_batch, facts.auto_drafts, cached=facts.drafts_cached
        )
        runs = StageRunWriter(self.roster, self.drafts) if facts.num_stages > 1 and facts.num_drafts else None
        self._writer = PlanWriter(self.roster, facts.num_drafts, runs, cached=facts.drafts_cached)
        self.guess: Guess | None = None
        self.admits = True
        self._lookup = facts.draft_lookup

    @property
    def num_preempted(self) -> int:
        """Preemptions since the start."""
        return self.growth.num_preempted

    def plan(self, step: int) -> InFlight | None:
        """Plan step number `step` and return it; None when nothing can run before more results arrive."""
        preempted = self.growth.num_preempted
        if self._chunks is not None:
            self._chunks.begin_step()
        budget = self._step_budget()
        slots, num_tokens = share_budget(self.table, budget, self._lag, self.drafts, self._stages)
        guessed = self._guess(slots, num_tokens) if self.guess is not None else {}
        slots, num_tokens, appended = self.growth.grow(slots, num_tokens)
        if self.admitter.offer_chunks(slots, num_tokens):
            slots, num_tokens, appended = self.growth.still_running(slots, num_tokens, appended)
        admitted: list[Admission] = []
        if self.growth.num_preempted == preempted and len(self.queue) and self.admits:
            room = budget - int(num_tokens.sum())
            if self.drafts.most:  # drafts have a budget of their own
                decodes = self.table.planned[slots] >= self.table.goal[slots]
                room += int((num_tokens[decodes] - 1).sum())
            slots, num_tokens, admitted = self.admitter.admit(slots, num_tokens, room)
        if not len(slots):
            return None
        planned = self._writer.write(step, slots, num_tokens, admitted, appended)
        if guessed:
            plan = planned.plan
            verified = plan.slots[: plan.num_decodes][plan.num_tokens[: plan.num_decodes] > 1].tolist()
            drafts = tuple(guessed[slot] for slot in verified if slot in guessed)
            planned.plan = msgspec.structs.replace(planned.plan, drafts=drafts)
        return planned

    def plan_idle(self, step: int) -> InFlight:
        """Plan a step without tokens. It gives back slots, as every plan does."""
        none = np.empty(0, np.int32)
        return self._writer.write(step, none, none, [], np.empty((0, 3), np.int32))

    def _guess(self, slots: I32, num_tokens: I32) -> dict[int, HostDrafts]:
        """Return the drafts of decodes with a grammar, by slot. `num_tokens` is reduced in place to what they need."""
        table, found = self.table, dict[int, HostDrafts]()
        for i in np.flatnonzero(table.masked[slots] & (num_tokens > 1)).tolist():
            slot = int(slots[i])
            request = table.requests[slot]
            if request is None or self.guess is None or table.planned[slot] < table.goal[slot]:
                continue
            made, right = int(table.drafts[slot, 0]), int(table.drafts[slot, 1:].sum())
            useless = self._lag > 1 and made >= TRIED * self.drafts.most and right * self.drafts.most < made
            lookup = (0, 0) if useless else self._lookup  # with them a request waits for a step, which brings a token
            drafts = self.guess(request, int(table.in_flight[slot]), int(num_tokens[i]) - 1, lookup)
            num_tokens[i] = 1 + len(drafts)
            if drafts:
                found[slot] = HostDrafts(slot, int(table.upper_bound[slot]), np.array(drafts, np.int32))
        return found

    def _step_budget(self) -> int:
        """Return the token budget of the next step.

        Short chunks keep decodes from stalling: few prompt tokens beside decodes get a chunk that about doubles the
        step's time. The whole budget is used when nothing decodes, and in two more cases. Many prompt tokens wait: they
        come first, because a step takes nearly as long with few decodes as with many. Or a prompt is long: short chunks
        near its end would read all the context before them with too few rows to keep a GPU busy.
        """
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
