"""Messages from the engine to the processes of its ranks arrive whole."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from quire.args.checkpoint import parse_checkpoint_config
from quire.args.mamba import MambaArgs
from quire.assemble import ranks
from quire.assemble.rank_child import RankTask, packed, unpacked
from quire.config.engine import EngineConfig
from quire.plan.engine import Drafting
from quire.ranks.headless import find_model
from quire.ranks.launchers import Place

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


def test_a_rank_of_another_host_reads_model_and_drafter_there() -> None:
    own = planned(parse_checkpoint_config(tiny_config(Tiny(family="qwen3"))))
    drafter = msgspec.structs.replace(own, folder="here/drafter")
    plan = msgspec.structs.replace(own, folder="here", drafting=Drafting(model=drafter))
    places = [Place(0, 0), Place(1, 0, ("there", "there/drafter"), "10.0.0.2"), Place(1, 1, (), "10.0.0.2")]
    tasks = list(ranks._tasks([plan] * 3, places, slice(3), ""))
    folders = [(task.plan.folder, task.plan.draft and task.plan.draft.folder) for task in tasks]
    assert folders == [("here", "here/drafter"), ("there", "there/drafter"), ("here", "here/drafter")]


def test_a_host_finds_model_and_drafter(tmp_path: Path) -> None:
    """The digest differs if the drafter does."""
    for name in ("model", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny_config(Tiny(family="qwen3"))))
    given = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
    options = {"model": str(tmp_path / "model"), "load_format": "dummy", "skip_tokenizer_init": True}
    config = EngineConfig.from_flat(**options, speculative_config=given)
    found = find_model(config)
    assert found.folders == (str(tmp_path / "model"), str(tmp_path / "drafter"))
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(tiny_config(Tiny(family="llama"))))
    assert find_model(config).digest != found.digest
    assert find_model(EngineConfig.from_flat(**options)).folders == found.folders[:1]
