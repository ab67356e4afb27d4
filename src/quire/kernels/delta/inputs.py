"""DeltaInputs for tests and measurements of the gated delta rule."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.states import StateMeta, StateView

FORMS = (
    DeltaForm(key_heads=2, heads=4, key_dim=16, value_dim=16, eps=1e-6),
    DeltaForm(key_heads=3, heads=3, key_dim=12, value_dim=24, eps=1e-5, act="sigmoid", doubled=True),
    DeltaForm(key_heads=1, heads=3, key_dim=40, value_dim=72, eps=1e-6, lowest=-5.0),
)


class Sequence(NamedTuple):
    """A sequence: its length before the step, its rows, the lengths after which a copy is kept (0: none), and the
    pending rows that were accepted."""

    past: int
    rows: int
    kept_at: tuple[int, int] = (0, 0)
    accepted: int = 0


class DeltaInputs(NamedTuple):
    """Arguments of `mix`, in their order."""

    qkv: Tensor
    gate: Tensor
    decay: Tensor
    strength: Tensor
    weights: DeltaWeights
    state: StateView
    meta: StateMeta
    form: DeltaForm


def make(
    form: DeltaForm,
    sequences: tuple[Sequence, ...],
    dtype: torch.dtype = torch.float32,
    *,
    by_channel: bool = False,
    taps: int = 4,
    pending: int = 0,
    seed: int = 0,
) -> DeltaInputs:
    """Return random inputs of a step. The arena has a row more for each sequence, then rows for copies.

    pending   room for so many pending rows; 0: states have none
    Rows of the arena that no sequence has, those of sequences that begin, and pending rows that were not accepted, hold
    NaN.
    """
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    tokens, count = sum(one.rows for one in sequences), len(sequences)
    widths = [form.channels, form.heads * form.value_dim, form.heads * (form.key_dim if by_channel else 1), form.heads]
    rows = random(tokens, 8 + sum(widths)).to(dtype)[:, 8:].split(widths, 1)
    weights = DeltaWeights(
        conv=random(taps, form.channels) * 0.5,
        rate=random(form.heads) * 0.5,
        shift=random(widths[2]),
        norm=1 + 0.2 * random(form.value_dim),
    )
    arena = 4 * count
    columns = torch.full((arena, taps - 1, form.channels), torch.nan, dtype=dtype)
    matrix = torch.full((arena, 2 * form.heads, form.key_dim, form.value_dim), torch.nan)[:, form.heads :]
    off = torch.full((arena, pending, sum(widths) - widths[1]), torch.nan, dtype=dtype) if pending else None
    at = torch.full((arena, 64), -1, dtype=torch.int32)[:, :1] if pending else None
    places = torch.randperm(2 * count, generator=draw)[:count]
    for one, place in zip(sequences, places.tolist(), strict=True):
        if one.past:
            columns[place] = random(taps - 1, form.channels).to(dtype)
            matrix[place] = random(form.heads, form.key_dim, form.value_dim)
            if off is not None and at is not None:
                at[place] = one.past - one.accepted
                off[place, : one.accepted] = random(one.accepted, off.shape[2]).to(dtype)
    kept_at, kept = (torch.zeros(arena, 2, dtype=torch.int32) for _ in range(2))
    kept_at[places] = torch.tensor([one.kept_at for one in sequences], dtype=torch.int32)
    kept[places] = 2 * count + torch.arange(2 * count, dtype=torch.int32).view(count, 2)
    starts = torch.tensor([0, *(one.rows for one in sequences)]).cumsum(0)
    meta = StateMeta(
        query_start=starts.int(),
        seq_lens=torch.tensor([one.past + one.rows for one in sequences], dtype=torch.int32),
        slots=places.int(),
        kept_at=kept_at,
        kept=kept,
        max_rows=max(one.rows for one in sequences),
    )
    return DeltaInputs(*rows, weights, StateView(columns, matrix, off, at), meta, form)
