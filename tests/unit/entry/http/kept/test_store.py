"""The store of responses, in memory and in a file of several HTTP processes: bounds, owners, lost runners."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.entry.http.errors import HttpError
from quire.entry.http.kept.store import Kept, ResponseStore, Running, numbered

ME = b"me"


def kept(size: int, **fields: Any) -> Kept:
    return Kept(**{"owner": ME, "body": b"x" * size, "items": b""} | fields)


def lacks(store: ResponseStore, names: str, owner: bytes = ME) -> bool:
    """Return True if the store has none of the names. A name that is not found counts as no use."""
    for name in names:
        with pytest.raises(HttpError, match="no stored response"):
            store.find(name, owner)
    return True


@pytest.mark.parametrize("several", [False, True])
def test_the_store_is_bounded_and_drops_what_was_not_used_for_longest(several: bool, tmp_path: Path) -> None:
    """Whichever process of several stores or uses a response."""
    stores = [ResponseStore(tmp_path if several else None, max_kept=3, max_bytes=100)]
    stores += [ResponseStore(tmp_path, max_kept=3, max_bytes=100)] * several
    one, other = stores[0], stores[-1]
    one.keep("a", kept(10))
    other.keep("b", kept(10, previous="a", items=b"[]"))
    one.keep("c", kept(10))
    assert [len(k.body) for k in other.chain("b", ME)] == [10, 10]  # a use of both
    assert other.find("b", ME) == kept(10, previous="a", items=b"[]")
    assert list(other.chain("b", ME))
    one.keep("d", kept(10))
    assert lacks(other, "c") and lacks(other, "abd", b"another")
    other.keep("e", kept(68))  # b goes before a, which it continues
    assert lacks(one, "b") and one.find("a", ME)
    other.keep("f", kept(101))
    assert lacks(one, "abcdef")
    one.keep("a", kept(100))
    other.keep("a", kept(90))
    other.keep("b", kept(10))
    assert len(one.find("a", ME).body) == 90
    one.drop("a")
    one.keep("c", kept(90))
    assert lacks(other, "a") and one.find("b", ME)


def test_a_background_response_is_ended_by_another_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, other = ResponseStore(tmp_path, max_kept=1), ResponseStore(tmp_path, max_kept=1)
        gone = asyncio.Event()

        async def run() -> None:
            await gone.wait()
            one.keep("a", kept(5, background=True))

        task = asyncio.create_task(run())
        one.begin("a", kept(1, background=True, runner=one.runner), Running(task, gone, asyncio.Event()))
        task.add_done_callback(lambda task: one.running.pop("a"))
        other.keep("b", kept(2))  # one that runs does not count
        assert other.find("b", ME) and other.find("a", ME).runner == one.runner
        with pytest.raises(HttpError, match="in progress"):
            list(other.chain("a", ME))
        await other.end("a", ME)
        assert task.done() and other.find("a", ME) == kept(5, background=True)
        assert lacks(one, "b"), "a response that has ended counts"

    asyncio.run(scenario())


def test_a_background_response_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, other = ResponseStore(tmp_path), ResponseStore(tmp_path)
        task = asyncio.create_task(asyncio.sleep(0))
        body = json.dumps({"status": "in_progress", "error": None}).encode()
        begun = kept(0, body=body, background=True, runner=one.runner)
        one.begin("a", begun, Running(task, asyncio.Event(), asyncio.Event()))
        await task
        one.running.clear()
        assert other.find("a", ME) == begun
        one._alive.close()  # as at the end of a process
        failed = other.find("a", ME)
        assert failed.runner == "" and json.loads(failed.body)["status"] == "failed"
        assert "has ended" in json.loads(failed.body)["error"]["message"]
        await other.end("a", ME)
        other.keep("b", begun)
        third = ResponseStore(tmp_path)
        assert {path.name for path in tmp_path.glob("runner*")} == {other.runner, third.runner}
        assert third.find("b", ME).runner == "", "the file of its runner is gone"

    asyncio.run(scenario())


def event(number: int, text: str) -> bytes:
    return numbered("delta", number, text=text)


@pytest.mark.parametrize("lost", [False, True])
def test_events_are_read_by_another_process(lost: bool, tmp_path: Path) -> None:
    """To their end, or until the process that makes them is gone. They count, and go with their response."""

    async def scenario() -> None:
        one, other = ResponseStore(tmp_path, max_bytes=1000), ResponseStore(tmp_path, max_bytes=1000)
        task = asyncio.create_task(asyncio.sleep(0))
        body = json.dumps({"status": "in_progress", "error": None}).encode()
        begun = kept(0, body=body, background=True, streamed=True, runner=one.runner)
        one.say("a", [event(0, "first")])
        one.begin("a", begun, Running(task, asyncio.Event(), asyncio.Event()))
        assert other.find("a", ME) == begun
        reading = other.events("a", ME, 0)
        assert await anext(reading) == event(0, "first")
        one.say("a", [event(1, "second"), event(2, "third")])
        assert await anext(reading) == event(1, "second") + event(2, "third")
        if lost:
            one.running.clear()
            one._alive.close()  # as at the end of a process
            last = await anext(reading)
            assert (
                json.loads(last.split(b"data: ")[1])["response"]["status"] == "failed"
                and b'"sequence_number":3,' in last
            )
        else:
            one.keep("a", replace(begun, runner=""), [event(3, "last")])
            assert await anext(reading) == event(3, "last")
        assert [found async for found in reading] == [] and len(
            [found async for found in other.events("a", ME, 3)]
        ) == 1
        other.keep("b", kept(800))
        assert lacks(other, "a"), "events count"
        assert not other._base.execute("SELECT * FROM events").fetchall()

    asyncio.run(scenario())
