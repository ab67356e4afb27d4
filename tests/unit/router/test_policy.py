"""The choice of a backend: remembered prefixes, KV events, and the cost of what is waiting."""

import asyncio
import json
from typing import Any

import pytest
import zmq

from quire.router.affinity import PrefixTable
from quire.router.backends import Backend, Load, residents, watch
from quire.router.events import KVIndex, block_chain, follow
from quire.router.policy import LOAD, Chooser, Sight
from quire.router.prompts import CHUNK, RoutedBody
from quire.router.settings import RouterConfig, router_config

from ...support.mock_backends import kv_batch


def config(policy: str, count: int = 3) -> RouterConfig:
    events = [f"tcp://127.0.0.1:{number + 1}" for number in range(count)] if policy == "exact" else []
    return router_config(
        {"backend": [f"http://b{number}" for number in range(count)], "policy": policy, "kv_events": events}
    )


def chooser(policy: str, indexes: dict[int, KVIndex] | None = None) -> tuple[Chooser, list[Backend]]:
    settings = config(policy)
    backends = [Backend(number, address, settings) for number, address in enumerate(settings.backend)]
    for backend in backends:
        backend.index = (indexes or {}).get(backend.number)
    return Chooser(settings, backends), backends


def look(chooser: Chooser, body: RoutedBody) -> Sight:
    return asyncio.run(chooser.look(body, "/v1/completions", [], None))


def prompt(text: Any) -> RoutedBody:
    return RoutedBody(json.dumps({"prompt": text}).encode())


def test_the_table_matches_the_longest_beginning_of_each_backend() -> None:
    table = PrefixTable(100)
    table.add([1, 2, 3], 0)
    table.add([1, 2], 2)
    assert table.match([1, 2, 3, 4]) == {0: 3, 2: 2}
    assert table.match([5, 1]) == table.match([]) == {}
    table.forget(0)
    assert table.match([1, 2, 3]) == {2: 2}


def test_the_table_is_bounded_and_forgets_ends_before_beginnings() -> None:
    table = PrefixTable(4)
    table.add([1, 2, 3, 4], 0)
    table.add([1, 5], 0)
    assert table.match([1, 2, 3, 4]) == {0: 3} and table.match([1, 5]) == {0: 2}


def test_chunks_are_of_the_whole_beginning() -> None:
    """Prompts that differ in tools, salt or an earlier chunk share nothing, though later text is the same."""
    text = "x" * 3 * CHUNK
    whole = prompt(text).chunks
    assert len(whole) == 3 and prompt(text + "y" * CHUNK).chunks[:3] == whole
    bodies = [
        {"prompt": "y" + text[1:]},
        {"prompt": text, "tools": [1]},
        {"prompt": text, "cache_salt": "s"},
        {"prompt": text, "model": "other"},
    ]
    for body in bodies:
        assert not set(RoutedBody(json.dumps(body).encode()).chunks) & set(whole)


