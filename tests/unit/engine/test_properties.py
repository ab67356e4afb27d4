"""Anything a front end may do, in any order: nothing leaks, and every request gets exactly its tokens."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import event, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from quire.contracts.errors import InvalidParameter, PromptTooLong, QueueFull
from quire.contracts.request import BlockReason, FinishReason, RequestState, Transfer
from quire.contracts.step import Tier
from quire.contracts.structured import StructuredOutputsParams
from quire.kv.copy_jobs import CopyJobs
from quire.kv.sharing import LEASE_SECONDS, Sharing
from quire.kv.store import KVStore
from quire.kv.tiered_pool import TieredPool

from ...support.full import FULL, full_rows
from ...support.mock_copies import FAULTS, MockDisk, MockPeers, MockRanksDisk
from ...support.pairwise import Row, label, pairwise
from ...support.tier_ledger import TierLedger

VOCAB, MAX_LEN = 7, 44  # few letters: prompts collide, and answers collide with prompts
STEMS = st.sampled_from([[], [0] * 9, [0, 1] * 6, [0] * 5 + [1] * 9])
PROMPTS = st.builds(list.__add__, STEMS, st.lists(st.integers(0, 2), min_size=1, max_size=12))
GRAMMARS = [
    StructuredOutputsParams(**fields).spec()
    for fields in (
        {"regex": "[ab]*c"},
        {"regex": "(abc|d{2,5}){1,3}"},
        {"regex": "[a-f]*"},
        {"choice": ["abba", "cafe", "face"]},
        {"regex": "a+b", "after": "cc"},
        {"regex": "a+b", "after": "cc", "budget": 3},
        {"after": "abc", "budget": 5},
        {"grammar": 'start: t /a+b/\nt[suffix="cc"]: /(?s:.*)/', "after": "cc", "budget": 3, "inside": True},
        {"grammar": 'start: "a" start "b" | "c"'},
        {"regex": "(a"},
    )
]
BELOW = {"none": (), "host": (), "disk": ("disk",), "peers": ("peers",), "all": ("disk", "peers")}  # the host's memory
TIERS = st.builds(
    dict,
    host_blocks=st.integers(1, 30),
    write_through=st.booleans(),
    delays=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=5),
    reserve=st.integers(1, 12),
)
TRANSFERS = [Transfer(name="mine"), Transfer(name="mine, too"), Transfer(name="theirs", address="a:1", num_tokens=12)]
MAYBE_STOPS = st.sampled_from([(), (), (), (3,), (1, 5)])


BLOCKS = {  # for a request of 40 tokens
    (None,): 10,
    (None, 5): 16,
    (9, None): 17,
    (3,): 6,
    (None, 16, 1): 24,
    (None, -8): 17,
    (-6,): 7,
    (None, -16, 5): 25,
}

# Features of an engine that meet in random schedules. `shape`: depth and drafts; from depth 3 on a preempted request
# can be due before its token.
FEATURES: dict[str, list[Any]] = {
    "shape": [(1, 0), (2, 0), (3, 0), (1, 3), (2, 3)],
    "tiers": list(BELOW),
    "windows": [(None,), (None, 5), (9, None), (3,), (None, 16, 1), (None, -8), (-6,), (None, -16, 5)],
    "sizes": [(1,), (2, 1), (1, 2), (1, 4)],
    "caching": [True, False],
    "policy": ["fcfs", "priority"],
    "watermark": [0.0, 0.3],
    "states": [0, 0, 1, 12],  # checkpoints; 0: no layer keeps states
}
OPTIONS = ("windows", "sizes", "caching", "policy", "max_waiting", "watermark", "states")  # of a rig
ROOMS = {"max_waiting": [2, 1000]}


def tiers_of(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a rig with these tiers, a key of `BELOW`."""
    if kind == "none":
        return {}
    made = {name: {"disk": MockDisk, "peers": MockPeers}[name] for name in BELOW[kind]}
    return options | {f"{of}{name}": make() for name, make in made.items() for of in ("", "state_")}


