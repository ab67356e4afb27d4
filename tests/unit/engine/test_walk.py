"""A random walk over sets of features on the mock: 30 random requests get their tokens, and nothing leaks.

A number is the seed of its engine and of its requests: `walk(number)` repeats one. 39 engines; 2,000 in the full run.
"""

import random
from functools import partial
from typing import Any

import pytest

from quire.config.checkpoints import CheckpointPlaces
from quire.contracts.adapters import Adapter
from quire.contracts.request import ReusedParts, Transfer
from quire.contracts.structured import StructuredOutputsParams
from quire.kv.sharing import LEASE_SECONDS
from quire.kv.states import ALL_PLACES

from ...support.full import FULL
from ...support.mock_copies import FAULTS, MockDisk, MockPeers
from ...support.replica_rig import RepeatableMock, ReplicaRig
from ...support.tier_ledger import TierLedger
from .conftest import EngineRig

ENGINES, REQUESTS = 2000 if FULL else 39, 30
VOCAB, MAX_LEN = 7, 60
NOTES = [[letter, (letter + 1) % 3, *[letter] * 8] for letter in range(3)]  # texts that prompts reuse
STEMS = [[], [0] * 12, [0, 1] * 8, [2] * 20]
WINDOWS = [(None,)] * 4 + [(None, 5), (9, None), (3,), (None, 16, 1), (None, -8), (-6,), (None, -16, 5)]
PLACES = [ALL_PLACES, CheckpointPlaces(every=8), CheckpointPlaces(prompt=False, turn=False)]
SHAPES = [(1, 1, 1), (2, 2, 1), (2, 2, 1), (3, 3, 1), (2, 1, 2), (4, 1, 4)]  # depth, lag of decodes, stages
GRAMMARS = [
    StructuredOutputsParams(**fields).spec()
    for fields in ({"regex": "[ab]*c"}, {"regex": "(abc|d{2,5}){1,3}"}, {"regex": "a+b", "after": "cc", "budget": 3})
]


def features(rng: random.Random) -> dict[str, Any]:
    """Draw the features of an engine: each that the table of meetings allows beside those before it."""
    one: dict[str, Any] = {"shape": rng.choice(SHAPES), "replicas": rng.choice([1, 1, 1, 2, 3])}
    one["lockstep"] = one["replicas"] > 1 and rng.random() < 0.6
    one["windows"], one["sizes"] = rng.choice(WINDOWS), rng.choice([(1,), (1,), (2, 1), (1, 2), (1, 4)])
    one["drafts"] = rng.choice([0, 0, 1, 3, 7])
    one["drafts_cached"] = one["drafts"] > 0 and rng.random() < 0.5
    one["caching"] = rng.random() < 0.8
    one["tiers"] = rng.choice([(), ("host",), ("host", "disk"), ("host", "peers"), ("host", "disk", "peers")])
    if not one["caching"] or one["replicas"] > 1 and len(one["tiers"]) > 1:
        one["tiers"] = ()
    one["states"] = rng.choice([0, 0, 1, 3, 12])
    one["blends"] = one["caching"] and not one["states"] and rng.random() < 0.4
    one["adapters"] = rng.choice([(0, 0), (0, 0), (1, 1), (2, 3)])
    one["policy"], one["watermark"] = rng.choice(["fcfs", "priority"]), rng.choice([0.0, 0.3])
    one["tight"] = rng.random() < 0.5  # few blocks: requests are preempted, blocks evicted
    return one


def engine(one: dict[str, Any], rng: random.Random) -> EngineRig:
    """Return the core of these features on mocks."""
    (depth, lag, stages), groups = one["shape"], len(one["windows"])
    slots = rng.choice([1, 3, 6])
    options: dict[str, Any] = {name: one[name] for name in ("windows", "sizes", "caching", "policy", "watermark")}
    options |= {name: one[name] for name in ("drafts", "drafts_cached", "states", "blends", "adapters")}
    options |= {
        "blocks": (20 if one["tight"] else 90) * groups * max(one["sizes"]),
        "slots": slots,
        "budget": slots + rng.choice([2, 9, 40]),
        "max_len": MAX_LEN,
        "vocab": VOCAB,
        "accepts": [rng.randint(0, one["drafts"]) for _ in range(11)],
        "places": rng.choice(PLACES),
        "loads": [rng.choice([1, 1, 4]) for _ in range(5)],
    }
    if one["tiers"]:
        made = {"disk": MockDisk, "peers": MockPeers}
        below = {f"{of}{name}": made[name]() for name in one["tiers"][1:] for of in ("", "state_")}
        options |= below | {
            "host_blocks": rng.choice([4, 12, 40]),
            "write_through": rng.random() < 0.5,
            "delays": [rng.choice([0, 0, 1, 3, 9]) for _ in range(13)],
            "faults": [rng.choice(("", "", "", "", *FAULTS[:4])) for _ in range(17)],
            "reserve": rng.choice([4, 9]),
        }
    if one["replicas"] > 1:
        return ReplicaRig(one["replicas"], lockstep=one["lockstep"], depth=depth, lag=lag, stages=stages, **options)
    mock: Any = partial(RepeatableMock, lag, stages)
    return EngineRig(depth, mock=mock, **options)


