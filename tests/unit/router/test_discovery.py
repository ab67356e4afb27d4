"""Backends from files and from DNS: what is understood, what changes nothing, and who comes and goes."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.contracts.errors import ConfigError
from quire.router import srv
from quire.router.addresses import Member, member
from quire.router.discovery import DnsSource, FileSource, SourceWatch
from quire.router.fleet import Fleet
from quire.router.settings import router_config
from quire.router.state import RouterState

from ...support.mock_backends import mock_backends, operate, routed

ONE = "http://a:80"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def shown(found: tuple[Member, ...]) -> list[tuple[str, float]]:
    return [(one.address.url, one.weight) for one in found]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("f.txt", "# engines\nhttp://a\n\nhttp://b:81/v1 weight=2  # large\n"),
        ("f", "http://a\nhttp://b:81,weight=2"),
        ("f.json", '["http://a", {"url": "http://b:81", "weight": 2}]'),
        ("f.yaml", "backends:\n- http://a\n- {url: 'http://b:81', weight: 2}\n"),
        ("f.yml", "- http://a\n- http://b:81,weight=2\n"),
    ],
)
def test_forms_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert shown(FileSource(str(tmp_path / name), 1.0).read()) == [(ONE, 1.0), ("http://b:81", 2.0)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("f", "", "names no backend: give a URL in each line"),
        ("f", "a:80", "not the URL of a server: give one such as"),
        ("f", "http://a wait=2", "unknown field `wait`"),
        ("f", "http://a weight=0", "Expected `float` > 0.0"),
        ("f", "http://a,weight=no", "a weight is a number above 0"),
        ("f", "http://a\nhttp://a:80", "this server is named twice"),
        ("f", b"\xff", "is no list of backends"),
        ("f.json", '{"backends": [', "is no list of backends"),
        ("f.json", '{"backend": []}', "unknown field `backend`"),
        ("f.json", '[{"url": "http://a", "kv_events": "udp://x"}]', "is no ZMQ address"),
        ("f.yaml", "- [", "is no list of backends"),
        ("missing/f", None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, name: str, text: str | bytes | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        FileSource(str(tmp_path / name), 1.0).read()
    assert words in str(caught.value) and f"--backend-file {tmp_path / name}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_backends_come_and_go_by_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backend that leaves the file ends its stream; nonsense changes nothing; a restart forgets no drained one."""

    async def work() -> None:
        async with mock_backends(3) as backends, ClientSession() as session:
            file, state = tmp_path / "backends.txt", str(tmp_path / "state")
            settings: dict[str, Any] = {"backend_file": str(file), "discovery_interval": 0.02, "state_file": state}

            def write(*numbers: int) -> None:
                file.write_text("\n".join(backends[number].url for number in numbers))

            async def by(url: str) -> set[str]:
                found = set()
                for _ in range(6):
                    async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
                        found.add((await answer.json())["by"])
                return found

            write(0)
            async with routed([], **settings) as (router, url):
                backends[0].step = asyncio.Semaphore(1)
                streamed = session.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
                streaming = asyncio.create_task(streamed.__aenter__())
                while not backends[0].begun:
                    await asyncio.sleep(0.005)
                write(1, 2)
                while sum(backend.usable for backend in router.own) != 2 or router.backends[0].usable:
                    await asyncio.sleep(0.005)
                assert await by(url) == {"b1", "b2"} and len(router.backends) == 3  # listed while it has a request
                for _ in range(6):
                    backends[0].step.release()
                assert (await (await streaming).read()).endswith(b"[DONE]\n\n")
                while len(router.backends) > 2:
                    await asyncio.sleep(0.005)
                assert backends[0].url not in router.metrics.render()[0].decode()
                file.write_text("nonsense")
                while not router.watches[0].failures:
                    await asyncio.sleep(0.005)
                assert await by(url) == {"b1", "b2"}
                await operate(router, "/backends/drain", {"backend": backends[2].url})
                write(1, 2)
            async with routed([], **settings) as (_, url):
                assert await by(url) == {"b1"}
            assert "The backends stay as they were." in caplog.text

    run(work())


def test_a_source_may_not_contradict_the_flags() -> None:
    config = router_config({"backend": [ONE], "prefill_backend": ["http://p"]})
    fleet = Fleet(config, RouterState(None))
    with pytest.raises(ConfigError, match="http://p:80 is in --prefill-backend, too"):
        fleet.update("f", [member("f", "http://p")])
    fleet.update("f", [member("f", "http://b,weight=3"), member("f", f"{ONE},weight=2")])
    assert [(backend.name, backend.weight) for backend in fleet.own] == [(ONE, 1.0), ("http://b:80", 3.0)]
    exact = Fleet(router_config({"backend_file": "f", "policy": "exact"}), RouterState(None))
    with pytest.raises(ConfigError, match="--policy exact needs kv_events of each backend, and http://b:80 has none"):
        exact.update("f", [member("f", "http://b")])


