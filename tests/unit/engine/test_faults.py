"""An exception in the bookkeeping of one request ends that request; the others get every token they should."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from quire.contracts.request import FinishReason

VICTIM = 1
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15, i] for i in range(4)]  # two full blocks in common


class Broken(RuntimeError):
    """The exception of a planted fault."""


def plant(
    owner: Any, name: str, is_victim: Callable[..., bool], *, after: bool = False, once: bool = False
) -> list[int]:
    """Make `owner.name` raise for the victim, before or after its work; returns a list that grows with each time."""
    work, times = getattr(owner, name), []

    def planted(*args: Any) -> Any:
        hit = is_victim(*args) and not (once and times)
        if hit and not after:
            times.append(1)
            raise Broken(name)
        result = work(*args)
        if hit:
            times.append(1)
            raise Broken(name)
        return result

    setattr(owner, name, planted)
    return times


def by_slot(rig: Any) -> Callable[..., bool]:
    def is_victim(slot: int, *rest: Any) -> bool:
        request = rig.table.requests[slot]
        return request is not None and request.new.handle == VICTIM

    return is_victim


def survive(rig: Any, times: list[int], *, tokens_before: int = 0) -> None:
    """Only the victim has failed, by an internal error; everybody else is served, also who comes later."""
    rig.drain()
    assert times, "the fault was never met"
    finish = rig.finish.pop(VICTIM)
    assert (finish.reason, finish.error) == (FinishReason.ERROR, "internal")
    assert len(rig.tokens[VICTIM]) >= tokens_before
    answer = rig.answer(VICTIM)[0]
    assert rig.tokens[VICTIM] == answer[: len(rig.tokens[VICTIM])]
    for handle in rig.finish:
        rig.judge(handle)
    del rig.asked[VICTIM]
    late = rig.add(PROMPTS[0], max_tokens=6, handle=100)
    rig.drain()
    rig.judge(late)


@pytest.mark.parametrize("point", ["match", "can_admit", "admit", "admit after", "publish", "publish after", "take"])
def test_a_fault_while_it_is_admitted(
    Rig: Any, depth: int, point: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(depth)
    name, _, after = point.partition(" ")
    chains, mine = rig.scheduler.roster._chains, by_slot(rig)
    if name in ("match", "can_admit"):
        times = plant(rig.allocator, name, lambda *args: rig.scheduler.queue.peek().new.handle == VICTIM)
    elif name == "take":  # half of `admit` is done then
        work, times = rig.pool.take, []

        def take(pool: Any, num: int) -> list[int]:
            if any(r is not None and r.new.handle == VICTIM for r in rig.table.requests):
                times.append(1)
                raise Broken("take")
            return work(num)

        monkeypatch.setattr(type(rig.pool), "take", take)
    else:
        times = plant(rig.allocator, name, mine, after=bool(after), once=True)
    for i, prompt in enumerate(PROMPTS):
        rig.add(prompt, max_tokens=6, handle=i)
    with caplog.at_level(logging.ERROR):
        survive(rig, times)
    assert sum("Broken" in (record.exc_text or "") for record in caplog.records) == 1
    assert VICTIM not in chains


@pytest.mark.parametrize("alone", [False, True])
def test_a_fault_while_its_blocks_grow(Rig: Any, depth: int, alone: bool) -> None:
    rig = Rig(depth, blocks=24 if alone else 40)
    mine = by_slot(rig)
    plant(
        rig.allocator,
        "grow_many",
        lambda slots, needed: any(map(mine, slots.tolist())) and bool((needed > rig.allocator.capacity[slots]).any()),
    )
    times = plant(rig.allocator, "grow", mine)
    for i, prompt in enumerate(PROMPTS):
        rig.add(prompt, max_tokens=12, handle=i)
    survive(rig, times, tokens_before=1)


def test_a_fault_while_a_later_chunk_is_published(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=8)  # its prompt of 26 tokens takes four steps
    mine, count = by_slot(rig), [0]

    def third(slot: int, *rest: Any) -> bool:
        count[0] += mine(slot)
        return mine(slot) and count[0] == 3

    times = plant(rig.allocator, "publish", third, after=True)
    rig.add([3, 4, 5], max_tokens=12, handle=0)
    rig.add(list(range(26)), max_tokens=6, handle=VICTIM)
    rig.add(list(range(26)), max_tokens=6, handle=2)  # wants the blocks that the victim was to compute
    survive(rig, times)


def test_a_fault_while_a_generated_block_is_published(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    times = plant(rig.scheduler.roster, "publish", lambda request, num: request.new.handle == VICTIM and num > 10)
    for i, prompt in enumerate(PROMPTS):
        rig.add(prompt, max_tokens=12, handle=i)
    survive(rig, times, tokens_before=3)


def test_a_parent_that_fails_frees_its_children(Rig: Any, depth: int) -> None:
    rig = Rig(depth)
    times = plant(rig.allocator, "admit", by_slot(rig))
    rig.add(PROMPTS[0], max_tokens=6, handle=VICTIM)
    rig.add(PROMPTS[0], max_tokens=6, handle=2, parent=VICTIM, seed=5)
    rig.add(PROMPTS[0], max_tokens=6, handle=3, parent=VICTIM, seed=6)
    survive(rig, times)


def test_a_preempted_request_that_fails_when_it_comes_back(Rig: Any, depth: int) -> None:
    rig = Rig(depth, blocks=12, max_len=48)
    times = plant(
        rig.allocator, "admit", lambda slot, *rest: by_slot(rig)(slot) and rig.table.requests[slot].num_preemptions > 0
    )
    rig.add(list(range(20)), max_tokens=20, handle=0)
    rig.add(list(range(50, 70)), max_tokens=20, handle=VICTIM)
    survive(rig, times, tokens_before=1)


def test_a_fault_while_its_prompt_is_scored(Rig: Any, depth: int) -> None:
    rig = Rig(depth, budget=8)  # its prompt of 26 tokens takes four steps
    times = plant(
        rig.core._finisher,
        "_new_rows",
        lambda request, *rest: request.new.handle == VICTIM and request.prompt_scored > 0,
    )
    rig.add([3, 4, 5], max_tokens=12, handle=0, scored=True)
    rig.add(list(range(26)), max_tokens=6, handle=VICTIM, scored=True)
    rig.add(list(range(30, 40)), max_tokens=6, handle=2, scored=True)
    survive(rig, times)


@pytest.mark.parametrize(
    "owner, name", [("roster", "add"), ("core", "_tags"), ("finisher", "watch"), ("queue", "push")]
)
def test_a_fault_while_it_is_added_leaves_nothing(Rig: Any, depth: int, owner: str, name: str) -> None:
    rig = Rig(depth)
    rig.add(PROMPTS[0], max_tokens=6, handle=0)
    part = {
        "roster": rig.scheduler.roster,
        "core": rig.core,
        "finisher": rig.core._finisher,
        "queue": rig.scheduler.queue,
    }
    fault = plant(part[owner], name, lambda *args: True, once=True)
    with pytest.raises(Broken):
        rig.add(PROMPTS[1], max_tokens=6, handle=VICTIM, stop_ids=(3,))
    assert fault and rig.scheduler.roster._chains.keys() == {0}
    rig.core.check()
    rig.add(PROMPTS[1], max_tokens=6, handle=2)
    rig.drain()
    for handle in rig.finish:
        rig.judge(handle)


def test_a_stop_id_outside_the_vocabulary_is_watched_by_nobody(Rig: Any) -> None:
    rig = Rig(vocab=100)
    with pytest.raises(IndexError):
        rig.add(PROMPTS[0], max_tokens=6, handle=0, stop_ids=(5, 100))
    rig.add(PROMPTS[0], max_tokens=6, handle=1)
    rig.drain()


def test_a_fault_in_the_middle_of_publishing_leaves_nothing_to_find(
    Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(depth, budget=64)  # all of its blocks in one go
    work, mine, times = type(rig.pool).publish, {}, []

    def publish(pool: Any, block: int, key: bytes) -> bool:
        victim = any(
            r is not None and r.new.handle == VICTIM and block in rig.allocator.table(slot)
            for slot, r in enumerate(rig.table.requests)
        )
        if victim and mine.setdefault(block, len(mine)) == 1:
            times.append(1)
            raise Broken("publish")
        return bool(work(pool, block, key))

    monkeypatch.setattr(type(rig.pool), "publish", publish)
    rig.add(PROMPTS[0], max_tokens=6, handle=0)
    rig.add(list(range(60, 75)), max_tokens=6, handle=VICTIM)
    rig.add(list(range(60, 75)), max_tokens=6, handle=2)  # the same prompt, and no block of it was computed
    survive(rig, times)
    assert rig.cached[2] == 0
