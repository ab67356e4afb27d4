"""Layers whose decodes run from the projection on in one kernel, and routers that are one with their norm. No torch."""

from typing import Any

from quire.args.latent import LatentArgs
from quire.args.layers import GroupedArgs
from quire.contracts.parallel import share
from quire.kernels.joined.choice import JoinedDecodes, choose_decodes, choose_latent
from quire.kernels.routing_plan import why_not
from quire.kernels.select import Choice
from quire.plan.engine import EnginePlan
from quire.plan.kinds.grouped import GroupedKind


def short_decodes(plan: EnginePlan) -> tuple[int, int]:
    """Return the most sequences of a step and the most tokens of a sequence for which some layers take another kernel
    than with longer contexts; (0, 0): there are none."""
    found = [one for one in joined_decodes(plan).values() if one.context]
    return (max(one.sequences for one in found), min(one.context for one in found)) if found else (0, 0)


def joined_decodes(plan: EnginePlan) -> dict[int, JoinedDecodes]:
    """Return layer -> its decodes, for each layer with attention by Triton's kernels, in order."""
    kernels, rank, found = {one.op: one for one in plan.kernels}, plan.mesh.rank, dict[int, JoinedDecodes]()
    heads, attention, latent = (kernels.get(op) for op in ("heads", "attention", "latent"))
    grouped = heads is not None and heads.name == "triton" and attention is not None and "heads" in attention.features
    how: Any = {"eager": plan.config.device.enforce_eager, "eight_bits": bool(plan.cache.features)}
    how["context"] = plan.config.model.max_model_len or plan.args.max_position_embeddings
    for layer, mixer in ((i, one.mixer) for i, one in enumerate(plan.args.layers)):
        if isinstance(mixer, GroupedArgs) and attention is not None and grouped:
            own, kv = share(mixer.num_heads, rank.tp, rank.place), GroupedKind(mixer).kv_heads(rank.tp, rank.place)
            found[layer] = choose_decodes(mixer, (own[1] - own[0], kv[1] - kv[0]), clusters=_lacks(attention), **how)
        elif isinstance(mixer, LatentArgs) and latent is not None and latent.name in ("hopper", "triton"):
            own, dcp = share(mixer.num_heads, rank.tp, rank.place), plan.mesh.parallel.dcp
            found[layer] = choose_latent(mixer, own[1] - own[0], clusters=_lacks(latent), divided=dcp > 1, **how)
    return found


def joined_router(plan: EnginePlan) -> str | None:
    """Return the reason why norm, router and choice of experts are no joined kernel in steps of few rows; "": they are.

    None: there are no routers, or their kernels are not Triton's.
    """
    routing = next((one for one in plan.kernels if one.op == "routing"), None)
    if plan.args.moe is None or routing is None or routing.name != "triton":
        return None
    moe, router = plan.args.moe, plan.linears.get(f"layers.{min(plan.args.expert_layers)}.mlp.router")
    if router is None:
        return None
    against = {
        _lacks(routing, "norm of few rows"): "norm of few rows" not in routing.features,
        f"it takes bfloat16, not {plan.dtype.dtype}": plan.dtype.dtype != "bfloat16",
        "the router's weight is quantized": router.scheme is not None,
        "its product keeps a fixed order": "norm" not in router.features,
        "the router has a norm of its own": bool(moe.router_eps),
        "the norm is a layer normalization, or its weight is float32": plan.args.norm.centered
        or plan.args.norm.plus_one,
        "experts are drawn, not chosen": plan.config.load.routing != "model",
    }
    own = next((reason for reason, holds in against.items() if holds), "")
    return own or why_not(moe.routing, plan.args.hidden_size)


def _lacks(choice: Choice, feature: str = "clusters") -> str:
    return "" if feature in choice.features else "it needs a Hopper GPU and NVRTC"