def test_round_robin_and_least_load() -> None:
    robin, backends = chooser("round-robin")
    sight = look(robin, prompt("x"))
    assert [robin.pick(sight, backends).number for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    least, backends = chooser("least-load")
    with Load(backends[0], 0, 0), Load(backends[1], 0, 0):
        assert {least.pick(sight, backends).number for _ in range(3)} == {2}
    assert {least.pick(sight, backends).number for _ in range(3)} == {0, 1, 2}


def test_affinity_returns_to_the_prefix_until_its_backend_has_more_to_compute() -> None:
    affine, backends = chooser("prefix-affinity")
    first = prompt("a" * 8 * CHUNK)
    chosen = affine.pick(look(affine, first), backends)
    affine.sent(first, chosen)
    longer = prompt("a" * 9 * CHUNK)
    sight = look(affine, longer)
    assert sight.of(chosen) == pytest.approx(sight.total * 8 / 9, rel=0.01)
    for _ in range(3):
        assert affine.pick(sight, backends) is chosen
    with Load(chosen, sight.total, 0):
        assert affine.pick(sight, backends) is chosen
    with Load(chosen, 4 * sight.total, 0):  # the wait there is longer than the prompt takes elsewhere
        assert affine.pick(sight, backends) is not chosen
    affine.fell(chosen)
    assert look(affine, longer).of(chosen) == 0


def stored(hashes: list[Any], parent: Any, tokens: list[int], size: int = 4, **more: Any) -> list[Any]:
    return [
        "BlockStored",
        hashes,
        parent,
        tokens,
        size,
        None,
        more.get("medium"),
        None,
        more.get("extras"),
        more.get("group"),
    ]


TOKENS = list(range(100, 112))


def held(index: KVIndex, tokens: list[int] = TOKENS) -> int:
    return index.match(block_chain(tokens, 4))


@pytest.mark.parametrize("as_map", [False, True])
def test_the_index_follows_events_of_both_forms(as_map: bool) -> None:
    def batch(*events: list[Any]) -> bytes:
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
        maps = [
            {"type": kind}
            | (
                dict(zip(names, values, strict=False))
                if kind == "BlockStored"
                else {"block_hashes": values[0]}
                if values
                else {}
            )
            for kind, *values in events
        ]
        return kv_batch(*(maps if as_map else events), as_map=as_map)

    index = KVIndex()
    index.take(0, batch(stored([b"h0", b"h1"], None, TOKENS[:8])))
    index.take(1, batch(stored([b"h2"], b"h1", TOKENS[8:]), stored([b"z"], b"unknown", TOKENS[:4])))
    assert held(index) == 3 and held(index, TOKENS[4:]) == 0 and len(index) == 3 and index.block_size == 4
    index.take(2, batch(["BlockRemoved", [b"h1"]]))
    assert held(index) == 1
    index.take(3, batch(["AllBlocksCleared"]))
    assert len(index) == index.lost == 0


def test_a_block_is_held_while_any_medium_has_it() -> None:
    index = KVIndex()
    index.take(0, kv_batch(stored([1], None, TOKENS[:4], medium="GPU"), stored([1], None, TOKENS[:4], medium="CPU")))
    index.take(1, kv_batch(["BlockRemoved", [1], "GPU"]))
    assert held(index) == 1
    index.take(2, kv_batch(["BlockRemoved", [1], "CPU"], ["BlockRemoved", [1], "CPU"]))
    assert held(index) == 0


def test_a_lower_tier_names_blocks_that_the_device_had() -> None:
    index = KVIndex()
    index.take(0, kv_batch(stored([1, 2], None, TOKENS[:8], medium="GPU"), ["BlockRemoved", [1, 2], "GPU"]))
    assert held(index) == 0
    index.take(1, kv_batch(stored([1, 2, 9], None, [], medium="CPU")))
    assert held(index) == 2 and index.lost == 0


@pytest.mark.parametrize(
    "event",
    [
        stored([1], None, TOKENS[:4], extras=[["salt"]]),
        stored([1], None, TOKENS[:4], group=1),
        ["BlockStored", [1], None, TOKENS[:4], 4, 7, None, "adapter"],
        ["SomethingNew", 1],
    ],
)
def test_blocks_of_more_than_tokens_are_left_out(event: list[Any]) -> None:
    index = KVIndex()
    index.take(0, kv_batch(event))
    assert len(index) == 0 and index.lost == 0


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"\xc1",
        b"\x90",
        kv_batch(["BlockStored", 1]),
        kv_batch(7),
        kv_batch(stored([1], None, [-1, 2, 3, 4])),
        kv_batch(stored([1, 2], None, [1, 2])),
    ],
)
def test_what_is_no_batch_empties_the_index(batch: bytes) -> None:
    index = KVIndex()
    index.take(0, kv_batch(stored([1], None, TOKENS[:4])))
    index.take(1, batch)
    assert len(index) == 0 and index.lost == 1


def test_a_missing_batch_empties_the_index() -> None:
    """A block of the missing batch may have replaced one that is in the index."""
    index = KVIndex()
    index.take(5, kv_batch(stored([1], None, TOKENS[:4])))
    assert index.missing(6) is None and index.missing(8) == 6
    index.take(8, kv_batch())
    assert len(index) == 0 and index.lost == 1


def test_exact_goes_where_the_blocks_are() -> None:
    indexes = {number: KVIndex() for number in range(3)}
    exact, backends = chooser("exact", indexes)
    indexes[1].take(0, kv_batch(stored([1, 2], None, TOKENS[:8])))
    indexes[2].take(0, kv_batch(stored([1], None, TOKENS[:4])))
    sight = asyncio.run(exact.look(prompt(TOKENS), "/v1/completions", [], backends[0]))
    assert (sight.total, [sight.of(backend) for backend in backends]) == (12, [0, 8, 4])
    assert exact.pick(sight, backends) is backends[1]


