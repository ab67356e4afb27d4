"""A trace of the next request: it has the steps in which the request took part, and nothing of it stays."""

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.config.bundled import bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.request import Account, NewRequest
from quire.contracts.sampling import SamplerSpec
from quire.engine.core import EngineCore
from quire.engine.mock_core import build_mock_core
from quire.observe.calls import Span
from quire.procs import request_trace
from quire.procs.core_server import serve_core
from quire.procs.messages import Add, Control, Failed, FromCore, Outputs, Rejected, Reply, Stop, ToCore
from quire.procs.request_trace import (
    MOST_DECODES,
    MOST_STEPS,
    PATIENCE,
    TRACE,
    RequestTrace,
    TracedRequest,
    by_step,
    core_stops,
)

from ...support.replica_rig import ReplicaRig

ASKED = 7  # number of the control


def make_core(**options: Any) -> EngineCore:
    return build_mock_core(EngineConfig.from_flat(device="mock", **options), bundled_model())


def new(handle: int, tokens: int = 6, prompt: int = 5, tenant: str = "") -> NewRequest:
    ids = array("I", [handle + 1, *range(1, prompt)]).tobytes()
    sampler = SamplerSpec(seed=handle, num_prompt=prompt)
    return NewRequest(
        handle=handle,
        request_id=f"r{handle}",
        token_ids=ids,
        max_tokens=tokens,
        sampler=sampler,
        account=Account(tenant),
    )


def asking(tenant: str = "", *, on: bool = True, number: int = ASKED, **more: Any) -> Control:
    return Control(number, TRACE, {"on": on, "tenant": tenant, **more})


def serve(core: Any, *messages: ToCore) -> list[FromCore]:
    """Run the core's loop over the messages, until it has nothing to do. Return what it says."""
    waiting, said = [*messages], list[FromCore]()
    serve_core(core, lambda wait: waiting.pop(0) if waiting else Stop() if wait else None, said.append)
    return said


def replies(said: list[FromCore], number: int = ASKED) -> list[Any]:
    return [one.value for one in said if isinstance(one, Reply) and one.id == number]


def traced(said: list[FromCore]) -> TracedRequest:
    (found,) = replies(said)
    return msgspec.json.decode(found, type=TracedRequest)


def traced_by(said: list[FromCore], number: int) -> str:
    (found,) = replies(said, number)
    return str(msgspec.json.decode(found)["request_id"])


def names(spans: list[Span]) -> Iterator[str]:
    for span in spans:
        yield span.name
        yield from names(span.inside)


def attributes(core: EngineCore) -> dict[Any, Any]:
    return {(id(owner), name): vars(owner).get(name, "nothing") for owner, name, _ in core_stops(core)}


def test_the_trace_has_the_steps_of_the_request_and_everything_is_put_back() -> None:
    core = make_core()
    before = attributes(core)
    said = serve(core, asking(), Add((new(0, prompt=40),)), Add((new(1),)))
    found = traced(said)
    assert (found.request_id, found.num_prompt, found.ended) == ("r0", 40, False)
    told = [(one.kind, one.first, one.count, one.requests, one.tokens) for one in found.steps]
    assert told == [("prefill", 0, 40, 2, 45), *(("decode", 40 + i, 1, 2, 2) for i in range(MOST_DECODES))]
    assert [call.name for call in found.calls] == ["EngineCore.add"]
    first, *others = found.steps
    way = ["EngineCore.step", "Scheduler.plan", "KVAllocator.admit", "EngineCore.submit", "MockExecutor.submit"]
    called = list(names(first.calls))
    at = [called.index(name) for name in [*way, "MockExecutor.collect", "Finisher.apply"]]
    assert at == sorted(at) and "EngineCore.add" not in called
    assert all(one.calls[0].begin >= first.calls[-1].end for one in others), "two steps ran at the same time"
    assert others[1].calls[0].again, "the second decode is like the first one"
    assert before == attributes(core)
    sampled = sum(len(one.step.handles) for one in said if isinstance(one, Outputs))
    assert sampled == 12, "a step is told twice, or not at all"


def test_nothing_is_recorded_before_the_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "_Recording", lambda *given: pytest.fail("recorded"))
    said = serve(make_core(), asking("mine"), Add((new(0, tenant="another"),)))
    assert replies(said) == []
    serve(make_core(), Add((new(0),)))


def test_a_prompt_of_many_chunks_has_its_first_steps() -> None:
    found = traced(serve(make_core(max_num_batched_tokens=16, max_num_seqs=4), asking(), Add((new(0, prompt=300),))))
    assert [one.kind for one in found.steps] == ["prefill"] * MOST_STEPS
    assert [one.first for one in found.steps] == list(range(0, 16 * MOST_STEPS, 16))


