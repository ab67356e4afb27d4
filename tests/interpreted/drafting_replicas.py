"""Replicas that stand for GPUs, as in `replicas_of_gpus.py`, with a drafter whose experts they share.

The drafter is a prediction layer ("mtp"), or a draft model ("draft_model"): its rows have another size, and memory of
their own. A method with the word "even" exchanges rows by gloo's all-gather, as many of each replica.

Each replica runs the same steps, the second one a step later. So prompts of one meet decodes of the other, with other
numbers of drafts, and each is idle once.
"""

import faulthandler
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.args.checkpoint import ModelArgs
from quire.assemble.kv_views import model_views
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.speculation import Speculation
from quire.contracts.step import SAMPLE, Admission, StepPlan
from quire.distributed.process_group import join_ranks
from quire.kernels.step.state import Exchanges
from quire.kvstore.arena import KVArena
from quire.layers.expert_dispatch import AllGatherExchange
from quire.layers.stack import Model
from quire.plan.as_stored import with_prediction
from quire.plan.drafts import rank_joined
from quire.plan.graphs import even_bounds
from quire.plan.kv_geometry import rank_geometry
from quire.plan.placement import ranks
from quire.procs.wire import encode
from quire.spec.layers import LayerDrafter
from quire.worker.construct import make_runner
from quire.worker.recorder import Key
from quire.worker.runner import StepRunner
from quire.worker.step_drafts import StepDrafts

from ..support.compared import BLOCK, CPU, LIMITS, VOCAB, model_args
from ..support.drafters import KnownAnswers
from ..support.features import feature
from ..support.triton_interpreter import repair_interpreter
from .ranks_of_gpus import rank_model
from .replicas_of_gpus import SIZE, in_lockstep, layout, shared_memory

DRAFTS = 3
SECONDS = 200  # after which a replica that waits for an exchange of the other one fails
# Of three decodes no step is captured, nor of a chunk of 30 tokens, which takes two exchanges. Three decodes with one
# draft (step 8) fit a bound of 4, but the tokens that the step before accepted do not.
SIZES = replace(
    LIMITS,
    graph_sizes=(2,),
    graph_tokens=(24,),
    exchanges=Exchanges(bounds=(4, 8, 24), joint=True),
    num_drafts=DRAFTS,
    draft_lengths=(DRAFTS,),
)
EVEN = Exchanges(bounds=even_bounds((2, 4), (1, 1 + DRAFTS)), joint=True, even=True)
EVEN_SIZES = replace(SIZES, graph_sizes=(2, 4), graph_tokens=(), exchanges=EVEN)


def arguments(method: str) -> tuple[ModelArgs, ModelArgs | None]:
    """The arguments of a model of one layer with experts, and of its draft model."""
    small = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    args = model_args("glm", **small)
    if method == "mtp":
        return with_prediction(args, drafting=1, embeds=True), None
    return args, model_args("glm", **small, hidden_size=64, num_experts_per_tok=1)


def reference(method: str) -> Model:
    """The whole model, with its drafter, with the reference kernels."""
    args, draft = arguments(method)
    model = rank_model(args, next(ranks(args, ALONE)), None, "")
    if draft is not None:
        model.draft = rank_model(draft, next(ranks(draft, ALONE)), None, "")
    return model


def make_memory(folder: Path, method: str) -> None:
    """Make the memory of both ranks, full of what is no number, and that of a draft model below the folder."""
    for place, args in zip((folder, folder / "draft"), arguments(method), strict=True):
        place.mkdir(exist_ok=True)
        for rank in range(SIZE if args is not None else 0):
            assert args is not None
            (place / f"buffer{rank}").write_bytes(b"\xff" * layout(args).num_bytes)
            (place / f"signal{rank}").write_bytes(bytes(1 << 10))


def drafting_plans(decoding: Callable[..., StepPlan], admitted: Callable[..., Admission]) -> tuple[StepPlan, ...]:
    """Chunks, decodes with equal and other numbers of drafts, with none, and beside a prompt, in two slots and three.

    decoding   makes a plan: step, slots, tokens, outputs, number of decodes
    """
    first, second, third = (
        admitted(2, 33, (1, 2, 3, 4), seed=5, temperature=0.9),
        admitted(0, 5, (5, 6, 7), seed=6, temperature=0.7),
        admitted(1, 7, (8, 9, 10), seed=7),
    )
    return (
        decoding(1, (2,), (30,), (0,), 0, admitted=(first,)),
        decoding(2, (2, 0), (3, 5), (SAMPLE, SAMPLE), 0, admitted=(second,)),
        decoding(3, (0, 2), (4, 4), (SAMPLE, SAMPLE), 2),
        decoding(4, (0, 2), (2, 4), (SAMPLE, SAMPLE), 2),
        decoding(5, (0, 2), (1, 1), (SAMPLE, SAMPLE), 2),
        decoding(6, (0, 2, 1), (2, 2, 7), (SAMPLE,) * 3, 2, admitted=(third,)),
        decoding(7, (0, 2, 1), (4, 3, 4), (SAMPLE,) * 3, 3),
        decoding(8, (0, 2, 1), (1, 1, 2), (SAMPLE,) * 3, 3),
        decoding(9, (1,), (2,), (SAMPLE,), 1),
    )


