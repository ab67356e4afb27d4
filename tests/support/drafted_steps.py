"""Steps of the gated delta rule with drafts: every number of accepted ones, and random schedules."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, ref
from quire.kernels.delta.inputs import DeltaInputs, Sequence, make

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


def decode(implementation: Any, given: DeltaInputs, schedule: Iterable[tuple[int, int]], kept_at: int = 0) -> Tensor:
    """Return the outputs of all rows of a sequence's inputs, by steps of (rows, rows that are accepted).

    Rows that are rejected have random inputs, and NaN in the last one.
    """
    draw, past, outputs = torch.Generator().manual_seed(5), 0, list[Tensor]()
    slot = given.meta.slots
    given.meta.kept_at[slot.long()] = torch.tensor([[kept_at, 0]], dtype=torch.int32)
    for rows, right in schedule:
        inputs = list[Tensor]()
        for one in given[:4]:
            wrong = torch.randn((rows - right, one.shape[1]), generator=draw)
            wrong[-1:] = torch.nan
            inputs.append(torch.cat((one[past : past + right], wrong)))
        step = replace(
            given.meta,
            query_start=torch.tensor([0, rows], dtype=torch.int32),
            seq_lens=torch.tensor([past + rows], dtype=torch.int32),
            max_rows=rows,
            decode_rows=1 if given.state.pending is None else given.state.pending.shape[1],
            plans={},
        )
        outputs.append(implementation.mix(*inputs, given.weights, given.state, step, given.form)[:right])
        past += right
    return torch.cat(outputs)


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
    """Check outputs and a copy of a schedule with drafts against plain decoding by the reference.

    number   of the schedule: below ROOM, each step accepts number + 1 rows
    """
    by_channel, one = number % 2 == 1, (Sequence(0, LENGTH),)
    plain = make(form, one, by_channel=by_channel)
    drafted = make(form, one, by_channel=by_channel, pending=ROOM)
    wanted = decode(ref, plain, [(1, 1)] * LENGTH, KEPT_AT)
    found = decode(implementation, drafted, schedules(LENGTH, ROOM)[number], KEPT_AT)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    kept = int(drafted.meta.kept[drafted.meta.slots[0], 0])
    assert drafted.state.at is not None and int(drafted.state.at[kept]) == KEPT_AT
    for part in ("columns", "matrix"):
        mine, other = getattr(drafted.state, part)[kept], getattr(plain.state, part)[kept]
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-5)
