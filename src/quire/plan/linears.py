"""Plans of linear layers: the packed layout of each, and its kernels by number of rows. No torch."""

from collections.abc import Iterable

import msgspec

from quire.args.checkpoint import ModelArgs
from quire.contracts.params import Param
from quire.kernels.linear_plan import LinearPlan, RowRange
from quire.kernels.select import Choice

NOT_LINEAR = ".kv_up"  # the kernels of latent attention run the projection of latents
WEIGHS = ".index.heads"  # the weights of an indexer's heads, which are never rounded


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
        scored = param.module.endswith(WEIGHS) or (exact and param.module.endswith(".router"))
        rounded = scored and "exact" not in choice.features
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
    """Return the plan of a router or an indexer whose scores are not rounded: one rounding more chooses others."""
    why = (choice.name, "rounds scores to the model's type")
    return LinearPlan(
        format=param.format,
        layout="ref",
        ranges=(RowRange(None, "ref"),),
        features=("exact",),
        reason=f"scores of {'indexers' if param.module.endswith(WEIGHS) else 'routers'} are not rounded",
        rejected=(*choice.rejected, why),
    )


def linear_plans(
    args: ModelArgs, params: Iterable[Param], choices: Iterable[Choice], *, adapted: bool = False
) -> dict[str, LinearPlan]:
    """Return name of a linear layer -> plan of its kernel. `choices` holds the kernel chosen for each operation.

    adapted   True: adapters may change the layers. They are added between a gated product and its activation, so a
              kernel that packs weights for both in a way of its own runs the product alone
    """
    plans = plan_linears(params, choices, exact=args.moe is not None and args.moe.router_float)
    if not adapted:
        return plans
    return {
        name: plan
        if {"plain", "ungated"} & {*plan.features}
        else msgspec.structs.replace(plan, features=tuple(one for one in plan.features if one != "gated"))
        for name, plan in plans.items()
    }
