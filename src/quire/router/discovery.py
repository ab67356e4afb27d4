"""Sources of backends while a router runs: a file, and names of DNS.

    FILE.txt     a line each: http://10.0.0.1:8000 weight=2          # and comments
    FILE.json, FILE.yaml    [URL, {"url": URL, "weight": 2, "kv_events": "tcp://10.0.0.1:5557"}], or {"backends": [...]}
    http://engines:8000     every address of the name, which the system's resolver knows
    http://_http._tcp.engines.example    servers of a service: SRV records with ports and weights (`srv.py`)

A source that cannot be read, or that names nothing, changes nothing: the backends of before stay.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from quire.contracts.errors import ConfigError
from quire.router import srv
from quire.router.addresses import Address, Member, distinct, member
from quire.router.fleet import Fleet

LOG = logging.getLogger("quire")
Found = tuple[tuple[Member, ...], float]  # backends, and the seconds for which they hold
MOST_BYTES = 1 << 20  # of a file
LEAST_SECONDS = 1.0  # between two questions, whatever time to live a record has


class Source(Protocol):
    """A place that names backends.

    name   for people
    must   it has to name backends at the start; else the router waits for them
    """

    name: str
    must: bool

    async def find(self) -> Found:
        """Return the backends of now. Raises `ConfigError` with the reason why there are none."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    kv_events: str = ""


def _line(text: str) -> _Entry:
    url, *settings = text.split()
    given = {name: value for name, _, value in (one.partition("=") for one in settings)}
    return msgspec.convert({"url": url, **given}, _Entry, strict=False)


class _BackendFile(msgspec.Struct, forbid_unknown_fields=True):
    backends: list[str | _Entry]


class FileSource:
    """A file of backends. It is read every `seconds`."""

    must = True

    def __init__(self, path: str, seconds: float) -> None:
        self._path, self._seconds = Path(path), seconds
        self.name = f"--backend-file {path}"

    async def find(self) -> Found:
        """Read the file, in a thread: its disk may be another machine's."""
        return await asyncio.to_thread(self.read), self._seconds

    def read(self) -> tuple[Member, ...]:
        """Return the backends of the file. Raises `ConfigError`."""
        try:
            data = self._path.read_bytes()[:MOST_BYTES]
            if self._path.suffix in (".json", ".yaml", ".yml"):
                entries = self._entries(data)
            else:
                lines = [line.partition("#")[0].strip() for line in data.decode().splitlines()]
                entries = [_line(line) for line in lines if line]
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError) as error:  # of UTF-8, JSON, YAML, or of the fields
            raise ConfigError(f"{self.name} is no list of backends: {' '.join(str(error).split())}.") from None
        if not entries:
            raise ConfigError(f"{self.name} names no backend: give a URL in each line, or the list of a JSON file.")
        return distinct(self.name, [member(self.name, one.url, one.weight, one.kv_events) for one in entries])

    def _entries(self, data: bytes) -> list[_Entry]:
        if self._path.suffix == ".json":
            content: Any = msgspec.json.decode(data)
        else:
            import yaml  # type: ignore[import-untyped]  # here: most routers read no such file

            try:
                content = yaml.safe_load(data)
            except yaml.YAMLError as error:
                raise ValueError(str(error)) from None
        found = msgspec.convert({"backends": content} if isinstance(content, list) else content, _BackendFile).backends
        return [_Entry(one) if isinstance(one, str) else one for one in found]


class DnsSource:
    """A name of DNS, asked every `seconds`: its addresses, or the servers of a service (`_http._tcp.NAME`).

    SRV records are asked for again when their time to live is over, if that is earlier.
    """

    must = False

    def __init__(self, one: Member, seconds: float, timeout: float, resolver: srv.Resolver | None = None) -> None:
        self._member, self._seconds, self._timeout, self._resolver = one, seconds, timeout, resolver
        self.name = f"--backend-dns {one.address.url}"

    async def find(self) -> Found:
        """Ask for the name."""
        host, port = self._member.address.host, self._member.address.port
        try:
            if not host.startswith("_"):
                return self._made(await self._addresses(host, port)), self._seconds
            found, seconds = await srv.services(host, self._resolver or srv.system_resolver(), self._timeout)
        except TimeoutError:
            raise ConfigError(f"{self.name}: no answer within {self._timeout:g} s.") from None
        except OSError as error:
            raise ConfigError(f"{self.name}: {error.strerror or error}.") from None
        except srv.DnsError as error:
            raise ConfigError(f"{self.name}: {error}.") from None
        # Weight 0 is for servers that are hardly to be used: here they count as 1, the least that others may have.
        address, weight = self._member.address, self._member.weight
        servers = [(address.at(one.target, one.port), max(1, one.weight) * weight) for one in found]
        return self._made(servers), max(LEAST_SECONDS, min(seconds, self._seconds))

    async def _addresses(self, host: str, port: int) -> list[tuple[Address, float]]:
        """Return the addresses of a name, sorted: the resolver turns them round."""
        async with asyncio.timeout(self._timeout):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = sorted({str(sockaddr[0]) for _, _, _, _, sockaddr in found})
        return [(self._member.address.at(one, port, name=host), self._member.weight) for one in addresses]

    def _made(self, servers: Sequence[tuple[Address, float]]) -> tuple[Member, ...]:
        if not servers:
            raise ConfigError(f"{self.name}: the name has no addresses.")
        return distinct(self.name, [Member(address=address, weight=weight) for address, weight in servers])


class SourceWatch:
    """Asks a source again and again, and tells a fleet. `failures`: answers that could not be used."""

    def __init__(self, source: Source, fleet: Fleet) -> None:
        self.source, self._fleet = source, fleet
        self.failures, self._last = 0, ""
        self._again = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def first(self) -> None:
        """Ask for the first time. Raises `ConfigError` if the source must name backends and does not."""
        if self.source.must:
            self._fleet.update(self.source.name, (await self.source.find())[0])
        else:
            await self.look(LEAST_SECONDS)

    async def look(self, default: float) -> float:
        """Ask once. Return the seconds until the next question."""
        try:
            found, seconds = await self.source.find()
            self._fleet.update(self.source.name, found)
        except ConfigError as error:
            self.failures += 1
            if str(error) != self._last:
                LOG.warning("%s The backends stay as they were.", error)
            self._last = str(error)
            return default
        if self._last:
            LOG.info("%s can be used again.", self.source.name)
        self._last = ""
        return seconds

    async def run(self, seconds: float) -> None:
        """Ask every so many seconds, until cancelled; at once after `now`."""
        self._loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await self._again.wait()
            except TimeoutError:
                pass
            self._again.clear()
            seconds = await self.look(seconds)

    def now(self) -> str:
        """Ask at once; from any thread. Return a sentence for the operator."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._again.set)
        return f"{self.source.name} is read again."
