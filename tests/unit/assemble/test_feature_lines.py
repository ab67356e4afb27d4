"""Lines of a start about what options turn on, or leave off."""

from typing import Any

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.assemble.feature_lines import feature_lines, turned_on
from quire.contracts.blocks import KVGeometry, KVGroup
from quire.contracts.parallel import Parallel
from quire.kv.pool import BlockPool
from quire.kv.store import KVStore
from quire.plan.memory import MemoryPlan
from quire.procs.messages import FEATURES

from ...support.filled_models import planned
from ...support.tiny_models import Tiny, tiny_config

ARGS = parse_checkpoint_config(tiny_config(Tiny(family="qwen3")))
EVENTS = {"enable_kv_cache_events": True, "replay_endpoint": "tcp://lo:5558"}


def told(num_found: int = 0, **options: Any) -> dict[str, str]:
    plan = planned(ARGS, **options)
    store = None
    if plan.offload.host_bytes:
        store = KVStore(
            BlockPool(8), KVGeometry(groups=(KVGroup(block_size=16, layers=(0,), components=()),)), num_host_blocks=1500
        )
        store.num_found = num_found
    memory = MemoryPlan(geometry=plan.geometry, num_blocks=9, max_model_len=64, kv_bytes=9, free_bytes=9)
    return turned_on(plan, store, memory)


def test_what_is_off_names_the_option_that_turns_it_on() -> None:
    assert told() == {
        "states": "",
        "drafts": "off (--speculative-config)",
        "KV tiers": "off (--kv-offload-gb)",
        "sharing": "",
        "adapters": "",
        "host weights": "",
    }
    assert tuple(told()) == ("states", *FEATURES)
    assert feature_lines(told()) == ()


@pytest.mark.parametrize(
    ("found", "options", "title", "words"),
    [
        (0, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, "drafts", "ngram, 4 drafts"),
        (0, {"kv_offload_gb": 2.5}, "KV tiers", "host memory 2.5 GiB = 1,500 blocks (lazy)"),
        (1, {"kv_offload_gb": 1, "kv_offload_dir": "/d"}, "KV tiers", "disk /d, at most 100 GiB, 1 block found there"),
        (77, {"kv_offload_gb": 1, "kv_offload_dir": "/d"}, "KV tiers", "77 blocks found there"),
        (0, {"kv_events_config": EVENTS}, "sharing", "KV events to tcp://lo:5557, replay tcp://lo:5558"),
    ],
)
def test_what_is_on_is_told_with_its_sizes(found: int, options: dict[str, Any], title: str, words: str) -> None:
    lines = told(found, **options)
    assert words in lines[title]
    assert any(words in line for line in feature_lines(lines))


def test_role_and_peers() -> None:
    role = {"kv_connector": "QuireConnector", "kv_role": "kv_consumer"}
    peers = ("10.0.0.1:5700", "[::1]:5701")
    lines = told(kv_offload_gb=1, kv_share="127.0.0.1:5702", kv_peers=peers, kv_transfer_config=role)
    assert lines["sharing"] == (
        "role decode (kv_consumer); read by others at 127.0.0.1:5702; reads 10.0.0.1:5700, [::1]:5701"
    )


def test_the_ports_of_ranks_on_other_hosts_are_told() -> None:
    hosts = {"parallel": Parallel(tp=2), "nnodes": 2, "tensor_parallel_size": 2, "kv_offload_gb": 1.0}
    assert told(**hosts, kv_share="10.0.0.1:5700")["sharing"] == (
        "read by others at 10.0.0.1:5700 (rank i of another host: there, at port 5701 + i)"
    )
