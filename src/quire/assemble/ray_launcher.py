"""Ranks on the nodes of a Ray cluster. Ray chooses the nodes and watches an actor for each rank, and does no more.

An actor runs the agent of one rank (`ranks/agent.py`), so starts, plans, results and faults go through the same
connections as on several hosts without Ray. Needs the extra `quire[ray]`.
"""

import logging
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from quire.config.env import rank_variables, variables_to_pass
from quire.contracts.errors import ConfigError
from quire.plan.engine import EnginePlan
from quire.procs.host_link import listen
from quire.ranks.headless import plan_digest, versions
from quire.ranks.host_launcher import Hosts
from quire.ranks.launchers import LocalLauncher
from quire.ranks.members import Members
from quire.ranks.ray_rank import JOIN_SECONDS, RayRank

CPU_RESOURCE = "quire_rank"  # a node without GPUs that offers it takes so many ranks; without it ranks take CPUs
PLACE_SECONDS = 120.0  # for Ray to reserve a place for each rank


def open_ray_hosts(plan: EnginePlan, module: str) -> Hosts:
    """Return a launcher of one actor per rank, which runs `module`. Raises `ConfigError` without Ray or places.

    plan   of any rank
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(
            "distributed_executor_backend=ray: Ray is not installed: `pip install 'quire[ray]'`, or "
            "start `quire serve --headless` on each host with --nnodes instead."
        ) from None
    world, gpus = plan.mesh.parallel.size, plan.machine.device == "cuda"
    with ExitStack() as failed:
        if not ray.is_initialized():
            _connect(ray)
            failed.callback(ray.shutdown)
        kind = _resource(ray, world, gpus)
        group = ray.util.placement_group([{kind: 1}] * world, strategy="PACK")
        failed.callback(_quietly, ray.util.remove_placement_group, group)
        if not group.wait(PLACE_SECONDS):
            raise ConfigError(
                f"Ray has not reserved {world} of the resource {kind} in {PLACE_SECONDS:.0f} s: others "
                "use them. `ray status` shows who."
            )
        sharing = plan.offload.sharing
        env = variables_to_pass(key=bool(sharing.place or sharing.peers))
        actors = _start_actors(ray, group, kind, module, env)
        for actor in actors:
            failed.callback(_quietly, ray.kill, actor)
        address, key = str(ray.util.get_node_ip_address()), secrets.token_bytes(32)
        listener = listen(address, 0)
        place, config = (address, listener.getsockname()[1]), msgspec.json.encode(plan.config)
        runs = [actor.run.remote(number, place, key, config) for number, actor in enumerate(actors)]

        def ended() -> str:
            """Return the words of an actor that has ended while the others are awaited."""
            done, _ = ray.wait(runs, timeout=0)
            return str(ray.get(done[0])) if done else ""

        members = Members(
            first=0,
            total=world,
            versions=versions(),
            gpus=gpus,
            seconds=JOIN_SECONDS,
            fault=ended,
            model=plan_digest(plan),
        )
        hosts = Hosts(LocalLauncher(module, rank_variables()), listener, key, members)
        hosts.on_close(failed.pop_all().close)
    return hosts


def _connect(ray: Any) -> None:
    """Connect to the Ray cluster of RAY_ADDRESS, else of this host; without one, start one here."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(logging_level=logging.ERROR)
    if main:  # Ray has set its own, which ends the process; a server lets requests finish
        signal.signal(signal.SIGTERM, handler)


def _resource(ray: Any, world: int, gpus: bool) -> str:
    """Return the resource of which each rank takes one. Raises `ConfigError` if the cluster has too few."""
    have = ray.cluster_resources()
    kind = "GPU" if gpus else CPU_RESOURCE if CPU_RESOURCE in have else "CPU"
    if have.get(kind, 0) < world:
        raise ConfigError(
            f"{world} ranks need {world} of the resource {kind}, and the Ray cluster has "
            f"{have.get(kind, 0):g}: add nodes, or lower -tp, -pp or -dp."
        )
    return kind


def _start_actors(ray: Any, group: Any, kind: str, module: str, env: Mapping[str, str]) -> list[Any]:
    """Start an actor in each bundle, for a rank that runs `module`. Return them in the order of the ranks.

    env   variables of this process for the ranks
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    own = ray.get_runtime_context().get_node_id()
    takes: dict[str, Any] = {
        "num_cpus": int(kind == "CPU"),
        "num_gpus": int(kind == "GPU"),
        "max_restarts": 0,
        "resources": {CPU_RESOURCE: 1} if kind == CPU_RESOURCE else None,
        "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
    }
    actor = ray.remote(RayRank)
    places = [PlacementGroupSchedulingStrategy(group, index) for index in in_order(nodes, own)]
    return [actor.options(**takes, scheduling_strategy=place).remote(module, env) for place in places]


def in_order(nodes: Mapping[int, str], own: str) -> list[int]:
    """Return the indices of bundles by node, those of the node `own` first. `nodes`: index of a bundle -> its node."""
    seen = list(dict.fromkeys(nodes[index] for index in sorted(nodes)))
    return sorted(nodes, key=lambda index: (nodes[index] != own, seen.index(nodes[index]), index))


def _quietly(free: Callable[..., object], *args: object) -> None:
    with suppress(Exception):  # Ray itself may have ended
        free(*args)
