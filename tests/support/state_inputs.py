"""Steps of sequences with states, for tests of the kernels that update states."""

from collections.abc import Iterator
from collections.abc import Sequence as Listed
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.delta.inputs import FORMS, Sequence, make
from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.shortconv import ShortConvWeights
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
CHUNKED = {  # with rows around multiples of 64, where chunks of prompts end
    "decodes": (Sequence(5, 1), Sequence(0, 1), Sequence(0, 0), Sequence(70, 1, (71, 0))),
    "edges": tuple(Sequence(0, rows) for rows in (63, 64, 65, 1)),
    "two chunks": tuple(Sequence(0, rows) for rows in (127, 128, 129)),
    "resumed": tuple(Sequence(past, 66) for past in (1, 63, 64, 65, 127)),
    "mixed": (Sequence(7, 1), Sequence(0, 0), Sequence(64, 5), Sequence(0, 33), Sequence(2, 1), Sequence(0, 0)),
    "copies": (
        Sequence(7, 1, (8, 0)),
        Sequence(0, 5, (2, 4)),
        Sequence(64, 9, (64, 74)),  # before the step and after it: no copy
        Sequence(0, 130, (64, 129)),
        Sequence(2, 2, (3, 4)),
        Sequence(60, 70, (62, 128)),
    ),
}
LONG = {  # for a GPU
    "one": (Sequence(70, 1),),
    "decodes": tuple(Sequence(past, 1, (past + 1, 0) if past % 9 == 0 else (0, 0)) for past in range(0, 120, 3)),
    "edges": tuple(Sequence(past, rows) for past in (0, 63, 64) for rows in (1, 63, 64, 65, 127, 129)),
    "mixed": (*(Sequence(past, 1) for past in range(9)), Sequence(0, 0), Sequence(0, 300, (17, 256)), Sequence(70, 40)),
    "prompt": (Sequence(0, 1000, (512, 1000)),),
}
MAMBA = (
    MambaForm(heads=4, groups=2, head_dim=16, state_dim=24),
    MambaForm(heads=6, groups=1, head_dim=20, state_dim=9, norm="first", eps=1e-3, lowest=0.3, highest=0.9),
    MambaForm(heads=2, groups=2, head_dim=72, state_dim=16, norm=""),
)
Rows = tuple[Any, ...]  # arguments of `mix`


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


