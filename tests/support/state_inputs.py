"""Steps of sequences with states, for tests of the kernels that update states."""

from collections.abc import Sequence as Listed
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from quire.kernels.delta.inputs import FORMS, Sequence, make
from quire.kernels.states import StateMeta, StateView

STEPS = {
    "decodes": (Sequence(5, 1), Sequence(0, 1), Sequence(70, 1)),
    "prompts": (Sequence(0, 3), Sequence(0, 1), Sequence(2, 2), Sequence(9, 70)),
    "mixed": (Sequence(7, 1), Sequence(0, 0), Sequence(64, 5), Sequence(0, 33)),
    "copies": (
        Sequence(7, 1, (8, 0)),
        Sequence(0, 5, (2, 4)),
        Sequence(64, 9, (64, 74)),  # before the step and after it: no copy
        Sequence(0, 33, (0, 33)),
        Sequence(2, 2, (3, 4)),
    ),
}


def meta_of(sequences: Listed[Sequence]) -> StateMeta:
    """The metadata of a step; the arena has four rows for each sequence, of which the last two are for copies."""
    return make(FORMS[0], tuple(sequences)).meta


def arena(meta: StateMeta, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """An arena of random states of the sequences that have rows before the step; all others hold NaN."""
    states = torch.full((len(meta.kept), *shape), torch.nan, dtype=dtype)
    draw = torch.Generator().manual_seed(seed)
    rows = (meta.query_start[1:] - meta.query_start[:-1]).tolist()
    for slot, length, count in zip(meta.slots.tolist(), meta.seq_lens.tolist(), rows, strict=True):
        if length > count:
            states[slot] = torch.randn(shape, generator=draw).to(dtype)
    return states


def pending_rows(
    sequences: Listed[Sequence], meta: StateMeta, room: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Pending rows and lengths of states: accepted rows are random, all others hold NaN."""
    rows = torch.full((len(meta.kept), room, width), torch.nan, dtype=dtype)
    at = torch.full((len(meta.kept), 64), -1, dtype=torch.int32)[:, :1]
    draw = torch.Generator().manual_seed(3)
    for one, slot in zip(sequences, meta.slots.tolist(), strict=True):
        if one.past:
            at[slot] = one.past - one.accepted
            rows[slot, : one.accepted] = torch.randn(one.accepted, width, generator=draw).to(dtype)
    return rows, at


def run(mix: Any, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The result of a kernel, and the states after it; the states of `given` stay as they are."""
    own = tuple(deepcopy(one) if isinstance(one, StateView) else one for one in given)
    state = next(one for one in own if isinstance(one, StateView))
    parts = mix(*own), state.columns, state.matrix, state.pending, state.at
    return tuple(one for one in parts if one is not None)
