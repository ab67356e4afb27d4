"""Sharing of KV blocks with other engines, as options ask for it: addresses, roles of prefill and decode, KV events."""

from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from socket import AI_NUMERICHOST, getaddrinfo

from quire.config.connectors import CONNECTOR, ROLES, node_options
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.plan.placement import parallel_sizes

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

    def of_rank(self, number: int, address: str) -> Place:
        """Return the place where a rank is read that is on another host than the engine core, at this address."""
        assert self.place is not None
        return address, self.place[1] + self.replicas + number

    def of(self, replica: int) -> "SharePlan":
        """Return the part of a replica: it is read at the port plus its number, and reads the other replicas, too."""
        if self.place is None:
            return self
        host, port = self.place
        places = [(host, port + number) for number in range(self.replicas)]
        peers = tuple(one for one in dict.fromkeys((*places, *self.peers)) if one != places[replica])
        return replace(self, place=places[replica], peers=peers, replicas=1)


def resolve_share(config: EngineConfig) -> SharePlan:
    """Return the part of an engine among others. Raises ConfigError for wrong names and values."""
    asked = config.share
    sends, takes = _roles(config)
    if asked.kv_share is None and not asked.kv_peers:
        return SharePlan()
    parallel = parallel_sizes(config.parallel)
    place = None if asked.kv_share is None else _place(asked.kv_share, "kv_share")
    used, what = parallel.dp, f"replica i is read at the port plus i, and -dp {parallel.dp}"
    if config.hosts.several:
        used += parallel.size
        what = f"rank i of another host is read at the port plus {parallel.dp} plus i, and {parallel}"
    if place is not None and place[1] + used > 1 << 16:
        raise ConfigError(
            f"kv_share={asked.kv_share!r}: {what} goes beyond port 65535: give a port of at most {(1 << 16) - used}."
        )
    return SharePlan(
        place=place,
        sends=sends,
        takes=takes,
        tp=parallel.tp,
        replicas=parallel.dp,
        peers=tuple(_place(peer, "kv_peers") for some in asked.kv_peers for peer in some.split(",")),
    )


def _roles(config: EngineConfig) -> tuple[bool, bool]:
    """Return `SharePlan.sends` and `takes`."""
    if not (asked := node_options(config.cache)):
        return False, False
    if (role := asked.get("kv_role")) not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r}: must be one of {', '.join(ROLES)}.")
    if unknown := sorted(set(asked) - {"kv_connector", "kv_role"}):
        raise ConfigError(
            f"kv_transfer_config: {CONNECTOR} has no {', '.join(unknown)}: --kv-share, --kv-peers and "
            "--kv-offload-gb say where blocks are."
        )
    return role != "kv_consumer", role != "kv_producer"


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