@pytest.mark.parametrize("with_replay", [True, False])
def test_events_over_zmq_with_a_batch_that_was_lost(with_replay: bool) -> None:
    async def work() -> None:
        context = zmq.asyncio.Context.instance()
        publisher, replayer = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        try:
            live, lost = (
                f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (publisher, replayer)
            )
            batches = [kv_batch(stored([n], n - 1 if n else None, TOKENS[4 * n : 4 * n + 4])) for n in range(3)]
            index = KVIndex()
            following = asyncio.create_task(follow(index, live, lost if with_replay else ""))
            while index.block_size == 0:  # until the subscription has come through
                await publisher.send_multipart([b"", (0).to_bytes(8, "big"), batches[0]])
                await asyncio.sleep(0.01)
            await publisher.send_multipart([b"", (2).to_bytes(8, "big"), batches[2]])
            if with_replay:
                name, _, first = await replayer.recv_multipart()
                assert int.from_bytes(first, "big") == 1
                for number in (1, 2):
                    await replayer.send_multipart([name, b"", number.to_bytes(8, "big"), batches[number]])
                await replayer.send_multipart([name, b"", (-1).to_bytes(8, "big", signed=True), b""])
            while held(index) != (3 if with_replay else 0):
                await asyncio.sleep(0.001)
            assert (index.lost > 0) is not with_replay
            following.cancel()
        finally:
            publisher.close(0)
            replayer.close(0)

    asyncio.run(asyncio.wait_for(work(), 30))


def asks(model: str, tokens: int) -> RoutedBody:
    return RoutedBody(json.dumps({"model": model, "prompt": list(range(tokens))}).encode())


@pytest.mark.parametrize("policy", ["prefix-affinity", "exact"])
def test_a_request_goes_where_its_adapter_is(policy: str) -> None:
    """Unless the backend has much to do: then another one brings the adapter to its device, and has it from then on."""
    chosen, backends = chooser(policy, {0: KVIndex()} if policy == "exact" else None)
    backends[2].resident = frozenset({"sql"})
    sight = look(chosen, asks("sql", 40))
    assert sight.resident == {2} and chosen.pick(sight, backends) is backends[2]
    assert look(chosen, asks("base", 40)).resident == set() == look(chosen, RoutedBody(b'{"model": 3}')).resident
    with Load(backends[2], LOAD + 1, 0):
        other = chosen.pick(sight, backends)
    assert other is not backends[2]
    chosen.sent(asks("sql", 40), other)
    assert look(chosen, asks("sql", 40)).resident == {2, other.number}


def test_backends_tell_of_their_adapters_in_their_metrics() -> None:
    backend = Backend(0, config("exact").backend[0], config("exact"))
    text = (
        '# HELP quire:adapter_requests Live requests.\nquire:adapter_requests{adapter="sql",engine="0"} 2.0\n'
        'quire:adapter_requests{adapter="a \\"b\\" \\\\c",engine="0"} 0.0\nquire:other{adapter="no"} 1\n'
    )

    async def fetch(*words: Any) -> tuple[int, bytes]:
        return 200, text.encode()

    backend.pool.fetch = fetch  # type: ignore[method-assign]
    assert asyncio.run(residents(backend, config("exact"))) == {"sql", 'a "b" \\c'}


@pytest.mark.parametrize("key", ["", "sk-router"])
def test_a_backend_that_wants_a_key_is_asked_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Unless the router has a key. A backend that comes up again may know other keys, and is asked again."""
    asked: list[tuple[bytes, dict[bytes, bytes]]] = []

    async def fetch(method: bytes, path: bytes, headers: Any, body: bytes, timeout: float) -> tuple[int, bytes]:
        asked.append((path, dict(headers)))
        return 401 if path == b"/metrics" and not headers else 200, b""

    async def work() -> None:
        settings = {"backend": ["http://h"], "health_interval": 0.01, "backend_api_key": key}
        routed = router_config(settings)
        backend = Backend(0, routed.backend[0], routed)
        backend.pool.fetch = fetch  # type: ignore[method-assign]
        watching = asyncio.create_task(watch(backend, routed))
        for beginning in (0, 8):
            while len(asked) < beginning + 8:
                await asyncio.sleep(0.001)
            backend.up = False
        watching.cancel()

    asyncio.run(asyncio.wait_for(work(), 60))
    sent = {b"authorization": b"Bearer sk-router"} if key else {}
    assert all(headers == sent for _, headers in asked)
    times = [path for path, _ in asked].count(b"/metrics")
    refused = [record for record in caplog.records if "QUIRE_BACKEND_API_KEY" in record.getMessage()]
    assert times >= 6 if key else (times, len(refused)) == (2, 2)
