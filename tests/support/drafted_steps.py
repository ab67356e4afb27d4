"""Steps of kernels with states, with drafts: every number of accepted ones, and random schedules."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, ref
from quire.kernels.delta.inputs import Sequence, make
from quire.kernels.states import StateMeta, StateView

ROOM, LENGTH, KEPT_AT = 4, 60, 41
PENDING = {
    "drafts": tuple(Sequence(9, 1 + i % 4, accepted=i) for i in range(5)),
    "first drafts": (Sequence(0, 1), Sequence(1, 4, accepted=1), Sequence(2, 3, (3, 5), accepted=2)),
    "copies of drafts": (Sequence(9, 4, (10, 13), accepted=1), Sequence(9, 4, (9, 14), accepted=4), Sequence(5, 4)),
    "mixed with prompts": (
        Sequence(9, 3, accepted=2),
        Sequence(9, 0, accepted=2),
        Sequence(8, 33, (16, 40), accepted=3),
        Sequence(0, 20, (16, 0)),
        Sequence(0, 4, (4, 2)),
    ),
}


def decode(mix: Any, given: tuple[Any, ...], schedule: Iterable[tuple[int, int]], kept_at: int = 0) -> Tensor:
    """Return the outputs of all rows of a sequence's inputs, by steps of (rows, rows that are accepted).

    given   arguments of `mix`: first those with rows, then others, with a state and the metadata of a step
    Rows that are rejected have random inputs, and NaN in the last one.
    """
    draw, past, outputs = torch.Generator().manual_seed(5), 0, list[Tensor]()
    tensors = list(takewhile(lambda one: isinstance(one, Tensor), given))
    state, meta = state_of(given), next(one for one in given if isinstance(one, StateMeta))
    meta.kept_at[meta.slots.long()] = torch.tensor([[kept_at, 0]], dtype=torch.int32)
    for rows, right in schedule:
        inputs = list[Tensor]()
        for one in tensors:
            wrong = torch.randn((rows - right, one.shape[1]), generator=draw)
            wrong[-1:] = torch.nan
            inputs.append(torch.cat((one[past : past + right], wrong)))
        step = replace(
            meta,
            query_start=torch.tensor([0, rows], dtype=torch.int32),
            seq_lens=torch.tensor([past + rows], dtype=torch.int32),
            max_rows=rows,
            decode_rows=1 if state.pending is None else state.pending.shape[1],
            plans={},
        )
        others = (step if one is meta else one for one in given[len(tensors) :])
        outputs.append(mix(*inputs, *others)[:right])
        past += right
    return torch.cat(outputs)


def state_of(given: tuple[Any, ...]) -> StateView:
    """The state among the arguments of a kernel."""
    return next(one for one in given if isinstance(one, StateView))


def schedules(length: int, room: int) -> list[list[tuple[int, int]]]:
    """Return schedules of `decode` for so many rows: one for each number of accepted rows, then random ones.

    Each begins with a chunk of a prompt; the random ones have further chunks, of any size, as after a preemption.
    """
    found = list[list[tuple[int, int]]]()
    for draw in [random.Random(seed) for seed in range(12)]:
        fixed = len(found) + 1 if len(found) < room else 0
        past, steps = 7, [(7, 7)]
        while past < length:
            rows = draw.choice([draw.randint(1, room), draw.randint(1, 12)])
            right = rows if rows > room else draw.randint(1, rows)
            rows, right = (room, fixed) if fixed else (rows, right)
            right = min(right, length - past)
            steps.append((right if rows > room else rows, right))
            past += right
        found.append(steps)
    return found


def check_decodes(implementation: Any, form: DeltaForm, number: int) -> None:
    """Check the gated delta rule of `implementation` by `check_schedule`, with decays by channel in each second one."""
    given = [make(form, (Sequence(0, LENGTH),), by_channel=number % 2 == 1, pending=room) for room in (0, ROOM)]
    check_schedule(implementation.mix, ref.mix, given[0], given[1], number)


def check_schedule(mix: Any, truth: Any, plain: tuple[Any, ...], drafted: tuple[Any, ...], number: int) -> None:
    """Check outputs and a copy of a schedule with drafts against plain decoding by the reference `truth`.

    plain, drafted   arguments of the kernel for LENGTH rows of a sequence; the latter have room for ROOM pending rows
    number           of the schedule: below ROOM, each step accepts number + 1 rows
    """
    wanted = decode(truth, plain, [(1, 1)] * LENGTH, KEPT_AT)
    found = decode(mix, drafted, schedules(LENGTH, ROOM)[number], KEPT_AT)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    meta, state = next(one for one in drafted if isinstance(one, StateMeta)), state_of(drafted)
    kept = int(meta.kept[meta.slots[0], 0])
    assert state.at is not None and int(state.at[kept]) == KEPT_AT
    for one, other in ((state.columns, state_of(plain).columns), (state.matrix, state_of(plain).matrix)):
        if one is not None and other is not None:
            torch.testing.assert_close(one[kept], other[kept], rtol=2e-5, atol=2e-5)