def in_bfloat16(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a kernel with the matrices of the states rounded to bfloat16."""

    def rounded(state: StateView) -> StateView:
        assert state.matrix is not None
        wide = torch.cat((state.matrix, state.matrix), 1).bfloat16()
        return replace(state, matrix=wide[:, state.matrix.shape[1] :])

    return tuple(rounded(one) if isinstance(one, StateView) else one for one in given)


def check_bfloat16(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Check outputs and states of a kernel against those of the reference, where matrices are bfloat16.

    Sums in another order round a few numbers to the other neighbour, which later rows see.
    """
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-2, atol=2e-2)
    assert found[2].dtype == torch.bfloat16
    torch.testing.assert_close(found[2], wanted[2], rtol=2e-2, atol=2e-2, equal_nan=True)
    there = ~wanted[2].isnan()
    assert (found[2] == wanted[2])[there].float().mean() > 0.97
    for one, other in zip((found[1], *found[3:]), (wanted[1], *wanted[3:]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def mamba_step(form: MambaForm, sequences: Listed[Sequence], dtype: torch.dtype = torch.float32, room: int = 0) -> Rows:
    """Random arguments of Mamba 2 for a step. Rows are slices of longer rows. room: for pending rows; 0: no drafts."""
    draw, meta = torch.Generator().manual_seed(2), meta_of(sequences)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    taps, widths = 4 - (form.groups == 1), [form.width, form.channels, form.heads]
    gate, inner, step = random(int(meta.query_start[-1]), 8 + sum(widths)).to(dtype)[:, 8:].split(widths, 1)
    weights = MambaWeights(
        conv=random(taps, form.channels) * 0.5,
        rate=random(form.heads) * 0.5,
        shift=random(form.heads),
        skip=random(form.heads),
        bias=random(form.channels) if form.norm else None,
        norm=1 + 0.2 * random(form.width) if form.norm else None,
    )
    columns = arena(meta, (taps - 1, form.channels), dtype)
    matrix = arena(meta, (2 * form.heads, form.state_dim, form.head_dim), torch.float32)[:, form.heads :]
    later = pending_rows(sequences, meta, room, form.channels + form.heads, dtype) if room else (None, None)
    return inner, gate, step, weights, StateView(columns, matrix, *later), meta, form


def conv_step(
    sequences: Listed[Sequence], channels: int, taps: int = 3, dtype: torch.dtype = torch.float32, room: int = 0
) -> Rows:
    """Random arguments of a short convolution for a step. An odd number of channels has biases. room: see above."""
    draw, meta = torch.Generator().manual_seed(1), meta_of(sequences)
    rows = torch.randn(int(meta.query_start[-1]), 3 * channels + 8, generator=draw).to(dtype)[:, 8:]
    bias = torch.randn(channels, generator=draw) if channels % 2 else None
    weights = ShortConvWeights(torch.randn(taps, channels, generator=draw), bias)
    later = pending_rows(sequences, meta, room, channels, dtype) if room else (None, None)
    return rows, weights, StateView(arena(meta, (taps - 1, channels), dtype), None, *later), meta


def resumed(given: Rows, states: tuple[Tensor, ...], past: int) -> Rows:
    """The arguments of the step behind the first `past` rows of a sequence, of which `states` has a copy at `past`."""
    place = next(i for i, one in enumerate(given) if isinstance(one, StateView))
    meta = given[place + 1]
    slot, total = int(meta.slots[0]), int(meta.query_start[-1])
    copy = int(meta.kept[slot, 0])
    state = deepcopy(given[place])
    for target, source in zip((state.columns, state.matrix), states, strict=False):
        target[slot] = source[copy]
    rest = replace(
        meta,
        query_start=torch.tensor([0, total - past], dtype=torch.int32, device=meta.slots.device),
        kept_at=torch.zeros_like(meta.kept_at),
        plans={},
    )
    return (
        *(one[past:] if isinstance(one, Tensor) else one for one in given[:place]),
        state,
        rest,
        *given[place + 2 :],
    )


def with_meta(given: Rows, **fields: Any) -> Rows:
    """The arguments of a step with other fields of its metadata, and no plans of it."""
    return tuple(replace(one, plans={}, **fields) if isinstance(one, StateMeta) else one for one in given)


def on_gpu(given: Rows) -> Rows:
    """The arguments of a step in the GPU's memory. Rows stay slices of longer rows."""
    own = [one for one in given if isinstance(one, Tensor)]
    padded = torch.cat((own[0][:, :8], *own), 1).cuda()[:, 8:]
    rows = iter(padded.split([one.shape[1] for one in own], 1))

    def moved(one: Any) -> Any:
        if isinstance(one, Tensor):
            return next(rows)
        tensors = {name: each.cuda() for name, each in vars(one).items() if isinstance(each, Tensor)}
        return replace(one, **tensors) if tensors else one

    return tuple(map(moved, given))


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    """Alike as a whole, and NaN in the same places."""
    assert found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan())
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-9))
    assert error <= bound, error


def captured(mix: Any, given: Rows) -> Iterator[tuple[Tensor, ...]]:
    """Capture a step in a CUDA graph; yield what `run` returns, of three replays from the same states."""
    own = tuple(deepcopy(one) if isinstance(one, StateView) else one for one in given)
    before, state = (next(one for one in step if isinstance(one, StateView)) for step in (given, own))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mix(*own)
    for _ in range(3):
        for name, tensor in vars(state).items():
            if tensor is not None:
                tensor.copy_(getattr(before, name))
        graph.replay()
        yield tuple(one for one in (y, state.columns, state.matrix, state.pending, state.at) if one is not None)


def poisoned() -> Iterator[None]:
    """Memory is NaN until it is written; of a fixture."""
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")
