"""Messages over a socket pair arrive whole and in order, of any length, and nobody waits for half a message."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from quire.procs.frames import CHUNK, MAX_JOINED, Frames

from ...support.started_ranks import nothing_left, until


@pytest.fixture
def ends() -> Iterator[tuple[Frames, Frames]]:
    with nothing_left():
        ours, theirs = map(Frames, socket.socketpair())
        yield ours, theirs
        ours.close()
        theirs.close()


def received(end: Frames, count: int) -> list[bytes]:
    messages: list[bytes] = []
    until(lambda: len(messages.extend(end.receive()) or messages) >= count, "messages are missing")
    return messages


def test_messages_of_every_length_arrive(ends: tuple[Frames, Frames]) -> None:
    ours, theirs = ends
    sizes = [0, 1, 3, MAX_JOINED - 4, MAX_JOINED, MAX_JOINED + 1, 3_000_000, 2]
    messages = [os.urandom(size) for size in sizes]
    sender = threading.Thread(target=lambda: [ours.send(message) for message in messages])
    sender.start()
    assert received(theirs, len(sizes)) == messages
    sender.join()
    assert theirs.receive() == []


def test_messages_of_several_threads_are_not_mixed(ends: tuple[Frames, Frames]) -> None:
    ours, theirs = ends
    senders = [
        threading.Thread(target=lambda n=n: [ours.send(bytes([n]) * 100_000) for _ in range(20)]) for n in range(4)
    ]
    for sender in senders:
        sender.start()
    messages = received(theirs, 80)
    for sender in senders:
        sender.join()
    assert all(len(message) == 100_000 and len(set(message)) == 1 for message in messages)


def test_messages_before_the_end_are_received(ends: tuple[Frames, Frames]) -> None:
    ours, theirs = ends
    theirs.send(b"unread")  # makes the end a reset connection
    for number in range(100):
        ours.send(bytes([number]) * 300)
    ours.close()
    messages: list[bytes] = []
    with pytest.raises(EOFError):
        while True:
            messages += theirs.receive()
    assert messages == [bytes([number]) * 300 for number in range(100)]
    with pytest.raises(OSError):
        theirs.send(b"x")


def test_a_last_message_that_fills_a_read_is_received(ends: tuple[Frames, Frames]) -> None:
    ours, theirs = ends
    ours.send(bytes(CHUNK - 4))
    ours.close()
    assert theirs.receive() == [bytes(CHUNK - 4)]
    with pytest.raises(EOFError):
        theirs.receive()


def test_half_a_message_is_kept(ends: tuple[Frames, Frames]) -> None:
    ours, theirs = ends
    for piece in (b"\x05\x00", b"\x00\x00he", b"ll"):
        ours._end.sendall(piece)
        assert theirs.receive() == []
    ours._end.sendall(b"o\x00\x00\x00\x00")
    assert theirs.receive() == [b"hello", b""]


def test_close_wakes_a_thread_that_waits_to_send(ends: tuple[Frames, Frames]) -> None:
    ours, _ = ends
    errors: list[OSError] = []

    def send() -> None:
        try:
            ours.send(bytes(10_000_000))
        except OSError as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    until(ours._sending.locked, "the thread has not begun")
    ours.close()
    sender.join()
    assert len(errors) == 1 and ours.fileno() == -1
    ours.close()


def test_posting_never_waits_and_what_finds_no_room_is_sent_later(ends: tuple[Frames, Frames]) -> None:
    ours, theirs = ends
    messages = [os.urandom(size) for size in (5, 3_000_000, 0, 200_000, 7)]
    for message in messages:
        ours.post(message)
    assert ours.full
    found: list[bytes] = []
    while len(found) < len(messages):
        found += theirs.receive()
        ours.flush()
    assert found == messages and not ours.full
    theirs.close()
    with pytest.raises(OSError):
        ours.post(b"stop")
