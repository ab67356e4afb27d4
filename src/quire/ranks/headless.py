"""`quire serve --headless`: a host of an engine whose server is elsewhere. Finds the model, then runs the agent."""

import hashlib
import importlib.metadata
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from quire import __version__
from quire.config.engine import EngineConfig, HostsConfig
from quire.config.env import cluster_key
from quire.config.hosts import counts_replicas
from quire.config.speculators import resolve_speculators
from quire.contracts.errors import ConfigError
from quire.plan.drafts import draft_config
from quire.plan.engine import EnginePlan
from quire.plan.meetings import check, inputs_of, met
from quire.plan.placement import parallel_sizes
from quire.platforms.detect import probe_driver, resolve_device
from quire.ranks.agent import JOIN_SECONDS, HostAgent
from quire.ranks.host_messages import HostHello, ModelFiles
from quire.weights.folder import fetch_weights, resolve_folders

CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}  # exit codes of a host that a signal has ended


def check_first_host(config: HostsConfig) -> None:
    """Raise `ConfigError` on a host that runs no engine core."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank}: only host 0 has an engine core. Start this host with `quire "
            "serve MODEL --headless` and the same flags."
        )


def serve_host(config: EngineConfig, module: str, say: Callable[[str], None]) -> int:
    """Run the ranks of this host until the engine ends. Return the exit code: 1 after a rank of this host has failed.

    module   builds a rank; see `HostAgent`;  say  prints a line for the user
    Raises a `QuireError` when host 0 is not found, does not take this host, or is lost.
    """
    hosts = config.hosts
    if not hosts.node_rank and hosts.data_parallel_size_local is None:
        raise ConfigError(
            f"headless: node_rank={hosts.node_rank} is the host of the server, which answers over HTTP: "
            "leave headless out, or give --nnodes and the --node-rank of this host."
        )
    if hosts.data_parallel_size_local is not None:  # host 0 says how many ranks this host has
        check(met(inputs_of(config)))
    key, _ = cluster_key()
    files = find_model(config)
    gpus = probe_driver().count if resolve_device(config.device.device).device == "cuda" else 0
    ranks = own_ranks(config)
    hello = HostHello(
        node=hosts.node_rank,
        name=f"{socket.gethostname()}, {f'ranks from {ranks[0]}' if ranks[1] else f'node {hosts.node_rank}'}",
        ranks=ranks,
        versions=versions(),
        devices=tuple(range(gpus)),
        files=files,
    )
    signals: list[signal.Signals] = []
    for number in CODES:
        signal.signal(number, lambda received, _: signals.append(signal.Signals(received)))
    agent = HostAgent(hosts.master_addr, hosts.master_port, key, hello, module, env={}, say=say)
    good = agent.run(lambda: f"was ended by {signals[0].name}" if signals else "", JOIN_SECONDS)
    return CODES[signals[0]] if signals else int(not good)


def own_ranks(config: EngineConfig) -> tuple[int, int]:
    """Return the first rank of this host and how many it has; (0, 0): the first host gives all equally many."""
    hosts, parallel = config.hosts, parallel_sizes(config.parallel)
    local = hosts.data_parallel_size_local or 0
    if not counts_replicas(hosts, parallel.dp):
        return 0, 0
    if not local:
        raise ConfigError("headless: data_parallel_size_local=0 is for host 0, which has the server: give a number.")
    first = hosts.data_parallel_start_rank or hosts.node_rank * local
    return first * parallel.replica, local * parallel.replica


def find_model(config: EngineConfig) -> ModelFiles:
    """Return the files of the model and of its drafter on this host, downloaded if needed."""
    config = resolve_speculators(config, resolve_folders(config)[0])
    folders = list[Path]()
    for one in filter(None, (config, draft_config(config, config.model.dtype))):
        folders.append(resolve_folders(one)[0])
        fetch_weights(one, folders[-1], lambda checkpoint: None)
    digest = model_digest(config, *folders)
    return ModelFiles(digest=digest, folders=tuple(str(folder.resolve()) for folder in folders))


def versions() -> str:
    """Return the versions that all hosts of an engine have alike."""
    return f"Quire {__version__}, PyTorch {importlib.metadata.version('torch')}"


def model_digest(config: EngineConfig, *folders: Path) -> str:
    """Return a digest of each config.json and of the names and sizes of the weight files, if they are read.

    folders   of the model, and of its draft model or EAGLE head
    """
    digest = hashlib.sha256()
    for folder in folders:
        digest.update((folder / "config.json").read_bytes())
        if config.load.load_format != "dummy":
            for path in sorted(folder.glob("*.safetensors")):
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()


def plan_digest(plan: EnginePlan) -> str:
    """Return the `model_digest` of the engine of a plan."""
    folders = (plan.folder, *((plan.draft.folder,) if plan.draft is not None else ()))
    return model_digest(plan.config, *map(Path, folders))
