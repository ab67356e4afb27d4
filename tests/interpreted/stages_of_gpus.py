"""Stages of a pipeline, two of them, that stand for GPUs: `rank_main(STAGE, FOLDER)` in a process for each.

As `ranks_of_gpus.py`. The model has sparse latent attention: its second layer, which the second stage has, shares the
indexer of the first one. Its prediction layer (MTP) drafts on the last stage. The plans are those that an engine made
for one rank that drafts as the last stage does: they name tokens and drafts that the steps before have brought.
"""

from pathlib import Path

import pytest
import torch

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.assemble.kv_views import model_views
from quire.contracts.parallel import ALONE, Parallel, Rank
from quire.contracts.speculation import Speculation
from quire.contracts.step import StepPlan
from quire.distributed.mesh import RankGroups
from quire.distributed.process_group import join_ranks
from quire.kernels.step.state import Limits
from quire.kvstore.arena import KVArena
from quire.layers.stack import Model
from quire.plan.as_stored import with_prediction
from quire.plan.kv_geometry import rank_geometry
from quire.plan.placement import ranks
from quire.procs.wire import Messages, encode
from quire.worker.construct import make_runner
from quire.worker.runner import StepRunner

from ..support.compared import BLOCK, CPU, LIMITS, SLOTS
from ..support.tiny_models import Tiny, tiny_config
from ..support.triton_interpreter import repair_interpreter
from .ranks_of_gpus import rank_model

SIZE, DRAFTS = 2, 2
DRAFTED = Limits(**(vars(LIMITS) | {"num_drafts": DRAFTS}))
GRAPHS = Limits(**(vars(DRAFTED) | {"graph_sizes": (2, SLOTS), "graph_tokens": (24,), "draft_lengths": (DRAFTS,)}))
SPECULATION = Speculation(method="mtp", num_drafts=DRAFTS)


def arguments() -> ModelArgs:
    """The arguments of a model of two layers that share an indexer, and of its prediction layer, which has its own, and
    whose passes share a choice."""
    raw = tiny_config(
        Tiny(family="glm_moe_dsa"), num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=None
    )
    del raw["num_mtp_layers"]
    own = {"num_nextn_predict_layers": 1, "vocab_size": 64, "index_share_for_mtp_iteration": True}
    return with_prediction(parse_checkpoint_config(raw | own), drafting=1, embeds=True)


def runner_of_rank(rank: Rank, limits: Limits, target: str, groups: RankGroups | None = None) -> StepRunner:
    """The runner of a stage, or of one rank with the whole model. target: "cuda", or "": the references"""
    args = arguments()
    model = rank_model(args, rank, None, target)
    device = target or "cpu"
    arena = KVArena(rank_geometry(args, rank, dtype="float32", device=device, block_size=BLOCK), 32, CPU)
    views = model_views(model, arena.views)
    return make_runner(model, views, limits, CPU, target=device, groups=groups or RankGroups(), speculation=SPECULATION)


def reference() -> Model:
    """The whole model with the reference kernels."""
    args = arguments()
    return rank_model(args, next(ranks(args, ALONE)), None, "")


def rank_main(number: int, place: str) -> None:
    """Run all plans of the folder on a stage, and save the results there."""
    from .test_cuda_worker import Event, Recording

    repair_interpreter()
    folder = Path(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr("quire.worker.construct.Graphs", Recording)
        patch.setattr("quire.worker.graphs.NARROW", 2)
        parallel = Parallel(pp=SIZE)
        groups = join_ranks(str(folder / "meeting"), number, parallel, CPU)
        runner = runner_of_rank(list(ranks(arguments(), parallel))[number], GRAPHS, "cuda", groups)
        plans = [Messages(StepPlan).decode(path.read_bytes()) for path in sorted(folder.glob("plan*"))]
        for plan in plans:
            (folder / f"result{number}-{plan.step}").write_bytes(encode(runner.run(plan)))
        (folder / f"kinds{number}").write_text(" ".join(sorted({key[0] for key in runner.recorder.ran})))  # type: ignore[attr-defined]
        assert groups.pp is not None
        groups.pp.barrier()
        torch.distributed.destroy_process_group()
