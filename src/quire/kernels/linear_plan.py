"""Plans of linear layers: the packed layout of each, and its kernels by number of rows. No torch."""

import importlib
from types import ModuleType

import msgspec

from quire.contracts.scheme import Scheme
from quire.kernels.supports import module_of


class RowRange(msgspec.Struct, frozen=True):
    """The name of an implementation of `quire.kernels.linear`, for inputs of up to `most` rows (None: any number)."""

    most: int | None
    kernel: str


class LinearPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a linear layer.

    format     format of the stored weights, a name of `quire.quantization.formats`
    scheme     scheme of quantized weights; None: unquantized
    layout     the implementation of `quire.kernels.linear` that packs the weights
    ranges     kernels that read this layout, by number of rows, ascending; the last takes any number
    features   features of these kernels, words of `quire.kernels.linear`
    reason     reason of the choice
    rejected   (implementation, reason why it was not chosen), for each that is preferred to the chosen one
    """

    format: str
    layout: str
    ranges: tuple[RowRange, ...]
    features: tuple[str, ...]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    scheme: Scheme | None = None

    def load(self) -> ModuleType:
        """Import and return the kernel's module. So far a plan has exactly one range."""
        (only,) = self.ranges
        assert only.most is None and only.kernel == self.layout, "a kernel reads the layout that it has packed"
        return importlib.import_module(module_of("linear", self.layout))
