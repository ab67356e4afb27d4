"""Plans of linear layers: the packed layout of each, and its kernels by number of rows. No torch."""

import importlib
from collections.abc import Iterable
from types import ModuleType

import msgspec

from quire.contracts.params import Param
from quire.contracts.scheme import Scheme
from quire.kernels.select import Choice

NOT_LINEAR = ".kv_up"  # the kernels of latent attention run the projection of latents


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
        return importlib.import_module(f"quire.kernels.linear.{self.layout}")


def plan_linears(params: Iterable[Param], choices: Iterable[Choice], *, exact: bool) -> dict[str, LinearPlan]:
    """Return module name -> plan, for every linear layer (module with a matrix) of `params`.

    choices  implementations of `linear`: one for unquantized weights, one for each kind of quantized weights in
             `params`
    exact    True: scores of routers must not be rounded to the model's dtype. If the chosen implementation rounds,
             routers take "ref"
    """
    plans: dict[str, LinearPlan] = {}
    chosen = {frozenset(choice.weights): choice for choice in choices if choice.op == "linear"}
    for param in params:
        if not is_linear(param):
            continue
        choice = chosen[param.scheme.needs if param.scheme else frozenset()]
        rounded = exact and param.module.endswith(".router") and "exact" not in choice.features
        plans[param.module] = (
            _exact(param, choice)
            if rounded
            else LinearPlan(
                format=param.format,
                layout=choice.name,
                ranges=(RowRange(None, choice.name),),
                features=choice.features,
                reason=choice.reason,
                rejected=choice.rejected,
                scheme=param.scheme,
            )
        )
    return plans


def is_linear(param: Param) -> bool:
    """Return True for a matrix that `quire.kernels.linear` multiplies; False for experts and for kv_up of MLA."""
    return len(param.shape) == 2 and param.name.endswith(".weight") and not param.module.endswith(NOT_LINEAR)


def _exact(param: Param, choice: Choice) -> LinearPlan:
    """Return the plan of a router whose scores are not rounded: one rounding more sends tokens to other experts."""
    why = (choice.name, "rounds scores to the model's type")
    return LinearPlan(
        format=param.format,
        layout="ref",
        ranges=(RowRange(None, "ref"),),
        features=("exact",),
        reason="scores of routers are not rounded",
        rejected=(*choice.rejected, why),
    )
