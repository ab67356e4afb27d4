"""KV reused at other positions, on the mock, which notices wrong sources and approximate blocks that others find."""

from array import array
from typing import Any

import numpy as np
import pytest

from quire.contracts.request import ReusedParts
from quire.contracts.step import Tier
from quire.kv.hashing import KeyChain, group_keys

NOTES = [list(range(at, at + 10)) for at in (100, 200, 300)]  # two blocks of four tokens, and two tokens more
QUESTION = [7, 8, 9]
SIZES: dict[str, Any] = {"blocks": 40, "blends": True, "budget": 64}


def prompt_of(*notes: int, before: tuple[int, ...] = ()) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """A prompt of notes and a question, and the chunks of the notes."""
    tokens, chunks = list(before), []
    for note in notes:
        chunks.append((len(tokens), len(tokens) + len(NOTES[note])))
        tokens += NOTES[note]
    return tokens + QUESTION, tuple(chunks)


def cached(rig: Any, *notes: int) -> Any:
    for note in notes:
        rig.add(NOTES[note], 1)
        rig.drain()
    return rig


def ask(rig: Any, *notes: int, before: tuple[int, ...] = (), ratio: float = 0.25, **fields: Any) -> int:
    prompt, chunks = prompt_of(*notes, before=before)
    return int(rig.add(prompt, 4, reused=ReusedParts(chunks, ratio), **fields))


def moved(rig: Any) -> list[tuple[int, ...]]:
    """(tokens, kept tokens, first shift) of every blended chunk of the plans."""
    return [(len(one.tokens), one.num_kept, int(one.shifts[0])) for plan in rig.plans for one in plan.features.blended]


def test_chunks_are_reused_behind_the_exact_prefix(Rig: Any, depth: int) -> None:
    """The first note is a prefix; of the others eight tokens each are moved, a quarter of them is kept."""
    rig = cached(Rig(depth, **SIZES), 0, 1, 2)
    handle = ask(rig, 0, 2, 1)
    rig.drain().judge(handle)
    assert moved(rig) == [(16, 4, 10)]
    (chunk,) = [one for plan in rig.plans for one in plan.features.blended]
    assert chunk.tokens.tolist() == [*range(2, 10), *range(12, 20)]  # of the chunk, which begins behind the prefix
    assert np.diff(chunk.shifts).max() == 10 and rig.cached[handle] == 8 + 16
    assert rig.origins[handle] == dict.fromkeys(range(2, 7), Tier.BLENDED)


def test_approximate_blocks_are_found_by_nobody(Rig: Any, depth: int) -> None:
    """Not behind the moved tokens either; what is before them is exact and is found."""
    rig = cached(Rig(depth, **SIZES), 1)
    first = ask(rig, 1, before=(1, 2, 3, 4, 5))
    rig.drain().judge(first)
    assert rig.cached[first] == 8 and len(moved(rig)) == 1
    prompt, _ = prompt_of(1, before=(1, 2, 3, 4, 5))
    exact = rig.add(prompt, 4)
    rig.drain().judge(exact)
    assert rig.cached[exact] == 4


def test_a_chunk_of_the_same_step_is_not_read_before_it_is_written(Rig: Any, depth: int) -> None:
    rig = Rig(depth, **SIZES)
    alone = rig.add(NOTES[1], 1)
    handle = ask(rig, 0, 1)
    rig.drain().judge(alone)
    rig.judge(handle)
    assert not moved(rig) and rig.cached[handle] == 0


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_a_prompt_in_several_steps(Rig: Any, depth: int, ratio: float) -> None:
    """Each scheduled chunk keeps its own share, and borrowed blocks are free again with the last."""
    rig = cached(Rig(depth, **SIZES | {"budget": 8}), 0, 1, 2)
    handle = ask(rig, 2, 1, 0, ratio=ratio)
    rig.drain().judge(handle)
    assert sum(count for count, _, _ in moved(rig)) == 16 and len(moved(rig)) > 1
    assert all(kept == int(np.ceil(ratio * count - 1e-6)) for count, kept, _ in moved(rig))


def test_without_room_for_both_the_prompt_is_computed(Rig: Any, depth: int) -> None:
    rig = cached(Rig(depth, **SIZES | {"blocks": 7}), 1)
    handle = ask(rig, 0, 1)  # seven blocks; to read two others, nine
    rig.drain().judge(handle)
    assert not moved(rig)


def test_preempted_requests_blend_again(Rig: Any, depth: int) -> None:
    rig = cached(Rig(depth, **SIZES | {"blocks": 24}), 0, 1)
    handles = []
    for first in (1, 2, 3):
        prompt, chunks = prompt_of(0, 1, before=(first,))
        handles.append(rig.add(prompt, 20, reused=ReusedParts(chunks, 0.5)))
    rig.drain()
    for handle in handles:
        rig.judge(handle)
    assert rig.scheduler.num_preempted and len(moved(rig)) > 3


def test_who_does_not_read_the_cache_reuses_nothing(Rig: Any, depth: int) -> None:
    rig = cached(Rig(depth, **SIZES), 1)
    other = ask(rig, 0, 1, cache_salt="s")
    alone = ask(rig, 0, 1, read_prefix_cache=False)
    rig.drain()
    rig.judge(other)
    rig.judge(alone)
    assert not moved(rig)


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_request_that_ends_early_gives_back_what_it_borrowed(Rig: Any, depth: int, end: str) -> None:
    """`drain` asserts that every block is free."""
    rig = cached(Rig(depth, **SIZES | {"budget": 8}), 0, 1, 2)
    handle = ask(rig, 2, 1, 0, fail_after=0 if end == "fail" else None)
    rig.step(2)
    if end == "abort":
        rig.abort(handle)
    rig.drain()
    assert moved(rig) and rig.allocator.pool.num_free == rig.num_blocks


