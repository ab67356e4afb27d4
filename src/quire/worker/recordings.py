"""Recorded CPU steps: the layers of small steps are recorded once per number of rows, then replayed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.native.recording import Buffers, KernelRecording
from quire.kernels.rope.rotary import Rotation
from quire.kernels.select import Kernels
from quire.layers.context import StepContext
from quire.layers.stack import Model, run_layers
from quire.worker.recorder import Recorder

MOST_ROWS = 16  # with more rows Python's time between two kernels is small beside the kernels'
KERNELS = 16  # kernels of a layer, at most
NATIVE = ("native", "panels")  # implementations whose calls are recorded
Kind = tuple[int, bool]  # rows of a step; True: decodes read a common prefix once


@dataclass(frozen=True)
class Recorded:
    """A recording of the layers' kernel calls on a CPU, with its input tensors and its output `out` [T, hidden].

    A replay first copies a step's inputs to the input tensors.

    threads   PyTorch's number of threads when it was recorded; with another number a new recording is made
    """

    recording: KernelRecording
    hidden: Tensor
    rotation: Rotation
    kv_slots: Tensor
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

    def run_layers(self, model: Model, hidden: Tensor, ctx: StepContext, layers: Iterable[int] | None = None) -> Tensor:
        """Run the layers: replay their recording, or run them and record them if possible. See `Recorder`."""
        (mixer,) = model.args.mixers  # a call is retargeted by the sizes that all layers have
        (attention,), block_size, kernel = ctx.attention, ctx.kv[0].block_size, model.kernels.attention
        kind, window = (len(hidden), attention.shared is not None), model.layers[0].attention.window
        if len(hidden) > MOST_ROWS or kind in self.obstacles or not kernel.rows_only(attention, block_size, window):
            self.counts["run"] += 1
            return run_layers(model, hidden, ctx, layers)
        rotation = model.rotary.rows(ctx.positions, hidden.dtype)
        found = self._recordings.get(kind)
        if found is None or found.threads != torch.get_num_threads():
            return self._record(model, kind, hidden, rotation, ctx)
        for kept, new in zip(
            (found.hidden, *found.rotation, found.kv_slots), (hidden, *rotation, attention.kv_slots), strict=True
        ):
            kept.copy_(new)
        kernel.retarget(found.recording.address, attention, block_size, mixer.num_heads, mixer.head_dim, window)
        found.recording.replay()
        self.counts["replayed"] += 1
        return found.out

    def _record(self, model: Model, kind: Kind, hidden: Tensor, rotation: Rotation, ctx: StepContext) -> Tensor:
        """Run the layers and record them. They read copies of the step's inputs, which the recording keeps."""
        hidden, rotation, meta = hidden.clone(), (rotation[0].clone(), rotation[1].clone()), ctx.attention[0]
        own = replace(meta, kv_slots=meta.kv_slots.clone())
        recording = KernelRecording(KERNELS * len(model.layers), self._buffers)
        step = replace(ctx, attention=(own,), live=None)  # rows that are not live are computed, too
        out = recording.record(lambda: run_layers(model, hidden, step, rotation=rotation))
        if recording.obstacle:
            self.obstacles[kind] = recording.obstacle
            self.counts["run"] += 1
            self._recordings.pop(kind, None)
            if not self._recordings:  # drop the memory that the failed recording took
                self._buffers = Buffers()
        else:
            self.counts["recorded"] += 1
            self._recordings[kind] = Recorded(recording, hidden, rotation, own.kv_slots, torch.get_num_threads(), out)
        return out

    def unrecorded(self) -> dict[str, str]:
        always = {
            f"more than {MOST_ROWS} rows": "Python's time between two kernels is small beside the kernels'",
            "long chunks of prompts": "their attention is divided anew in every step",
        }
        return always | {f"{rows} row{'s' * (rows > 1)}": why for (rows, _), why in sorted(self.obstacles.items())}

    def __len__(self) -> int:
        return len(self._recordings)


def not_recordable(kernels: Kernels, num_groups: int, *, divided: bool = False) -> str:
    """Return the reason why the layers of a model with these kernels cannot be recorded, or "".

    divided   other ranks hold parts of layers
    """
    if divided:
        return "layers sum over ranks, and a recording holds kernels alone"
    if num_groups > 1:
        return f"the layers are in {num_groups} KV groups, and a recording has the block tables of one"
    strange = [f"{choice.op} is {choice.name}" for choice in kernels.choices if choice.name not in NATIVE]
    if strange:
        return f"{strange[0]}, whose operations are PyTorch's"
    if "recording" in kernels.features("attention"):
        return ""
    return "a recorded call of its attention cannot be retargeted"
