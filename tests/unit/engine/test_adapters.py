"""Adapters on the mock, whose tokens depend on the adapter: who waits, who goes on, whose slot it is."""

import random
from collections import Counter
from typing import Any

import pytest

from quire.contracts.adapters import Adapter
from quire.contracts.request import BlockReason, FinishReason, RequestState

from ...support.full import full_rows

PROMPT = [3, 1, 4, 1, 5]


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/{name}", f"content of {name}")


def ask(rig: Any, name: str, tokens: int = 4, **fields: Any) -> int:
    """Add a request for an adapter; "" for the base model."""
    return int(rig.add(PROMPT, tokens, adapter=adapter(name) if name else None, **fields))


def test_nobody_behind_a_request_waits_while_its_adapter_is_loaded(Rig: Any, depth: int) -> None:
    rig = Rig(depth, adapters=(1, 1), loads=(6,))
    first, behind = ask(rig, "sql"), ask(rig, "")
    rig.step()
    assert rig.request(first).blocked_on is BlockReason.ADAPTER and rig.request(behind).state is RequestState.RUNNING
    while behind not in rig.finish:
        rig.step()
    assert first not in rig.finish and not rig.tokens[first]
    rig.drain()
    rig.judge(first)
    rig.judge(behind)


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(Rig: Any, depth: int) -> None:
    rig = Rig(depth, adapters=(2, 2))
    rig.mock.broken.add(adapter("bad").digest)
    wrong, other, right, base = (ask(rig, name) for name in ("bad", "bad", "good", ""))
    rig.drain()
    for handle in (wrong, other):
        finish = rig.finish[handle]
        assert (finish.reason, finish.error) == (FinishReason.ERROR, "adapter") and "'bad' could not" in finish.message
    rig.judge(right)
    rig.judge(base)
    rig.mock.broken.clear()  # its files are right again
    rig.judge(rig.drain() and (late := ask(rig, "bad")) and rig.drain() and late)


def test_the_slot_of_an_idle_adapter_is_taken_the_least_recently_used_first(Rig: Any) -> None:
    rig = Rig(adapters=(2, 3))
    for name in ("a", "b", "a", "c", "a", "b"):  # c takes the slot of b, then b that of c
        ask(rig, name)
        rig.drain()
    stats = rig.scheduler.roster.adapters.stats()
    assert list(stats.resident) == ["a", "b"] and (stats.loads, stats.reads) == (4, 3), "b came back from host memory"


def test_host_memory_forgets_what_was_used_least_recently(Rig: Any) -> None:
    rig = Rig(adapters=(1, 2))
    for name in ("a", "b", "c", "b", "a"):
        ask(rig, name)
        rig.drain()
    stats = rig.scheduler.roster.adapters.stats()
    assert (stats.loads, stats.reads) == (5, 4), "only b was still there"


def test_no_adapter_keeps_the_others_out_for_ever(Rig: Any, depth: int) -> None:
    """A stream of requests for one adapter, which never lets its slot go."""
    rig = Rig(depth, adapters=(1, 1), slots=2)
    ask(rig, "busy", 8)
    rig.step(3)
    other = ask(rig, "other")
    for _ in range(40):
        if len([1 for handle in rig.asked if handle not in rig.finish]) < 4:
            ask(rig, "busy", 8)
        rig.step()
    assert other in rig.finish
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)


def test_a_prompt_is_not_shared_between_adapters(Rig: Any) -> None:
    """The mock sees KV of another adapter at once: it depends on the adapter."""
    rig = Rig(adapters=(2, 2))
    prompt = list(range(100, 117))
    for name in ("", "a", "b", "a", ""):
        handle = rig.add(prompt, 3, adapter=adapter(name) if name else None)
        rig.drain()
        rig.judge(handle)
    assert [rig.cached[handle] for handle in sorted(rig.cached)] == [0, 0, 0, 16, 16]
    same = rig.add(prompt, 3, adapter=Adapter("another name", "/x", adapter("b").digest))
    rig.drain()
    assert rig.cached[same] == 16, "the content counts, not the name"


def test_completions_of_a_prompt_and_aborts(Rig: Any, depth: int) -> None:
    rig = Rig(depth, adapters=(1, 1), loads=(4,))
    parent = ask(rig, "a", 6)
    child = ask(rig, "a", 6, parent=parent)
    waits = ask(rig, "b")
    rig.step(2)
    rig.abort(waits)
    gone = ask(rig, "c")
    rig.step(8)
    rig.abort(gone)
    rig.drain()
    for handle in (parent, child):
        rig.judge(handle)


def test_an_engine_without_adapters_refuses_them(Rig: Any) -> None:
    with pytest.raises(ValueError, match="--enable-lora"):
        ask(Rig(), "a")


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(Rig: Any, depth: int, seed: int) -> None:
    """Many adapters, few slots, few blocks, loads of any length, some of which fail: each answer is its adapter's."""
    dice = random.Random(seed)
    slots = dice.randint(1, 4)
    loads, slots_of = [dice.randint(0, 5) for _ in range(7)], (slots, slots + dice.randint(0, 3))
    rig = Rig(depth, adapters=slots_of, loads=loads, blocks=24, slots=dice.randint(2, 6))
    names = [f"a{number}" for number in range(12)]
    rig.mock.broken |= {adapter(name).digest for name in names[:2]}
    for _ in range(80):
        name = dice.choice(["", *names])
        prompt = [dice.randint(0, 2) for _ in range(dice.randint(1, 12))]
        handle = rig.add(prompt, dice.randint(1, 9), adapter=adapter(name) if name else None)
        if dice.random() < 0.1:
            rig.step(dice.randint(0, 3))
            if handle in rig.requests:
                rig.abort(handle)
        rig.step(dice.randint(0, 3))
    rig.drain()
    for handle, new in rig.asked.items():
        if new.adapter is not None and new.adapter.name in names[:2]:
            assert rig.finish[handle].error == "adapter" or rig.finish[handle].reason is FinishReason.ABORT
        else:
            rig.judge(handle)


@pytest.mark.parametrize("count", [200, *full_rows([2000])])
def test_five_hundred_adapters_by_zipfs_law(Rig: Any, count: int) -> None:
    """32 slots; about a third of the requests miss. Nothing is lost, and every answer is that of its adapter."""
    dice = random.Random(count)
    names, weights = [f"a{number}" for number in range(500)], [1 / (number + 1) for number in range(500)]
    rig = Rig(2, adapters=(32, 128), loads=(3, 1, 7), slots=48, blocks=600)
    waits, waiting = dict[int, int](), dict[int, int]()
    for name in dice.choices(names, weights, k=count):
        handle = ask(rig, name, dice.randint(1, 12))
        waiting[handle] = 0
        for _ in range(dice.randint(0, 2)):
            rig.step()
            waits |= {one: steps for one, steps in waiting.items() if rig.tokens[one] or one in rig.finish}
            waiting = {one: steps + 1 for one, steps in waiting.items() if one not in waits}
    rig.drain()
    for handle in rig.asked:
        rig.judge(handle)
    stats = rig.scheduler.roster.adapters.stats()
    assert len(rig.finish) == count and stats.failed == stats.waiting == 0
    assert count / 8 < stats.loads < count * 0.8 and stats.reads <= stats.loads
    print(f"{stats.loads} loads of {count}, {stats.reads} from files; steps to the first token: {histogram(waits)}")


def histogram(waits: dict[int, int]) -> dict[int, int]:
    return dict(sorted(Counter(waits.values()).items()))
