"""The core's loop, fed from a list: prompts are taken whole, every step is told, a fault is told and is the end."""

import logging
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import EngineDead
from quire.contracts.request import FinishReason, NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.core import EngineCore
from quire.engine.mock_core import build_mock_core
from quire.procs.core_server import serve_core
from quire.procs.messages import Abort, Add, Control, Failed, FromCore, Outputs, Rejected, Reply, Stop, ToCore

from ...support.mock_tokens import mock_tokens
from ...support.replica_rig import ReplicaRig


def make_core(**options: Any) -> EngineCore:
    return build_mock_core(EngineConfig.from_flat(device="mock", **options), bundled_model())


def new(handle: int, tokens: int = 4, parent: int | None = None) -> NewRequest:
    prompt = array("I", [handle + 1, 2, 3])
    return NewRequest(
        handle=handle,
        request_id=str(handle),
        token_ids=prompt.tobytes(),
        max_tokens=tokens,
        sampler=SamplerSpec(seed=handle, num_prompt=3),
        parent=parent,
    )


class Caller:
    """Gives its messages one per step, or all at once, then `Stop` when the core waits; keeps what comes back."""

    def __init__(self, *messages: ToCore, at_once: bool = True) -> None:
        self.waiting, self.at_once = list(messages), at_once
        self.said: list[FromCore] = []
        self.waited = 0
        self._steps = 0

    def receive(self, wait: bool) -> ToCore | None:
        if wait:
            self.waited += 1
        if self.waiting and (wait or self.at_once or self._steps < len(self.said)):
            self._steps = len(self.said)
            return self.waiting.pop(0)
        return Stop() if wait else None

    def send(self, message: FromCore) -> None:
        self.said.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    def tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for message in self.of(Outputs):
            for handle, token in zip(message.step.handles.tolist(), message.step.tokens.tolist(), strict=True):
                found.setdefault(handle, []).append(token)
        return found

    def ends(self) -> dict[int, FinishReason]:
        return {finish.handle: finish.reason for message in self.of(Outputs) for finish in message.step.finished}


