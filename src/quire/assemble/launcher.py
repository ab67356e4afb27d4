"""The launcher that a configuration asks for, and the rendezvous of its ranks: on one host, on several, or on Ray."""

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.config.env import cluster_key, rank_variables
from quire.config.hosts import counts_replicas
from quire.plan.engine import EnginePlan
from quire.plan.placement import ranks_here
from quire.procs.host_link import interface_of, listen
from quire.ranks.headless import plan_digest, versions
from quire.ranks.host_launcher import Hosts
from quire.ranks.launchers import Launcher, LocalLauncher, Place
from quire.ranks.members import Members

MODULE = "quire.assemble.rank_child"
LOG = logging.getLogger("quire").getChild("hosts")


def open_launcher(plan: EnginePlan) -> Launcher:
    """Return the launcher of an engine's ranks. `plan`: of any rank. Raises a `UserError` that names the fix."""
    config = plan.config
    hosts, gpus = config.hosts, plan.machine.device == "cuda"
    if hosts.distributed_executor_backend == "ray":
        from quire.assemble.ray_launcher import open_ray_hosts  # an extra, and a slow import

        return open_ray_hosts(plan, MODULE)
    if hosts.nnodes == 1:
        return LocalLauncher(MODULE, rank_variables())
    key, where = cluster_key()
    listener = listen(hosts.master_addr, hosts.master_port)
    address, port = listener.getsockname()[:2]
    parallel = plan.mesh.parallel
    counted = counts_replicas(hosts, parallel.dp)
    own, total = ranks_here(hosts, parallel) if counted else None, hosts.nnodes
    others = f"hosts with {parallel.size - own} more ranks" if own is not None else f"{total - 1} more hosts"
    LOG.info("listening on %s:%d for %s; they need the key in %s.", address, port, others, where)
    about: dict[str, Any] = {"versions": versions(), "gpus": gpus, "model": plan_digest(plan)}
    members = Members(first=1, total=total, own=own, world=parallel.size, **about)
    return Hosts(LocalLauncher(MODULE, rank_variables(interface_of(address))), listener, key, members)


@contextmanager
def open_meeting(launcher: Launcher, places: Sequence[Place]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the rendezvous of ranks with these places for `join_ranks`, and the descriptors that they inherit for it.

    On one host it is a file. On Linux the file has no name outside these processes: nothing of it is left, however they
    end. Ranks of other hosts use a store of this process, which the launcher keeps.
    """
    if isinstance(launcher, Hosts) and not all(place.local for place in places):
        from quire.distributed.process_group import open_store

        listener = listen(launcher.address, 0)
        address, port = listener.getsockname()[:2]
        launcher.keep(open_store(listener))
        yield f"tcp://{address}:{port}", ()
    elif hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-ranks")
        try:
            yield f"/proc/self/fd/{descriptor}", (descriptor,)
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="quire-ranks-", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder, "meeting")), ()
