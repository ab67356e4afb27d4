"""A core of a rig that is watched: every frame is compared with the objects of the engine, counted in another way."""

from collections import Counter
from typing import Any

from quire.contracts.live import LiveEngine, LiveEvent
from quire.contracts.live import LiveEventKind as Kind
from quire.contracts.request import RequestState
from quire.kv.census import pool_map

NEXT = {  # event -> the events that may follow it in the life of a request
    Kind.ARRIVED: {Kind.BLOCKED, Kind.QUEUED, Kind.ADMITTED, Kind.FINISHED},
    Kind.BLOCKED: {Kind.BLOCKED, Kind.QUEUED, Kind.FINISHED},
    Kind.QUEUED: {Kind.BLOCKED, Kind.ADMITTED, Kind.FINISHED},
    Kind.ADMITTED: {Kind.FETCHED, Kind.CHUNK, Kind.PREEMPTED, Kind.FINISHED},
    Kind.FETCHED: {Kind.FETCHED, Kind.CHUNK, Kind.PREEMPTED, Kind.FINISHED},
    Kind.CHUNK: {Kind.CHUNK, Kind.PREEMPTED, Kind.ADMITTED, Kind.BLOCKED, Kind.FINISHED},
    Kind.PREEMPTED: {Kind.CHUNK, Kind.BLOCKED, Kind.QUEUED, Kind.ADMITTED, Kind.FINISHED},
    Kind.FINISHED: {Kind.CHUNK, Kind.ARRIVED},  # a chunk that was in flight; another request with this handle
}


class WatchedCore:
    """Takes a frame after every step of a rig (`EngineRig`), and checks it."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        rig.core.watch(True)
        self.recorder = rig.core.recorder
        self.num_steps = 0
        self.sums = Counter[str]()
        self.lives: dict[int, list[LiveEvent]] = {}

    def check(self) -> None:
        """Compare a frame with the engine."""
        frame = self.recorder.frame(0)
        assert not frame.lost_events and not frame.skipped
        self._check_steps(frame)
        self._check_queue(frame)
        self._check_blocks(frame)
        for event in frame.events:
            life = self.lives.setdefault(event.handle, [])
            assert event.what is Kind.ARRIVED if not life else event.what in NEXT[life[-1].what], (life, event)
            life.append(event)

    def finish(self) -> None:
        """Check the sums over everything, when the rig has come to its end."""
        rig, events = self.rig, [event for life in self.lives.values() for event in life]
        counts = Counter(event.what for event in events)
        assert self.num_steps == sum(name == "collect" for name, _ in rig.events)
        assert counts[Kind.ARRIVED] == counts[Kind.FINISHED]
        assert counts[Kind.PREEMPTED] == rig.scheduler.num_preempted
        chunks = sum(int(plan.num_tokens[plan.num_decodes :].sum()) for plan in rig.plans)
        assert self.sums["prompt_tokens"] == chunks == sum(one.count for one in events if one.what is Kind.CHUNK)
        assert self.sums["tokens"] == sum(int(plan.num_tokens.sum()) for plan in rig.plans)
        if totals := rig.scheduler.drafts.totals:
            assert (self.sums["drafts"], self.sums["accepted"]) == (totals[1], sum(totals[2:]))

    def _check_steps(self, frame: LiveEngine) -> None:
        plans = {plan.step: plan for plan in self.rig.plans}
        for step in frame.steps:
            plan = plans[step.step]
            assert (step.decodes, step.tokens) == (plan.num_decodes, int(plan.num_tokens.sum()))
            assert [count for _, _, count, _ in step.chunks] == plan.num_tokens[plan.num_decodes :].tolist()
        collected = [number for name, number in self.rig.events if name == "collect"]
        assert [step.step for step in frame.steps] == collected[self.num_steps :]
        self.num_steps = len(collected)
        assert frame.sums.sampled == sum(step.sampled for step in frame.steps)
        for name in ("prompt_tokens", "tokens", "drafts", "accepted"):
            self.sums[name] += getattr(frame.sums, name)
        assert frame.sums.steps == len(frame.steps)
        if frame.steps:
            assert frame.steps[-1].sampled == len(self.rig.outputs.handles)

    def _check_queue(self, frame: LiveEngine) -> None:
        scheduler, rows = self.rig.scheduler, frame.requests
        assert frame.queue.running == len(scheduler.table) == rows.state.count("running")
        assert frame.queue.waiting == len(scheduler.queue) == rows.state.count("waiting") + frame.queue.preempted
        assert frame.queue.preempted == rows.state.count("preempted")
        assert sum(frame.queue.blocked.values()) == scheduler.roster.num_blocked
        live = {request.new.handle: request for request in self.rig.core._requests.values()}
        assert sorted(rows.handle) == sorted(live) and not rows.more
        for i, handle in enumerate(rows.handle):
            request = live[handle]
            assert (rows.id[i], rows.slot[i], rows.tokens[i]) == (
                request.new.request_id,
                request.slot,
                len(request.tokens),
            )
            held = 0
            if request.state is RequestState.RUNNING:
                tables = [self.rig.allocator.table(request.slot, g) for g in range(len(self.rig.allocator.groups))]
                held = sum(block != 0 for table in tables for block in table)
            assert rows.blocks[i] == held

    def _check_blocks(self, frame: LiveEngine) -> None:
        rig, pool, blocks = self.rig, self.rig.pool, frame.blocks
        slots = [request.slot for request in rig.table.active()]
        kinds, letters = Counter[str](), ""
        for block in range(1, pool.num_blocks + 1):
            refs, key = pool._refs[block], pool._keys[block]
            where = [
                g for g in range(len(rig.allocator.groups)) if any(block in rig.allocator.table(s, g) for s in slots)
            ]
            assert len(where) <= 1, "a block of two groups"
            letter = "s" if refs > 1 else "o" if refs else "." if key is None else "c"
            letters += letter
            kinds[letter if where or not refs else "moving"] += 1
            if where:
                kinds[f"{letter}{where[0]}"] += 1
        assert (blocks.own, blocks.shared, blocks.moving, blocks.cached, blocks.free, blocks.total) == (
            *(kinds[name] for name in ("o", "s", "moving", "c", ".")),
            pool.num_blocks,
        )
        for g, group in enumerate(blocks.groups):
            assert (group.own, group.shared) == (kinds[f"o{g}"], kinds[f"s{g}"])
        assert pool_map(pool) == letters
