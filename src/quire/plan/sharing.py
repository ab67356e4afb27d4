"""Sharing of KV blocks with other engines, as options ask for it: addresses, roles of prefill and decode, KV events."""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from socket import AI_NUMERICHOST, getaddrinfo

import msgspec

from quire.config.engine import EngineConfig
from quire.config.serve import is_loopback
from quire.contracts.errors import ConfigError
from quire.plan.placement import parallel_sizes

CONNECTOR = "QuireConnector"  # of prefill and decode nodes, in kv_transfer_config
ROLES = ("kv_both", "kv_producer", "kv_consumer")
Place = tuple[str, int]  # host and port


@dataclass(frozen=True, kw_only=True)
class SharePlan:
    """Part of an engine among others.

    place          where other engines read the blocks in its host memory; None: nowhere
    peers          the engines whose blocks it reads
    sends, takes   it computes prompts for other engines; it goes on with prompts that others have computed
    tp             its tensor-parallel size
    replicas       its replicas: each is an engine of its own for others, see `of`
    """

    place: Place | None = None
    peers: tuple[Place, ...] = ()
    sends: bool = False
    takes: bool = False
    tp: int = 1
    replicas: int = 1

    def of(self, replica: int) -> "SharePlan":
        """Return the part of a replica: it is read at the port plus its number, and reads the other replicas, too."""
        if self.place is None:
            return self
        host, port = self.place
        places = [(host, port + number) for number in range(self.replicas)]
        peers = tuple(one for one in dict.fromkeys((*places, *self.peers)) if one != places[replica])
        return replace(self, place=places[replica], peers=peers, replicas=1)


class EventSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The option kv_events_config, with vLLM's names.

    endpoint          ZeroMQ address; bound when it has a wildcard, names the interface `lo`, or is ipc; else connected
    replay_endpoint   address on which batches can be asked for again
    buffer_steps      batches that can be asked for again
    hwm               batches that wait for a slow subscriber; further ones are lost to it
    max_queue_size    batches that wait to be sent; further ones are lost
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://lo:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def exposed(self) -> tuple[str, ...]:
        """Addresses on which other machines can connect, without a key, and read the events."""
        pairs = (self.endpoint, self.bound), (self.replay_endpoint, True)
        return tuple(each for each, bound in pairs if each and bound and not _is_near(each))

    @property
    def bound(self) -> bool:
        """True when `endpoint` is an address of this machine, False when events are sent to another one."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("tcp://lo:", "ipc:"))


def resolve_share(config: EngineConfig, host_gb: float) -> SharePlan:
    """Return the part of an engine with `host_gb` GiB of host memory for KV blocks. Raises ConfigError."""
    asked = config.share
    sends, takes = _roles(config)
    if asked.kv_share is None and not asked.kv_peers:
        return SharePlan()
    name = "kv_share" if asked.kv_share else "kv_peers"
    if host_gb == 0:
        raise ConfigError(
            f"{name}: engines read each other's blocks through host memory, and kv_offload_gb is 0: set "
            "kv_offload_gb, too, such as 8."
        )
    parallel, hosts = parallel_sizes(config.parallel), config.hosts
    if hosts.distributed_executor_backend == "ray" or (hosts.nnodes > 1 and asked.kv_share):
        raise ConfigError(
            f"{name} is not implemented for ranks on several hosts, whose memory the engine core cannot "
            f"read (kv_peers works with nnodes): use one host and distributed_executor_backend=mp, or "
            f"leave out {name}."
        )
    if asked.kv_share and sys.platform != "linux":
        raise ConfigError(
            "kv_share needs memory that processes share, which is implemented for Linux alone: leave it out."
        )
    place = None if asked.kv_share is None else _place(asked.kv_share, "kv_share")
    if place is not None and place[1] + parallel.dp > 1 << 16:
        raise ConfigError(
            f"kv_share={asked.kv_share!r}: replica i is read at the port plus i, and -dp {parallel.dp} "
            f"goes beyond port 65535: give a port of at most {(1 << 16) - parallel.dp}."
        )
    return SharePlan(
        place=place,
        sends=sends,
        takes=takes,
        tp=parallel.tp,
        replicas=parallel.dp,
        peers=tuple(_place(peer, "kv_peers") for some in asked.kv_peers for peer in some.split(",")),
    )


def read_events_config(config: EngineConfig) -> EventSettings | None:
    """Return the settings of KV events; None when none are asked for. Raises ConfigError."""
    try:
        settings = msgspec.convert(config.share.kv_events_config or {}, EventSettings)
        if settings.publisher not in (None, "null", "zmq"):
            raise ValueError(f"publisher={settings.publisher!r} does not exist: use zmq")
        if min(settings.buffer_steps, settings.hwm, settings.max_queue_size) < 1:
            raise ValueError("buffer_steps, hwm and max_queue_size must be 1 or more")
    except ValueError as error:  # which msgspec.ValidationError is
        raise ConfigError(
            f"kv_events_config: {error}. Its keys are {', '.join(EventSettings.__struct_fields__)}, as "
            'in {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.'
        ) from None
    if not settings.enable_kv_cache_events or settings.publisher == "null":
        return None
    if not config.cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config tells the content of the prefix cache, which is off: leave out "
            "enable_prefix_caching=False, or kv_events_config."
        )
    return settings


def events_notes(config: EngineConfig) -> tuple[str, ...]:
    """Return the note about KV events that any machine can read. vLLM's form has no key, so none can be asked for."""
    settings = read_events_config(config)
    if settings is None or not settings.exposed:
        return ()
    return (
        f"kv_events_config: whoever can reach {' or '.join(settings.exposed)} reads the tokens of every prompt and "
        "answer: the protocol has no key. Let a firewall admit your routers alone, or use tcp://lo:5557, which this "
        "machine alone reaches.",
    )


