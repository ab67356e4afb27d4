"""KV events over ZeroMQ, in vLLM's frames, from a thread of the core's process.

    PUB      topic, number of the batch (8 bytes, big-endian), batch (msgpack)
    ROUTER   asked: "", first number wanted; answered: "", number, batch for each batch that is left, then "", -1, ""

A number is used once; a subscriber that misses one asks for it. Knows sockets and bytes, nothing of blocks.
"""

import logging
import threading
from collections import deque
from contextlib import suppress

import msgspec
import zmq

from quire.config.engine import EngineConfig
from quire.config.events import EventSettings, read_events_config
from quire.contracts.errors import ConfigError
from quire.engine.core import EngineCore
from quire.kv.events import EventBatch, EventLog

LOG = logging.getLogger("quire").getChild("kv")
LAST_WORDS_MS = 1000  # that an engine which ends waits for the thread
INSIDE, BYTES, LAST = "inproc://batches", 8, (-1).to_bytes(8, "big", signed=True)


def publish_events(core: EngineCore, config: EngineConfig, replica: int = 0) -> EngineCore:
    """Make a core publish its KV events, if the configuration asks for them; return the core."""
    if (settings := read_events_config(config)) is not None:
        store, allocator = core.scheduler.roster.store, core.scheduler.allocator
        host = None if store is None else store.host
        core.events = EventLog(allocator, host, EventPublisher(settings, replica), replica)
    return core


class EventPublisher:
    """Sends batches to subscribers. One thread calls it. Raises ConfigError when a socket cannot be had."""

    def __init__(self, settings: EventSettings, replica: int = 0) -> None:
        self._context, self._settings, self._count = zmq.Context(io_threads=1), settings, 0
        self._encode = msgspec.msgpack.Encoder().encode
        ends = [self._context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUB, zmq.ROUTER)]
        for end, most in zip(ends, (settings.max_queue_size, 1, settings.hwm, 2 * settings.buffer_steps), strict=True):
            end.set_hwm(most)
            end.linger = 0
        taken, self._given, public, replay = ends
        self._given.sndtimeo = LAST_WORDS_MS
        taken.bind(INSIDE)
        self._given.connect(INSIDE)
        try:
            address = "endpoint", _address(settings.endpoint, replica)
            (public.bind if settings.bound else public.connect)(address[1])
            if settings.replay_endpoint:
                address = "replay_endpoint", _address(settings.replay_endpoint, replica)
                replay.bind(address[1])
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"kv_events_config: {address[0]} {address[1]} cannot be used: {error}. Give a free port, "
                "such as tcp://*:5557."
            ) from None
        self._thread = threading.Thread(
            target=self._run, args=(taken, public, replay), name="quire-kv-events", daemon=True
        )
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Send a batch, without waiting. A batch that finds no room is lost: subscribers miss its number."""
        number, self._count = self._count, self._count + 1
        try:
            self._given.send_multipart((number.to_bytes(BYTES, "big"), self._encode(batch)), zmq.NOBLOCK)
        except zmq.Again:
            LOG.warning("batch %d of KV events is lost: max_queue_size is reached.", number)

    def close(self) -> None:
        """Send what waits, and end the thread."""
        with suppress(zmq.ZMQError):
            self._given.send_multipart((b"", b""))
        self._thread.join(LAST_WORDS_MS / 1000)
        self._context.destroy(0)

    def _run(self, taken: "zmq.Socket[bytes]", public: "zmq.Socket[bytes]", replay: "zmq.Socket[bytes]") -> None:
        topic, kept = self._settings.topic.encode(), deque[tuple[bytes, bytes]](maxlen=self._settings.buffer_steps)
        poller = zmq.Poller()
        for end in (taken, replay):
            poller.register(end, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if replay in ready and len(asked := replay.recv_multipart()) == 3:
                who, empty, first = asked
                for number, data in [*kept, (LAST, b"")]:
                    if number >= first:  # of equal length, so in the order of the numbers
                        replay.send_multipart((who, empty, number, data))
            if taken in ready:
                number, data = taken.recv_multipart()
                if not number:
                    return
                kept.append((number, data))
                public.send_multipart((topic, number, data))


def _address(endpoint: str, replica: int) -> str:
    """Return the address of a replica: the port, or the name, of the first one and its number."""
    endpoint = endpoint.replace("//lo:", "//127.0.0.1:")
    if endpoint.startswith("tcp:") and (parts := endpoint.rpartition(":"))[2].isdigit():
        return f"{parts[0]}:{int(parts[2]) + replica}"
    return f"{endpoint}_dp{replica}" if replica else endpoint
