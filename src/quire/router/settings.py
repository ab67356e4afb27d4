"""The settings of a router, from its flags (`flags.txt`); every wrong value is one line with its fix."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from quire.config.env import BACKEND_KEY, backend_key
from quire.contracts.errors import ConfigError, shown
from quire.router.addresses import Member, event_addresses, member, members

AFFINE, EXACT, HASHED = "prefix-affinity", "exact", "consistent-hash"  # policies
COSTED = (AFFINE, EXACT)  # policies that look at prompts
LEAST = {
    "prefill_threshold": 1,
    "affinity_entries": 1,
    "load_bound": 1,
    "retries": 0,
    "retry_budget": 0,
    "hedge_after": 0,
    "breaker_failures": 0,
    "breaker_seconds": 0.01,
    "discovery_interval": 0.01,
    "connect_timeout": 0.01,
    "first_byte_timeout": 0.01,
    "health_interval": 0.01,
    "shutdown_timeout": 0,
}  # option -> smallest value
HEADER = re.compile(r"[a-z0-9-]{1,64}")
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Sources of backends, beside the flags that name them. Fields are named as the flags."""

    backend_file: str | None = None
    backend_dns: tuple[Member, ...] = ()
    discovery_interval: float = 5.0


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """The choice of a backend."""

    policy: str = AFFINE
    affinity_entries: int = 2**18
    session_header: str = "x-session-id"
    load_bound: float = 1.25


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Answers to backends that fail or are late. 0 switches hedging and circuit breakers off."""

    retries: int = 2
    retry_budget: float = 0.2
    hedge_after: float = 0.0
    breaker_failures: int = 5
    breaker_seconds: float = 10.0
    connect_timeout: float = 5.0
    first_byte_timeout: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """Checks of the health of backends, and the API key that the router itself shows to them ("" for none)."""

    health_interval: float = 2.0
    health_path: str = "/health"
    backend_api_key: str = ""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the router's own requests to backends."""
        return [(b"authorization", b"Bearer " + self.backend_api_key.encode())] if self.backend_api_key else []


PARTS = {"discovery": Discovery, "choice": BackendChoice, "faults": Faults, "health": Health}


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of a router, named as its flags."""

    backend: tuple[Member, ...] = ()
    prefill_backend: tuple[Member, ...] = ()
    prefill_threshold: int = 2048
    discovery: Discovery = Discovery()
    choice: BackendChoice = BackendChoice()
    faults: Faults = Faults()
    health: Health = Health()
    admin_port: int | None = None
    state_file: str | None = None
    shutdown_timeout: float = 30.0


def router_config(given: Mapping[str, Any]) -> RouterConfig:
    """Return the checked settings of flags, by their names with underscores. Raises `ConfigError`."""
    values = dict(given)
    for name, least in LEAST.items():
        value = values.get(name, least)
        if not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a number of at least {least}.")
    if not re.fullmatch(r"/[!-~]*", path := values.get("health_path", "/")):
        raise ConfigError(f"--health-path {shown(path)}: a path begins with a slash and has no spaces: /health.")
    if not 0 <= (values.get("admin_port") or 0) <= 65535:
        raise ConfigError(f"--admin-port {values['admin_port']}: must be in 0..65535; 0 is any free port.")
    values["session_header"] = header = values.get("session_header", BackendChoice.session_header).lower()
    if not HEADER.fullmatch(header):
        raise ConfigError(f"--session-header {shown(header)}: the name of a header has letters, digits and dashes.")
    values["backend_api_key"] = key = values.get("backend_api_key") or backend_key()
    if not re.fullmatch("[!-~]*", key):
        raise ConfigError(f"--backend-api-key, or {BACKEND_KEY}: a key is printable ASCII without spaces.")
    values["prefill_backend"] = members("--prefill-backend", values.get("prefill_backend", ()))
    values["backend_dns"] = tuple(member("--backend-dns", text) for text in values.get("backend_dns", ()))
    named = members("--backend", values.get("backend", ()))
    found = values["backend_dns"] or values.get("backend_file") is not None
    if not named and not found:
        raise ConfigError(
            "no backend is named: give --backend URL, once for each server, --backend-file FILE or --backend-dns URL."
        )
    both = {one.address.url for one in named} & {one.address.url for one in values["prefill_backend"]}
    if both:
        raise ConfigError(f"{min(both)} is in --backend and in --prefill-backend: a server has one of the two parts.")
    values["backend"] = _with_events(named, values.get("kv_events", ()), values)
    _refuse_idle(values)
    return _part(RouterConfig, values | {name: _part(kind, values) for name, kind in PARTS.items()})


def _refuse_idle(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a setting that nothing would read."""
    policy = values.get("policy", BackendChoice.policy)
    hashed = policy == HASHED, f"--policy {HASHED}"
    needs = {
        "affinity_entries": (policy in COSTED, f"--policy {AFFINE} or {EXACT}"),
        "session_header": hashed,
        "load_bound": hashed,
        "prefill_threshold": (bool(values["prefill_backend"]), "--prefill-backend"),
        "breaker_seconds": (values.get("breaker_failures") != 0, "--breaker-failures above 0"),
        "discovery_interval": (
            bool(values["backend_dns"]) or values.get("backend_file") is not None,
            "--backend-file or --backend-dns",
        ),
    }
    defaults = {one.name: one.default for kind in (RouterConfig, *PARTS.values()) for one in fields(kind)}
    for name, (read, other) in needs.items():
        if not read and values.get(name, defaults[name]) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} changes nothing without {other}: add that, or leave {flag} out.")


def _part(kind: type[Part], values: Mapping[str, Any]) -> Part:
    return kind(**{one.name: values[one.name] for one in fields(kind) if one.name in values})  # type: ignore[arg-type]


def _with_events(named: tuple[Member, ...], texts: Sequence[str], values: Mapping[str, Any]) -> tuple[Member, ...]:
    """Return the backends with their KV events. Raises `ConfigError` unless policy exact has one for each."""
    exact = values.get("policy") == EXACT
    if exact and values["backend_dns"]:
        raise ConfigError("--policy exact: DNS names no KV events: name backends and events in --backend-file.")
    if texts and not exact or exact and named and not texts:
        raise ConfigError("--policy exact and --kv-events go together: give both, or none.")
    if texts and len(texts) != len(named):
        raise ConfigError(
            f"--kv-events has {len(texts)} addresses for {len(named)} backends: give one for each --backend, "
            "in the same order."
        )
    events = [event_addresses("--kv-events", text) for text in texts] or [("", "")] * len(named)
    return tuple(replace(one, kv_events=pair) for one, pair in zip(named, events, strict=True))
