"""Pauses, sleep and updates of a mock core: what happens to requests, and what an engine refuses after a failure."""

from typing import Any

import pytest

from quire.contracts.errors import EngineAsleep, InvalidParameter, UserError, WeightsError
from quire.contracts.output import Finish, StepOutputs
from quire.engine.core import EngineCore
from quire.procs.life import Life

from .test_core_server import Caller, make_core, new


class Engine:
    """A core, its life, and ranks that note what they are told and fail when told to."""

    def __init__(self) -> None:
        self.core: EngineCore = make_core()
        self.life = Life(self.core, self.step)
        self.told: list[tuple[str, Any]] = []
        self.failing = ""
        self.finished: dict[int, Finish] = {}
        self.tokens: dict[int, int] = {}
        self.core.executor.control = self.control  # type: ignore[method-assign]

    def control(self, name: str, args: dict[str, Any]) -> Any:
        assert not self.core.in_flight, "a step is under way"
        self.told.append((name, next(iter(args.values()), None)))
        if name == self.failing:
            raise WeightsError("no such tensor")
        return ["folder", None] if name == "staged" else [None, None]

    def step(self) -> StepOutputs:
        outputs = self.core.step()
        for finish in outputs.finished:
            self.finished[finish.handle] = finish
        for handle in outputs.handles.tolist():
            self.tokens[handle] = self.tokens.get(handle, 0) + 1
        return outputs

    def run(self, steps: int = 200) -> None:
        while self.core.has_work and steps:
            self.step()
            steps -= 1

    def update(self) -> None:
        self.life.start_weights()
        self.life.update_weights({"path": "folder"})
        self.life.finish_weights()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_at_a_pause(mode: str, engine: Engine) -> None:
    engine.core.add(new(0, 30))
    engine.run(5)
    engine.life.pause(mode)
    engine.core.add(new(1, 3))  # it waits, whatever the mode
    engine.run()
    assert engine.life.settled and engine.life.held and not engine.core.has_work
    ended = {"keep": {}, "wait": {0: "length"}, "abort": {0: "abort"}}
    assert {handle: str(one.reason) for handle, one in engine.finished.items()} == ended[mode]
    assert engine.finished.get(0) is None or (engine.finished[0].error == "paused") == (mode == "abort")
    engine.core.abort(1)
    engine.run()
    assert 1 in engine.finished, "who waits can leave"
    engine.core.add(new(2, 3))
    engine.life.resume()
    engine.run()
    assert {0, 2} <= engine.finished.keys()
    assert mode == "abort" or engine.tokens[0] == 30
    engine.core.check()


def test_sleep_drops_all_kv_and_wakes_up_part_by_part(engine: Engine) -> None:
    pool = engine.core.scheduler.allocator.pool
    engine.core.add(new(0, 60))
    engine.run(40)
    engine.life.quiet("keep")
    engine.life.sleep(1)
    assert engine.life.level == 1 and pool.num_free == pool.num_blocks and engine.told == [("sleep", 1)]
    with pytest.raises(EngineAsleep, match=r"sleeps \(level 1\): wake it"):
        engine.life.check()
    with pytest.raises(UserError, match="already"):
        engine.life.sleep(2)
    engine.life.wake_up(["kv_cache"])
    assert engine.life.level == 1 and not engine.core.has_work
    with pytest.raises(EngineAsleep):
        engine.life.resume()
    engine.life.wake_up()
    assert [parts for name, parts in engine.told if name == "wake"] == [["kv_cache"], ["weights"]]
    engine.run()
    assert engine.tokens[0] == 60 and engine.finished[0].reason == "length"
    engine.core.check()


def test_a_sleep_that_fails_on_a_rank_wakes_the_others(engine: Engine) -> None:
    engine.failing = "sleep"
    with pytest.raises(WeightsError):
        engine.life.sleep(1)
    assert [name for name, _ in engine.told] == ["sleep", "wake"]
    engine.life.check_running()


def test_level_2_serves_nothing_before_weights_have_come(engine: Engine) -> None:
    for calls in ([None], [["weights", "kv_cache"]], [["kv_cache"], ["weights"]]):  # the last one reads the files
        engine.life.sleep(2)
        for tags in calls:
            engine.life.wake_up(tags)
        engine.life.check_running()
    engine.life.sleep(2)
    with pytest.raises(UserError, match="wake them first"):
        engine.life.start_weights()
    engine.life.wake_up(["weights"])
    engine.life.wake_up(["kv_cache"])
    with pytest.raises(EngineAsleep, match="dropped by sleep level 2, and woken before the KV cache: send new ones"):
        engine.life.check()
    engine.update()
    engine.life.check_running()


def test_an_update_that_lacks_a_tensor_changes_nothing(engine: Engine) -> None:
    engine.core.add(new(0, 30))
    engine.run(5)
    engine.failing = "prove_weights"
    with pytest.raises(WeightsError):
        engine.update()
    assert engine.told[-1][0] == "end_weights" and "load_weights" not in dict(engine.told)
    engine.life.check_running()
    engine.run()
    assert engine.tokens[0] == 30


def test_an_update_that_fails_in_the_middle_serves_nothing_until_another_has_ended(engine: Engine) -> None:
    engine.core.add(new(0, 30))
    engine.run(5)
    engine.failing = "load_weights"
    with pytest.raises(WeightsError):
        engine.update()
    with pytest.raises(EngineAsleep, match=r"not whole, because an update failed in the middle \(no such tensor\)"):
        engine.life.check()
    assert not engine.core.has_work, "the request of the old weights waits"
    engine.failing = ""
    engine.update()
    engine.run()
    assert engine.tokens[0] == 30 and engine.finished[0].reason == "length"
    engine.core.check()


def test_words_that_do_not_exist(engine: Engine) -> None:
    for call, words in (
        (lambda: engine.life.pause("stop"), "abort, wait, keep"),
        (lambda: engine.life.sleep(3), "1 or 2"),
        (lambda: engine.life.wake_up(["cache"]), "weights, kv_cache"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            call()
    engine.failing = "start_weights"
    with pytest.raises(WeightsError):
        engine.life.start_weights()
    engine.life.check_running()
    for outside in (lambda: engine.life.update_weights({}), engine.life.finish_weights):
        with pytest.raises(UserError, match="begin one by /start_weight_update"):
            outside()


def test_the_loop_refuses_requests_of_a_sleeping_core_by_the_class_that_http_knows() -> None:
    from quire.procs.core_server import serve_core
    from quire.procs.messages import Add, Control, Outputs, Rejected, Reply

    core = make_core()
    core.executor.control = lambda name, args: [None]  # type: ignore[assignment,method-assign]
    asked = [Add((new(0, 50),)), Control(1, "quiet", {"mode": "keep"}), Control(2, "sleep"), Add((new(1),))]
    caller = Caller(*asked, Control(3, "wake_up"), at_once=False)
    assert serve_core(core, caller.receive, caller.send) == 0
    assert [(one.handles, one.kind) for one in caller.of(Rejected)] == [((1,), "EngineAsleep")]
    assert [one.error for one in caller.of(Reply)] == [None] * 3
    assert sum(len(one.step.handles) for one in caller.of(Outputs)) == 50
