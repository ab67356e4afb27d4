"""Decode steps of few rows on a CPU: the layers are recorded at the first step of so many rows, and then replayed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.native.tape import Buffers, Tape
from quire.layers.context import StepContext
from quire.layers.rope import Rotation
from quire.layers.stack import Model, run_layers

MOST_ROWS = 16  # with more, what Python takes between two kernels is little beside them
KERNELS = 16  # of a layer, at most


@dataclass(frozen=True)
class Recorded:
    """A tape, the tensors that it reads, and what it leaves."""

    tape: Tape
    hidden: Tensor
    rotation: Rotation
    kv_slots: Tensor
    threads: int
    out: Tensor


class LayerTapes:
    """Runs the layers of a model, from a tape where there can be one.

    obstacle   why nothing of this model can be recorded, or ""
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._attention = model.kernels.attention
        self._tapes: dict[int, Recorded] = {}
        self._buffers = Buffers()
        self.obstacle = "" if "tape" in model.kernels.features("attention") else "its attention is not native"

    def run(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """hidden [T, hidden] -> [T, hidden], to be read before the next step."""
        num_rows, block_size = len(hidden), ctx.kv[0].block_size
        if self.obstacle or num_rows > MOST_ROWS or not self._attention.rows_only(ctx.attention, block_size):
            return run_layers(self._model, hidden, ctx)
        rotation = self._model.rotary.rows(ctx.positions, hidden.dtype)
        found = self._tapes.get(num_rows)
        if found is None or found.threads != torch.get_num_threads():
            return self._record(hidden, rotation, ctx)
        for kept, new in zip((found.hidden, *found.rotation, found.kv_slots),
                             (hidden, *rotation, ctx.attention.kv_slots), strict=True):
            kept.copy_(new)
        args = self._model.args
        self._attention.retarget(found.tape.address, ctx.attention, block_size, args.num_heads, args.head_dim)
        found.tape.play()
        return found.out

    def _record(self, hidden: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Run the layers on copies of the step's inputs, which stay."""
        hidden, rotation, meta = hidden.clone(), (rotation[0].clone(), rotation[1].clone()), ctx.attention
        own = replace(meta, kv_slots=meta.kv_slots.clone())
        tape = Tape(KERNELS * len(self._model.layers), self._buffers)
        step = StepContext(ctx.positions, own, ctx.kv)
        out = tape.record(lambda: run_layers(self._model, hidden, step, rotation=rotation))
        self.obstacle = tape.obstacle
        if self.obstacle:  # for good
            self._tapes, self._buffers = {}, Buffers()
        else:
            threads = torch.get_num_threads()
            self._tapes[len(hidden)] = Recorded(tape, hidden, rotation, own.kv_slots, threads, out)
        return out
