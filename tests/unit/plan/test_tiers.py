"""The tiers that options and vLLM's connectors ask for, and the refusals with their fixes."""

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.contracts.errors import UserError
from quire.plan.meetings import check, inputs_of, met
from quire.plan.sharing import SharePlan
from quire.plan.tiers import GIB, OffloadPlan, resolve_offload


def plan(**options: Any) -> OffloadPlan:
    config = EngineConfig.from_flat(**options)
    check(met(inputs_of(config, device="cpu")))
    return resolve_offload(config)


@pytest.mark.parametrize("hosts", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}], ids=str)
def test_ranks_on_several_hosts_have_all_tiers(hosts: dict[str, Any]) -> None:
    """A rank on another host is read there, at a port of its own behind those of the replicas."""
    tiers = {"kv_offload_gb": 1.0, "kv_offload_dir": "/kv", "kv_share": "10.0.0.1:5700", "kv_peers": ("a:1",)}
    found = plan(**tiers, **hosts, data_parallel_size=2, tensor_parallel_size=2)
    assert (found.folder, found.sharing.peers) == ("/kv", (("a", 1),))
    assert [found.sharing.of(replica).place for replica in (0, 1)] == [("10.0.0.1", 5700), ("10.0.0.1", 5701)]
    assert found.sharing.of_rank(3, "10.0.0.2") == ("10.0.0.2", 5705)
    assert found.sharing.of(1).peers[0] == ("10.0.0.1", 5700)


def connector(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}}