def watch(runner: StepRunner, known: dict[int, list[int]]) -> list[tuple[int, torch.Tensor]]:
    """Let a runner with a drafter of layers have drafts that are right or wrong by chance. Returns the (positions,
    logits) of the drafts of the layers as they come."""
    own, seen = feature(runner, StepDrafts), list[tuple[int, torch.Tensor]]()
    drafter = own.drafter
    assert isinstance(drafter, LayerDrafter)
    drafter.on_logits = lambda slots, places, logits: seen.extend(zip(places.tolist(), logits.clone(), strict=True))
    own.drafter = KnownAnswers(known, runner.sampler.table.rows, "random", VOCAB, drafter)  # type: ignore[assignment]
    return seen


def rank_main(number: int, method: str, place: str) -> None:
    """Run the steps of a replica. Save the results in the folder, and the bounds of the exchanges of each step."""
    from quire.kernels.comm import triton_exchange

    from .test_cuda_worker import Event, Recording, admission, drafting_plan
    from .test_exchange import yielding

    made, dispatch, recorded = list[int](), triton_exchange.dispatch, dict[Key, list[int]]()
    gather, (method, *even) = AllGatherExchange.dispatch, method.split()

    def counted(*given: Any) -> Any:
        made.append(given[-2])
        return dispatch(*given)

    def counted_rows(own: AllGatherExchange, routed: Any, rows: Any) -> Any:
        made.extend(rows)
        return gather(own, routed, rows)

    class Compared(Recording):
        """A recording would make the same exchanges again."""

        def run(self, key: Key, work: Callable[[], None]) -> None:
            before = len(made)
            super().run(key, work)
            assert recorded.setdefault(key, made[before:]) == made[before:], f"{key}: other exchanges than before"

    repair_interpreter()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    folder = Path(place)
    with pytest.MonkeyPatch.context() as patch:
        yielding(patch)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr("quire.worker.construct.Graphs", Compared)
        patch.setattr("quire.worker.graphs.NARROW", 2)
        patch.setattr(triton_exchange, "dispatch", counted)
        patch.setattr(AllGatherExchange, "dispatch", counted_rows)
        (args, draft), parallel = arguments(method), Parallel(dp=SIZE, experts=True)
        groups, kept = join_ranks(str(folder / "meeting"), number, parallel, CPU), None
        if not even:
            slots, kept = shared_memory(folder, number, layout(args))
            groups = replace(groups, slots=slots)
        rank = list(ranks(args, parallel))[number]
        model = rank_model(args, rank, None, "cuda", groups)
        pages = rank_geometry(args, rank, dtype="float32", device="cuda", block_size=BLOCK)
        if draft is not None:
            own = list(ranks(draft, parallel))[number]
            theirs, more = groups, None
            if not even:
                slots, more = shared_memory(folder / "draft", number, layout(draft))
                theirs = replace(groups, slots=slots)
            model.draft = rank_model(draft, own, None, "cuda", theirs)
            others = rank_geometry(draft, own, dtype="float32", device="cuda", block_size=BLOCK)
            kept, pages = (kept, more), rank_joined(pages, others, args, rank)
        arena = KVArena(pages, 32, CPU)
        runner = make_runner(
            model,
            model_views(model, arena.views),
            EVEN_SIZES if even else SIZES,
            CPU,
            target="cuda",
            groups=groups,
            speculation=Speculation(method=method, num_drafts=DRAFTS),
        )
        known = {int(seed): text for seed, text in json.loads((folder / "texts").read_text()).items()}
        seen, bounds = watch(runner, known), list[list[int]]()
        for plan in in_lockstep(drafting_plans(drafting_plan, admission), number, drafts=True):
            made.clear()
            (folder / f"result{number}-{plan.step}").write_bytes(encode(runner.run(plan)))
            bounds.append(list(made))
        (folder / f"exchanges{number}").write_text(json.dumps(bounds))
        ran = sorted({key[0] for key in runner.recorder.ran})  # type: ignore[attr-defined]
        (folder / f"kinds{number}").write_text(" ".join(ran))
        torch.save(seen, folder / f"drafts{number}")
        faulthandler.cancel_dump_traceback_later()
        torch.distributed.destroy_process_group()
        del kept