class EngineMachine(RuleBasedStateMachine):
    """The core on the mock; the rig keeps the record, and checks it and the pool after every step.

    setup   values of `FEATURES` and `ROOMS`; the features that it leaves out are drawn
    """

    def __init__(self, rig_class: Any, setup: Row) -> None:
        super().__init__()
        self.rig_class, self.setup = rig_class, setup
        self.depth, self.drafts = setup["shape"]

    @initialize(
        blocks=st.integers(5, 12),
        slots=st.integers(1, 5),
        extra=st.integers(0, 20),
        accepts=st.lists(st.integers(0, 3), min_size=1, max_size=7),
        below=TIERS,
        watched=st.booleans(),
        drawn=st.fixed_dictionaries({name: st.sampled_from(given) for name, given in (FEATURES | ROOMS).items()}),
    )
    def start(
        self,
        blocks: int,
        slots: int,
        extra: int,
        accepts: list[int],
        below: dict[str, Any],
        watched: bool,
        drawn: dict[str, Any],
    ) -> None:
        setup = drawn | self.setup
        event(f"windows {setup['windows']}")
        event(f"tiers {setup['tiers']}")
        self.rig = self.rig_class(
            self.depth,
            blocks=blocks * len(setup["windows"]),
            slots=slots,
            budget=slots + extra,
            max_len=MAX_LEN,
            vocab=VOCAB,
            drafts=self.drafts,
            accepts=accepts,
            **{name: setup[name] for name in OPTIONS},
            **tiers_of(setup["tiers"], below),
        )
        self.bound, self.slots = setup["max_waiting"], slots
        self.ledger = TierLedger(self.rig) if self.rig.store else None
        if watched:
            self.rig.watch()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([0, 1, 5, 16, 18, 20]),
        seed=st.integers(0, 3),
        stops=MAYBE_STOPS,
        min_tokens=st.integers(0, 5),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "", "a"]),
        reads=st.sampled_from([True, True, True, False]),
        lives=st.sampled_from([None] * 6 + [0, 3]),
        fail_after=st.sampled_from([None] * 8 + [0, 2, 9]),
        scored=st.sampled_from([False, False, True]),
        children=st.sampled_from([0, 1, 3]),
        pool=st.sampled_from(["", "", "", "mean", "last", "cls"]),
        grammar=st.sampled_from([None] * 7 + GRAMMARS),
        most_drafts=st.sampled_from([None, None, 0, 1]),
        transfer=st.sampled_from([None] * 6 + TRANSFERS),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        stops: tuple[int, ...],
        min_tokens: int,
        priority: int,
        salt: str,
        reads: bool,
        lives: float | None,
        fail_after: int | None,
        scored: bool,
        children: int,
        pool: str,
        grammar: str | None,
        most_drafts: int | None,
        transfer: Transfer | None,
    ) -> None:
        rig = self.rig
        if pool:
            max_tokens, scored, children, stops, grammar = 0, False, 0, (), None
        fields = {
            "stop_ids": stops,
            "min_tokens": min_tokens,
            "priority": priority,
            "cache_salt": salt,
            "read_prefix_cache": reads,
            "deadline": None if lives is None else rig.now + lives,
            "num_drafts": most_drafts,
            "transfer": transfer if self.ledger and not pool else None,
            "pool": pool,
            "grammar": grammar,
        } | ({"read_prefix_cache": False} if pool in ("mean", "cls") else {})
        end = len(prompt) + max_tokens
        if end > MAX_LEN or rig.allocator.most_blocks(end, rig.core._most_in_flight) > rig.num_blocks:
            with pytest.raises(PromptTooLong):
                rig.add(prompt, max_tokens, **fields)
            return
        waiting = len(rig.scheduler.queue) + rig.scheduler.roster.num_blocked
        num_free = self.slots - len(rig.scheduler.table)
        if waiting + 1 + children > self.bound + num_free:
            with pytest.raises(QueueFull if 1 + children <= self.bound + self.slots else InvalidParameter):
                rig.add(prompt, max_tokens, places=1 + children, **fields)
            return
        parent = rig.add(
            prompt, max_tokens, seed=seed, fail_after=fail_after, scored=scored, places=1 + children, **fields
        )
        for index in range(children):
            rig.add(prompt, max_tokens, seed=seed + 100 + index, parent=parent, **fields)

    @precondition(lambda self: self.rig.asked)
    @rule(data=st.data())
    def late_child(self, data: st.DataObject) -> None:
        """A child whose parent may be in any state, or gone."""
        rig = self.rig
        parent = data.draw(st.sampled_from(sorted(rig.asked)))
        live = parent not in rig.finish and parent in rig.requests
        asked = rig.asked[parent]  # a vector's child generates nothing
        rig.add(rig.prompts[parent], asked.max_tokens, parent=parent, grammar=asked.grammar)
        event(f"child of a parent {'live' if live else 'gone'}")

    @precondition(lambda self: self.rig.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.rig.asked)))
        request = self.rig.requests.get(handle)
        event(f"abort {request.state.value if request else 'finished'}")
        self.rig.abort(handle)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        rig = self.rig
        before = rig.scheduler.num_preempted
        for _ in range(times):
            rig.step()
            if self.ledger is not None:
                self.ledger.check()
            if not rig.core.has_work:
                break
        if rig.scheduler.num_preempted > before:
            event("preempted")
        late = [
            h
            for h, new in rig.asked.items()
            if h not in rig.finish and new.deadline is not None and new.deadline <= rig.now
        ]
        assert not late, f"{late} outlived their deadline"

    @rule()
    def time_passes(self) -> None:
        self.rig.now += 2

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data(), after=st.integers(0, 3))
    def plant_failure(self, data: st.DataObject, after: int) -> None:
        """At an output that the device has not reached yet."""
        rig = self.rig
        handle = data.draw(st.sampled_from(sorted(rig.requests)))
        rig.mock.fail.setdefault(str(handle), len(rig.tokens[handle]) + self.depth * (1 + self.drafts) + after)

    @precondition(lambda self: self.rig.peers is not None)
    @rule()
    def peers_learn(self) -> None:
        """Other engines have computed the same."""
        self.rig.mock._copies.teach(self.rig.store.host._index, self.rig.peers)
        if self.rig.store.states is not None:
            self.rig.mock._state_copies.teach(self.rig.store.states.host._index, self.rig.state_peers)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.rig.core.reset_prefix_cache() == (len(self.rig.table) == 0)
        self.rig.core.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        end(self.rig)
        for handle in self.rig.asked:
            self.rig.judge(handle)


