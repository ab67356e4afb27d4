"""Ranks that stand for GPUs, as in `ranks_of_gpus.py`, with a draft model, of which each has a slice, or the whole."""

import json
from pathlib import Path

import pytest
import torch

from quire.args.checkpoint import ModelArgs
from quire.assemble.kv_views import model_views
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.speculation import Speculation
from quire.distributed import Group
from quire.distributed.mesh import RankGroups
from quire.distributed.process_group import ProcessGroup, join_ranks
from quire.kernels.step.state import Limits
from quire.kvstore.arena import KVArena
from quire.layers.stack import Model
from quire.plan.drafts import rank_joined
from quire.plan.kv_geometry import rank_geometry
from quire.plan.placement import ranks
from quire.procs.wire import encode
from quire.worker.construct import make_runner
from quire.worker.runner import StepRunner

from ..support.changed_args import with_layers
from ..support.compared import BLOCK, CPU, LIMITS
from ..support.triton_interpreter import repair_interpreter
from .drafting_replicas import DRAFTS, drafting_plans, watch
from .ranks_of_gpus import SIZE, SharedFiles, rank_model, small

DRAFTED = Limits(**(vars(LIMITS) | {"num_drafts": DRAFTS}))
GRAPHS = Limits(**(vars(DRAFTED) | {"graph_sizes": (2, 4), "graph_tokens": (48,), "draft_lengths": (DRAFTS,)}))
SPECULATION = Speculation(method="draft_model", num_drafts=DRAFTS)


def of_draft(args: ModelArgs) -> ModelArgs:
    """The arguments of the draft model: those of the model, with two layers."""
    return with_layers(args, 2)


def drafting_runner(
    number: int, parallel: Parallel, limits: Limits, target: str, tp: Group | None = None, whole: bool = False
) -> StepRunner:
    """The runner of a rank, with its slice of the draft model, or the whole."""
    args, device = small("dense"), target or "cpu"
    draft = of_draft(args)
    rank = list(ranks(args, parallel))[number]
    own = next(ranks(draft, ALONE)) if whole else list(ranks(draft, parallel))[number]
    model: Model = rank_model(args, rank, tp, target)
    model.draft = rank_model(draft, own, None if whole else tp, target)
    pages = (
        rank_geometry(one, part, dtype="float32", device=device, block_size=BLOCK)
        for one, part in ((args, rank), (draft, own))
    )
    arena = KVArena(rank_joined(*pages, args, rank), 32, CPU)
    views = model_views(model, arena.views)
    return make_runner(model, views, limits, CPU, target=device, groups=RankGroups(tp=tp), speculation=SPECULATION)


def rank_main(number: int, whole: bool, place: str) -> None:
    """Run the steps on a rank, and save results and drafts in the folder."""
    from .test_cuda_worker import Event, Recording, admission, drafting_plan

    repair_interpreter()
    folder = Path(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr("quire.worker.construct.Graphs", Recording)
        patch.setattr("quire.worker.graphs.NARROW", 2)
        parallel = Parallel(tp=SIZE)
        joined = join_ranks(str(folder / "meeting"), number, parallel, CPU)
        assert isinstance(joined.tp, ProcessGroup)
        tp = SharedFiles(joined.tp, folder)
        runner = drafting_runner(number, parallel, GRAPHS, "cuda", tp, whole)
        known = {int(seed): text for seed, text in json.loads((folder / "texts").read_text()).items()}
        seen = watch(runner, known)
        for plan in drafting_plans(drafting_plan, admission):
            (folder / f"result{number}-{plan.step}").write_bytes(encode(runner.run(plan)))
        torch.save(seen, folder / f"drafts{number}")
        torch.distributed.destroy_process_group()
