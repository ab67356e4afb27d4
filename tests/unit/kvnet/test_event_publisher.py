"""The publisher of KV events, as a subscriber of vLLM's hears it: frames, numbers, and batches asked for again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.events import EventSettings
from quire.contracts.errors import ConfigError
from quire.kv.events import AllBlocksCleared, EventBatch
from quire.kvnet.event_publisher import EventPublisher, _address

WAIT_MS = 5_000


@pytest.fixture
def connect() -> Iterator[Any]:
    """Makes a socket that is connected to an address."""
    context = zmq.Context()

    def connected(kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.rcvtimeo, socket.linger = WAIT_MS, 0
        socket.connect(address)
        return socket

    yield connected
    context.destroy(0)


def batch(number: int) -> EventBatch:
    return EventBatch(float(number), [AllBlocksCleared()], 2)


def settings(folder: Path, **more: Any) -> EventSettings:
    return EventSettings(endpoint=f"ipc://{folder}/a", replay_endpoint=f"ipc://{folder}/b", topic="kv@here", **more)


def heard(socket: "zmq.Socket[bytes]") -> tuple[bytes, int, Any]:
    topic, number, data = socket.recv_multipart()
    return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(data)


def ask(socket: "zmq.Socket[bytes]", first: int) -> list[int]:
    """Ask for batches again; return their numbers."""
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    numbers = []
    while (answer := socket.recv_multipart())[2]:
        numbers.append(int.from_bytes(answer[1], "big"))
        assert msgspec.msgpack.decode(answer[2]) == [float(numbers[-1]), [{"type": "AllBlocksCleared"}], 2]
    assert answer == [b"", b"\xff" * 8, b""]
    return numbers


def test_batches_are_numbered_and_can_be_had_again(tmp_path: Path, connect: Any) -> None:
    publisher = EventPublisher(settings(tmp_path, buffer_steps=4))
    listener, other = connect(zmq.SUB, f"ipc://{tmp_path}/a"), connect(zmq.SUB, f"ipc://{tmp_path}/a")
    listener.subscribe("kv@")
    other.subscribe("elsewhere")
    asking = connect(zmq.DEALER, f"ipc://{tmp_path}/b")
    count = 0
    while not listener.poll(20):  # a subscription takes a moment
        publisher.publish(batch(count))
        count += 1
    while (last := heard(listener))[1] < count - 1:
        pass
    for number in range(count, count + 6):
        publisher.publish(batch(number))
        last = heard(listener)
        assert last == (b"kv@here", number, [float(number), [{"type": "AllBlocksCleared"}], 2])
    newest = count + 5
    assert ask(asking, newest - 1) == [newest - 1, newest]
    assert ask(asking, 0) == list(range(newest - 3, newest + 1)), "four are kept"
    asking.send(b"nonsense")
    assert ask(asking, newest + 1) == []
    assert not other.poll(0)
    publisher.close()


def test_what_finds_no_room_is_lost_and_its_number_missing(
    tmp_path: Path, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventPublisher, "_run", lambda *_: None)  # as if the thread were slow
    monkeypatch.setattr("quire.kvnet.event_publisher.LAST_WORDS_MS", 10)
    publisher = EventPublisher(settings(tmp_path, max_queue_size=2))
    for number in range(12):
        publisher.publish(batch(number))
    assert publisher._count == 12
    publisher.close()


def test_replicas_have_addresses_of_their_own() -> None:
    assert _address("tcp://*:5557", 2) == "tcp://*:5559"
    assert _address("tcp://lo:5557", 0) == "tcp://127.0.0.1:5557"
    assert _address("ipc:///x/a", 0) == "ipc:///x/a" and _address("ipc:///x/a", 1) == "ipc:///x/a_dp1"


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        EventPublisher(settings(tmp_path / "missing"))
