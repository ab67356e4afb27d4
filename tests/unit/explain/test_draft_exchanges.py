"""A rank exchanges what is told of the passes of its drafter: prediction layers, draft models, EAGLE heads."""

import functools
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.contracts.parallel import Parallel, share
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import StepPlan
from quire.explain.describe import plan_engine
from quire.plan.draft_exchanges import FIRST, LATER, PROMPTS
from quire.reports.ranks import describe_one
from quire.spec import draft_passes

from ...support import eagle
from ...support.full import full_rows
from ...support.prediction_layers import noisy, predicting
from .test_ranks import Engine, config, expected, replica_rows, sampled

DRAFTS = 3
PASSES = ("PredictionPass", "HeadPass", "ModelPass")
Made = Callable[[str], tuple[Path, dict[str, Any]]]
TP2, DP2 = Parallel(tp=2), Parallel(dp=2, experts=True)
FEW = [
    ("mtp", Parallel(dp=2, tp=2, experts=True)),
    ("mtp", Parallel(dp=2, pp=2, experts=True)),
    ("noisy", DP2),
    ("eagle3", Parallel(tp=2, pp=2)),
]
MORE = [
    ("mtp", DP2),
    *((kind, sizes) for kind in ("mtp", "noisy", "eagle") for sizes in (TP2, Parallel(tp=2, experts=True))),
    ("noisy", Parallel(dp=2, tp=2, experts=True)),
    ("mtp", Parallel(pp=2, tp=2)),
    ("eagle3", TP2),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Makes models and the options of their drafters."""

    @functools.cache
    def make(kind: str) -> tuple[Path, dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp(kind)
        given: dict[str, Any] = {"method": kind, "num_speculative_tokens": DRAFTS}
        if kind.startswith("eagle"):
            target = eagle.model(folder / "model", bundled_model(), 0.001, "gpt_oss")
            known = {"known": eagle.VOCAB // 2} if kind == "eagle3" else {}  # ranks gather the logits of such a head
            eagle.write(folder / "drafter", kind, eagle.knowing(kind, target, **known))
            return target, given | {"model": str(folder / "drafter")}
        target = predicting(folder, "glm4_moe", bundled_model(), 0.04)
        if kind == "noisy":
            noisy(target, folder / "drafter")
            given |= {"method": "draft_model", "model": str(folder / "drafter")}
        return target, given

    return make


@dataclass
class Passes:
    """The passes of a rank in a step: (rows, rows of each replica or None), and the rows of the logits of each."""

    runs: list[tuple[int, tuple[int, ...] | None]] = field(default_factory=list)
    logits: list[int] = field(default_factory=list)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], Passes]:
    """(thread, number of the step) -> the passes that were made."""
    found: dict[tuple[int, int], Passes] = defaultdict(Passes)
    steps: dict[int, int] = {}

    def note(name: str, real: Any) -> Any:
        def noted(own: Any, *given: Any, **more: Any) -> Any:
            at = threading.get_ident()
            one = found[at, steps.get(at, -1)]
            if name == "logits":
                one.logits.append(len(given[0]))
            else:
                ctx = given[-1]
                one.runs.append((len(ctx.positions), None if ctx.replicas is None else ctx.replicas.rows))
            return real(own, *given, **more)

        return noted

    for kind in PASSES:
        for name in ("run", "join", "logits"):
            cls = getattr(draft_passes, kind)
            monkeypatch.setattr(cls, name, note(name, getattr(cls, name)))
    real = Engine._mark_steps

    def marked(own: Engine, number: int, part: Any) -> None:
        real(own, number, part)
        submit = part.worker.submit

        def counted(plan: StepPlan) -> None:
            steps[threading.get_ident()] = plan.step
            submit(plan)

        part.worker.submit = counted

    monkeypatch.setattr(Engine, "_mark_steps", marked)
    return found


def drafted(rank: dict[str, Any], sizes: Parallel, plan: StepPlan, own: Passes) -> Counter[tuple[str, str, int]]:
    """The exchanges that are told of the passes of a rank in a step, with the rows that these passes have."""
    found: Counter[tuple[str, str, int]] = Counter()
    if not rank["last"]:
        assert not own.runs, "a stage before the last one drafts nothing"
        return found
    tp, sync = sizes.tp, None if plan.sync is None else plan.sync.drafts
    prompts = len(plan.slots) > plan.num_decodes if sync is None else any(sync.prompts)
    decodes = len(own.runs) - prompts
    if sync is not None and own.runs[0][1] is not None:
        assert decodes == (max(1, sync.most) if any(sync.decodes) else 0), "passes are those of the record"
    names, logits = [FIRST, *[LATER] * (decodes - 1)][:decodes], [*own.logits, *[0] * (decodes - len(own.logits))]
    at = 0 if sizes.pp > 1 else decodes  # the last stage of a pipeline drafts at the end of a step
    names[at:at], logits[at:at] = [PROMPTS] * prompts, [0] * prompts
    for name, (rows, every), drawn in zip(names, own.runs, logits, strict=True):
        first, end = share(rows if every is None else every[rank["replica"]], tp, rank["place"])
        counts = {
            "token": rows,
            "token of its share": end - first,
            "token of all replicas": sum(every or ()),
            "decode": drawn,
        }
        for one in (one for one in rank["collectives"] if one["drafts"] == name):
            count = counts[one["per"]]
            if one["group"] == "ep" and one["per"] == "token":  # rows are padded
                count = (every or ())[rank["replica"]]
            joined = one["group"] == "ep" or one["where"].startswith("outputs of the replica")
            if count or joined:
                times = one["times"] // (DRAFTS - 1 if name == LATER else 1)
                found[one["group"], one["kind"], count * one["message_bytes"]] += times
    return found


@pytest.mark.parametrize(("kind", "sizes"), [*FEW, *full_rows(MORE)], ids=str)
def test_ranks_exchange_what_is_told_of_drafts(
    kind: str, sizes: Parallel, made: Made, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, given = made(kind)
    asked = config(folder, sizes, speculative_config=given)
    report = plan_engine(asked)
    engine, drafts = Engine(folder, sizes, monkeypatch, speculative_config=given), 0
    try:
        for handle, count in enumerate((20, 31)):
            prompt = array("I", [(7 * handle + j * j + 3) % 90 for j in range(count)]).tobytes()
            spec = SamplerSpec(seed=0, num_prompt=count, temperature=0.0)
            engine.core.add(NewRequest(handle=handle, request_id="r", token_ids=prompt, max_tokens=9, sampler=spec))
        while engine.core.has_work:
            assert all(finish.error is None for finish in engine.core.step().finished)
        for number, steps in enumerate(engine.steps):
            rank = describe_one(report, number)
            for plan, calls in steps:
                if not any(replica_rows(plan)):
                    continue
                own = passes[engine.threads[number], plan.step]
                drafts += len(own.runs)
                told = expected(rank, sizes.tp, plan, None, False, False) + drafted(rank, sizes, plan, own)
                assert calls == told, (number, plan.step, own)
    finally:
        engine.core.shutdown()
    assert drafts > 10 * sizes.size and any(sampled(plan) > 1 for plan, _ in engine.steps[0])
