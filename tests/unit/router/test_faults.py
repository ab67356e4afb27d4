"""Streams through a router while backends die, refuse, fall silent or are drained."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest

from ...support.mock_backends import MockBackend, mock_backends, routed

PATIENCE = 60.0
EVENTS = 6


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def body_of(user: str = "u", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Once", "stream": True, "max_tokens": EVENTS, "user": user} | fields


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    """The status and the events of a completion; "cut" where the connection broke off."""
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        try:
            text = (await answer.read()).decode()
        except aiohttp.ClientPayloadError:
            return answer.status, ["cut"]
        if not answer.content_type.endswith("event-stream"):
            return answer.status, [json.loads(text)]
        lines = [line[6:] for line in text.split("\n\n") if line]
        return answer.status, [line if line == "[DONE]" else json.loads(line) for line in lines]


def is_whole(events: list[Any]) -> bool:
    return [event.get("i") for event in events[:-1]] == list(range(EVENTS)) and events[-1] == "[DONE]"


def broken_off(events: list[Any]) -> tuple[list[int], str]:
    """The numbers of the events before the error that ends a stream, and the code of the error."""
    *pieces, error, done = events
    assert done == "[DONE]"
    return [piece["i"] for piece in pieces], error["error"]["code"]


@pytest.mark.parametrize("count", [2, 4])
def test_500_streams_and_a_backend_that_is_killed(count: int) -> None:
    """Only streams that had begun on the killed backend end early, with an error; every other one is whole."""

    async def work() -> None:
        async with mock_backends(count) as backends, routed(backends) as (router, url):
            victim = backends[0]
            victim.stalls, victim.event_s = True, 0.05
            users = [f"{'stall' if i % 3 else 'go'}{i}" for i in range(500)]
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                asked = [asyncio.create_task(stream(session, url, body_of(user))) for user in users]
                while len(victim.bodies) < 400 // count or not victim.begun:
                    await asyncio.sleep(0.001)
                assert victim.live > len(victim.begun)
                await victim.kill()
                answers = dict(zip(users, await asyncio.gather(*asked), strict=True))
            broken = {user: broken_off(events) for user, (_, events) in answers.items() if not is_whole(events)}
            assert {status for status, _ in answers.values()} == {200}
            assert broken and set(broken) <= victim.begun
            assert all(numbers == list(range(len(numbers))) and code == "backend_failed"
                       for numbers, code in broken.values())
            assert router.num_live == 0 and all(b.in_flight == b.active == b.waiting == 0 for b in router.backends)
            assert not router.backends[0].up

    run(work())