def _is_near(endpoint: str) -> bool:
    """True for a ZeroMQ address that only this machine can reach."""
    scheme, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    return scheme != "tcp" or host == "lo" or is_loopback(host)


def _roles(config: EngineConfig) -> tuple[bool, bool]:
    """Return `SharePlan.sends` and `takes`."""
    asked, share = config.cache.kv_transfer_config or {}, config.share
    if asked.get("kv_connector") != CONNECTOR:
        return False, False
    if (role := asked.get("kv_role")) not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r}: must be one of {', '.join(ROLES)}.")
    if unknown := sorted(set(asked) - {"kv_connector", "kv_role"}):
        raise ConfigError(
            f"kv_transfer_config: {CONNECTOR} has no {', '.join(unknown)}: --kv-share, --kv-peers and "
            "--kv-offload-gb say where blocks are."
        )
    sends, takes = role != "kv_consumer", role != "kv_producer"
    missing = ["kv_share"] * (sends and not share.kv_share) + ["kv_peers"] * (takes and not share.kv_peers)
    if missing:
        raise ConfigError(
            f"kv_transfer_config: kv_role={role} without {' and '.join(missing)}: a prefill node shares "
            "its blocks (--kv-share HOST:PORT), a decode node reads those of prefill nodes (--kv-peers)."
        )
    return sends, takes


def _place(text: str, option: str) -> Place:
    """Return host and port of HOST:PORT; the host is loopback if only a port is given."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{option}={text!r}: give a host and a port, such as 127.0.0.1:5700.")
    with suppress(OSError):  # a name is not a number
        host = "*" if ip_address(getaddrinfo(host, 0, flags=AI_NUMERICHOST)[0][4][0]).is_unspecified else host
    if host == "*":
        raise ConfigError(
            f"{option}={text!r}: other engines cannot connect to this address. Give the address by which "
            "they reach this host."
        )
    return host, int(port)
