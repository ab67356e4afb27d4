"""The interfaces of the kinds of steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.contracts.params import Part
from quire.explain.verify.differences import Differences

Keep = Callable[[str, Tensor], None]  # records the result of a step
Parts = Mapping[str, Sequence[Part]]  # name of a parameter below its layer -> parts of this rank


class HalfSteps(Protocol):
    """The steps of a half of a layer.

    room    the reference's module that has the half
    paths   step -> paths of the reference's module with its result, the first that exists; else it is `room`.STEP
    inputs  step -> paths of the module whose input the step is
    cached  steps whose results are read from the KV cache, in its type
    """

    room: str
    paths: Mapping[str, tuple[str, ...]]
    inputs: Mapping[str, tuple[str, ...]]
    cached: tuple[str, ...] = ()

    def watch(self, half: Any, keep: Keep, parts: Parts) -> None:
        """Record every step of one of our modules from now on, joined from the parts of the ranks that divide it."""


class MixerSteps(HalfSteps, Protocol):
    """The steps of a mixer that attends."""

    def replace(self, differences: Differences, stage: str, q: Tensor, k: Tensor, v: Tensor) -> Iterable[Tensor]:
        """Compare the queries, keys and values [1, H, T, D] of the reference, and return Quire's."""


class FeedForwardSteps(HalfSteps, Protocol):
    """The steps of a feed-forward part."""
