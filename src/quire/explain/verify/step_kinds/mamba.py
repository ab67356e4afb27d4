"""Steps of recurrent layers with one projection before their kernel: Mamba 2 and short convolutions."""

from collections.abc import Mapping

from quire.explain.verify.recording import on_result, on_sum
from quire.explain.verify.step_kinds.interfaces import Keep
from quire.layers.mamba import Mamba
from quire.layers.shortconv import ShortConv


class ScanSteps:
    """The steps of such a layer. A `HalfSteps`.

    room   the reference's module, by either of its names
    inner  name of the step between the two projections
    """

    def __init__(self, room: str, inner: str, *others: str) -> None:
        rooms = (room, *others)
        output = tuple(f"{one}.out_proj" for one in rooms)
        self.room, self.inner = room, inner
        self.paths: Mapping[str, tuple[str, ...]] = {
            "in_proj": tuple(f"{one}.in_proj" for one in rooms),
            "out_proj": output,
        }
        self.inputs: Mapping[str, tuple[str, ...]] = {inner: output}

    def watch(self, layer: Mamba | ShortConv, keep: Keep) -> None:
        """Record the first projection, the result of the kernel, and its projection."""
        on_result(layer.input, keep, "in_proj")
        on_sum(layer.output, keep, self.inner, "out_proj")
