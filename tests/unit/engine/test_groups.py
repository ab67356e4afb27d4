"""Several KV groups with different lifetimes: the mock notices a row that sees what is not there any more."""

import json
from pathlib import Path
from typing import Any

import pytest

import quire.bench
from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.blocks import first_seen
from quire.contracts.errors import PromptTooLong
from quire.plan.kinds import mixer
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone

from ...support.full import full_rows

BOTH = (None, 8)


def held(rig: Any, handle: int, group: int) -> int:
    """Blocks that a request holds in a group."""
    return sum(block != 0 for block in rig.allocator.table(rig.request(handle).slot, group))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_window_holds_what_its_rows_see_and_no_more(Rig: Any, depth: int, drafts: int) -> None:
    """7 tokens before the row and those in flight, in blocks of 4; full attention holds all."""
    rig = Rig(depth, windows=BOTH, blocks=80, budget=12, drafts=drafts, accepts=(3, 0, 2))
    handle = rig.add(range(50), 60)
    most = 0
    while True:
        rig.step()
        if handle in rig.finish:
            break
        most = max(most, held(rig, handle, 1))
        assert held(rig, handle, 0) * 4 >= len(rig.request(handle).tokens) - 1
        if len(rig.tokens[handle]) > 8:
            assert held(rig, handle, 1) <= (7 + 1 + depth * (1 + drafts)) // 4 + 2
    assert most <= (7 + 12) // 4 + 2
    rig.judge(handle)
    rig.drain()


@pytest.mark.parametrize("window", [2, 8, -8])
def test_a_window_keeps_what_a_drafter_with_layers_computes_again(Rig: Any, depth: int, window: int) -> None:
    """The first pass of a step has the rows that were accepted in the step before; the first row's window is there."""
    rig = Rig(depth, windows=(window,), block_size=1, blocks=60, drafts=3, drafts_cached=True, accepts=(3, 0, 2))
    handle, before, most = rig.add(range(9), 60), 0, 0
    while True:
        rig.step()
        if handle in rig.finish:
            break
        decodes = rig.plans[-1].num_decodes
        if decodes and before:
            blocks = rig.allocator.table(rig.request(handle).slot, 0)
            assert all(blocks[first_seen(before + 1, window) :]), "the drafter reads blocks that are given back"
            most = max(most, held(rig, handle, 0))
        before = rig.mock._tables[str(handle)].began if decodes else 8
    assert 0 < most <= abs(window) + 3 + depth * 4
    rig.judge(handle)
    rig.drain()


def test_steps_say_which_group_a_block_belongs_to(Rig: Any) -> None:
    rig = Rig(windows=BOTH, budget=6)
    rig.add(range(20), 3)
    rig.drain()
    (admission,) = rig.plans[0].admitted
    assert [len(ids) for ids in admission.block_ids] == [5, 2]
    assert [[group for _, group, _ in p.appended.tolist()] for p in rig.plans] == [[], [1], [1, 1], [], [0, 1], []]


def test_a_request_that_does_not_fit_in_all_groups_is_refused(Rig: Any) -> None:
    """64 tokens need 16 blocks of full attention, and 5 of a window of 8 with chunks of 8."""
    for windows, fits in (((None, 8), True), ((None, None), False), ((None, 8, 8), False), ((8, 8), True)):
        rig = Rig(windows=windows, blocks=21, budget=8)
        if fits:
            rig.add(range(44), 20)
            rig.drain()
            rig.judge(0)
        else:
            with pytest.raises(PromptTooLong, match="need more than the 21 KV blocks"):
                rig.add(range(44), 20)


def test_a_later_turn_finds_what_it_needs_of_each_group(Rig: Any, depth: int) -> None:
    rig = Rig(depth, windows=BOTH, blocks=40)
    first = rig.add(range(30), 10)
    rig.drain()
    second = rig.add([*range(30), *rig.tokens[first], 7, 8], 10)
    rig.drain()
    rig.judge(second)
    assert rig.cached[second] == 36
    (admission,) = [a for p in rig.plans for a in p.admitted][1:]
    full, window = (ids.tolist() for ids in admission.block_ids)
    assert all(full) and window[:7] == [0] * 7 and all(window[7:])


def test_completions_of_one_prompt_share_its_blocks_in_each_group(Rig: Any, depth: int) -> None:
    rig = Rig(depth, windows=BOTH, blocks=60)
    parent = rig.add(range(30), 10)
    children = [rig.add(range(30), 10, parent=parent, seed=50 + i) for i in range(3)]
    rig.drain()
    for handle in (parent, *children):
        rig.judge(handle)
    assert [rig.cached[child] for child in children] == [28] * 3


def test_prefixes_that_are_read_once_are_those_of_full_attention(Rig: Any) -> None:
    for windows, shared in ((BOTH, True), ((8, None), True), ((8,), False)):
        rig = Rig(windows=windows, blocks=1800, slots=4, budget=4000, max_len=2000)
        prompt = list(range(1400))
        parent = rig.add(prompt, 8)
        rig.add(prompt, 8, parent=parent)
        rig.step(4)
        assert bool(rig.plans[-1].shared) is shared
        rig.drain()


@pytest.mark.parametrize("blocks", [20, 12, 9])
def test_a_hit_behind_the_window_of_the_only_group_is_admitted(Rig: Any, blocks: int) -> None:
    """The second turn of a conversation: most blocks of the hit have been given back, and count as nothing."""
    rig = Rig(windows=(8,), block_size=4, blocks=blocks, budget=8, slots=4, max_len=128)
    first = rig.add(range(90), 2)
    rig.drain()
    second = rig.add([*range(90), *rig.tokens[first], 7, 8], 2)
    for _ in range(50):
        rig.step()
    assert second in rig.finish and rig.cached[second] == 88 and rig.pool.num_free == blocks


@pytest.mark.parametrize("num", [4, *full_rows([64])])
def test_long_requests_of_gemma_hold_full_layers_and_windows(Rig: Any, num: int) -> None:
    """Gemma 3 12B, requests at 32k: blocks in decode are at most 1.05 of full layers and windows by the token.

    The core and the mock have the groups of the plan, with a block of 128 tokens as on a GPU.
    """
    raw = json.loads((Path(quire.bench.__file__).parent / "models" / "gemma-3-12b" / "config.json").read_text())
    args = parse_checkpoint_config(raw)
    geometry = rank_geometry(args, alone(args), dtype="bfloat16", device="cuda", block_size=None)
    length, more = 32_768, 330
    each = geometry.request_blocks(length + more, 8192)
    rig = Rig(
        depth=2,
        slots=num,
        blocks=num * each,
        block_size=geometry.block_size,
        budget=8192,
        max_len=length + more,
        windows=geometry.windows,
        caching=False,
    )
    handles = [rig.add([(7 * i + j) % 900 for j in range(length)], more) for i in range(num)]
    held = []
    while rig.core.has_work:
        rig.step()
        if not rig.finish and all(len(rig.tokens[handle]) > 2 for handle in handles):
            held.append((rig.num_blocks - rig.pool.num_free) * geometry.page_bytes)
    token = sum(one.num_bytes(1) for one in geometry.groups[0].components)  # of a layer
    windows = [mixer(one.mixer).window for one in args.layers]
    assert (windows.count(None), windows.count(1024)) == (8, 40)
    exact = num * token * (8 * length + 40 * 1024)
    assert len(held) > 10 and max(held) <= 1.05 * exact, f"{max(held) / exact:.3f}"
    assert rig.scheduler.num_preempted == 0
