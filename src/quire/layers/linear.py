"""Linear projections, fused over their checkpoint parts, and how every layer's weights are packed."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from quire.layers.context import Build
from quire.quantization import unquantized


class Linear(nn.Module):
    """[T, in_features] -> [T, sum of parts].

    `parts` maps each checkpoint part to its output rows, in stacking order; a projection of one part names it "".
    Parameters `weight` and `bias` exist until `pack`, which turns them into the kernel's layout.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool, build: Build) -> None:
        super().__init__()
        self.kernel = build.kernels.linear
        self.rows = unquantized.rows_of(parts)
        shapes = unquantized.describe(parts, in_features, bias)
        self.weight: nn.Parameter | None = build.parameter(*shapes["weight"])
        self.bias: nn.Parameter | None = build.parameter(*shapes["bias"]) if bias else None
        self.packed: unquantized.PackedLinear | None = None

    def pack(self) -> None:
        """Reorder the weights for the kernel and free the plain ones; once, after loading."""
        assert self.weight is not None, "packed twice"
        self.packed = unquantized.pack(self.kernel, self.weight, self.bias)
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        assert self.packed is not None, "run before pack()"
        return unquantized.run(self.kernel, x, self.packed)


@runtime_checkable
class Packs(Protocol):
    """A layer whose loaded weights become something else before the first step."""

    def pack(self) -> None:
        """Do it; once, after loading."""


def pack_layers(model: nn.Module) -> None:
    """Call `pack` on every layer below `model` that has one, in order."""
    for module in model.modules():
        if module is not model and isinstance(module, Packs):
            module.pack()


def parameter_rows(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Parameter, dict[str, tuple[int, int]]]]:
    """(name, parameter, rows of each part) for `model.named_modules()`; what is not fused has the one part ""."""
    for prefix, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            rows = module.rows if isinstance(module, Linear) else {"": (0, parameter.shape[0])}
            yield full, parameter, rows
