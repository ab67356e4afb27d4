"""Options of several hosts, the key that they share, and the variables of their ranks."""

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig, HostsConfig
from quire.config.env import CLUSTER_KEY, cluster_key, rank_variables, unknown_variables, variables_to_pass
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, met
from quire.plan.placement import hosts_note
from quire.ranks.headless import check_first_host, serve_host


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(CLUSTER_KEY, raising=False)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_key_is_the_variable_s(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(CLUSTER_KEY, "k" * 16)
    assert cluster_key() == (b"k" * 16, CLUSTER_KEY)
    assert not folder.exists() and CLUSTER_KEY not in unknown_variables(())
    monkeypatch.setenv(CLUSTER_KEY, "k" * 15)
    with pytest.raises(ConfigError, match="the key in QUIRE_CLUSTER_KEY has 15 characters: use at least 16"):
        cluster_key()


def test_the_first_host_makes_a_file_that_the_others_read(folder: Path) -> None:
    folder.parent.joinpath("cache").write_text("in the way")
    with pytest.raises(ConfigError, match="is not set, and .*cluster_key cannot be used .*Set QUIRE_CLUSTER_KEY"):
        cluster_key()
    folder.unlink()
    key, where = cluster_key()
    assert len(key) == 64 and stat.S_IMODE(Path(where).stat().st_mode) == 0o600
    assert cluster_key() == (key, str(folder / "cluster_key"))


def test_processes_that_make_the_key_at_the_same_time_have_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads a half, and nobody fails because another was first."""

    def slow(count: int) -> str:
        time.sleep(0.1)
        return os.urandom(count).hex()

    monkeypatch.setattr("quire.config.env.secrets.token_hex", slow)
    with ThreadPoolExecutor(8) as pool:
        found = [future.result() for future in [pool.submit(cluster_key) for _ in range(8)]]
    assert len(set(found)) == 1
    assert [path.name for path in folder.iterdir()] == ["cluster_key"]


def test_ranks_talk_through_the_interface_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert rank_variables()["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in rank_variables()
    assert rank_variables("eth1").items() >= {("GLOO_SOCKET_IFNAME", "eth1"), ("NCCL_SOCKET_IFNAME", "=eth1")}
    assert not any("IFNAME" in name for name in rank_variables(""))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert "NCCL_SOCKET_IFNAME" not in rank_variables("eth1")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"node_rank": 1}, "node_rank=1: 1 hosts have the numbers 0 to 0"),
        ({"distributed_executor_backend": "external_launcher"}, "must be one of mp, uni, ray"),
        ({"nnodes": 0}, "nnodes=0: must be at least 1"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat(**options)


def check_hosts(hosts: HostsConfig, parallel: Parallel) -> None:
    check(met(Inputs(config=EngineConfig(hosts=hosts), parallel=parallel)))


def test_each_host_gets_the_same_number_of_ranks() -> None:
    check_hosts(HostsConfig(nnodes=2), Parallel(tp=2, dp=2))
    with pytest.raises(ConfigError, match="-tp 2: 2 ranks cannot be divided equally among 3 hosts"):
        check_hosts(HostsConfig(nnodes=3), Parallel(tp=2))
    with pytest.raises(ConfigError, match="one rank runs on this host, without Ray"):
        check_hosts(HostsConfig(distributed_executor_backend="ray"), Parallel())
    with pytest.raises(ConfigError, match="only host 0 has an engine core"):
        check_first_host(HostsConfig(nnodes=2, node_rank=1))
    with pytest.raises(ConfigError, match="nnodes=2: Ray knows its hosts itself"):
        check_hosts(HostsConfig(nnodes=2, distributed_executor_backend="ray"), Parallel(tp=2))


def test_a_layer_across_hosts_is_noted() -> None:
    assert not hosts_note(Parallel(tp=2, dp=2), (0, 0, 1, 1)) and not hosts_note(Parallel(pp=2), (0, 1))
    assert hosts_note(Parallel(tp=4), (0, 0, 1, 1)).startswith("-tp 4: slices of a layer are on several hosts")


@pytest.mark.parametrize(
    "given, fits",
    [
        ({"dp": 4}, (4,)),
        ({"dp": 4, "nnodes": 2}, (0, 2, 3)),
        ({"dp": 1, "tp": 2}, (1,)),
        ({"dp": 1, "tp": 2, "nnodes": 2}, (0, 1)),
        ({"dp": 2, "tp": 2, "nnodes": 4}, (1,)),
        ({"dp": 3, "tp": 2, "nnodes": 2}, (0, 2)),
    ],
    ids=str,
)
def test_the_replicas_of_a_host(given: dict[str, int], fits: tuple[int, ...]) -> None:
    """Hosts may have other numbers where they are as many as this host's number asks for."""
    parallel = Parallel(dp=given["dp"], tp=given.get("tp", 1))
    for local in range(6):
        hosts = HostsConfig(nnodes=given.get("nnodes", 1), data_parallel_size_local=local)
        if local in fits:
            check_hosts(hosts, parallel)
        else:
            with pytest.raises(ConfigError, match=f"_local={local}: .*give at most {given['dp']}"):
                check_hosts(hosts, parallel)
    with pytest.raises(ConfigError, match="1 hosts .* with 2 replicas each do not have 4"):
        check_hosts(HostsConfig(data_parallel_size_local=2), Parallel(dp=4))


def test_a_further_host_refuses_another_number_of_replicas() -> None:
    """Before it looks for the model."""
    config = EngineConfig.from_flat(
        model="none", nnodes=2, node_rank=1, master_addr="10.0.0.1", data_parallel_size=4, data_parallel_size_local=1
    )
    with pytest.raises(ConfigError, match="_local=1: 2 hosts .nnodes. with 1 replicas each do not have 4"):
        serve_host(config, "", print)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"data_parallel_size_local": 2}, (2, 0)),
        ({"data_parallel_size_local": 2, "data_parallel_start_rank": 2}, (2, 1)),
        ({"data_parallel_size_local": 1, "data_parallel_start_rank": 3}, (4, 3)),
        ({"data_parallel_size_local": 4}, (1, 0)),
        ({"data_parallel_size_local": 2, "nnodes": 2, "node_rank": 1}, (2, 1)),
        ({"data_parallel_size_local": 2, "distributed_executor_backend": "ray"}, (1, 0)),
        ({"data_parallel_size_local": 3}, (2, 0)),
        ({"data_parallel_size_local": 3, "data_parallel_start_rank": 1}, (2, 1)),
        ({"data_parallel_size_local": 2, "data_parallel_start_rank": 1}, (2, 1)),
        ({"data_parallel_size_local": 0}, (2, 0)),
        ({"data_parallel_size_local": 5}, (1, 0)),
    ],
    ids=str,
)
def test_replicas_of_each_host_tell_the_hosts(given: dict[str, Any], found: tuple[int, int]) -> None:
    """As launch lines of vLLM have it: with -dp 4."""
    hosts = EngineConfig.from_flat(data_parallel_size=4, **given).hosts
    assert (hosts.nnodes, hosts.node_rank) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data_parallel_start_rank": 2}, "give data_parallel_size_local"),
        ({"data_parallel_size_local": 2, "data_parallel_start_rank": 3}, "2 replicas from this one on .* than the 4"),
        ({"data_parallel_size_local": 2, "data_parallel_start_rank": 4}, "2 replicas from this one on .* than the 4"),
        ({"data_parallel_size_local": 0, "data_parallel_start_rank": 1}, "give data_parallel_size_local"),
        ({"data_parallel_size_local": 1, "data_parallel_start_rank": 1, "nnodes": 8}, "a replica has several hosts"),
        (
            {"data_parallel_size_local": 1, "data_parallel_start_rank": 3, "nnodes": 4, "node_rank": 2},
            "is that of host 3, and node_rank is 2",
        ),
    ],
    ids=str,
)
def test_a_first_replica_that_fits_no_host(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat(data_parallel_size=4, **given)


def test_ranks_of_ray_get_the_key_if_they_read_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_KEY, "the key of this cluster")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not variables_to_pass(key=False).keys() & {CLUSTER_KEY, "RAY_ADDRESS"}
    assert variables_to_pass(key=True)[CLUSTER_KEY] == "the key of this cluster"
