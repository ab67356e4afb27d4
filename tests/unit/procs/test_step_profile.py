"""A profile of steps: it ends at its limits, keeps no more than it may, and a fault of it is not one of the engine."""

from array import array
from typing import Any

import msgspec
import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.request import NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.mock_core import build_mock_core
from quire.procs import step_profile
from quire.procs.core_server import serve_core
from quire.procs.messages import Add, Control, FromCore, Outputs, Reply, Stop, ToCore
from quire.procs.step_profile import PROFILE, StepProfiled


def served(core: Any, *messages: ToCore) -> tuple[Reply, int]:
    """Serve messages until the core has nothing to do. Return the one reply, and the number of tokens."""
    waiting, said = [*messages], list[FromCore]()
    code = serve_core(core, lambda wait: waiting.pop(0) if waiting else Stop() if wait else None, said.append)
    (reply,) = (one for one in said if isinstance(one, Reply))
    assert code == 0
    return reply, sum(len(one.step.tokens) for one in said if isinstance(one, Outputs))


def asking(steps: int) -> Control:
    return Control(7, PROFILE, {"on": True, "token": "x", "seconds": 60.0, "steps": steps})


def new(tokens: int = 8) -> Add:
    ids, sampler = array("I", [1, 2, 3]).tobytes(), SamplerSpec(seed=0, num_prompt=3)
    return Add((NewRequest(handle=0, request_id="r", token_ids=ids, max_tokens=tokens, sampler=sampler),))


@pytest.mark.parametrize("most", [100_000, 5])
def test_it_ends_with_its_steps_and_keeps_what_it_may(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "MOST_SLICES", most)
    core = build_mock_core(EngineConfig.from_flat(device="mock"), bundled_model())
    reply, tokens = served(core, asking(3), new())
    found = msgspec.json.decode(str(reply.value), type=StepProfiled)
    own = found.parts["engine core"]
    assert tokens == 8 and [facts["tokens"] for facts in found.facts] == [3, 1, 1]
    calls = [one for one in own if one[0] != step_profile.STEPS]
    assert (len(calls) == most) == bool(found.lost) == (most == 5)
    assert "step" not in vars(core)


def test_a_runner_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    core = build_mock_core(EngineConfig.from_flat(device="mock"), bundled_model())
    monkeypatch.setattr(core.executor, "control", lambda name, args: [([], 0, "no kernels."), ([], 0, "")])
    reply, _ = served(core, asking(3), new())
    assert msgspec.json.decode(str(reply.value), type=StepProfiled).notes == ["rank 0: no kernels."]


def test_a_fault_of_it_is_told_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    core = build_mock_core(EngineConfig.from_flat(device="mock"), bundled_model())

    def refuse(name: str, args: dict[str, Any]) -> object:
        raise ConfigError(f"unknown control {name!r}.")

    monkeypatch.setattr(core.executor, "control", refuse)
    reply, tokens = served(core, asking(3), new())
    assert "unknown control" in str(reply.error) and tokens == 8 and "step" not in vars(core)
