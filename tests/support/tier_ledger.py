"""An account of all that a store of KV tiers plans and reports, and the invariants that hold after every operation."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from quire.contracts.request import BlockReason, RequestState
from quire.contracts.step import CopyJob, FileNews, FinishedCopy, StepCopies, Tier
from quire.kv.sharing import Sharing
from quire.kv.tiered_pool import TieredPool

CHANGES = ("num_stored", "num_loaded", "num_failed", "stored_bytes", "loaded_bytes")


class TierLedger:
    """Follows the jobs of a rig's store from plan to report. `check` compares the rig with what they must have done."""

    def __init__(self, rig: Any) -> None:
        self._rig, self._store = rig, rig.store
        self._jobs: dict[int, CopyJob] = {}
        self._counted: Counter[tuple[bool, Tier, str]] = Counter()
        self._contents: dict[tuple[bool, bytes], bytes] = {}
        self._kinds = {one.jobs._states: one for one in self._store._kinds}  # True: checkpoints of states
        self._expired = 0.0  # time at which leases were looked through last
        self._take, self._finished = self._store.take_copies, self._store.finished
        self._store.take_copies, self._store.finished = self.take_copies, self.finished

    def take_copies(self) -> StepCopies | None:
        """See `KVStore`."""
        self._expired = self._rig.now
        copies: StepCopies | None = self._take()
        self._jobs |= {job.id: job for job in (() if copies is None else copies.before + copies.after)}
        return copies

    def finished(self, reports: Iterable[FinishedCopy], files: Iterable[FileNews] = ()) -> None:
        """See `KVStore`."""
        reports = tuple(reports)
        for report in reports:
            job = self._jobs.pop(report.id)
            stored = job.source == Tier.DEVICE or job.target not in (Tier.DEVICE, Tier.HOST)
            tier, verb = (job.target, "stored") if stored else (job.source, "loaded")
            kind = job.states
            void = self._kinds[kind].jobs.running[report.id].void - set(report.failed)
            self._counted[kind, tier, "num_failed"] += len(report.failed)
            self._counted[kind, tier, f"num_{verb}"] += len(job.keys) - len(report.failed) - len(void)
            self._counted[kind, tier, f"{verb}_bytes"] += report.num_bytes
        self._finished(reports, files)

    def check(self) -> None:
        """Assert the invariants; `KVStore.check` has asserted those of references."""
        self._check_leases()
        self._check_waits()
        for kind, tiers in self._kinds.items():
            self._check_jobs(kind, tiers)
            self._check_contents(kind, tiers)
            for tier, stats in tiers.counters().items():
                for name in CHANGES:
                    assert getattr(stats, name) == self._counted[kind, tier, name], f"{name} of {tier} does not add up"
            host = tiers.host
            held = sum(host.refs(block) > 0 for block in range(1, host.num_blocks + 1))
            assert tiers.counters()[Tier.HOST].num_used == held + host.num_cached, "host blocks do not add up"

    def _check_jobs(self, kind: bool, tiers: TieredPool) -> None:
        planned = {job.id: job for job in tiers.jobs._before + tiers.jobs._after}
        taken = {number: job for number, job in self._jobs.items() if job.states == kind}
        assert tiers.jobs.running.keys() == taken.keys() | planned.keys(), "a job is lost"
        pools = {Tier.DEVICE: tiers.pool, Tier.HOST: tiers.host}
        written, read = Counter[tuple[Tier, int]](), set[tuple[Tier, int]]()
        for job in (*taken.values(), *planned.values()):
            written.update((job.target, block) for block in job.targets.tolist())
            read.update((job.source, block) for block in job.sources.tolist() if job.source == Tier.HOST)
        for (tier, block), times in written.items():
            alone = times == 1 and pools[tier].refs(block) == 1 and (tier, block) not in read
            assert alone and pools[tier].key(block) is None, f"{tier} block {block} is written in two states"
        assert all(pools[tier].refs(block) for tier, block in read), "a block is read that nobody holds"

    def _check_leases(self) -> None:
        for sharing in filter(None, (self._store.sharing, self._store.sharing.states)):
            self._check_leases_of(sharing)
        for peers in filter(None, (self._rig.peers, self._rig.state_peers)):
            assert peers.promised.keys() <= self._rig.requests.keys(), "a promise has outlived its request"

    def _check_leases_of(self, sharing: Sharing) -> None:
        late = [name for name, lease in sharing._leases.items() if lease.until <= self._expired]
        assert not late, f"leases {late} have outlived their time"
        assert sharing._num_held == len(sharing.held()), "leased blocks do not add up"

    def _check_waits(self) -> None:
        waiting = {
            handle
            for handle, request in self._rig.requests.items()
            if request.state is RequestState.BLOCKED and request.blocked_on is BlockReason.REMOTE_KV
        }
        assert self._store._fetches.keys() | set(self._store._ready) == waiting, "a request waits for no tier"

    def _check_contents(self, kind: bool, tiers: TieredPool) -> None:
        """A key has one content, wherever it is; blocks that are being copied have no key."""
        copies = self._rig.mock._state_copies if kind else self._rig.mock._copies
        found = [(key, copies.host_block(block)) for key, block in tiers.host._index.items()]
        for tier in copies._below.values():
            found += [(key, block.tobytes()) for key, block in tier.items()]
        if kind:
            found += [(key, self._rig.mock._checkpoints[block].tobytes()) for key, block in tiers.pool._index.items()]
        for key, content in found:
            assert self._contents.setdefault((kind, key), content) == content, "two contents of one key"
