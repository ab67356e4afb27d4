"""Ranks, two of them, that stand for GPUs: `rank_main(RANK, KIND, FOLDER)` in a process for each.

Its kernels are those of a GPU, in Triton's interpreter; its memory is the CPU's. Sums go through files that both ranks
map, by the kernel that reads the memory of other GPUs; everything else goes through gloo.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.args.checkpoint import ModelArgs
from quire.assemble.build import vocabulary_slice
from quire.assemble.kv_views import kv_views
from quire.contracts.parallel import ALONE, Parallel, Rank
from quire.distributed import Group
from quire.distributed.mesh import RankGroups
from quire.distributed.process_group import ProcessGroup, join_ranks
from quire.distributed.symmetric import SymmetricGroup
from quire.kernels.comm import BUFFERS, Peers
from quire.kernels.select import select_kernels
from quire.kernels.step.state import Limits
from quire.kvstore.arena import KVArena
from quire.layers.context import Build
from quire.layers.decoder import Decoder
from quire.layers.stack import Model
from quire.plan.kinds.blocks import operations
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import layout
from quire.plan.linears import linear_plans
from quire.plan.placement import ranks
from quire.procs.wire import encode
from quire.weights.units import load_units
from quire.worker.construct import make_runner

from ..support.compared import BLOCK, CPU, LIMITS, model_args
from ..support.filled_models import experts_plan, sliced, stored_tensors
from ..support.triton_interpreter import repair_interpreter

NO_GROUPS = RankGroups()
ROOM, PROGRAMS, SIZE = 1 << 16, 4, 2
SIZES = Limits(**(vars(LIMITS) | {"graph_sizes": (2, 4), "graph_tokens": (48,)}))


def small(kind: str) -> ModelArgs:
    """The arguments of a model of one layer, with experts unless it is dense. "divided": of latents, among ranks."""
    latent = kind in ("latent", "divided")
    changes = {"first_k_dense_replace": 0} if latent else {}
    return model_args("latent" if latent else kind, num_hidden_layers=1, **changes)


class SharedFiles(SymmetricGroup):
    """A group whose symmetric memory lies in files of a folder."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        def mapped(name: str, size: int) -> list[Tensor]:
            return [
                torch.from_file(str(folder / f"{name}{rank}"), shared=True, size=size, dtype=torch.uint8)
                for rank in range(SIZE)
            ]

        self._maps = mapped("buffer", BUFFERS * ROOM), mapped("signal", 4 * PROGRAMS * SIZE)
        buffers, signals = (torch.tensor([one.data_ptr() for one in some]) for some in self._maps)
        ProcessGroup.__init__(self, group.group, group.rank, group.ranks)
        self.kind, self._calls = "files", 0
        self._peers = Peers(buffers, signals, group.rank, ROOM, PROGRAMS)
        self.num_sums = 0

    def _sum(self, part: Tensor, residual: Tensor | None) -> Tensor:
        self.num_sums += 1
        return super()._sum(part, residual)


def rank_model(args: ModelArgs, rank: Rank, tp: Group | None, target: str, groups: RankGroups = NO_GROUPS) -> Model:
    """The slices of a random checkpoint that a rank holds; the references without a target.

    groups   of a replica in lock-step
    """
    ops, params = operations(args), layout(args, rank)
    kernels = select_kernels(
        target or "cpu",
        "float32",
        ops=ops,
        head_dim=args.mixers[0].head_dim,
        forced=None if target else dict.fromkeys(ops, "ref"),
    )
    whole = args.moe is None or len(rank.expert_ids) == args.moe.routing.num_experts
    build = Build(
        torch.float32,
        CPU,
        kernels,
        {param.name: param for param in params},
        linear_plans(args, params, kernels.choices),
        experts=None if whole else tuple(rank.expert_ids),
        groups=replace(groups, tp=tp),
        moe=experts_plan(args, "float32", target or "cpu", "" if target else "ref"),
        vocabulary=None if tp is None else vocabulary_slice(args.vocab_size, tp),
        owners=() if groups.ep is None else _owners(args, rank, groups.ep.size),
        layers=rank.layers,
    )
    model = Decoder(args, params, build)
    stored = {name: tensor * 0.3 for name, tensor in stored_tensors(layout(args)).items()}
    for unit in load_units(params):
        model.take(
            unit.module,
            unit.place,
            {raw.name: torch.cat([sliced(part, stored[part.stored]) for part in raw.parts]) for raw in unit.tensors},
        )
    return model


def _owners(args: ModelArgs, rank: Rank, size: int) -> tuple[int, ...]:
    """The rank of each expert among replicas of one rank."""
    every = list(ranks(args, Parallel(dp=size, experts=True)))
    held = {expert: one.number for one in every for expert in one.expert_ids}
    return tuple(held[expert] for expert in range(len(held)))


def rank_main(number: int, kind: str, place: str) -> None:
    """Run all plans on a rank, and save the results in the folder."""
    from .test_cuda_worker import PLANS, Event, Recording

    repair_interpreter()
    folder = Path(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr("quire.worker.construct.Graphs", Recording)
        patch.setattr("quire.worker.graphs.NARROW", 2)
        args, parts = small(kind), SIZE if kind == "divided" else 1
        parallel = Parallel(tp=SIZE, experts=kind == "experts", dcp=parts)
        joined = join_ranks(str(folder / "meeting"), number, parallel, CPU)
        assert isinstance(joined.tp, ProcessGroup)
        tp = SharedFiles(joined.tp, folder)
        rank = list(ranks(args, parallel))[number]
        groups = RankGroups(tp=tp, dcp=tp if parts > 1 else None)
        model = rank_model(args, rank, tp, "cuda", groups)
        arena = KVArena(rank_geometry(args, rank, dtype="float32", device="cuda", block_size=BLOCK // parts), 32, CPU)
        runner = make_runner(
            model,
            kv_views([one.mixer for one in args.layers], map(arena.views, range(args.num_layers))),
            SIZES,
            CPU,
            target="cuda",
            groups=groups,
        )
        for plan in PLANS:
            (folder / f"result{number}-{plan.step}").write_bytes(encode(runner.run(plan)))
        assert tp.num_sums == len(PLANS) * (1 + 2 * args.num_layers)
        torch.distributed.destroy_process_group()


def reference(kind: str) -> Model:
    """The whole model with the reference kernels."""
    args = small(kind)
    return rank_model(args, next(ranks(args, ALONE)), None, "")
