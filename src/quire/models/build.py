"""Construction of a model from an engine's plan."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.kernels import routing
from quire.kernels.select import load_kernels
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.models.layout import layout, stored_names
from quire.models.plan import EnginePlan
from quire.quantization.assign import with_formats


def build_model(plan: EnginePlan, sum_tp: Callable[[Tensor], Tensor] | None = None) -> Decoder:
    """Build the model of a rank, without weights. `quire.weights` loads them into its layers, which pack them.

    sum_tp   adds up the partial results of the ranks that share a layer; None: this rank has the whole layer
    """
    args, rank = plan.args, plan.mesh.rank
    kernels = load_kernels(plan.kernels)
    whole = args.moe is None or rank.experts == (0, args.moe.routing.num_experts)
    build = Build(
        dtype=getattr(torch, plan.dtype.dtype), device=torch.device(plan.machine.device), kernels=kernels,
        params={param.name: param for param in plan.params}, linears=plan.linears,
        experts=None if whole else tuple(range(*rank.experts)), sum_tp=sum_tp, kv_groups=plan.geometry.groups,
        moe=plan.experts,
    )  # fmt: skip
    whole_model = with_formats(layout(args), plan.quantization) if plan.mesh.parallel.size > 1 else ()
    everything = frozenset(stored_names(whole_model))
    model = Decoder(args, plan.params, build, elsewhere=everything)
    if plan.config.load.routing == "uniform" and args.moe is not None:
        for layer in args.moe.layers:
            model.layers[layer].mlp.choose = partial(routing.uniform, kernels.routing, args.moe.routing)
    return model
