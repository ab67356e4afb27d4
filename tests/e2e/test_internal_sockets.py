"""Junk on the sockets between the server's processes is dropped, counted and logged once."""

from pathlib import Path

import msgspec
import pytest
import zmq

from quire.procs.messages import Abort, Add, Loading, Outputs, Rejected
from quire.procs.wire import encode

from .serving import MOCK, running_server, wait_until

EMPTY_ROWS = msgspec.msgpack.Ext(1, bytes([0, 255]) + bytes(4 * 255))  # an array of 255 dimensions, without elements
ONE, TWO = (msgspec.msgpack.Ext(1, bytes([0, 1, n, 0, 0, 0]) + bytes(4 * n)) for n in (1, 2))
JUNK = [
    b"",
    b"junk",
    b"\xc1",
    b"\x00" * 32 * 2**20,
    b"\x91" * 100_000,
    b"\x81\xa4type",
    *(
        msgspec.msgpack.encode(value)
        for value in (
            None,
            7,
            "stop",
            [],
            {},
            {"type": "shout"},
            {"type": 5},
            {"type": "abort", "handles": "all"},
            {"type": "abort"},
            {"type": "add", "requests": [{}]},
            {"type": "add", "requests": []},
            {"type": "control"},
            {"type": "outputs", "step": {"handles": EMPTY_ROWS, "tokens": EMPTY_ROWS}},
            {"type": "outputs", "step": {"handles": ONE, "tokens": TWO}},
            {"type": "rejected", "handles": [], "kind": "QueueFull", "message": "m"},
            {"type": "reply", "id": "1"},
        )
    ),
    b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb",
    encode(Abort((1, 2)))[:-1],
    encode(Abort((1, 2))) + b"\x00",
]


@pytest.mark.parametrize("name, foreign", [("to", Loading("weights")), ("from", Abort((1,)))])
def test_junk_is_dropped_counted_and_told_once(name: str, foreign: Loading | Abort) -> None:
    with running_server(*MOCK) as server:
        before = server.complete(seed=1).text()
        (folder,) = Path(server.log.parent).glob("quire-*")
        with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
            peer.linger = 0
            peer.connect(f"ipc://{folder / name}")
            for data in (*JUNK, encode(foreign)):
                peer.send(data)
            peer.send_multipart([b"one", b"two"])
            direction = {"to": "to_core", "from": "from_core"}[name]

            def counted() -> float:
                return sum(
                    value
                    for labels, value in server.metric("quire:internal_messages_dropped_total").items()
                    if f'direction="{direction}"' in labels
                )

            wait_until(lambda: counted() >= len(JUNK) + 3, f"{len(JUNK) + 3} dropped")
            assert counted() == len(JUNK) + 3
        assert server.complete(seed=1).text() == before and server.ask("/ready").status == 200
        assert server.stderr.count("is no message") == 1 and "Traceback" not in server.stderr


def test_no_message_lacks_what_is_read_of_it() -> None:
    for kind, fields in (
        (Add, {"requests": []}),
        (Rejected, {"handles": [], "kind": "k", "message": "m"}),
        (Outputs, {"step": {"handles": ONE, "tokens": TWO}}),
    ):
        with pytest.raises((msgspec.ValidationError, TypeError)):
            msgspec.convert(fields, kind)