def broken_on(number: int, work: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    calls = [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise error
        return work(*args, **options)

    return call


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_are_served_and_the_core_waits_when_idle(depth: int) -> None:
    core = make_core(async_depth=depth)
    caller = Caller(Add((new(0),)), Add((new(1, 6),)))
    assert serve_core(core, caller.receive, caller.send) == 0
    vocab = core.facts.vocab_size
    assert caller.tokens() == {0: mock_tokens([1, 2, 3], 0, 4, vocab), 1: mock_tokens([2, 2, 3], 1, 6, vocab)}
    assert caller.ends() == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
    assert caller.waited == 2  # before the first message and after the last token, and never between
    core.check()


def test_empty_outputs_are_a_sign_of_life() -> None:
    caller = Caller(Add((new(0, 2),)))
    serve_core(make_core(async_depth=2), caller.receive, caller.send)
    assert len(caller.of(Outputs)[0].step.handles) == 0


def test_a_prompt_is_taken_whole_or_not_at_all() -> None:
    core = make_core()
    many = Add((new(10), new(11, parent=10), new(12, 10**6, parent=10)))  # the third does not fit the context
    caller = Caller(many, Add((new(0),)))
    serve_core(core, caller.receive, caller.send)
    (refused,) = caller.of(Rejected)
    assert refused.handles == (10, 11, 12) and refused.kind == "PromptTooLong"
    assert caller.ends() == {10: FinishReason.ABORT, 11: FinishReason.ABORT, 0: FinishReason.LENGTH}
    assert caller.tokens().keys() == {0}
    core.check()


def test_a_prompt_that_the_queue_has_no_room_for_is_refused_whole() -> None:
    core = make_core(max_waiting=2, max_num_seqs=1)
    three = Add((new(10), new(11, parent=10), new(12, parent=10)))
    caller = Caller(Add((new(0),)), three, Add((new(1),)))
    serve_core(core, caller.receive, caller.send)
    (refused,) = caller.of(Rejected)
    assert refused.handles == (10, 11, 12) and refused.kind == "QueueFull" and "max_waiting=2" in refused.message
    assert caller.ends() == dict.fromkeys((0, 1), FinishReason.LENGTH)
    core.check()


def test_a_fault_over_one_prompt_rejects_that_prompt(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    core.add = broken_on(2, core.add, ZeroDivisionError("planted"))  # type: ignore[method-assign]
    caller = Caller(Add((new(0), new(1, parent=0))), Add((new(2),)))
    with caplog.at_level(logging.ERROR):
        assert serve_core(core, caller.receive, caller.send) == 0
    (refused,) = caller.of(Rejected)
    assert refused.handles == (0, 1) and refused.kind == "RequestFailed"
    assert caller.tokens().keys() == {2} and "planted" in caplog.text
    core.check()


def test_an_abort_ends_requests_and_ignores_strangers() -> None:
    core = make_core()
    caller = Caller(Add((new(0, 1000),)), Add((new(1, 3),)), Abort((0, 77)), at_once=False)
    serve_core(core, caller.receive, caller.send)
    assert caller.ends() == {0: FinishReason.ABORT, 1: FinishReason.LENGTH}
    core.check()


def test_controls_are_answered() -> None:
    core = make_core()
    caller = Caller(Control(1, "reset_prefix_cache"), Control(2, "check"), Control(3, "explode"))
    serve_core(core, caller.receive, caller.send)
    assert caller.said == [Reply(1, True), Reply(2, True), Reply(3, error="unknown control 'explode'.")]


def test_a_control_that_fails_leaves_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    monkeypatch.setattr(core, "check", broken_on(1, core.check, AssertionError("3 blocks leaked")))
    caller = Caller(Control(1, "check"), Add((new(0),)))
    assert serve_core(core, caller.receive, caller.send) == 0
    assert caller.of(Reply) == [Reply(1, error="AssertionError: 3 blocks leaked")]
    assert caller.ends() == {0: FinishReason.LENGTH}


def test_a_fault_of_a_step_is_told_and_is_the_end() -> None:
    core = make_core()
    core.executor.collect = broken_on(3, core.executor.collect, OSError("device lost"))  # type: ignore[method-assign]
    caller = Caller(Add((new(0, 10),)))
    assert serve_core(core, caller.receive, caller.send) == 1
    failed = caller.said[-1]
    assert isinstance(failed, Failed) and failed.kind == "EngineDead"
    assert "OSError: device lost" in failed.message and "Traceback" in failed.details
    assert len(caller.tokens()[0]) == 2


@pytest.mark.parametrize("renews", [False, True])
def test_an_idle_engine_ends_for_a_dead_replica_if_another_one_follows(renews: bool) -> None:
    rig = ReplicaRig(2, lockstep=False)
    rig.mocks[0].fault = "planted"
    caller, looks = Caller(), iter([None, None, Stop()])
    assert serve_core(rig.core, lambda wait: next(looks), caller.send, renews=renews) == int(renews)
    ends = [message.message for message in caller.of(Failed)]
    assert ends == ["rank that died before: no request runs now, so its replica comes back with all others."] * renews


def test_other_controls_are_the_executor_s() -> None:
    core = make_core()
    asked: list[Any] = []
    core.executor.control = lambda name, args: asked.append((name, args)) or {"steps": 3}  # type: ignore[method-assign]
    caller = Caller(Control(1, "describe", {"deep": True}))
    serve_core(core, caller.receive, caller.send)
    assert caller.said == [Reply(1, '{"steps":3}')] and asked == [("describe", {"deep": True})]


def test_an_idle_core_notices_that_its_executor_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks anything. An executor of one process never says it; ranks may die at any time."""
    core, looked, said = make_core(), [], list[FromCore]()
    core.executor.check_alive()

    def dead() -> None:
        looked.append(True)
        if len(looked) == 3:
            raise EngineDead("rank 1 was killed by SIGKILL.")

    monkeypatch.setattr(core.executor, "check_alive", dead)
    assert serve_core(core, lambda wait: None, said.append) == 1
    (last,) = said
    assert isinstance(last, Failed) and last.message == "rank 1 was killed by SIGKILL."
