"""Engines of several ranks, each a process on this CPU, as users see them: notes, banner, plan, commands."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, EngineConfig, SamplingParams
from quire.config.bundled import bundled_model
from quire.contracts.errors import ConfigError
from quire.entry.cli.main import main
from quire.explain.describe import plan_engine

from .in_process import running_inside

TINY = str(bundled_model())
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "use_tqdm_on_load": False,
}
CUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def cut() -> Iterator[LLM]:
    with LLM(**OPTIONS, **CUT) as llm:
        yield llm


def test_the_notes_name_the_ranks_and_their_memory(cut: LLM) -> None:
    (note,) = (note for note in cut.engine.notes if "ranks" in note)
    assert note.startswith("4 ranks: tp 2, pp 2, gloo (ranks 0, 1: 10.01 MiB of weights, 16.00 MiB of KV cache, 0.12 ")
    assert "; ranks 2, 3: " in note and note.endswith(" of buffers each).")


def test_ranks_answer_as_one_device(cut: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(**OPTIONS) as alone:
        answers = [llm.generate("The json module", greedy, use_tqdm=False)[0].outputs[0] for llm in (cut, alone)]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_server_shows_the_plan_and_every_rank() -> None:
    with running_inside(model=TINY, **OPTIONS, **CUT) as inside:
        with urllib.request.urlopen(f"{inside.server.url}/debug/plan") as answer:
            found = json.load(answer)
        with urllib.request.urlopen(f"{inside.server.url}/version") as answer:
            version = json.load(answer)
        inside.check()
    runners = found.pop("runner")
    assert len(runners) == 4 and all("recorder: none" in runner["parts"][-1] for runner in runners)
    described = json.loads(json.dumps(plan_engine(EngineConfig.from_flat(model=TINY, **OPTIONS, **CUT)).describe()))
    assert found == described
    assert "4 ranks: tp 2, pp 2, gloo" in json.dumps(version)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["bench", "profile"], 3, "-tp 2: `quire bench profile` cannot run with several ranks"),
        (["bench", "kernels"], 2, "-tp"),
        (["weights", TINY], 2, "-tp"),
    ],
)
def test_commands_that_look_into_the_model(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, said: str
) -> None:
    assert main([*args, "-tp", "2"]) == code
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and said in err


def test_a_worker_of_ranks_is_not_here(cut: LLM) -> None:
    with pytest.raises(ConfigError, match="each in a process of its own"):
        cut.engine.worker  # noqa: B018
