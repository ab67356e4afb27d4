"""Messages from the engine to the processes of its ranks arrive whole."""

import math

import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.args.mamba import MambaArgs
from quire.assemble.rank_child import RankTask, packed, unpacked

from ...support.filled_models import planned
from ...support.tiny_models import FAMILIES, Tiny, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_receives_the_plan_that_was_made(family: str) -> None:
    task = RankTask(
        plan=planned(parse_checkpoint_config(tiny_config(Tiny(family=family)))), meeting="tcp://a:1", threads=2
    )
    assert unpacked(packed(task), RankTask) == task


def test_a_limit_that_is_not_set_arrives_as_infinity() -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="granite_mamba")))
    task = unpacked(packed(RankTask(plan=planned(args), meeting="", threads=1)), RankTask)
    mixers = [one for one in task.plan.args.mixers if isinstance(one, MambaArgs)]
    assert mixers and all(one.steps == (0.0, math.inf) for one in mixers)
