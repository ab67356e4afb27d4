"""The exchanges of passes that draft, counted. `explain/test_draft_exchanges.py` compares them with those of steps."""

from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.explain.describe import plan_engine
from quire.plan.collectives import Collective
from quire.plan.draft_exchanges import FIRST, LATER, PROMPTS, draft_exchanges
from quire.plan.placement import ranks


def plan(shared: Path, model: str = "DeepSeek-V3", **options: Any) -> Any:
    config = EngineConfig.from_flat(model=str(shared / "hf" / model), **options)
    return plan_engine(config, "h200").plan


def mtp(number: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": number}}


def brief(found: list[Collective]) -> list[tuple[str, str, str, int]]:
    return [(one.drafts, one.kind, one.group, one.times) for one in found]


def test_each_pass_makes_the_exchanges_of_the_layer_that_drafts(shared: Path) -> None:
    lockstep: dict[str, Any] = {"data_parallel_size": 8, "enable_expert_parallel": True}
    made = plan(shared, **lockstep, **mtp(3))
    pulls = ("pull", "ep")
    assert brief(list(draft_exchanges(made))) == [
        *[(FIRST, *pulls, 1)] * 3,
        *[(LATER, *pulls, 2)] * 3,
        *[(PROMPTS, *pulls, 1)] * 3,
    ]
    one = brief(list(draft_exchanges(plan(shared, **lockstep, **mtp(1)))))
    assert one == [*[(FIRST, *pulls, 1)] * 3, *[(PROMPTS, *pulls, 1)] * 3], "the first pass gives the only draft"
    assert not list(draft_exchanges(plan(shared, **lockstep)))
    wide = brief(list(draft_exchanges(plan(shared, **lockstep | {"data_parallel_size": 16}, **mtp(3)))))
    ways = ("all-gather", "ep"), ("reduce-scatter", "ep")
    assert wide == [(name, *way, times) for name, times in ((FIRST, 1), (LATER, 2), (PROMPTS, 1)) for way in ways]


def test_slices_are_summed_and_drafts_are_picked_by_all_ranks(shared: Path) -> None:
    found = list(draft_exchanges(plan(shared, tensor_parallel_size=8, **mtp(2))))
    of_layer = [("all-reduce", "tp", 1)] * 3  # embedding, attention, experts
    pick = ("all-gather", "tp", 1)
    assert brief(found) == [
        *[(name, *one) for name in (FIRST, LATER) for one in (*of_layer, pick)],
        *[(PROMPTS, *one) for one in of_layer],
    ]
    assert [(one.message_bytes, one.per) for one in found if one.kind == "all-gather"] == [(8, "decode")] * 2


def test_the_last_stage_alone_drafts(shared: Path) -> None:
    made = plan(shared, pipeline_parallel_size=2, tensor_parallel_size=4, **mtp(2))
    first, *_, last = ranks(made.args, made.mesh.parallel)
    assert not list(draft_exchanges(made, first))
    assert list(draft_exchanges(made, last)) == list(draft_exchanges(made))
