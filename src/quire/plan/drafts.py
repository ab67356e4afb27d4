"""Draft layers, draft models and EAGLE heads: arguments and plans of an engine with them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.args.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.contracts.blocks import KVGeometry
from quire.contracts.parallel import Parallel, Rank
from quire.contracts.speculation import read_speculative_config
from quire.plan.as_stored import with_prediction
from quire.plan.engine import EnginePlan, state_types
from quire.plan.kv_geometry import layer_groups, state_groups


def with_draft_layers(args: ModelArgs, given: Mapping[str, Any] | None) -> ModelArgs:
    """Return the arguments of a model with the layers that the option `speculative_config` makes it draft with.

    A model without a layer that can draft keeps its arguments: a row of `plan/meetings.py` refuses the method for it.
    """
    speculation = read_speculative_config(given)
    if speculation is not None and speculation.head:
        return replace(args, prediction=msgspec.structs.replace(args.prediction, embeds=True))
    if speculation is None or speculation.method != "mtp" or args.prediction.lack:
        return args
    asked = speculation.index_share_for_mtp_iteration
    shares = args.prediction.shares if asked is None else asked
    return with_prediction(args, drafting=1, embeds=True, shares=shares)


def draft_config(config: EngineConfig, dtype: str) -> EngineConfig | None:
    """Return the options with which the draft model of an engine is planned, or its EAGLE head; None without one.

    dtype   of the computation of the model, and of a head, which reads its states
    """
    speculation = read_speculative_config(config.scheduler.speculative_config)
    if speculation is None or not speculation.model:
        return None
    return replace(
        config,
        model=replace(
            config.model,
            model=speculation.model,
            tokenizer=None,
            revision=speculation.revision,
            max_model_len=None,
            dtype=dtype if speculation.head else config.model.dtype,
        ),
        scheduler=replace(config.scheduler, speculative_config=None),
        cache=replace(config.cache, enable_cache_blend=False),  # it computes all tokens
        load=replace(config.load, quantization=speculation.quantization, cpu_offload_gb=0.0, hf_overrides=None),
    )


def draft_division(
    config: EngineConfig, drafter: EngineConfig, args: ModelArgs, parallel: Parallel
) -> tuple[EngineConfig, Parallel]:
    """Return the options of a draft model or EAGLE head, and its division over the ranks of an engine.

    config    options of the engine;  drafter  those of the draft model, as `draft_config` returns them
    parallel  sizes of the engine

        experts that the model's ranks divide      divided alike, without a pipeline; they keep their places
        "draft_tensor_parallel_size": 1            each rank has the whole drafter
        else                                       the ranks of a tensor-parallel group divide it, as the model

    Ranks keep their numbers: those that do not divide a drafter together count as its replicas.
    """
    speculation = read_speculative_config(config.scheduler.speculative_config)
    tp = 1 if speculation is not None and speculation.draft_tensor_parallel_size == 1 else parallel.tp
    drafter = replace(drafter, hosts=replace(drafter.hosts, data_parallel_size_local=None))
    if args.moe is None:
        drafter = replace(drafter, load=replace(drafter.load, routing="model"))
    elif parallel.experts and tp == parallel.tp and parallel.pp == 1:
        return drafter, replace(parallel, redundant=None)
    return drafter, Parallel(tp=tp, dp=parallel.size // tp)


def head_method(config: EngineConfig) -> str:
    """Return the method of the EAGLE head that an engine drafts with; "" without one."""
    speculation = read_speculative_config(config.scheduler.speculative_config)
    return speculation.head if speculation else ""


def with_spelling(args: ModelArgs, stored: Collection[str]) -> ModelArgs:
    """Return the arguments of an EAGLE head with the names that its checkpoint gives to layer and projection."""
    assert args.eagle is not None
    layers = ("midlayer", "layers.0", "transformer")
    at = next((at for at in layers if f"{at}.mlp.down_proj.weight" in stored), args.eagle.at)
    fc = "fusion_fc" if "fusion_fc.weight" in stored else "fc"
    bias = f"{fc}.bias" in stored if stored else args.eagle.bias
    return replace(args, eagle=replace(args.eagle, at=at, fc=fc, bias=bias))


def with_draft_model(plan: EnginePlan, draft: EnginePlan) -> EnginePlan:
    """Return the plan of an engine with a draft model or EAGLE head, whose layers follow those of the model in each
    page."""
    drafting = msgspec.structs.replace(plan.drafting, model=draft)
    types = state_types(plan)._replace(activations=draft.dtype.dtype)
    states = state_groups(draft.args, draft.mesh.rank, types)
    geometry = msgspec.structs.replace(draft.geometry, states=states)
    geometry = rank_joined(plan.geometry, geometry, plan.args, plan.mesh.rank)
    return msgspec.structs.replace(plan, drafting=drafting, geometry=geometry)


def joint_drafts(plan: EnginePlan) -> bool:
    """Return True if replicas in lock-step share experts of the drafter's layers, and make its passes together."""
    if plan.draft is not None:
        return plan.draft.mesh.parallel.lockstep and plan.draft.args.moe is not None
    own = plan.args.expert_layers[-1:]
    return plan.mesh.parallel.lockstep and plan.args.draft_layers > 0 and own >= (plan.args.num_layers,)