def test_addresses_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address is a backend; a name that has none changes nothing, and the certificate must have the name."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        answers: list[Any] = [["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"], socket.gaierror(-2, "unknown"), []]

        async def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
            assert host == "engines"
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        fleet = Fleet(router_config({"backend_dns": ["https://engines:81"]}), RouterState(None))
        watch = SourceWatch(DnsSource(member("x", "https://engines:81,weight=2"), 5.0, 1.0), fleet)
        await watch.first()
        urls = ["https://10.0.0.1:81", "https://10.0.0.2:81", "https://[fd00::1]:81"]
        assert [(backend.name, backend.weight) for backend in fleet.own] == [(url, 2.0) for url in urls]
        for failures in (1, 2):
            await watch.look(5.0)
            assert watch.failures == failures and [backend.name for backend in fleet.own] == urls
        address = fleet.own[0].pool._address
        assert (address.host, address.name, address.authority) == ("10.0.0.1", "engines", "engines:81")

    run(work())


def record(name: bytes, priority: int, weight: int, port: int, target: bytes, ttl: int = 30) -> bytes:
    data = struct.pack("!3H", priority, weight, port) + target
    return name + struct.pack("!HHIH", srv.SRV, 1, ttl, len(data)) + data


class Datagrams(asyncio.DatagramProtocol):
    """A name server of datagrams. answer: function of a question"""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        self._transport.sendto(b"another answer", address)
        self._transport.sendto(self._answer(data), address)


@contextlib.asynccontextmanager
async def name_server(answers: Callable[[bytes, bool], bytes]) -> AsyncIterator[srv.Resolver]:
    """A name server of SRV records. answers: function of a question, and of whether it came by a datagram"""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        answer = answers(await reader.readexactly(size), False)
        writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: Datagrams(lambda asked: answers(asked, True)), local_addr=address
    )
    yield srv.Resolver((address,), ("lan",))
    transport.close()
    server.close()


def test_servers_of_a_service() -> None:
    """SRV records: ports, weights, the most preferred priority, and names that point to earlier ones."""
    question, pointer = b"\5_http\4_tcp\3llm\3lan\0", b"\xc0\x0c"
    at_lan = struct.pack("!H", 0xC000 | 12 + question.index(b"\3lan"))
    alias = pointer + struct.pack("!HHIH", 5, 1, 9, 2) + pointer  # CNAME: other kinds are passed by
    records = [
        alias,
        record(pointer, 1, 10, 8001, b"\2e1" + at_lan, 3),
        record(pointer, 1, 0, 8002, b"\2e2\3lan\0"),
        record(pointer, 2, 9, 8003, b"\2e3\3lan\0"),
    ]

    def answers(asked: bytes, short: bool) -> bytes:
        name = asked[12 : -4 - len(srv.EXTENDED)]
        code, found = {question: (0, records), b"\6broken\0": (2, [])}.get(name, (srv.NO_SUCH_NAME, []))
        cut = srv.TRUNCATED if short and found else 0
        head = asked[:2] + struct.pack("!5H", 0x8180 | code | cut, 1, 0 if cut else len(found), 0, 0)
        return head + asked[12 : -len(srv.EXTENDED)] + b"".join(() if cut else found)

    async def work() -> None:
        async with name_server(answers) as resolver:
            source = DnsSource(member("x", "http://_http._tcp.llm"), 5.0, 10.0, resolver)
            found, seconds = await source.find()
            assert shown(found) == [("http://e1.lan:8001", 10.0), ("http://e2.lan:8002", 1.0)] and seconds == 3.0
            for name, words in (("_no._tcp.llm", "has no SRV records"), ("broken", "answered with code 2")):
                with pytest.raises(srv.DnsError, match=words):
                    await srv.services(name, resolver, 10.0)
            for name in ("a..b", "ä", "x" * 64):
                with pytest.raises(srv.DnsError, match="is no name of DNS"):
                    await srv.services(name, resolver, 10.0)

    run(work())


@pytest.mark.parametrize("answer", [b"", b"\0\1", b"\xc0\x0c", bytes(12), b"\xff" * 40])
def test_nonsense_of_a_name_server_is_an_error(answer: bytes) -> None:
    async def work() -> None:
        async with name_server(lambda asked, short: asked[:2] + b"\x81\x80\0\0\0\1\0\0\0\0" + answer) as resolver:
            with pytest.raises(srv.DnsError):
                await srv.services("a", resolver, 10.0)

    run(work())


def test_the_resolver_of_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("# x\nsearch a.example b.example\nnameserver 10.0.0.53\nnameserver fe80::1%eth0\nnameserver no\n")
    assert srv.system_resolver(file).search == ("a.example", "b.example")
    assert srv.system_resolver(file).servers[0] == ("10.0.0.53", 53)
    for text in ("search x\n", None):
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(srv.DnsError):
            srv.system_resolver(file)
