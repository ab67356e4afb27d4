"""Recorded CPU steps: the layers of small steps are recorded once per number of rows, then replayed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from quire.kernels.native.recording import Buffers, KernelRecording
from quire.kernels.rope.rotary import Turns
from quire.kernels.select import Kernels
from quire.layers.context import StepContext
from quire.layers.decoder import Recurrent
from quire.layers.stack import Model, run_layers
from quire.worker.recorder import Recorder

MOST_ROWS = 16  # with more rows Python's time between two kernels is small beside the kernels'
# Kernels of a layer, at most: one with an input of its own and quantized activations has about 27, adapters add two for
# each linear layer.
KERNELS = 48
NATIVE = ("native", "panels", "invariant_cpu")  # implementations whose calls are recorded
# Rows of a step; True: decodes read a common prefix once; sequences with states; True: some rows have an adapter.
Kind = tuple[int, bool, int, bool]


@dataclass(frozen=True)
class GroupCalls:
    """The attention calls of the layers of a KV group: their rows in a step, by which they are retargeted.

    number                number of the group
    layer                 index of one of its layers
    window                tokens that a row attends to; None: all
    num_heads, head_dim   of its layers; the most, if they differ
    """

    number: int
    layer: int
    window: int | None
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class Recorded:
    """A recording of the layers' kernel calls on a CPU, with its input tensors and its output `out` [T, hidden].

    A replay first copies a step's inputs to the input tensors.

    kv_slots   slots of the step's keys in each KV group
    inputs     inputs of the layers beside the residual stream [T, L, P]; None: the model has none
    adapters   slots of the rows' adapters [T]; None: no row has one
    threads    PyTorch's number of threads when it was recorded; with another number a new recording is made
    """

    recording: KernelRecording
    hidden: Tensor
    turns: Turns
    kv_slots: tuple[Tensor, ...]
    inputs: Tensor | None
    adapters: Tensor | None
    threads: int
    out: Tensor


class LayerRecordings(Recorder):
    """The recorder of a CPU: records and replays the layers' kernel calls in steps of at most `MOST_ROWS` tokens.

    obstacles   kind of steps that could not be recorded -> the reason
    """

    def __init__(self) -> None:
        super().__init__("")
        self.obstacles: dict[Kind, str] = {}
        self._recordings: dict[Kind, Recorded] = {}
        self._buffers = Buffers()
        self._groups: tuple[GroupCalls, ...] = ()  # of the model, found at the first step

    def run_layers(self, model: Model, hidden: Tensor, ctx: StepContext, layers: Iterable[int] | None = None) -> Tensor:
        """Run the layers: replay their recording, or run them and record them if possible. See `Recorder`."""
        kernel, groups = model.kernels.attention, self._groups or _groups_of(model)
        self._groups = groups
        steps = [(one, ctx.attention[one.number], ctx.kv[one.layer].block_size) for one in groups]
        sequences = 0 if ctx.states is None else len(ctx.states.slots)
        shared, adapted = any(meta.shared is not None for meta in ctx.attention), ctx.adapters is not None
        kind = len(hidden), shared, sequences, adapted
        small = len(hidden) <= MOST_ROWS and kind not in self.obstacles
        if not (small and all(kernel.rows_only(meta, size, one.window) for one, meta, size in steps)):
            self.counts["run"] += 1
            return run_layers(model, hidden, ctx, layers)
        turns = model.rotary.rows(ctx.positions, hidden.dtype)
        found = self._recordings.get(kind)
        if found is None or found.threads != torch.get_num_threads():
            return self._record(model, kind, hidden, turns, ctx)
        slots = [meta.kv_slots for meta in ctx.attention]
        of_rows = None if ctx.adapters is None else ctx.adapters.slots
        inputs = found.hidden, found.inputs, found.adapters, *chain(*found.turns), *found.kv_slots
        for kept, new in zip(inputs, (hidden, ctx.inputs, of_rows, *chain(*turns), *slots), strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)
        for one, meta, size in steps:
            kernel.retarget(found.recording.address, meta, size, one.num_heads, one.head_dim, one.window)
        found.recording.replay()
        self.counts["replayed"] += 1
        return found.out

    def _record(self, model: Model, kind: Kind, hidden: Tensor, turns: Turns, ctx: StepContext) -> Tensor:
        """Run the layers and record them. They read copies of the step's inputs, which the recording keeps."""
        hidden, turns = hidden.clone(), tuple(tuple(rows.clone() for rows in turn) for turn in turns)
        own = tuple(replace(meta, kv_slots=meta.kv_slots.clone()) for meta in ctx.attention)
        assert [meta.kv_group for meta in own] == list(range(len(own))), "a recorded call finds its rows by the group"
        recording = KernelRecording(KERNELS * len(model.layers), self._buffers)
        # Rows that are not live are computed, too. Metadata of states are views of buffers that every step fills. A
        # further tensor of the context would be that of this step for ever.
        inputs = None if ctx.inputs is None else ctx.inputs.clone()
        adapters = None if ctx.adapters is None else replace(ctx.adapters, slots=ctx.adapters.slots.clone())
        step = replace(ctx, attention=own, live=None, inputs=inputs, adapters=adapters)
        out = recording.record(lambda: run_layers(model, hidden, step, turns=turns))
        if recording.obstacle:
            self.obstacles[kind] = recording.obstacle
            self.counts["run"] += 1
            self._recordings.pop(kind, None)
            if not self._recordings:  # drop the memory that the failed recording took
                self._buffers = Buffers()
        else:
            self.counts["recorded"] += 1
            slots = tuple(meta.kv_slots for meta in own)
            of_rows, threads = None if adapters is None else adapters.slots, torch.get_num_threads()
            self._recordings[kind] = Recorded(recording, hidden, turns, slots, inputs, of_rows, threads, out)
        return out

    def unrecorded(self) -> dict[str, str]:
        always = {
            f"more than {MOST_ROWS} rows": "Python's time between two kernels is small beside the kernels'",
            "long chunks of prompts": "their attention is divided anew in every step",
        }
        return always | {
            f"{rows} row{'s' * (rows > 1)}{' with adapters' * adapted}": why
            for (rows, _, _, adapted), why in sorted(self.obstacles.items())
        }

    def __len__(self) -> int:
        return len(self._recordings)


def _groups_of(model: Model) -> tuple[GroupCalls, ...]:
    """Return the attention calls of a model's layers, by KV group."""
    found: dict[int, GroupCalls] = {}
    for index, layer in enumerate(model.layers):
        own = layer.attention
        if own is None or isinstance(own, Recurrent):
            continue
        before = found.setdefault(own.group, GroupCalls(own.group, index, own.window, own.num_heads, own.head_dim))
        most = {"num_heads": max(before.num_heads, own.num_heads), "head_dim": max(before.head_dim, own.head_dim)}
        found[own.group] = replace(before, **most)
    return tuple(found.values())


def not_recordable(kernels: Kernels, *, divided: bool = False) -> str:
    """Return the reason why the layers of a model with these kernels cannot be recorded, or "".

    divided   other ranks hold parts of layers
    """
    if divided:
        return "layers sum over ranks, and a recording holds kernels alone"
    strange = [f"{choice.op} is {choice.name}" for choice in kernels.choices if choice.name not in NATIVE]
    if strange:
        return f"{strange[0]}, whose operations are PyTorch's"
    if "recording" in kernels.features("attention"):
        return ""
    return "a recorded call of its attention cannot be retargeted"
