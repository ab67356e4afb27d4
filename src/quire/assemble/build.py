"""Construction of a model from an engine's plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quire.adapters.slots import slot_plan
from quire.args.experts import MoEArgs
from quire.assemble.adapters import add_slots
from quire.contracts.parallel import Parallel, vocabulary_share
from quire.distributed import Group
from quire.distributed.mesh import ALONE, RankGroups
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels import routing
from quire.kernels.expert_copies.slots import REPLICA_ROWS, ExpertSlots, initial_slots
from quire.kernels.layer_copies import layer_copies
from quire.kernels.select import load_kernels
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.layers.read_states import ReadStates
from quire.layers.streamed import StreamedLayers
from quire.plan.collectives import head_reads
from quire.plan.engine import EnginePlan, host_layers, own_draft
from quire.plan.host_layers import SLOTS
from quire.plan.joined import joined_decodes
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks
from quire.quantization.assigned import with_formats


def build_model(plan: EnginePlan, groups: RankGroups = ALONE, target: EnginePlan | None = None) -> Decoder:
    """Build the model of a rank, without weights. `quire.weights` loads them into its layers, which pack them.

    groups   of this rank: `tp` shares every layer, `ep` divides the experts
    target   plan of the model for which this one drafts; None: it drafts for none
    """
    args, rank, tp = plan.args, plan.mesh.rank, groups.tp
    joined = {f"layers.{layer}.attention": one for layer, one in joined_decodes(plan).items()}
    kernels = replace(load_kernels(plan.kernels), joined=joined)
    whole = args.moe is None or len(rank.expert_ids) == args.moe.routing.num_experts
    build = Build(
        dtype=getattr(torch, plan.dtype.dtype),
        device=torch.device(plan.machine.device),
        kernels=kernels,
        params={param.name: param for param in plan.params},
        linears=plan.linears,
        experts=None if whole else tuple(rank.expert_ids),
        groups=groups,
        owners=owners(plan) if groups.ep is not None else (),
        kv_groups=(target or plan).geometry.groups,
        before=0 if target is None else len(range(*target.mesh.rank.layers)),
        moe=plan.experts,
        layers=rank.layers,
        vocabulary=None if tp is None else vocabulary_slice(args.vocab_size, tp),
    )
    whole_model = with_formats(layout(args), plan.quantization) if plan.mesh.parallel.size > 1 else ()
    everything = frozenset(stored_names(whole_model))
    modules = None
    if args.foreign is not None:
        from quire.foreign.blocks import foreign_modules

        modules = foreign_modules(Path(plan.folder), args, build)
    model = Decoder(args, plan.params, build, elsewhere=everything, modules=modules)
    if reads := head_reads(args, plan.draft.args if plan.draft else None):
        model.reads = ReadStates(reads, model.numbers, model.layers)
    if (drafter := own_draft(plan)) is not None:
        model.draft = build_model(drafter, _of_drafter(groups, drafter.mesh.parallel), plan)
        if drafter.args.eagle is not None:
            model.draft.layers[0].reads = model.reads
    if args.moe is not None:
        _draw_and_balance(plan, args.moe, model)
    if (host := host_layers(plan)).layers:
        model.streamed = StreamedLayers(host.layers, rank.layers[0], SLOTS, layer_copies(build.device))
    if target is None and (slots := slot_plan(plan)) is not None:
        model.adapters = add_slots(model, plan, slots)
    return model


def _of_drafter(groups: RankGroups, parallel: Parallel) -> RankGroups:
    """Return the groups of a rank that divide its draft model. parallel: sizes of the draft model"""
    if parallel.lockstep:
        return replace(groups, slots=groups.draft_slots)
    return RankGroups(tp=groups.tp if parallel.tp > 1 else None)


def _draw_and_balance(plan: EnginePlan, moe: MoEArgs, model: Decoder) -> None:
    """Let the routers of a model draw experts, and its experts move between ranks, as the plan says."""
    rank, parallel, routed = plan.mesh.rank, plan.mesh.parallel, plan.config.load.routing
    redundant, num_experts = parallel.redundant, moe.routing.num_experts
    for layer, block in model.blocks.items():
        if layer not in plan.args.expert_layers:
            continue
        experts = block.experts
        if redundant is not None:
            each, place = len(rank.expert_ids), rank.replica * parallel.tp + rank.place
            turns = parallel.expert_ranks if parallel.round_robin else 1
            slots = (one.to(model.device) for one in initial_slots(num_experts, redundant, turns))
            experts.balance(
                ExpertSlots(*slots, first_row=rank.replica * REPLICA_ROWS),
                range(place * each, (place + 1) * each),
                num_experts + redundant,
            )
        if routed != "model":
            draw = routing.drawing(routed, layer, num_experts, model.device)
            experts.choose = partial(draw, model.kernels.routing, moe.routing)


def owners(plan: EnginePlan) -> tuple[int, ...]:
    """Return the rank of each expert in the group of ranks that divide the experts of a stage."""
    stage = [rank for rank in ranks(plan.args, plan.mesh.parallel) if rank.stage == plan.mesh.rank.stage]
    found = {expert: place for place, rank in reversed(list(enumerate(stage))) for expert in rank.expert_ids}
    return tuple(found[expert] for expert in range(len(found)))


def vocabulary_slice(size: int, tp: Group) -> VocabularySlice:
    """Return the slice of a vocabulary of `size` ids that a rank holds, as `models.layout` divides it."""
    ranges = [vocabulary_share(size, tp.size, rank) for rank in range(tp.size)]
    return VocabularySlice(tp, ranges[tp.rank][0], tuple(end - first for first, end in ranges))