def connectors(*inner: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    return connector("MultiConnector", role, connectors=list(inner))


def test_options() -> None:
    assert plan() == OffloadPlan()
    both = plan(kv_offload_gb=1.5, kv_offload_dir="/kv", kv_offload_dir_gb=2.0, kv_offload_policy="write_through")
    assert both == OffloadPlan(host_bytes=3 * GIB // 2, write_through=True, folder="/kv", folder_bytes=2 * GIB)
    assert plan(kv_offload_gb=1.0).policy == "lazy" and both.policy == "write_through"


def node(role: str, **more: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": role}, **more}


def test_prefill_and_decode_nodes() -> None:
    given = {"kv_offload_gb": 1.0, "kv_share": ":5700", "kv_peers": ("a:1",)}
    found = {role: plan(**node(role, **given)) for role in ("kv_producer", "kv_consumer", "kv_both")}
    assert [(one.sharing.sends, one.sharing.takes, one.policy) for one in found.values()] == [
        (True, False, "write_through"),
        (False, True, "lazy"),
        (True, True, "write_through"),
    ]
    assert found["kv_both"].sharing == SharePlan(place=("127.0.0.1", 5700), peers=(("a", 1),), sends=True, takes=True)


def test_peers() -> None:
    shared = plan(kv_offload_gb=1.0, kv_share="5700", kv_peers=("10.0.0.2:5700,a:1", "[::1]:80"))
    assert shared.sharing.place == ("127.0.0.1", 5700), "loopback, unless told otherwise"
    assert shared.sharing.peers == (("10.0.0.2", 5700), ("a", 1), ("::1", 80))
    assert plan(**connector("LMCacheConnectorV1"), kv_share=":1").sharing.place == ("127.0.0.1", 1)


def test_replicas_are_peers_of_each_other() -> None:
    """Replica i is read at the port plus i. It reads the other replicas first, and never itself."""
    whole = plan(kv_offload_gb=1.0, kv_share="10.0.0.1:5700", kv_peers=("a:1", "10.0.0.1:5701"), data_parallel_size=3)
    for expert_parallel in (False, True):
        same = plan(
            kv_offload_gb=1.0,
            kv_share="10.0.0.1:5700",
            kv_peers=("a:1", "10.0.0.1:5701"),
            data_parallel_size=3,
            enable_expert_parallel=expert_parallel,
        )
        assert same == whole and whole.sharing.place == ("10.0.0.1", 5700)
    parts = [whole.sharing.of(replica) for replica in range(3)]
    assert [one.place for one in parts] == [("10.0.0.1", port) for port in (5700, 5701, 5702)]
    assert [[port for _, port in one.peers] for one in parts] == [[5701, 5702, 1], [5700, 5702, 1], [5700, 5701, 1]]
    alone = plan(kv_offload_gb=1.0, kv_share=":5700", kv_peers=("a:1",)).sharing
    assert alone.of(0) == alone
    hidden = plan(kv_offload_gb=1.0, kv_peers=("a:1",), data_parallel_size=2).sharing
    assert hidden.of(1).place is None and hidden.of(1).peers == (("a", 1),), "not read, so not by each other"


def test_connectors() -> None:
    offloading = plan(**connector("OffloadingConnector", cpu_bytes_to_use=3 * GIB, block_size=64))
    assert offloading.host_bytes == 3 * GIB and not offloading.folder
    (note,) = offloading.notes
    assert "OffloadingConnector means --kv-offload-gb 3 here" in note
    assert plan(**connector("LMCacheConnectorV1")).host_bytes == 5 * GIB, "LMCache's default"
    eager = connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=GIB, lazy_offload=False)
    assert plan(**eager).write_through and not offloading.write_through
    sized = plan(
        **connector(
            "LMCacheConnectorV1",
            **{
                "lmcache.max_local_cpu_size": 20,
                "lmcache.chunk_size": 256,
                "lmcache.local_disk": "file:///kv",
                "lmcache.max_local_disk_size": 7,
            },
        )
    )
    assert (sized.host_bytes, sized.folder, sized.folder_bytes) == (20 * GIB, "/kv", 7 * GIB)


def test_options_of_our_tiers_win_over_a_connector() -> None:
    theirs = connector("LMCacheConnectorV1", **{"lmcache.max_local_cpu_size": 20, "lmcache.local_disk": "/theirs"})
    both = plan(**theirs, kv_offload_gb=1.0, kv_offload_dir="/kv", kv_offload_dir_gb=3.0)
    assert (both.host_bytes, both.folder, both.folder_bytes) == (GIB, "/kv", 3 * GIB)
    assert "max_local_cpu_size and lmcache.local_disk changes nothing beside options of" in both.notes[1]
    assert plan(**connector("OffloadingConnector"), kv_offload_gb=2.0).host_bytes == 2 * GIB
    assert plan(**theirs, kv_offload_dir="/kv").host_bytes == 20 * GIB


def test_a_connector_of_nodes_and_one_of_tiers_are_one_engine() -> None:
    nodes, tiers = {"kv_connector": "QuireConnector"}, {"kv_connector": "LMCacheConnectorV1"}
    found = plan(**connectors(nodes, tiers, role="kv_producer"), kv_share=":5700")
    assert found.host_bytes == 5 * GIB and (found.sharing.sends, found.sharing.takes) == (True, False)
    own = plan(**connectors(tiers, nodes | {"kv_role": "kv_consumer"}), kv_peers=("a:1",), kv_offload_gb=1.0)
    assert own.host_bytes == GIB and (own.sharing.sends, own.sharing.takes) == (False, True)
    assert plan(**connectors(tiers)).host_bytes == 5 * GIB
    assert plan(**connectors(nodes), kv_share=":1", kv_peers=("a:1",), kv_offload_gb=1.0).sharing.sends


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_offload_dir": "/kv"}, "set kv_offload_gb, too"),
        ({"kv_offload_gb": float("inf")}, "sizes have an end"),
        (connector("LMCacheConnectorV1", **{"lmcache.max_local_cpu_size": float("inf")}), "sizes have an end"),
        ({"kv_offload_gb": 1.0, "enable_prefix_caching": False}, "prefix cache, which is off"),
        (
            connector("NixlConnector"),
            'NixlConnector.* is not implemented: .* "QuireConnector", "kv_role": "kv_producer"',
        ),
        (node("kv_producer"), "kv_role=kv_producer without kv_share: a prefill node shares"),
        (node("kv_both", kv_share=":1", kv_offload_gb=1.0), "kv_role=kv_both without kv_peers"),
        (node("kv_producer", kv_share=":1"), "kv_share: engines read .* kv_offload_gb is 0"),
        (node("kv_sender"), "kv_role='kv_sender': must be one of"),
        (
            {"kv_transfer_config": {"kv_connector": "QuireConnector", "kv_role": "kv_consumer", "kv_port": 5}}
            | {"kv_peers": ("a:1",), "kv_offload_gb": 1.0},
            "has no kv_port",
        ),
        ({"kv_share": ":5700"}, "kv_share: engines read .* kv_offload_gb is 0"),
        ({"kv_peers": ("a:1",)}, "kv_peers: engines read"),
        (
            {"kv_share": ":65530", "kv_offload_gb": 1.0, "data_parallel_size": 7},
            "replica i is read at the port plus i, and -dp 7 goes beyond port 65535: give a port of at most 65529",
        ),
        ({"kv_share": ":5700-5701", "kv_offload_gb": 1.0, "data_parallel_size": 2}, "give a host and a port"),
        (
            {"kv_share": ":65532", "kv_offload_gb": 1.0, "tensor_parallel_size": 4, "nnodes": 2},
            "rank i of another host is read at the port plus 1 plus i, .* give a port of at most 65531",
        ),
        (
            connectors({"kv_connector": "OffloadingConnector"}, {"kv_connector": "LMCacheConnectorV1"}),
            "MultiConnector of OffloadingConnector, LMCacheConnectorV1: an engine has one host memory",
        ),
        (connectors({"kv_connector": "QuireConnector"}, {"kv_connector": "QuireConnector"}), "QuireConnector once"),
        (connectors({"kv_connector": "NixlConnector"}), "kv_connector='NixlConnector' is not implemented"),
        (connector("MultiConnector"), "has a list of connectors in kv_connector_extra_config and nothing else"),
        (connector("MultiConnector", connectors=["OffloadingConnector"]), "has a list of connectors"),
        ({"kv_share": "5700x", "kv_offload_gb": 1.0}, "give a host and a port"),
        ({"kv_share": "a:0", "kv_offload_gb": 1.0}, "give a host and a port"),
        ({"kv_share": "0.0.0.0:5700", "kv_offload_gb": 1.0}, "cannot connect to this address"),
        (connector("OffloadingConnector"), "without cpu_bytes_to_use: say how much"),
        (
            connector("OffloadingConnector", cpu_bytes_to_use=GIB, num_cpu_blocks=3),
            "has num_cpu_blocks, which Quire does",
        ),
        (connector("OffloadingConnector", cpu_bytes_to_use="much"), "must be positive numbers"),
        (connector("LMCacheConnectorV1", role="kv_sender"), "kv_role='kv_sender': must be one of"),
        ({"kv_offload_policy": "write_through"}, "kv_offload_policy=write_through: .* set kv_offload_gb, too"),
        ({"kv_offload_gb": 1.0, "kv_offload_dir_gb": 5.0}, "kv_offload_dir_gb=5: .* give kv_offload_dir, too"),
        ({"kv_offload_gb": 1.0, "kv_offload_dir": ""}, "kv_offload_dir='' names no folder"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_roll": "kv_both"}},
            "has kv_roll, which Quire",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": [1]}},
            r"kv_connector_extra_config=\[1\]: must be a mapping",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_load_failure_policy": "fail"}},
            "kv_load_failure_policy='fail'",
        ),
        (connector("LMCacheConnectorV1", **{"lmcache.local_cpu": False}), "local_cpu=False: .* leave it out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_fix(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(**options)
