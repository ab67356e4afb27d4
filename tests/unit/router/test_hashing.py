"""The policy consistent-hash: routers agree, few sessions move, no backend gets too many, and turns stay together."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.router.backends import Backend
from quire.router.policy import Chooser
from quire.router.prompts import RoutedBody
from quire.router.rendezvous import LEAST_BOUND, hash_of, home, place
from quire.router.settings import router_config

KEYS = [hash_of(str(number).encode()) for number in range(2_000)]


def backends_of(urls: Sequence[str]) -> list[Backend]:
    config = router_config({"backend": list(urls), "policy": "consistent-hash"})
    return [Backend(number, member, config) for number, member in enumerate(config.backend)]


def urls_of(count: int, salt: str = "") -> list[str]:
    return [f"http://{salt}engine-{number}:8000" for number in range(count)]


@settings(max_examples=2, deadline=None)
@given(salt=st.text("abcdefgh", max_size=4), at=st.integers(0, 63))
def test_a_backend_moves_its_own_share_and_nothing_else(salt: str, at: int) -> None:
    """Of 64 backends one is left out: its keys move, and all others stay. So a backend that is added moves as many."""
    backends = backends_of(urls_of(64, salt))
    left = [backend for backend in backends if backend.number != at]
    moved = 0
    for key in KEYS:
        before, after = home(key, backends), home(key, left)
        assert after is before or before.number == at
        moved += after is not before
    assert moved <= len(KEYS) / 64 + 6 * (len(KEYS) / 64) ** 0.5  # six standard deviations


def test_homes_are_even_and_follow_weights() -> None:
    backends = backends_of(["http://a,weight=3", "http://b", "http://c,weight=0.5"])
    count = Counter(home(key, backends).number for key in KEYS)
    for number, weight in enumerate((3, 1, 0.5)):
        assert count[number] == pytest.approx(len(KEYS) * weight / 4.5, abs=4 * len(KEYS) ** 0.5 / 2)


def test_routers_agree_whatever_order_they_know() -> None:
    one, other = backends_of(urls_of(8)), backends_of(urls_of(8)[::-1])
    assert all(home(key, one).name == home(key, other).name for key in KEYS)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_backend_gets_more_than_its_share(count: int) -> None:
    """Few sessions with many requests each, of which none ends."""
    backends, bound, draw, moved = backends_of(urls_of(count)), 1.25, random.Random(count), 0
    for number in range(100):
        key = KEYS[draw.choice((0, 0, 0, 1))]
        chosen, overflows = place(key, backends, bound)
        assert overflows == (chosen is not home(key, backends)) and not (overflows and number < LEAST_BOUND)
        moved += overflows
        chosen.in_flight += 1
        assert chosen.in_flight <= max(LEAST_BOUND, bound * (number + 1) / count)
    assert bool(moved) == (count > 1)


def look(chooser: Chooser, body: dict[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()) -> int:
    routed = RoutedBody(json.dumps(body).encode())
    return asyncio.run(chooser.look(routed, "/v1/chat/completions", headers, None)).session


def test_turns_of_a_conversation_are_one_session() -> None:
    config = router_config({"backend": urls_of(2), "policy": "consistent-hash"})
    chooser = Chooser(config, backends_of(urls_of(2)))
    system = {"role": "system", "content": "You help." * 500}
    first = [system, {"role": "user", "content": "a"}]
    turns = [first, [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]]
    assert len({look(chooser, {"messages": turn}) for turn in turns}) == 1
    assert len({look(chooser, {"input": turn, "instructions": "x"}) for turn in turns}) == 1
    different: list[dict[str, Any]] = [
        {"messages": [system, {"role": "user", "content": "b"}]},
        {"messages": first, "model": "other"},
        {"messages": first, "tools": [1]},
        {"messages": first, "prompt_cache_key": "k"},
        {"prompt": "a"},
        {"prompt": [1, 2]},
        {"input": "a"},
        {},
    ]
    assert len({look(chooser, body) for body in ({"messages": first}, *different)}) == 1 + len(different)
    for one, other in (
        ({"messages": turns[0], "prompt_cache_key": "k"}, {"messages": turns[1], "prompt_cache_key": "k"}),
        ({"prompt": "x" * 2048}, {"prompt": "x" * 2048 + "y"}),
    ):
        assert look(chooser, one) == look(chooser, other)
    headers = [(b"x-session-id", b"s")]
    assert look(chooser, {"messages": first}, headers) == look(chooser, {"prompt": "other"}, headers)
