"""Construction of a model from an engine's plan."""

from functools import partial

import torch

from quire.contracts.parallel import vocabulary_share
from quire.distributed import Group
from quire.distributed.mesh import ALONE, RankGroups
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels import routing
from quire.kernels.experts.slots import REPLICA_ROWS, ExpertSlots, initial_slots
from quire.kernels.select import load_kernels
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.plan.engine import EnginePlan
from quire.plan.formats import with_formats
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks


def build_model(plan: EnginePlan, groups: RankGroups = ALONE) -> Decoder:
    """Build the model of a rank, without weights. `quire.weights` loads them into its layers, which pack them.

    groups   of this rank: `tp` shares every layer, `ep` divides the experts
    """
    args, rank, tp = plan.args, plan.mesh.rank, groups.tp
    kernels = load_kernels(plan.kernels)
    whole = args.moe is None or len(rank.expert_ids) == args.moe.routing.num_experts
    build = Build(
        dtype=getattr(torch, plan.dtype.dtype),
        device=torch.device(plan.machine.device),
        kernels=kernels,
        params={param.name: param for param in plan.params},
        linears=plan.linears,
        experts=None if whole else tuple(rank.expert_ids),
        tp=tp,
        ep=groups.ep,
        slots=groups.slots,
        owners=owners(plan) if groups.ep is not None else (),
        kv_groups=plan.geometry.groups,
        moe=plan.experts,
        layers=rank.layers,
        vocabulary=None if tp is None else vocabulary_slice(args.vocab_size, tp),
    )
    whole_model = with_formats(layout(args), plan.quantization) if plan.mesh.parallel.size > 1 else ()
    everything = frozenset(stored_names(whole_model))
    model = Decoder(args, plan.params, build, elsewhere=everything)
    if plan.draft is not None:
        model.draft = build_model(plan.draft, groups)
        if plan.draft.args.eagle is not None:
            model.draft.layers[0].watch(model.layers)
    if plan.mesh.parallel.redundant is not None and args.moe is not None:
        num_experts, redundant = args.moe.routing.num_experts, plan.mesh.parallel.redundant
        for layer in args.moe.layers:
            slots = (one.to(build.device) for one in initial_slots(num_experts, redundant))
            model.layers[layer].mlp.balance(
                ExpertSlots(*slots, first_row=rank.replica * REPLICA_ROWS),
                range(*rank.experts),
                num_experts + redundant,
            )
    if plan.config.load.routing != "model" and args.moe is not None:
        for layer in args.moe.layers:
            draw = routing.drawing(plan.config.load.routing, layer, args.moe.routing.num_experts, build.device)
            model.layers[layer].mlp.choose = partial(draw, kernels.routing, args.moe.routing)
    return model


def owners(plan: EnginePlan) -> tuple[int, ...]:
    """Return the rank of each expert in the group of ranks that divide the experts of a stage."""
    stage = [rank for rank in ranks(plan.args, plan.mesh.parallel) if rank.stage == plan.mesh.rank.stage]
    found = {expert: place for place, rank in reversed(list(enumerate(stage))) for expert in rank.expert_ids}
    return tuple(found[expert] for expert in range(len(found)))


def vocabulary_slice(size: int, tp: Group) -> VocabularySlice:
    """Return the slice of a vocabulary of `size` ids that a rank holds, as `models.layout` divides it."""
    ranges = [vocabulary_share(size, tp.size, rank) for rank in range(tp.size)]
    return VocabularySlice(tp, ranges[tp.rank][0], tuple(end - first for first, end in ranges))
