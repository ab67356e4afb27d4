"""KV events of a server: a subscriber hears which blocks a request has left, and that they are gone."""

import asyncio

import msgspec
import zmq

from ..support.addresses import free_port
from .in_process import running_inside


def test_a_subscriber_hears_the_blocks_of_a_request() -> None:
    port = free_port()
    given = {"enable_kv_cache_events": True, "endpoint": f"tcp://lo:{port}", "topic": "kv"}
    with running_inside(kv_events_config=given, block_size=4) as inside, zmq.Context() as context:
        with context.socket(zmq.SUB) as listener:
            listener.rcvtimeo, listener.linger = 20_000, 0
            listener.connect(f"tcp://127.0.0.1:{port}")
            listener.subscribe("kv")
            number = 0
            while not listener.poll(50):  # a subscription takes a moment
                number += 1
                inside.server.complete(prompt=[number + 5] * 9, max_tokens=1, stream=False)
            topic, first, data = listener.recv_multipart()
            time, events, replica = msgspec.msgpack.decode(data)
            assert topic == b"kv" and len(first) == 8 and time > 1.7e9 and replica == 0
            assert events[0]["type"] == "BlockStored" and events[0]["medium"] == "GPU" and events[0]["block_size"] == 4
            assert len(set(events[0]["token_ids"])) == 1 and len(events[0]["token_ids"]) == 8
            asyncio.run_coroutine_threadsafe(inside.engine.control("reset_prefix_cache"), inside.loop).result(20)
            while events[-1] != {"type": "AllBlocksCleared"}:
                events = msgspec.msgpack.decode(listener.recv_multipart()[2])[1]
