"""Replicas, two of them, that stand for GPUs: `rank_main(RANK, KIND, FOLDER)` in a process for each.

As `ranks_of_gpus.py`, for replicas in lock-step that share experts: rows go through memory that both map, or by gloo's
all-gather for a kind with the word "even". Each replica runs the same steps, the second one a step later; so each is
idle once.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from quire.args.checkpoint import ModelArgs
from quire.assemble.kv_views import kv_views
from quire.contracts.parallel import Parallel, Rank
from quire.contracts.step import I32, StepPlan
from quire.distributed.mesh import RankGroups
from quire.distributed.process_group import join_ranks
from quire.engine.lockstep import agreed
from quire.kernels.comm import Peers
from quire.kernels.comm.exchange import Layout, Slots
from quire.kernels.step.state import Exchanges
from quire.kvstore.arena import KVArena
from quire.layers.stack import Model
from quire.plan.graphs import even_bounds
from quire.plan.kv_geometry import rank_geometry
from quire.plan.placement import ranks
from quire.procs.wire import encode
from quire.worker.construct import make_runner

from ..support.compared import BLOCK, CPU, LIMITS
from ..support.triton_interpreter import repair_interpreter
from .ranks_of_gpus import rank_model, small

PROGRAMS, SIZE, ROWS = 4, 2, 48
# Steps of at most 2 tokens, and of at most 24: prompts of 30 tokens take two exchanges, which are not captured. Two
# decodes are padded to 4 tokens: more than the bound.
SIZES = replace(LIMITS, graph_sizes=(4,), graph_tokens=(24,), exchanges=Exchanges(bounds=(2, 24)))
EVEN_SIZES = replace(LIMITS, graph_sizes=(4,), exchanges=Exchanges(bounds=even_bounds((4,), (1,)), even=True))


def layout(args: ModelArgs) -> Layout:
    """The layout of the memory of a rank."""
    assert args.moe is not None
    return Layout(
        ranks=SIZE,
        rows=max(SIZES.exchanges.bounds),
        hidden=args.hidden_size,
        top_k=args.moe.routing.top_k,
        item_bytes=4,
    )


def shared_memory(folder: Path, rank: int, made: Layout) -> tuple[Slots, object]:
    """The memory of both ranks, in files, and the mapped files, which must be kept."""
    maps = [
        [
            torch.from_file(str(folder / f"{name}{other}"), shared=True, size=size, dtype=torch.uint8)
            for other in range(SIZE)
        ]
        for name, size in (("buffer", made.num_bytes), ("signal", 4 * PROGRAMS * SIZE))
    ]
    buffers, signals = (torch.tensor([one.data_ptr() for one in some]) for some in maps)
    return Slots(Peers(buffers, signals, rank, made.num_bytes, PROGRAMS), made, maps[0][rank]), maps


def model_of(args: ModelArgs, rank: Rank, groups: RankGroups) -> Model:
    """The slices of a random checkpoint that a rank holds."""
    return rank_model(args, rank, None, "cuda", groups)


def in_lockstep(plans: tuple[StepPlan, ...], number: int, *, drafts: bool = False) -> list[StepPlan]:
    """The plans of a replica, with an idle one, and the record of each step. drafts: a drafter has layers"""
    empty: I32 = np.empty(0, np.int32)
    idle = StepPlan(step=0, slots=empty, num_decodes=0, num_tokens=empty, num_rows=empty, outputs=np.empty(0, np.uint8))
    both = [[*plans, None], [None, *plans]]
    records = [agreed(pair, -1, drafts=drafts) for pair in zip(*both, strict=True)]
    return [msgspec.structs.replace(one or idle, sync=sync) for one, sync in zip(both[number], records, strict=True)]


def rank_main(number: int, kind: str, place: str) -> None:
    """Run the steps of a replica, and save the results in the folder."""
    from .test_cuda_worker import PLANS, Event, Recording
    from .test_exchange import yielding

    repair_interpreter()
    folder, (kind, *even) = Path(place), kind.split()
    with pytest.MonkeyPatch.context() as patch:
        yielding(patch)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr("quire.worker.construct.Graphs", Recording)
        patch.setattr("quire.worker.graphs.NARROW", 2)
        args, parallel = small(kind), Parallel(dp=SIZE, experts=True)
        groups, kept = join_ranks(str(folder / "meeting"), number, parallel, CPU), None
        if not even:
            slots, kept = shared_memory(folder, number, layout(args))
            groups = replace(groups, slots=slots)
        rank = list(ranks(args, parallel))[number]
        model = model_of(args, rank, groups)
        arena = KVArena(rank_geometry(args, rank, dtype="float32", device="cuda", block_size=BLOCK), 32, CPU)
        runner = make_runner(
            model,
            kv_views([one.mixer for one in args.layers], map(arena.views, range(args.num_layers))),
            EVEN_SIZES if even else SIZES,
            CPU,
            target="cuda",
            groups=groups,
        )
        for plan in in_lockstep(PLANS if even else PLANS[:7], number):
            (folder / f"result{number}-{plan.step}").write_bytes(encode(runner.run(plan)))
        captured = {shape.key: shape for shape in runner.recorder.shapes()}
        ran = [captured[key] for key in getattr(runner.recorder, "ran", ()) if key in captured]
        kinds = {shape.key[0] for shape in ran} | {"beyond" for shape in ran if shape.tokens > shape.bound}
        (folder / f"kinds{number}").write_text(" ".join(sorted(kinds)))
        torch.distributed.destroy_process_group()
        del kept
