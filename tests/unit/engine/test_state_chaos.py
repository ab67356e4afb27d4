"""States, checkpoints, drafts, preemptions and tiers in random schedules, with an account of every checkpoint."""

import random
from collections import Counter
from typing import Any

import pytest

from quire.config.checkpoints import CheckpointPlaces
from quire.engine.core import EngineCore
from quire.kv.states import StateCheckpoints

from ...support.checked_executor import CheckedExecutor
from ...support.full import FULL
from ...support.mock_copies import FAULTS, MockDisk, MockPeers
from ...support.state_ledger import StateLedger
from .test_properties import VOCAB, TierEvents, chaos, count, end, enough

OPERATIONS = 100_000 if FULL else 6_000


class StateEvents:
    """Checks the account of checkpoints after every operation, with that of tiers if there are any."""

    def __init__(self, rig: Any, rng: random.Random, seen: Counter[str]) -> None:
        self._tiers = TierEvents(rig, rng, seen) if rig.store is not None else None
        self._rig, self._rng, self._seen, self._ledger = rig, rng, seen, StateLedger(rig)

    def fields(self) -> dict[str, Any]:
        """See `TierEvents`."""
        return self._tiers.fields() if self._tiers is not None else {}

    def happen(self) -> None:
        """Do something or nothing, and check all invariants."""
        if self._tiers is not None:
            self._tiers.happen()
        elif self._rng.random() < 0.01:
            self._seen["reset"] += 1
            self._rig.core.reset_prefix_cache()
        self._ledger.check()


def state_rig(rig_class: Any, seed: int, rng: random.Random) -> Any:
    """A core with few blocks, few checkpoints and few slots; half of them have tiers that are slow and fail."""
    drafts, windows = rng.choice([0, 0, 3]), rng.choice([(None,), (None,), (None, 6)])
    places = [CheckpointPlaces()] * 3 + [CheckpointPlaces(every=4), CheckpointPlaces(branch=False, turn=False)]
    tiers: dict[str, Any] = {}
    if seed % 2:
        tiers = {
            "host_blocks": rng.choice([8, 40]),
            "host_states": rng.choice([1, 4, 12]),
            "write_through": seed % 4 == 1,
            "delays": [rng.choice([0, 0, 1, 3, 9]) for _ in range(13)],
            "faults": [rng.choice(("", "", "", "", *FAULTS[:4])) for _ in range(17)],
            "reserve": rng.choice([4, 9]),
        }
        tiers |= {"disk": MockDisk(), "state_disk": MockDisk()} if seed % 3 else {}
        tiers |= {"peers": MockPeers(), "state_peers": MockPeers()} if seed % 5 < 3 else {}
    return rig_class(
        1 + rng.randrange(3),
        blocks=rng.choice([11, 14, 20]) * len(windows),
        windows=windows,
        vocab=VOCAB,
        slots=rng.choice([2, 3, 6]),
        budget=rng.choice([7, 16]),
        drafts=drafts,
        accepts=[rng.randint(0, drafts) for _ in range(11)],
        drafts_cached=drafts > 0 and seed % 2 == 1,
        states=rng.choice([1, 2, 4, 12]),
        places=rng.choice(places),
        **tiers,
    )


def run(rig_class: Any, seed: int, seen: Counter[str]) -> None:
    """Run requests until all have ended and nothing is held."""
    rng = random.Random(seed)
    rig = state_rig(rig_class, seed, rng)
    events, stems = StateEvents(rig, rng, seen), [[letter] * 16 for letter in range(5)]
    chaos(rig, rng, seen, num_requests=40, stems=stems, tiers=events)
    end(rig)
    count(rig, seen)
    states = rig.outputs.stats.prefix.states
    assert rig.states.pool.num_free == rig.states.pool.num_blocks, "a checkpoint leaked"
    seen["state hits"] += states.hits
    seen["state cuts"] += states.cut
    seen["checkpoints"] += states.taken
    for tier, stats in states.tiers.items():
        for did in ("loaded", "stored", "failed"):
            seen[f"{tier} checkpoints {did}"] += getattr(stats, f"num_{did}")


def test_states_through_chaos(Rig: Any) -> None:
    """Every invariant holds after each operation: 6,000, and 100,000 in the full run, with fixed seeds."""
    seen: Counter[str] = Counter()
    seed = 0
    while seen["operations"] < OPERATIONS:
        run(Rig, seed, seen)
        seed += 1
    expected = {
        "state hits": 900,
        "state cuts": 300,
        "checkpoints": 300,
        "preempted": 20,
        "resumed": 40,
        "drafted": 100,
    }
    expected |= {"host checkpoints loaded": 5, "disk checkpoints loaded": 3, "host checkpoints stored": 60, "reset": 5}
    expected |= {
        "host checkpoints failed": 5,
        "peer checkpoints loaded": 2,
        "finish error": 5,
        "finish abort": 10,
        "shared with the parent": 20,
    }
    enough(seen, expected)


def at_planning(states: Any, *asked: Any) -> Any:
    """Checkpoints that can be found when their step is planned."""
    copies = OF_PROMPT(states, *asked)
    for one in copies:
        states._settle(one.checkpoint, one.chain, one.length)
        states.pool.take(1)
    return copies


def at_submit(core: Any, planned: Any, *sync: Any) -> None:
    """Checkpoints that can be found when their step is submitted, before its result has come."""
    SUBMIT(core, planned, *sync)
    core.scheduler.allocator.states.came(planned.copies)
    planned.copies.clear()


def unsettled(states: Any, slot: int, *left: Any, **how: Any) -> None:
    """Requests that leave their slots and keep their checkpoints."""
    held = states._held.pop(slot, None)
    LEAVE(states, slot, *left, **how)
    if held is not None:
        states._held[slot] = held


def rejected(states: Any, slot: int, tokens: Any, computed: int, *, sound: bool = True) -> None:
    """Checkpoints that only rejected drafts have passed."""
    if slot in states._held and sound:
        computed = max(computed, states._held[slot][1]) if states._held[slot][1] <= len(tokens.tokens) else computed
    LEAVE(states, slot, tokens, computed, sound=sound)


OF_PROMPT, LEAVE, SUBMIT = StateCheckpoints.of_prompt, StateCheckpoints.leave, EngineCore.submit
BUGS: dict[str, tuple[Any, str, Any, str]] = {
    "a checkpoint leaks": (
        StateCheckpoints,
        "_settle",
        lambda states, checkpoint, *_: states._coming.pop(checkpoint),
        "references of checkpoints|held by nobody",
    ),
    "requests keep their checkpoints": (
        StateCheckpoints,
        "leave",
        unsettled,
        "that is free holds a checkpoint|held by nobody",
    ),
    "a checkpoint is published when its step is planned": (
        StateCheckpoints,
        "of_prompt",
        at_planning,
        "no step has copied|with another state",
    ),
    "a checkpoint is published before its result": (EngineCore, "submit", at_submit, "before its result has come"),
    "rejected drafts are published": (StateCheckpoints, "leave", rejected, "before its result|with another state"),
    "a slot is not zeroed": (
        CheckedExecutor,
        "_state_of",
        lambda mock, slot, computed: mock._states.get(slot, 0),
        "with another state",
    ),
    "no state is restored": (
        StateCheckpoints,
        "take_restored",
        lambda states: states.restored.clear() or [],
        "is missing|references of",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_every_invariant_of_states_can_fail(Rig: Any, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    room, name, wrong, words = BUGS[bug]
    monkeypatch.setattr(room, name, wrong)
    with pytest.raises(AssertionError, match=words):
        for seed in range(30):
            run(Rig, seed, Counter())