@pytest.mark.parametrize(
    ("setup", "examples"),
    [(row, 9) for row in pairwise(FEATURES | ROOMS)]
    + full_rows([({"shape": shape}, 3000) for shape in FEATURES["shape"]]),
    ids=lambda value: label(value) if isinstance(value, dict) else None,
)
def test_state_machine(Rig: Any, setup: Row, examples: int) -> None:
    """Every pair of features meets in some row, and its examples draw the rest; the full run draws everything."""

    def machine() -> EngineMachine:
        return EngineMachine(Rig, setup)

    run_state_machine_as_test(
        machine if FULL else seeded(crc32(label(setup).encode()))(machine),  # else all rows draw the same
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None),
    )


def tiered_rig(rig_class: Any, seed: int, rng: random.Random) -> Any:
    """A core over small tiers that are slow and fail: host memory, and also a disk, or peers, or both."""
    windows = (None, 6) if seed % 4 == 3 else (None,)
    faults = FAULTS[: 4 if seed % 5 else 5]  # a full disk is written no more
    return rig_class(
        1 + seed % 2,
        blocks=rng.choice([11, 14, 20]) * len(windows),
        windows=windows,
        vocab=VOCAB,
        slots=rng.choice([3, 6]),
        budget=rng.choice([7, 16]),
        host_blocks=rng.choice([4, 12, 40]),
        disk=MockDisk() if seed % 2 else None,
        peers=MockPeers() if seed % 3 else None,
        write_through=seed % 3 == 0,
        delays=[rng.choice([0, 0, 1, 3, 9]) for _ in range(13)],
        faults=[rng.choice(("", "", "", "", *faults)) for _ in range(17)],
        reserve=rng.choice([4, 9]),
    )