def ask(rig: EngineRig, one: dict[str, Any], rng: random.Random, number: int) -> None:
    """Add a random request, and sometimes children of it."""
    fields: dict[str, Any] = {
        "stop_ids": rng.choice([(), (), (3,), (1, 5)]),
        "min_tokens": rng.choice([0, 0, 4]),
        "priority": rng.randint(-1, 1),
        "cache_salt": rng.choice(["", "", "", "a"]),
        "read_prefix_cache": rng.random() < 0.9,
        "num_drafts": rng.choice([None, None, 0, 1]),
        "scored": rng.random() < 0.2,
    }
    prompt = rng.choice(STEMS) + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    kind, max_tokens = rng.random(), rng.choice([0, 1, 5, 16])
    if one["blends"] and kind < 0.4:
        prompt, parts = [rng.randrange(3) for _ in range(rng.randrange(5))], []
        for _ in range(rng.choice([1, 1, 2])):
            note = rng.choice(NOTES)
            parts.append((len(prompt), len(prompt) + len(note)))
            prompt += note
        fields["reused"] = ReusedParts(tuple(parts), rng.choice([0.0, 0.3, 1.0]))
        prompt += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
    elif one["blends"] and kind < 0.55:
        prompt = list(rng.choice(NOTES))
    elif kind < 0.65:
        fields |= {"grammar": rng.choice(GRAMMARS)}
    elif kind < 0.75:
        pool = rng.choice(["mean", "last", "cls"])
        fields |= {"pool": pool, "scored": False, "stop_ids": (), "min_tokens": 0}
        fields["read_prefix_cache"] = fields["read_prefix_cache"] and pool == "last"
        max_tokens = 0
    elif one["tiers"] and one["replicas"] == 1 and kind < 0.85:
        theirs = Transfer(name="theirs", address="a:1", num_tokens=12)
        fields["transfer"] = rng.choice([Transfer(name=f"lease {number}"), theirs])
    if one["adapters"][0] and (name := rng.choice(["", "sql", "math", "law"])):
        fields["adapter"] = Adapter(name, f"/{name}", f"content of {name}")
    if rng.random() < 0.1:
        fields["fail_after"] = rng.choice([0, 2, 9])
    children = rng.choice([0, 0, 0, 2]) if "pool" not in fields else 0
    parent = rig.add(prompt, max_tokens, places=1 + children, **fields)
    for seed in range(children):
        rest = {name: value for name, value in fields.items() if name not in ("scored", "fail_after", "transfer")}
        rig.add(prompt, max_tokens, seed=seed, parent=parent, **rest)


def walk(number: int) -> None:
    """Run the engine of this number until its requests have ended, judge them, and look for what was left."""
    rng = random.Random(number)
    one = features(rng)
    rig = engine(one, rng)
    ledger = TierLedger(rig) if rig.store and one["replicas"] == 1 else None
    begun = 0
    while begun < REQUESTS or rig.requests:
        if begun < REQUESTS and rng.random() < 0.5:
            ask(rig, one, rng, begun)
            begun += 1
        if rig.requests and rng.random() < 0.03:
            rig.abort(rng.choice(sorted(rig.requests)))
        if rng.random() < 0.01:
            rig.core.reset_prefix_cache()
        if rig.peers is not None and rng.random() < 0.3:
            rig.mock._copies.teach(rig.store.host._index, rig.peers)
            if rig.state_peers is not None and rig.store.states is not None:
                rig.mock._state_copies.teach(rig.store.states.host._index, rig.state_peers)
        rig.step()
        if ledger is not None:
            ledger.check()
    for _ in range(2 if ledger else 0):  # the first time, a lease may be renewed
        rig.now += LEASE_SECONDS
        rig.store.sharing.expire()
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


@pytest.mark.parametrize("first", range(0, ENGINES, 100))
def test_random_sets_of_features(first: int) -> None:
    for number in range(first, min(first + 100, ENGINES)):
        try:
            walk(number)
        except Exception as fault:
            fault.add_note(f"engine {number}: {features(random.Random(number))}")
            raise
