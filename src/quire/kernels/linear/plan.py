"""Plans of linear layers: one packed layout each, and the kernels that read it by number of rows. No torch."""

import importlib
from collections.abc import Iterable
from types import ModuleType

import msgspec

from quire.contracts.params import Param
from quire.kernels.select import Choice

NOT_LINEAR = ".kv_up"  # the projection of latents is run by the kernels of latent attention


class RowRange(msgspec.Struct, frozen=True):
    """The implementation of `quire.kernels.linear` that computes products of up to `most` rows; None: of any number."""

    most: int | None
    kernel: str


class LinearPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which a linear layer runs.

    format    of its stored weights, a name of `quire.quantization.formats`
    layout    the implementation of `quire.kernels.linear` that packs them
    ranges    kernels that read this layout, by number of rows, ascending; the last takes any number
    features  of these kernels, words of `quire.kernels.linear`
    reason    for the choice;  rejected  (implementation, why not) of those before it
    """

    format: str
    layout: str
    ranges: tuple[RowRange, ...]
    features: tuple[str, ...]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    def load(self) -> ModuleType:
        """Import the kernel. One range is all that there is so far."""
        (only,) = self.ranges
        assert only.most is None and only.kernel == self.layout, "a kernel reads the layout that it has packed"
        return importlib.import_module(f"quire.kernels.linear.{self.layout}")


def plan_linears(params: Iterable[Param], choice: Choice, *, exact: bool) -> dict[str, LinearPlan]:
    """The plan of every module of `params` that multiplies with a matrix, by its name.

    choice   of the implementation for all of them
    exact    scores of routers are not rounded to the model's type: where the choice would, they take the reference
    """
    plans: dict[str, LinearPlan] = {}
    for param in params:
        if len(param.shape) < 2 or not param.name.endswith(".weight") or param.module.endswith(NOT_LINEAR):
            continue
        rounded = exact and param.module.endswith(".router") and "exact" not in choice.features
        plans[param.module] = _exact(param, choice) if rounded else LinearPlan(
            format=param.format, layout=choice.name, ranges=(RowRange(None, choice.name),), features=choice.features,
            reason=choice.reason, rejected=choice.rejected)  # fmt: skip
    return plans


def _exact(param: Param, choice: Choice) -> LinearPlan:
    """Few outputs, and one rounding more sends tokens to other experts."""
    why = (choice.name, "rounds scores to the model's type")
    return LinearPlan(format=param.format, layout="ref", ranges=(RowRange(None, "ref"),), features=("exact",),
                      reason="scores of routers are not rounded", rejected=(*choice.rejected, why))  # fmt: skip
