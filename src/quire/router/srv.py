"""SRV records of DNS: servers of a service, with ports and weights. The system's resolver gives addresses alone.

    question   header of 12 bytes, the name in labels, type, class
    record     name, type, class, time to live, length; of SRV: priority, weight, port, target

Asked by a datagram, and over TCP if the answer is too long for one: that of 64 backends is. Names of answers may point
to earlier ones (compression).
"""

import asyncio
import ipaddress
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

SRV, INTERNET = 33, 1
NO_SUCH_NAME = 3
RECURSION_DESIRED, TRUNCATED = 0x0100, 0x0200
# Additional record of a question: answers of 1,232 bytes are welcome, which pass every network whole.
EXTENDED = struct.pack("!BHHIH", 0, 41, 1232, 0, 0)
RESEND_SECONDS = 1.0  # for datagrams that were lost
MOST_JUMPS = 64  # pointers in a name: a loop of them ends
RESOLVER_FILE = Path("/etc/resolv.conf")
DNS_PORT = 53


class DnsError(Exception):
    """A name was not resolved. The message says why."""


@dataclass(frozen=True)
class Service:
    """A server of a service: an SRV record."""

    priority: int
    weight: int
    port: int
    target: str


@dataclass(frozen=True)
class Resolver:
    """The name servers of a machine (address, port), and the domains that complete a name."""

    servers: tuple[tuple[str, int], ...]
    search: tuple[str, ...] = ()


def system_resolver(file: Path = RESOLVER_FILE) -> Resolver:
    """Return what resolv.conf says. Raises `DnsError` if it names no server."""
    servers, search = list[tuple[str, int]](), tuple[str, ...]()
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError as error:
        raise DnsError(f"{file} cannot be read: {error.strerror}") from None
    for words in lines:
        if words[:1] == ["nameserver"] and len(words) > 1 and _is_address(words[1]):
            servers.append((words[1], DNS_PORT))
        elif words[:1] in (["search"], ["domain"]):
            search = tuple(words[1:])
    if not servers:
        raise DnsError(f"{file} names no server")
    return Resolver(tuple(servers), search)


async def services(name: str, resolver: Resolver, timeout: float) -> tuple[list[Service], float]:
    """Return the servers of the most preferred priority, and the seconds for which they hold. Raises `DnsError`."""
    for whole in (name, *(f"{name}.{domain}" for domain in resolver.search)):
        found = await _ask(whole, resolver, timeout)
        if found:
            first = min(service.priority for service, _ in found)
            kept = [service for service, _ in found if service.priority == first]
            return kept, min(seconds for _, seconds in found)
    raise DnsError(f"{name} has no SRV records")


async def _ask(name: str, resolver: Resolver, timeout: float) -> list[tuple[Service, float]]:
    """Ask one name server after the other. [] for a name that does not exist."""
    reason = ""
    for host, port in resolver.servers:
        try:
            async with asyncio.timeout(timeout):
                return await _exchange(name, host, port)
        except TimeoutError:
            reason = f"the name server {host} did not answer within {timeout:g} s"
        except (OSError, asyncio.IncompleteReadError) as error:
            reason = f"the name server {host}: {error}"
        except (struct.error, IndexError, UnicodeDecodeError):
            reason = f"the name server {host} sent no DNS answer"
        except DnsError as error:
            reason = str(error)
    raise DnsError(reason)


async def _exchange(name: str, host: str, port: int) -> list[tuple[Service, float]]:
    head = struct.pack("!6H", secrets.randbelow(1 << 16), RECURSION_DESIRED, 1, 0, 0, 1)
    asked = head + _name(name) + struct.pack("!HH", SRV, INTERNET) + EXTENDED
    answer = await _by_datagram(asked, host, port)
    if struct.unpack_from("!2H", answer)[1] & TRUNCATED:
        answer = await _by_stream(asked, host, port)
    return _read(answer, asked[:2], host)


class _Datagrams(asyncio.DatagramProtocol):
    """Takes the answer to a question, which has its number."""

    def __init__(self, number: bytes) -> None:
        self._number = number
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, address: object) -> None:
        """Take a datagram; others than the answer are dropped."""
        if data[:2] == self._number and not self.answer.done():
            self.answer.set_result(data)

    def error_received(self, error: Exception) -> None:
        """Take the refusal of the other side."""
        if not self.answer.done():
            self.answer.set_exception(error)


async def _by_datagram(asked: bytes, host: str, port: int) -> bytes:
    loop = asyncio.get_running_loop()
    transport, waits = await loop.create_datagram_endpoint(lambda: _Datagrams(asked[:2]), remote_addr=(host, port))
    try:
        while not waits.answer.done():
            transport.sendto(asked)
            await asyncio.wait({waits.answer}, timeout=RESEND_SECONDS)
        return waits.answer.result()
    finally:
        transport.close()


async def _by_stream(asked: bytes, host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(struct.pack("!H", len(asked)) + asked)
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        return await reader.readexactly(size)
    finally:
        writer.close()


def _read(answer: bytes, number: bytes, host: str) -> list[tuple[Service, float]]:
    """Return the SRV records of an answer and their times to live."""
    got, flags, num_questions, num_answers = struct.unpack_from("!2s3H", answer)
    if got != number:
        raise DnsError(f"the name server {host} answered another question")
    if code := flags & 15:
        if code == NO_SUCH_NAME:
            return []
        raise DnsError(f"the name server {host} answered with code {code}")
    at = 12
    for _ in range(num_questions):
        at = _read_name(answer, at)[1] + 4
    found = []
    for _ in range(num_answers):
        at = _read_name(answer, at)[1]
        kind, _, seconds, length = struct.unpack_from("!HHIH", answer, at)
        at += 10
        if kind == SRV:
            priority, weight, service_port = struct.unpack_from("!3H", answer, at)
            target, _ = _read_name(answer, at + 6)
            found.append((Service(priority, weight, service_port, target), float(seconds)))
        at += length
    return found


def _name(name: str) -> bytes:
    """Return a name as labels. Raises `DnsError` for one that is none."""
    try:
        labels = [label.encode("ascii") for label in name.rstrip(".").split(".")]
    except UnicodeEncodeError:
        labels = []
    if not labels or not all(0 < len(label) < 64 for label in labels):
        raise DnsError(f"{name!r} is no name of DNS")
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _read_name(data: bytes, at: int) -> tuple[str, int]:
    """Return the name at a place, and the place behind it."""
    labels, behind = [], None
    for _ in range(MOST_JUMPS * 2):
        size = data[at]
        if size >= 0xC0:
            behind = at + 2 if behind is None else behind
            at = (size & 0x3F) << 8 | data[at + 1]
        elif size:
            labels.append(data[at + 1 : at + 1 + size].decode("ascii"))
            at += 1 + size
        else:
            return ".".join(labels), at + 1 if behind is None else behind
    raise DnsError("the answer has a name without end")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