class TierEvents:
    """Random events of tiers between the operations of `chaos`, and random fields of its requests about tiers."""

    def __init__(self, rig: Any, rng: random.Random, seen: Counter[str]) -> None:
        self._rig, self._rng, self._seen, self._ledger = rig, rng, seen, TierLedger(rig)
        self._num_leases = 0

    def fields(self) -> dict[str, Any]:
        """Return fields of a request: some are computed for another engine, some by one."""
        if (kind := self._rng.random()) < 0.15:
            self._num_leases += 1
            return {"transfer": Transfer(name=f"lease {self._num_leases}")}
        return {"transfer": Transfer(name="theirs", address="a:1", num_tokens=12)} if kind < 0.25 else {}

    def happen(self) -> None:
        """Do something or nothing, and check all invariants."""
        rig, rng, sharing = self._rig, self._rng, self._rig.store.sharing
        if rng.random() < 0.01:
            self._seen["reset"] += 1
            rig.core.reset_prefix_cache()
            rig.core.check()
            assert not rig.store.host._index and not any(rig.mock._copies._below.values()), "a reset forgot a block"
        if rng.random() < 0.05:
            leases = [*sharing._leases]
            rig.now += rng.choice([1, 4, 31])
            for name in leases[: rng.randrange(3)]:
                sharing.told.put((name, rng.random() < 0.5))
            self._seen["expired"] += sum(lease.until <= rig.now for lease in sharing._leases.values())
        if rig.peers is not None and rng.random() < 0.3:
            rig.mock._copies.teach(rig.store.host._index, rig.peers)
            for key in rng.sample([*rig.peers], len(rig.peers) // 9):
                del rig.peers[key]
            if rig.state_peers is not None and rig.store.states is not None:
                rig.mock._state_copies.teach(rig.store.states.host._index, rig.state_peers)
        self._seen["leased"] += len(sharing._leases)
        self._ledger.check()


def test_tiers_through_chaos(Rig: Any) -> None:
    """3,000 operations, 10,000 in the full run, fixed seeds: requests come, are aborted, preempted and fail, blocks are
    stored, evicted and loaded, copies fail, leases and promises come and end, caches are reset.

    Every invariant holds after each operation.
    """
    seen: Counter[str] = Counter()
    for seed in range(22 if FULL else 9):
        rng = random.Random(seed)
        tier_chaos(tiered_rig(Rig, seed, rng), rng, seen)
    expected = {f"{tier} num_{did}": 50 for tier in ("host", "disk") for did in ("loaded", "stored", "failed")}
    expected |= {"peer num_loaded": 20, "peer num_failed": 50, "reset": 20, "leased": 500, "expired": 30}
    expected |= {"operations": 10_000, "preempted": 30, "host num_dropped": 50, "abort blocked": 3}
    enough(seen, expected if FULL else {name: least * 3 // 10 for name, least in expected.items()})


def test_tiers_of_two_ranks_through_chaos(Rig: Any) -> None:
    """Each rank copies a half of every block, and fails on its own; then another engine reads what these have."""
    seen: Counter[str] = Counter()
    for seed in range(10 if FULL else 4):
        rng, disk = random.Random(seed), MockRanksDisk()
        for tier in (Tier.DISK, Tier.PEER):
            faults = [rng.choice(("", "", "", "", *FAULTS[:4])) for _ in range(17)]
            rig = Rig(
                1 + seed % 2,
                blocks=rng.choice([11, 20]),
                vocab=VOCAB,
                slots=4,
                budget=rng.choice([7, 16]),
                disk=MockRanksDisk(tier, disk.parts),
                host_blocks=rng.choice([4, 12, 40]),
                faults=faults,
                write_through=seed % 3 == 0,
                delays=[rng.choice([0, 0, 1, 3, 9]) for _ in range(13)],
                reserve=rng.choice([4, 9]),
            )
            chaos(rig, rng, seen, num_requests=40, stems=[[letter] * 16 for letter in range(5)])
            rig.drain()
            for handle in rig.asked:
                rig.judge(handle)
            stats = rig.outputs.stats.tiers[tier]
            seen[f"{tier} loaded"] += stats.num_loaded
            seen[f"{tier} failed"] += stats.num_failed
    enough(seen, {f"{tier} {did}": 11 if FULL else 4 for tier in ("disk", "peer") for did in ("loaded", "failed")})


def unfailed(store: Any, reports: Any, *files: Any) -> Any:
    """A store that publishes blocks that failed."""
    return KVStore_finished(store, [msgspec.structs.replace(report, failed=()) for report in reports], *files)


def early(store: Any, keys: Any) -> int:
    """A store that publishes blocks before they are loaded."""
    number = TieredPool_load(store, keys)
    job = store.jobs.running[number].job
    store.pool.publish(int(job.targets[0]), job.keys[0])
    return int(number)


def unreleased(store: Any, job: Any, *ended: Any) -> None:
    """A store that keeps the sources of jobs."""
    store.host.share(job.sources.tolist() if job.source == Tier.HOST else ())
    TieredPool_settle(store, job, *ended)


def lost(jobs: Any) -> None:
    """Jobs that no step gets."""
    jobs._before, jobs._after = [], []


def kept(store: Any, handle: int) -> None:
    """A store that keeps the blocks of requests that wait no more."""
    if (fetch := store._fetches.get(handle)) is not None:
        store._pool.share(fetch.leased[:1])
    KVStore_forget(store, handle)


def ended_lease(sharing: Any, name: str) -> None:
    """Leases that end and keep a block."""
    sharing._host.share(sharing._leases[name].blocks[:1])
    Sharing_end(sharing, name)


TieredPool_load, TieredPool_settle, KVStore_finished = TieredPool._load, TieredPool._settle, KVStore.finished
KVStore_forget, Sharing_end = KVStore.forget, Sharing._end
BUGS = {
    "a failed block is published": (KVStore, "finished", unfailed, "does not add up|two contents of one key"),
    "void copies are published": (CopyJobs, "void", lambda *_: None, "two contents of one key|not its own prefix"),
    "blocks are published early": (TieredPool, "_load", early, "written in two states|not its own prefix"),
    "sources are not released": (TieredPool, "_settle", unreleased, "references of host blocks"),
    "matched blocks are not released": (KVStore, "forget", kept, "reference counts of blocks"),
    "jobs are lost": (CopyJobs, "take", lost, "a job is lost"),
    "waits are not forgotten": (KVStore, "forget", lambda *_: None, "a request waits for no"),
    "failures are not counted": (TieredPool, "_count", lambda *_: None, "does not add up"),
    "leases do not expire": (Sharing, "expire", lambda *_: None, "outlived their time"),
    "leases leak": (Sharing, "_end", ended_lease, "references of host blocks"),
    "promises are not settled": (Sharing, "settle", lambda *_: None, "a promise has outlived"),
    "a reset forgets a tier": (KVStore, "reset", lambda *_: None, "a reset forgot a block"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_every_invariant_of_tiers_can_fail(Rig: Any, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    room, name, wrong, words = BUGS[bug]
    monkeypatch.setattr(room, name, wrong)
    with pytest.raises(AssertionError, match=words):
        for seed in range(30):
            rng = random.Random(seed)
            tier_chaos(tiered_rig(Rig, seed, rng), rng, Counter())


def tier_chaos(rig: Any, rng: random.Random, seen: Counter[str]) -> None:
    """Run requests over the tiers of a rig, until all have ended and no block is held."""
    chaos(
        rig, rng, seen, num_requests=70, stems=[[letter] * 16 for letter in range(5)], tiers=TierEvents(rig, rng, seen)
    )
    end(rig)
    count(rig, seen)


def end(rig: Any) -> None:
    """Let all requests end, then the leases that they have begun, then the copies."""
    rig.now += LEASE_SECONDS
    for _ in range(20_000):
        if not rig.requests:
            break
        rig.step()
    assert not rig.requests, "the engine makes no progress"
    for _ in range(2 if rig.store else 0):  # the first time, a lease may be renewed
        rig.now += LEASE_SECONDS
        rig.store.sharing.expire()
    rig.drain()


def chaos(
    rig: Any,
    rng: random.Random,
    seen: Counter[str],
    num_requests: int,
    stems: list[list[int]] | None = None,
    tiers: Any = None,
    grammars: list[str] | None = None,
) -> None:
    """Requests come, grow and go at random until all are done; `seen` counts what happened.

    stems   beginnings of prompts;  tiers   `TierEvents`, or None;  grammars   of some requests; None: drawn
    """
    if grammars is None:
        grammars = rng.choice([[], GRAMMARS])  # a request that has one keeps the engine at depth 2
    while len(rig.asked) < num_requests or rig.core.has_work:
        if len(rig.asked) < num_requests and rng.random() < 0.5:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
            if stems:
                prompt = (rng.choice(stems) + prompt)[:24]
            max_tokens = rng.choice([0, 1, 5, 16])
            grammar = rng.choice([None] * 7 + grammars)
            fields = {
                "stop_ids": rng.choice([(), (), (3, 5)]),
                "scored": rng.random() < 0.2,
                "fail_after": rng.choice([None] * 5 + [3]),
                "grammar": grammar,
            }
            fields |= tiers.fields() if tiers else {}
            parent = rig.add(prompt, max_tokens, **fields)
            seen["compiled"] += rig.request(parent).blocked_on is BlockReason.GRAMMAR
            for _ in range(rng.choice([0, 0, 0, 2])):
                child = rig.add(prompt, max_tokens, parent=parent, grammar=grammar)
                seen["blocked"] += rig.request(child).state is RequestState.BLOCKED
        live = sorted(rig.requests)
        if live and rng.random() < 0.04:
            victim = rig.request(rng.choice(live))
            in_flight = victim.in_flight or (victim.slot >= 0 and rig.table.in_flight[victim.slot])
            seen[f"abort {victim.state.value}{' in flight' if in_flight else ''}"] += 1
            rig.abort(victim.new.handle)
        if tiers:
            tiers.happen()
        seen["waits for its own token"] += any(
            r.in_flight and r.state is RequestState.WAITING for r in rig.requests.values()
        )
        got = rig.step()
        preempted = {h for h, r in rig.requests.items() if r.state is RequestState.WAITING}
        seen["token after preemption"] += len(preempted.intersection(got.handles.tolist()))
        seen["resumed"] += sum(r.num_preemptions > 0 and r.state is RequestState.RUNNING for r in rig.requests.values())


def count(rig: Any, seen: Counter[str]) -> None:
    """Judge all requests of a rig and count what a run of it has met."""
    for handle in rig.asked:
        rig.judge(handle)
        ended, asked = rig.finish[handle], rig.asked[handle]
        seen["scored"] += bool(rig.rows[handle])
        seen[f"finish {ended.reason.value}"] += 1
        seen["masked tokens"] += len(rig.tokens[handle]) if asked.grammar else 0
        seen["ended by its grammar"] += (ended.reason is FinishReason.STOP) > (ended.stop_id is not None)
        seen["shared with the parent"] += asked.parent is not None and rig.cached.get(handle, 0) > 0
    for tier, stats in rig.outputs.stats.tiers.items():
        for name in ("num_loaded", "num_stored", "num_failed", "num_dropped"):
            seen[f"{tier} {name}"] += getattr(stats, name)
    seen["preempted"] += rig.scheduler.num_preempted
    seen["evicted"] += rig.pool.evictions
    seen["hits"] += rig.scheduler.admitter.prefix_hits
    seen["dropped"] += rig.num_sampled - sum(map(len, rig.tokens.values()))
    seen["drafted"] += sum(int(plan.num_tokens[: plan.num_decodes].sum()) - plan.num_decodes for plan in rig.plans)
    seen["operations"] += len(rig.events) + len(rig.asked)


LONG = pairwise(FEATURES | {"grammars": [False, True]})
MET: dict[
    str, Callable[[Row], bool]
] = {  # what happens beside every feature -> True for the runs that it can happen in
    "preempted": lambda row: True,
    "dropped": lambda row: True,
    "evicted": lambda row: True,
    "finish abort": lambda row: True,
    "finish error": lambda row: True,
    "scored": lambda row: True,
    "shared with the parent": lambda row: True,
    "drafted": lambda row: row["shape"][1] > 0,
    "masked tokens": lambda row: row["grammars"],
    "host num_loaded": lambda row: row["tiers"] != "none",
    "host num_failed": lambda row: row["tiers"] != "none",
    "disk num_loaded": lambda row: "disk" in BELOW[row["tiers"]],
    "peer num_loaded": lambda row: "peers" in BELOW[row["tiers"]],
}


def long_rig(rig_class: Any, row: Row, seed: int, rng: random.Random) -> Any:
    """A core with the features of a row, and with so few blocks that requests are preempted."""
    (depth, drafts), windows = row["shape"], row["windows"]
    below = {
        "host_blocks": rng.choice([12, 40]),
        "write_through": seed % 2 == 0,
        "delays": [rng.choice([0, 0, 1, 3]) for _ in range(13)],
        "faults": [rng.choice(("", "", "", "", *FAULTS[:4])) for _ in range(17)],
        "reserve": rng.choice([4, 9]),
    }
    return rig_class(
        depth,
        blocks=BLOCKS[windows],
        slots=rng.choice([4, 6]),
        budget=rng.choice([7, 16]),
        vocab=VOCAB,
        drafts=drafts,
        accepts=[rng.randint(0, drafts) for _ in range(11)],
        drafts_cached=drafts > 0 and seed % 2 == 1,
        **{name: row[name] for name in ("windows", "sizes", "caching", "policy", "watermark")},
        **tiers_of(row["tiers"], below),
    )


def test_long_runs_meet_everything(Rig: Any) -> None:
    """The same on fixed seeds, so that what was exercised can be counted and compared with zero.

    Every pair of features meets in a run, and each that `MET` counts meets every feature.
    """
    seen: Counter[Any] = Counter()
    for seed, row in enumerate(LONG * (4 if FULL else 1)):
        rng, run = random.Random(seed), Counter[str]()
        rig = long_rig(Rig, row, seed, rng)
        tiers = TierEvents(rig, rng, run) if rig.store else None
        stems = [[letter] * 16 for letter in range(5)] if rig.store else None
        chaos(rig, rng, run, num_requests=40, stems=stems, tiers=tiers, grammars=GRAMMARS if row["grammars"] else [])
        end(rig)
        count(rig, run)
        for name in (name for name, possible in MET.items() if possible(row)):
            seen.update({(name, feature): run[name] for feature in row.items()})
        seen += run
    never = [key for key, times in seen.items() if isinstance(key, tuple) and not times]
    assert not never, f"these do not meet: {never}"
    expected = {
        "preempted": 50,
        "evicted": 1000,
        "hits": 2000,
        "resumed": 150,
        "blocked": 150,
        "scored": 60,
        "shared with the parent": 100,
        "dropped": 80,
        "abort waiting": 20,
        "abort running": 3,
        "abort running in flight": 5,
        "token after preemption": 20,
        "waits for its own token": 3,
        "compiled": 60,
        "masked tokens": 300,
        "ended by its grammar": 20,
        "drafted": 600,
        "leased": 500,
        "expired": 10,
        **{f"finish {reason.value}": 20 for reason in FinishReason},
    }
    enough(seen, expected)


def enough(seen: Counter[Any], expected: dict[str, int]) -> None:
    """Assert that events were met as often as a test is worth."""
    short = {name: (seen[name], least) for name, least in expected.items() if seen[name] < least}
    assert not short, f"seen less often than the test is worth: {short}; all: {dict(seen)}"
