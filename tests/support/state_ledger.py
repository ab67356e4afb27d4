"""An account of checkpoints of states that reads plans and results alone, and what must hold after every operation."""

from typing import Any

from quire.contracts.request import RequestState
from quire.contracts.step import Tier
from quire.engine.mock_executor import FIRST, chain
from quire.kv.hashing import KeyChain
from quire.kv.states import state_key


class StateLedger:
    """Follows the checkpoints of a rig. A publication is checked when it happens, the holders by `check`."""

    def __init__(self, rig: Any) -> None:
        self._rig, self._pool = rig, rig.states.pool
        self._copied: dict[int, dict[int, int]] = {}  # checkpoint -> length -> last step that copies it there
        self._seen = 0  # plans that were read
        self._truth: dict[bytes, int] = {}  # key -> state of its tokens
        self._settle = rig.states._settle
        rig.states._settle = self.settle
        self._pool.on_publish.append(self.published)

    def settle(self, checkpoint: int, tokens: KeyChain, length: int) -> None:
        """See `StateCheckpoints`: its copy is found from here on, if `length` is above 0."""
        self._read_plans()
        if length:
            digest = FIRST
            for token in tokens.tokens[:length]:
                digest = chain(digest, token)
            self._truth[state_key(tokens, length)] = digest
            step = self._copied.get(checkpoint, {}).get(length)
            assert step is not None, "a checkpoint is published that no step has copied"
            collected = [number for event, number in self._rig.events if event == "collect"]
            first = min(self._steps(checkpoint, length), default=step)
            assert collected and first <= collected[-1], "a checkpoint is published before its result has come"
        self._settle(checkpoint, tokens, length)

    def published(self, checkpoint: int, key: bytes) -> None:
        """Hear of a checkpoint that can be found."""
        assert key in self._truth, "a checkpoint is published that no request has left"
        content = int(self._rig.mock._checkpoints[checkpoint, 0])
        assert content == self._truth[key], "a checkpoint is published with another state"

    def check(self) -> None:
        """Assert that each checkpoint that is not free has a holder."""
        self._read_plans()
        rig, pool, store = self._rig, self._pool, self._rig.store
        flying = len(rig.core.in_flight)
        named = {
            checkpoint
            for plan in (rig.plans[-flying:] if flying else [])
            if plan.features.states is not None
            for _, _, checkpoint in plan.features.states.kept.tolist()
        }
        running = {r.slot for r in rig.requests.values() if r.state is RequestState.RUNNING}
        named |= {checkpoint for slot, (checkpoint, _) in rig.states._held.items() if slot in running}
        if store is not None and store.states is not None:
            jobs = store.states.jobs.running.values()
            named |= {block for one in jobs if one.job.target == Tier.DEVICE for block in one.job.targets.tolist()}
            named |= {fetch.checkpoint for fetch in store._fetches.values()}
        held = {one for one in range(1, pool.num_blocks + 1) if pool.refs(one)}
        assert held <= named, f"checkpoints {sorted(held - named)} are held by nobody"

    def _steps(self, checkpoint: int, length: int) -> list[int]:
        """Return the steps, since the checkpoint was last taken for this length, that copy a state to it."""
        found = list[int]()
        for plan in reversed(self._rig.plans):
            kept = [] if plan.features.states is None else plan.features.states.kept.tolist()
            lengths = [at for _, at, one in kept if one == checkpoint]
            if lengths and length not in lengths:
                break
            found += [plan.step] * bool(lengths)
        return found

    def _read_plans(self) -> None:
        for plan in self._rig.plans[self._seen :]:
            for _, length, checkpoint in [] if plan.features.states is None else plan.features.states.kept.tolist():
                self._copied.setdefault(checkpoint, {})[length] = plan.step
        self._seen = len(self._rig.plans)
