"""Lines of API keys: however much a key asks for, another one waits for its share of tokens and no longer."""

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.contracts.errors import QueueFull
from quire.contracts.request import Account, NewRequest, Request, RequestState
from quire.contracts.sampling import SamplerSpec
from quire.engine.queue import WaitingQueue

A, B = Account("", "a"), Account("", "b")
LONGEST, SLOTS = 40, 3
SIZES = st.tuples(st.integers(1, LONGEST), st.integers(0, LONGEST))  # tokens of prompt and output
SMALL = st.tuples(st.integers(1, 3), st.integers(0, 3))
LINES = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.lists(SIZES, min_size=25, max_size=25)), max_size=3)


def request(number: int, account: Account, num_prompt: int) -> Request:
    prompt = array("I", [1] * num_prompt).tobytes()
    sampler = SamplerSpec(seed=0, num_prompt=num_prompt)
    new = NewRequest(
        handle=number, request_id=str(number), token_ids=prompt, max_tokens=LONGEST, sampler=sampler, account=account
    )
    return Request(new, number)


class Slots:
    """An engine of a few slots that does nothing but serve the queue: it starts a request, or ends one."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(by_priority=False, bound=None, num_slots=SLOTS)
        self.outputs: dict[Request, int] = {}
        self.running: list[Request] = []
        self.served: dict[str, int] = {}  # tokens by line

    def add(self, account: Account, sizes: list[tuple[int, int]]) -> list[Request]:
        made = []
        for num_prompt, num_output in sizes:
            made.append(request(len(self.outputs), account, num_prompt))
            self.outputs[made[-1]] = num_output
            self.queue.push(made[-1])
        return made

    def turn(self, ending: int) -> None:
        if len(self.running) < SLOTS and self.queue.peek() is not None:
            one, tokens = self.queue.pop(), 0
            one.to(RequestState.RUNNING)
            one.num_cached = 0
            self.running.append(one)
            tokens = one.num_prompt
        else:
            one = self.running.pop(ending % len(self.running))
            tokens = self.outputs[one]
            one.tokens.extend([1] * tokens)
            one.to(RequestState.FINISHED)
            self.queue.pay(one, len(one.tokens))
        name = one.new.account.line
        self.served[name] = self.served.get(name, 0) + tokens


@settings(max_examples=60, deadline=None)
@given(LINES, st.lists(SIZES | SMALL, min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 99))
def test_a_flood_delays_another_key_by_its_share(
    floods: list[tuple[float, list[tuple[int, int]]]], mine: list[tuple[int, int]], late: int, ending: int
) -> None:
    """While a key waits, another one gets at most as many tokens by weight, one more prompt, and the outputs of the
    requests that it has in the slots."""
    slots = Slots()
    for number, (weight, sizes) in enumerate(floods):
        slots.add(Account("", f"flood {number}", weight), sizes)
    for _ in range(late if floods else 0):
        slots.turn(ending)
    before = dict(slots.served)
    wanted = slots.add(A, mine)
    while any(one.state is RequestState.WAITING for one in wanted):
        slots.turn(ending)
    paid = slots.served["a"]
    for number, (weight, _) in enumerate(floods):
        name = f"flood {number}"
        most = paid * weight + (1 + SLOTS) * LONGEST
        assert slots.served.get(name, 0) - before.get(name, 0) <= most


def test_tokens_are_shared_by_weight_and_nobody_saves_up() -> None:
    queue = WaitingQueue(by_priority=False, bound=None, num_slots=SLOTS)
    heavy = Account("", "heavy", 2.0)
    for number in range(60):
        queue.push(request(number, A, 10))
    for _ in range(20):  # alone
        assert queue.peek() is not None and queue.pop().new.account is A
    for number in range(60, 120):
        queue.push(request(number, heavy, 5))
    came = []
    for _ in range(15):
        assert queue.peek() is not None
        came.append(queue.pop().new.account.line)
    assert 11 <= came.count("heavy") <= 13, "of three tokens two, so of 15 requests 12"
    assert "a" in came[:8], "it owes nothing for the time when nobody else waited"


def order(floods: int, account: Account, Rig: Any, **options: Any) -> int:
    """Return how many requests of a flood start before the first of another key that comes later."""
    rig = Rig(1, slots=2, **options)
    flood = [rig.add([1, 2, 3], 4, account=A) for _ in range(floods)]
    rig.step()
    late = rig.add([4, 5], 4, account=account)
    started = sum(handle in rig.cached for handle in flood)
    while late not in rig.cached:
        rig.step()
    return sum(handle in rig.cached for handle in flood) - started


def test_a_key_that_comes_late_is_next(Rig: Any) -> None:
    assert order(12, B, Rig) <= 1 and order(12, A, Rig) >= 9


def test_priority_comes_before_fairness(Rig: Any) -> None:
    rig = Rig(1, slots=1, policy="priority")
    rig.add([1], 2, account=A)
    rig.step()
    handles = [rig.add([2], 2, account=account, priority=level) for account, level in ((A, 1), (B, 1), (A, 0))]
    while handles[2] not in rig.cached:
        rig.step()
    assert not {*handles[:2]} & {*rig.cached}


@pytest.mark.parametrize(("slots", "most", "fit"), [(1, 8, 5), (8, 6, 11)])
def test_a_flood_leaves_room_in_the_queue_for_others(Rig: Any, slots: int, most: int, fit: int) -> None:
    """Requests that free slots take do not wait, though no step has admitted them yet."""
    rig = Rig(1, slots=slots, max_waiting=most)
    taken = 0
    with pytest.raises(QueueFull, match="requests of this API key are waiting already"):
        while taken < 20:
            rig.add([1], 2, account=A)
            taken += 1
    assert taken == fit, "a key may have as many as it leaves free"
    for _ in range(2):
        rig.add([1], 2, account=B)
    rig.drain()