def test_a_request_that_waits_is_traced_when_it_runs_and_others_are_left_out() -> None:
    core = make_core(max_num_seqs=1)
    said = serve(core, Add((new(0, tokens=30),)), asking(), Add((new(1, tokens=1),)))
    found = traced(said)
    assert found.request_id == "r1" and found.ended
    assert [(one.kind, one.requests) for one in found.steps] == [("prefill", 1)]


def test_a_request_that_lives_is_traced_from_its_next_step_on_and_one_that_has_ended_is_refused() -> None:
    core = make_core()
    before = attributes(core)
    record = {"request_id": "r1", "handles": [9, 1], "num_prompt": 5}
    said = serve(core, Add((new(0, tokens=50),)), Add((new(1, tokens=50),)), asking(record=record, decodes=3))
    found = traced(said)
    assert (found.request_id, found.num_prompt, found.ended, found.calls) == ("r1", 5, False, [])
    assert [one.kind for one in found.steps][-3:] == ["decode"] * 3 and before == attributes(core)
    said = serve(core, asking(record=record))
    assert replies(said) == ['{"refused":"request_ended"}'] and before == attributes(core)


def test_a_request_that_is_refused_ends_the_trace() -> None:
    core = make_core()
    said = serve(core, asking(), Add((new(0, tokens=10**6),)), Add((new(1),)))
    assert any(isinstance(one, Rejected) for one in said)
    found = traced(said)
    assert found.ended and not found.steps and [call.name for call in found.calls] == ["EngineCore.add"]


def test_nobody_comes() -> None:
    now, said = [0.0], list[FromCore]()
    trace = RequestTrace(make_core(), said.append, lambda: now[0])
    trace.ask(asking())
    for _ in range(2):
        trace.tell()
        assert trace.active and not said
        now[0] = PATIENCE - 1
    now[0] = PATIENCE
    trace.tell()
    assert replies(said) == ['{"refused":"no_request"}'] and not trace.active


def test_a_trace_that_fails_leaves_the_engine_running() -> None:
    core = make_core()
    before = attributes(core)
    core.executor.control = lambda name, args: ["no calls"]  # type: ignore[method-assign]
    said = serve(core, asking(), Add((new(0),)))
    (reply,) = (one for one in said if isinstance(one, Reply))
    assert reply.value is None and "there is no trace" in str(reply.error)
    assert before == attributes(core) and not any(isinstance(one, Failed) for one in said)


def test_one_waits_at_a_time_and_can_leave() -> None:
    said = serve(make_core(), asking(), asking(number=8), asking(on=False, number=9), Add((new(0),)))
    refused = ['{"refused":"trace_replaced"}']
    assert replies(said) == replies(said, 8) == refused and replies(said, 9) == [True]
    said = serve(make_core(), asking("a"), asking("b", on=False, number=9), Add((new(0, tenant="a"),)))
    assert traced(said).request_id == "r0", "another key has ended the wait"
    core = make_core()
    before = attributes(core)
    said = serve(core, asking(), Add((new(0),)), asking(on=False, number=9), asking(number=8), Add((new(1),)))
    assert [traced_by(said, number) for number in (ASKED, 8)] == ["r0", "r1"], "a caller who left ends the recording"
    assert before == attributes(core)
    said = serve(make_core(), asking(), Add((new(0),)), asking(number=8))
    assert traced(said).request_id == "r0" and replies(said, 8) == ['{"refused":"trace_runs"}']


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_request_of_a_replica(lockstep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "MOST_OTHERS", 0)  # steps of the other replica do not count
    rig = ReplicaRig(2, lockstep=lockstep)
    told: list[tuple[int, bool]] = []
    for number, one in enumerate(rig.core.cores):
        one.executor.control = lambda name, args, number=number: told.append((number, args["on"])) or []
    before = [attributes(core) for core in rig.core.cores]
    found = traced(serve(rig.core, Add((new(0),)), asking(), Add((new(1),))))
    assert found.request_id == "r1"
    assert [one.kind for one in found.steps] == ["prefill"] + ["decode"] * MOST_DECODES
    assert all(one.requests == 1 and one.calls[0].name == "Replicas.step" for one in found.steps)
    replicas = [0, 1] if lockstep else [1]
    assert told == [(number, on) for on in (True, False) for number in replicas]
    assert before == [attributes(core) for core in rig.core.cores]


def test_calls_of_a_runner_by_step() -> None:
    def calls(text: str) -> list[Span]:
        return [Span(f"StepRunner.{name}", "") for name in text.split()]

    def told(text: str, skipped: int = 0) -> list[str]:
        return [" ".join(one.name.partition(".")[2] for one in step) for step in by_step(calls(text), skipped)]

    assert told("submit collect submit release collect") == ["submit collect", "submit release collect"]
    assert told("submit collect submit collect collect", skipped=1) == ["submit collect", "submit collect"]
    assert told("release submit submit collect") == ["submit collect", "submit"]
