"""States of recurrent layers for tests that run layers without an engine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs
from quire.contracts.parallel import Rank
from quire.kernels.states import StateMeta
from quire.kvstore.states import StateArena
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone

CPU = torch.device("cpu")


def state_arena(args: ModelArgs, num_rows: int, *, rank: Rank | None = None, dtype: str = "float32") -> StateArena:
    """Rows of the states of a model (of one rank), full of ones in every bit: NaN in each type."""
    geometry = rank_geometry(args, rank or alone(args), dtype=dtype, device="cpu", block_size=16)
    arena = StateArena(geometry, num_rows, CPU)
    arena.rows.fill_(255)
    return arena


def state_meta(starts: Tensor, lengths: Sequence[int], slots: Sequence[int]) -> StateMeta:
    """A step of sequences in these slots, without copies. starts: see `StateMeta`."""
    none = torch.zeros(max(slots, default=0) + 1, 2, dtype=torch.int32)
    return StateMeta(
        query_start=starts.int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        kept_at=none,
        kept=none,
        max_rows=int(starts.diff().max()),
    )
