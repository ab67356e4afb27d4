"""KV events: a subscriber that keeps what they say has the blocks of the pools, and can compute their hashes again."""

import random
from array import array
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.events import events_notes, read_events_config
from quire.contracts.adapters import Adapter
from quire.contracts.errors import ConfigError
from quire.contracts.step import Tier
from quire.kv.events import EventBatch, EventLog
from quire.kv.hashing import KeyChain
from quire.plan.meetings import inputs_of, met

PROMPT = [1, 2, 3] * 8  # six blocks of four tokens


class Follower:
    """A subscriber: decodes each batch, and keeps the blocks by medium and group."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], set[int]] = {}
        self.said: list[Any] = []
        self.closed = False

    def publish(self, batch: EventBatch) -> None:
        time, events, replica = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
        assert time > 1.7e9 and replica == 3 and events
        for event in events:
            self.said.append(event)
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            held = self.blocks.setdefault((event["medium"], event["group_idx"]), set())
            hashes = set(event["block_hashes"])
            if event["type"] == "BlockStored":
                assert event["medium"] == "CPU" or not hashes & held, "told twice"
                assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"]) * (
                    event["medium"] == "GPU"
                )
                held |= hashes
            else:
                assert event["type"] == "BlockRemoved" and hashes <= held, "never told"
                held -= hashes

    def close(self) -> None:
        self.closed = True

    def held(self, medium: str = "GPU", group: int = 0) -> set[int]:
        return self.blocks.get((medium, group), set())


def follow(rig: Any) -> Follower:
    """Make a rig tell its events, and return who hears them."""
    follower, host = Follower(), rig.store and rig.store.host
    rig.core.events = EventLog(rig.allocator, host, follower, 3)
    return follower


def hashes(keys: Any, group: int = 0) -> set[int]:
    return {int.from_bytes(key[24:32], "big") for key in keys if len(key) == 32 + bool(group)}


def test_blocks_are_told_with_tokens_and_parents(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    follower = follow(rig)
    rig.add(PROMPT, 9, cache_salt="s")
    rig.drain()
    chain = KeyChain(bytes(32), 4, array("I", PROMPT + list(rig.tokens[0])), (("salt", "s"),))
    wanted = [int.from_bytes(key[24:], "big") for key in chain.keys(8)]  # the last token has no KV
    stored = [event for event in follower.said if event["type"] == "BlockStored"]
    assert [one for event in stored for one in event["block_hashes"]] == wanted
    assert [one for event in stored for one in event["token_ids"]] == chain.tokens[:32].tolist()
    assert [one for event in stored for one in event["extra_keys"]] == [["s"]] + [None] * 7
    ends = [event["block_hashes"][-1] for event in stored]
    assert [event["parent_block_hash"] for event in stored] == [None, *ends[:-1]]
    assert (
        stored[0].items()
        >= {
            "block_size": 4,
            "medium": "GPU",
            "lora_id": None,
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }.items()
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"blocks": 14},
        {"blocks": 20, "windows": (None, 8)},
        {"blocks": 20, "windows": (None, 8), "sizes": (1, 2)},
        {"blocks": 14, "windows": (None, None), "sizes": (2, 1)},
        {"blocks": 14, "host_blocks": 9},
    ],
    ids=str,
)
def test_a_follower_has_the_blocks(Rig: Any, depth: int, sizes: dict[str, Any]) -> None:
    rig, draw = Rig(depth, slots=3, **sizes), random.Random(depth)
    follower = follow(rig)
    for _ in range(60):
        prompt = [draw.randrange(2)] * draw.randrange(1, 17) + [draw.randrange(3)] * draw.randrange(8)
        handle = rig.add(prompt, draw.randrange(1, 12))
        rig.step(draw.randrange(5))
        if not draw.randrange(8):
            rig.abort(handle)
        if not draw.randrange(12):
            rig.core.reset_prefix_cache()
        rig.step(1)
        for group in range(len(rig.allocator.groups)):
            there = hashes(rig.pool._index, group)
            told = follower.held("GPU", group)
            assert told <= there and (rig.store is not None or told == there)
        assert rig.store is None or follower.held("CPU") == hashes(rig.store.host._index)
    for event in (event for event in follower.said if event["type"] == "BlockStored" and event["medium"] == "GPU"):
        assert event["block_size"] == rig.allocator.groups[event["group_idx"]].block_size
        assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
    kinds = {event["type"] for event in follower.said}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_blocks_that_came_back_are_told_to_be_there(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=12, slots=2, host_blocks=60, write_through=True)
    follower = follow(rig)
    for prompt in (PROMPT, *([i] * 32 for i in range(5, 9))):
        rig.add(prompt, 4)
        rig.drain()
    wanted = hashes(KeyChain(bytes(32), 4, array("I", PROMPT)).keys(6))
    assert not wanted & follower.held() and wanted <= follower.held("CPU")
    rig.add(PROMPT, 4)
    rig.drain()
    assert rig.outputs.stats.tiers[Tier.HOST].num_loaded and wanted <= follower.held()


def test_an_engine_that_ends_says_no_more(Rig: Any) -> None:
    rig = Rig(1)
    follower = follow(rig)
    rig.core.shutdown()
    assert follower.closed and not follower.said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "publisher='kafka' does not exist"),
        ({"enable_kv_cache_events": True, "hwm": 0}, "must be 1 or more"),
        ({"enable_kv_cache_event": True}, "enable_kv_cache_event"),
        ({"enable_kv_cache_events": "yes"}, "Expected `bool`"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_events_config(EngineConfig.from_flat(kv_events_config=given))


def test_settings() -> None:
    for given in (None, {}, {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert read_events_config(EngineConfig.from_flat(kv_events_config=given)) is None
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", "replay_endpoint": "tcp://*:5558"}
    config = EngineConfig.from_flat(kv_events_config=given)
    settings = read_events_config(config)
    assert settings is not None and settings.topic == "kv" and settings.endpoint == "tcp://lo:5557"
    (row,) = met(inputs_of(EngineConfig.from_flat(kv_events_config=given, enable_prefix_caching=False)))
    assert "prefix cache, which is off: leave out enable_prefix_caching=False, or kv_events_config." in row.said


@pytest.mark.parametrize(
    ("endpoint", "replay", "told"),
    [
        ("tcp://lo:5557", None, ""),
        ("tcp://[::1]:5557", "tcp://127.0.0.1:5558", ""),
        ("ipc:///tmp/x", None, ""),
        ("tcp://10.0.0.9:5557", None, ""),  # connected to: nobody can connect to this engine
        ("tcp://*:5557", None, "tcp://*:5557"),
        ("tcp://[::]:5557", "tcp://0.0.0.0:5558", "tcp://[::]:5557 or tcp://0.0.0.0:5558"),
        ("tcp://lo:5557", "tcp://10.0.0.9:5558", "tcp://10.0.0.9:5558"),
    ],
)
def test_events_that_other_machines_can_read_are_a_note(endpoint: str, replay: str | None, told: str) -> None:
    given = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    notes = events_notes(EngineConfig.from_flat(kv_events_config=given))
    assert bool(notes) == bool(told) and all(f"reach {told} reads the tokens" in note for note in notes)
    assert not events_notes(EngineConfig.from_flat())


def test_blocks_of_adapters_have_their_name(Rig: Any) -> None:
    """So that a subscriber that serves the base model leaves them out."""
    rig = Rig(adapters=(1, 1))
    follower = follow(rig)
    rig.add(PROMPT, 2)
    rig.add(PROMPT, 2, adapter=Adapter("sql", "/sql", "content"))
    rig.drain()
    told = [event for event in follower.said if event["type"] == "BlockStored"]
    named: dict[str | None, list[int]] = {None: [], "sql": []}
    for event in told:
        named[event["lora_name"]] += event["block_hashes"]
    assert len(named[None]) == len(named["sql"]) == 6 and not {*named[None]} & {*named["sql"]}
