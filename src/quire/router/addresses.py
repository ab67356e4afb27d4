"""Addresses of backends, as people and other programs spell them.

    http://10.0.0.1:8000                     the URL of a server; /v1 at its end is left out
    http://10.0.0.1:8000,weight=2            it takes twice the requests of a server with weight 1

Knows spellings. Knows nothing of connections.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from quire.contracts.errors import ConfigError, shown

ZMQ_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/*,]+):\d{1,5}|ipc://[^\s,]+")
MOST_MEMBERS = 1_024  # backends of a router: each costs a connection every second for its health
EXAMPLE = "http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a backend. `url` names the backend to people; `base` is the path before those of the API.

    name   the name under which `host` was found by DNS; for the Host header and for the certificate
    """

    url: str
    host: str
    port: int
    tls: bool = False
    base: str = ""
    name: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return _authority(self.name or self.host, self.port)

    def at(self, host: str, port: int, name: str = "") -> "Address":
        """Return the address of one server among those that this one stands for."""
        url = f"{'https' if self.tls else 'http'}://{_authority(host, port)}{self.base}"
        return replace(self, url=url, host=host, port=port, name=name)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A backend that takes part.

    weight      its share of the requests, beside the weights of others
    kv_events   address of its KV events, and of those that were lost or ""; ("", ""): it sends none
    """

    address: Address
    weight: float = 1.0
    kv_events: tuple[str, str] = ("", "")


def members(where: str, texts: Iterable[str]) -> tuple[Member, ...]:
    """Parse backends. Raises `ConfigError` for one that is no URL, or is named twice; `where` begins its message."""
    return distinct(where, [member(where, text) for text in texts])


def distinct(where: str, found: Iterable[Member]) -> tuple[Member, ...]:
    """Return the backends. Raises `ConfigError` for one that is named twice, or for more than a router can watch."""
    by_url = dict[str, Member]()
    for one in found:
        if one.address.url in by_url:
            raise ConfigError(f"{where} {one.address.url}: this server is named twice: name it once.")
        by_url[one.address.url] = one
    if len(by_url) > MOST_MEMBERS:
        raise ConfigError(f"{where} names {len(by_url):,} backends: give at most {MOST_MEMBERS:,}, or a second router.")
    return tuple(by_url.values())


def member(where: str, text: str, weight: float = 1.0, kv_events: str = "") -> Member:
    """Parse a backend: its URL, and perhaps ",weight=W" behind it. Raises `ConfigError`."""
    url, comma, setting = text.partition(",")
    if comma:
        name, _, number = setting.partition("=")
        weight = _number(number) if name == "weight" else 0.0
    if not 0 < weight < math.inf:
        raise ConfigError(f"{where} {shown(text)}: a weight is a number above 0: {EXAMPLE},weight=2.")
    events = event_addresses(where, kv_events) if kv_events else ("", "")
    return Member(address=_address(where, url), weight=weight, kv_events=events)


def event_addresses(where: str, text: str) -> tuple[str, str]:
    """Parse the addresses of a backend's KV events: the live ones, and perhaps those for lost ones behind a comma."""
    live, _, lost = text.partition(",")
    for address in filter(None, (live, lost)):
        if not ZMQ_ADDRESS.fullmatch(address):
            raise ConfigError(
                f"{where} {text}: {shown(address)} is no ZMQ address to connect to: give "
                "tcp://host:port, or ipc://path."
            )
    return live, lost


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(where: str, text: str) -> Address:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{where} {text}: {error}: give a URL such as {EXAMPLE}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{where} {text}: not the URL of a server: give one such as {EXAMPLE}.")
    if parts.username is not None or parts.query or parts.fragment or not re.fullmatch(r"[!-~]+", text):
        raise ConfigError(
            f"{where} {text.rpartition('@')[2]}: no user, query, fragment or space is taken: give "
            "scheme, host, port and path. Clients send API keys themselves."
        )
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    address = Address(url="", host=parts.hostname, port=port or (443 if tls else 80), tls=tls, base=base)
    return replace(address, url=f"{parts.scheme}://{address.authority}{base}")