def test_chunks_without_a_full_block_cost_nothing(Rig: Any, depth: int) -> None:
    """A prompt of many separators has as many chunks. None of them can be in the pool, so none has keys."""
    rig = Rig(depth, **SIZES | {"max_len": 512, "blocks": 128})
    prompt = [1, 2, 3, 9] * 100
    handle = rig.add(prompt, 1, reused=ReusedParts(tuple((at, at + 3) for at in range(0, 400, 4)), 0.5))
    assert rig.scheduler.roster.chunks.chains(handle, 0) == []
    rig.drain().judge(handle)


def test_chunks_come_back_from_host_memory(Rig: Any, depth: int) -> None:
    """All of them at once, beside what continues the prefix."""
    rig = cached(Rig(depth, **SIZES | {"blocks": 14}, host_blocks=80, write_through=True, delays=[2]), 0, 1, 2)
    for other in range(4):
        rig.add([500 + other] * 40, 1)
        rig.drain()
    before = rig.outputs.stats.tiers[Tier.HOST].num_loaded
    handle = ask(rig, 0, 2, 1)
    rig.drain().judge(handle)
    assert rig.outputs.stats.tiers[Tier.HOST].num_loaded - before == 6
    assert moved(rig) == [(16, 4, 10)] and rig.cached[handle] == 24


@pytest.mark.parametrize(
    "tiers", [{}, {"host_blocks": 30, "delays": [0, 3], "faults": ["", "lost", "", "half"]}], ids=["device", "host"]
)
@pytest.mark.parametrize("seed", range(4))
def test_random_use(Rig: Any, depth: int, seed: int, tiers: dict[str, Any]) -> None:
    """Texts alone and in prompts of any order, aborted, preempted, in chunks, through two tiers; all are checked."""
    random = np.random.default_rng(seed)
    rig = Rig(depth, **SIZES | {"blocks": 26, "budget": 12, "slots": 4} | tiers)
    for _ in range(150):
        what = random.integers(0, 10)
        if what == 0:
            rig.add(NOTES[random.integers(3)], int(random.integers(1, 4)))
        elif what < 3 and len(rig.asked) - len(rig.finish) < 6:
            before = tuple(int(token) for token in random.integers(1, 4, random.integers(0, 6)))
            notes = [int(note) for note in random.integers(0, 3, random.integers(1, 4))]
            ask(rig, *notes, before=before, ratio=float(random.choice([0.0, 0.3, 1.0])))
        elif what == 3 and rig.asked:
            rig.abort(int(random.choice(list(rig.asked))))
        elif what == 4 and not random.integers(8):
            rig.core.reset_prefix_cache()
        else:
            rig.step()
    rig.drain()
    for handle, finish in rig.finish.items():
        if finish.reason != "abort":
            rig.judge(handle)
    assert moved(rig)


def test_borrowed_blocks_stay_until_the_last_of_them_is_read(Rig: Any, depth: int) -> None:
    """A decode needs a block meanwhile; the oldest that nobody else holds is one of them. So the prompt gives way."""
    rig = cached(Rig(depth, **SIZES | {"budget": 8, "blocks": 12}), 0, 1)
    other = rig.add([1, 2, 3], 24)
    rig.step(5)
    handle = ask(rig, 1, 0, before=(4,), ratio=0.0)
    rig.drain()
    rig.judge(other)
    rig.judge(handle)
    assert moved(rig) and rig.scheduler.num_preempted


def test_an_admission_that_breaks_off_gives_back_what_it_borrowed(
    Rig: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`drain` asserts that every block is free."""
    rig = cached(Rig(depth, **SIZES), 1)
    monkeypatch.setattr(rig.allocator, "admit", lambda *given: 1 / 0)
    handle = ask(rig, 0, 1)
    rig.drain()
    assert rig.finish[handle].error == "internal" and not moved(rig)


@pytest.mark.parametrize(("windows", "sizes"), [((None, 8), (1,)), ((None, -8), (1,)), ((None, 8, None), (1, 2, 1))])
def test_groups_of_layers_are_read_each_in_its_blocks(Rig: Any, depth: int, windows: Any, sizes: Any) -> None:
    """The blocks that a window has given up are found as long as no other request has taken them."""
    rig = cached(Rig(depth, **SIZES | {"blocks": 80, "windows": windows, "sizes": sizes}), 0, 1, 2)
    handle = ask(rig, 2, 1, 0, before=(5, 6))
    rig.drain().judge(handle)
    assert sum(count for count, _, _ in moved(rig)) == 3 * 8 == rig.cached[handle]


def test_text_whose_blocks_a_window_has_lost_is_computed(Rig: Any, depth: int) -> None:
    """Tokens 4 to 7 of a text of twelve have no block in the group with a window: they are new, with their own KV."""
    rig = Rig(depth, **SIZES | {"windows": (None, 4)})
    rig.add(list(range(100, 112)), 1)
    rig.drain()
    allocator = rig.scheduler.roster.allocator
    chain = KeyChain(bytes(32), 4, array("I", range(100, 112)))
    allocator.pool.forget([allocator.pool.lookup(group_keys(chain, 1, 4, 2, 1)[0])])
    handle = rig.add([1, 2, 3, *range(100, 112), 9], 4, reused=ReusedParts(((3, 15),), 0.0))
    rig.drain().judge(handle)
    (chunk,) = [one for plan in rig.plans for one in plan.features.blended]
    assert chunk.tokens.tolist() == [*range(3, 7), *range(11, 15)] and rig.cached[handle] == 8
