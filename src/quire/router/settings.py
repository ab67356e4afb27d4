"""The settings of a router, from its flags (`flags.txt`); every wrong value is one line with its fix.

Knows the spellings of addresses. Knows nothing of connections.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from quire.contracts.errors import ConfigError, shown

EXACT = "exact"
COSTED = ("prefix-affinity", EXACT)  # policies that look at prompts
ZMQ_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/*,]+):\d{1,5}|ipc://[^\s,]+")
LEAST = {
    "prefill_threshold": 1,
    "affinity_entries": 1,
    "retries": 0,
    "connect_timeout": 0.01,
    "first_byte_timeout": 0.01,
    "health_interval": 0.01,
    "shutdown_timeout": 0,
}  # option -> smallest value


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a backend. `url` names the backend to people; `base` is the path before those of the API."""

    url: str
    host: str
    port: int
    tls: bool = False
    base: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of a router, named as its flags.

    kv_events   (address of the events, address for lost ones or "") of each backend, in the order of `backend`
    """

    backend: tuple[Address, ...]
    prefill_backend: tuple[Address, ...] = ()
    prefill_threshold: int = 2048
    kv_events: tuple[tuple[str, str], ...] = ()
    policy: str = "prefix-affinity"
    affinity_entries: int = 2**18
    retries: int = 2
    connect_timeout: float = 5.0
    first_byte_timeout: float = 600.0
    health_interval: float = 2.0
    health_path: str = "/health"
    admin_port: int | None = None
    shutdown_timeout: float = 30.0


def router_config(given: Mapping[str, Any]) -> RouterConfig:
    """Return the checked settings of flags, by their names with underscores. Raises `ConfigError`."""
    values = {field.name: given[field.name] for field in fields(RouterConfig) if field.name in given}
    for name, least in LEAST.items():
        value = values.get(name, least)
        if not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a number of at least {least}.")
    if not re.fullmatch(r"/[!-~]*", path := values.get("health_path", "/")):
        raise ConfigError(f"--health-path {shown(path)}: a path begins with a slash and has no spaces: /health.")
    if not 0 <= (values.get("admin_port") or 0) <= 65535:
        raise ConfigError(f"--admin-port {values['admin_port']}: must be in 0..65535; 0 is any free port.")
    values["backend"] = addresses("--backend", values.get("backend", ()))
    values["prefill_backend"] = addresses("--prefill-backend", values.get("prefill_backend", ()))
    if not values["backend"]:
        raise ConfigError("no backend is named: give --backend URL, once for each server.")
    both = {address.url for address in values["backend"]} & {address.url for address in values["prefill_backend"]}
    if both:
        raise ConfigError(f"{min(both)} is in --backend and in --prefill-backend: a server has one of the two parts.")
    values["kv_events"] = event_addresses(values.get("kv_events", ()), len(values["backend"]), values.get("policy", ""))
    return RouterConfig(**values)


def addresses(flag: str, texts: Sequence[str]) -> tuple[Address, ...]:
    """Parse the URLs of backends. Raises `ConfigError` for one that is no URL, or is named twice."""
    found: dict[str, Address] = {}
    for text in texts:
        address = _address(flag, text)
        if address.url in found:
            raise ConfigError(f"{flag} {text}: this server is named twice: name it once.")
        found[address.url] = address
    return tuple(found.values())


def event_addresses(texts: Sequence[str], count: int, policy: str) -> tuple[tuple[str, str], ...]:
    """Parse the addresses of KV events. Raises `ConfigError` unless there is one for each of `count` backends."""
    if (policy == EXACT) != bool(texts):
        raise ConfigError("--policy exact and --kv-events go together: give both, or none.")
    if texts and len(texts) != count:
        raise ConfigError(
            f"--kv-events has {len(texts)} addresses for {count} backends: give one for each --backend, "
            "in the same order."
        )
    pairs = []
    for text in texts:
        live, _, lost = text.partition(",")
        for address in filter(None, (live, lost)):
            if not ZMQ_ADDRESS.fullmatch(address):
                raise ConfigError(
                    f"--kv-events {text}: {shown(address)} is no ZMQ address to connect to: give "
                    "tcp://host:port, or ipc://path."
                )
        pairs.append((live, lost))
    return tuple(pairs)


def _address(flag: str, text: str) -> Address:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: {error}: give a URL such as http://127.0.0.1:8000.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} {text}: not the URL of a server: give one such as http://127.0.0.1:8000.")
    if parts.username is not None or parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", text):
        raise ConfigError(
            f"{flag} {text.rpartition('@')[2]}: no user, query, fragment or space is taken: give "
            "scheme, host, port and path. Clients send API keys themselves."
        )
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    address = Address(url="", host=parts.hostname, port=port or (443 if tls else 80), tls=tls, base=base)
    return Address(**{**vars(address), "url": f"{parts.scheme}://{address.authority}{base}"})