def draft_notes(plan: EnginePlan) -> tuple[str, ...]:
    """Return lines about the drafter that the user should see."""
    head = plan.draft.args.eagle if plan.draft is not None else None
    length = plan.config.model.max_model_len or plan.args.max_position_embeddings
    long = (
        (
            f"the EAGLE head was trained for {head.context} positions, and the engine has {length}: behind those, "
            "fewer drafts may be right.",
        )
        if head is not None and head.context < length
        else ()
    )
    return (*(plan.speculation.notes if plan.speculation else ()), *long)


def rank_joined(own: KVGeometry, draft: KVGeometry, args: ModelArgs, rank: Rank) -> KVGeometry:
    """Return the KV cache of a rank's layers, with those of a draft model, which the last stage of a pipeline has."""
    counts = [len(layers) for layers in layer_groups(args)]
    return joined(own, draft, len(range(*rank.layers)), counts, here=rank.last)


def joined(
    geometry: KVGeometry,
    draft: KVGeometry,
    first: int | None = None,
    counts: Sequence[int] = (),
    *,
    here: bool = True,
) -> KVGeometry:
    """Return the KV cache of a model and its draft model, whose layers follow those of the model.

    first    number of the draft model's first layer, which follows those of the model; None: all of these have a cache
    counts   layers of the model in each of its groups; (): as in `geometry`
    here     False: this rank has no layer of the draft model, and the same groups as ranks that have
    A group of the draft model joins the model's group with the same window that has the fewest layers, and takes its
    blocks. If there is none, it stands alone.
    """
    if first is None:
        first = sum(len(group.layers) for group in geometry.groups)
    groups, counts = list(geometry.groups), counts or [len(group.layers) for group in geometry.groups]
    taken = set[int]()
    for other in draft.groups:
        alike = [at for at, one in enumerate(geometry.groups) if one.window == other.window and at not in taken]
        at = min(alike, key=counts.__getitem__) if alike else len(groups)
        taken.add(at)
        if not alike:
            groups.append(msgspec.structs.replace(other, layers=(), components=()))
        if here:
            groups[at] = msgspec.structs.replace(
                groups[at],
                layers=(*groups[at].layers, *(first + layer for layer in other.layers)),
                drafts=other.components,
                num_drafts=len(other.layers),
            )
    states = [msgspec.structs.replace(one, layers=tuple(first + layer for layer in one.layers)) for one in draft.states]
    return msgspec.structs.replace(geometry, groups=tuple(groups), states=(*geometry.states, *(states if here else ())))
