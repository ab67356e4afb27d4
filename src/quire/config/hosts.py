"""Options of several hosts. vLLM counts replicas in some of them, where Quire counts hosts."""

from dataclasses import dataclass, replace

from quire.config.option import option
from quire.contracts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """Several hosts."""

    nnodes: int = option(1, "hosts; each runs the same number of ranks", flags=("-n",), least=1)
    node_rank: int = option(
        0,
        "number of this host; the server and the engine core run on host 0, the others start with --headless",
        flags=("-r",),
        least=0,
    )
    data_parallel_size_local: int | None = option(
        None, "replicas of this host; 0 on host 0: the server alone. In the place of --nnodes", flags=("-dpl",), least=0
    )
    data_parallel_start_rank: int = option(
        0, "first replica of this host, in the place of --node-rank", flags=("-dpr",), least=0
    )
    master_addr: str = option("127.0.0.1", "address of host 0, by which the other hosts reach it")
    master_port: int = option(29501, "port on host 0 for the other hosts", least=0)
    distributed_executor_backend: str = option(
        "mp",
        "way to start ranks: mp (uni) = processes of the hosts, ray = on the nodes of a Ray cluster",
        choices=("mp", "uni", "ray"),
    )

    @property
    def several(self) -> bool:
        """True when ranks may be on other hosts than the engine core."""
        return self.nnodes > 1 or self.distributed_executor_backend == "ray"


def fewest_hosts(local: int, replicas: int) -> int:
    """Return the fewest hosts with `replicas` replicas, if one of them has `local`."""
    return -(-replicas // local) if local else 2


def counts_replicas(hosts: HostsConfig, replicas: int) -> bool:
    """True if each host says how many of the replicas it has, so that hosts may have other numbers."""
    local = hosts.data_parallel_size_local
    if local is None or local > replicas or hosts.distributed_executor_backend == "ray":
        return False
    return hosts.nnodes == fewest_hosts(local, replicas)


def hosts_of_replicas(hosts: HostsConfig, replicas: int) -> HostsConfig:
    """Return the options with the hosts that a number of replicas of this host stands for.

        data_parallel_size 4, data_parallel_size_local 2                                  2 hosts, this is host 0
        data_parallel_size 4, data_parallel_size_local 2, data_parallel_start_rank 2      2 hosts, this is host 1
        data_parallel_size 4, data_parallel_size_local 0                                  the server; replicas elsewhere
        data_parallel_size 4, data_parallel_size_local 3, data_parallel_start_rank 1      the last 3 of 4 replicas

    More hosts may come where others have fewer replicas. Ray knows its hosts itself. Raises ConfigError for a first
    replica that does not fit.
    """
    local, first = hosts.data_parallel_size_local, hosts.data_parallel_start_rank
    if hosts.distributed_executor_backend == "ray":
        return hosts
    if first and not local:
        raise ConfigError(f"data_parallel_start_rank={first}: give data_parallel_size_local, the replicas of a host.")
    if local is None or local > replicas:  # a row of `plan/meetings.py` says so
        return hosts
    if first + local > replicas:
        raise ConfigError(
            f"data_parallel_start_rank={first}: {local} replicas from this one on (data_parallel_size_local) are more "
            f"than the {replicas} that there are (data_parallel_size)."
        )
    fewest = fewest_hosts(local, replicas)
    if first and hosts.nnodes > fewest:
        raise ConfigError(
            f"data_parallel_start_rank={first}: with nnodes={hosts.nnodes} a replica has several hosts: leave it "
            "out, and give --node-rank."
        )
    rank = 0 if not first else 1 if first % local else first // local
    if hosts.node_rank not in (0, rank) and first:
        raise ConfigError(
            f"data_parallel_start_rank={first} is that of host {rank}, and node_rank is {hosts.node_rank}: leave one "
            "of them out."
        )
    nnodes = fewest if hosts.nnodes == 1 else hosts.nnodes  # another number is refused by a row, too
    return replace(hosts, nnodes=nnodes, node_rank=hosts.node_rank or rank)
