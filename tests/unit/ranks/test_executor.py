"""Ranks as processes: they build in step, run steps in order, answer controls, and tell their errors as they are."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.contracts.errors import ConfigError, EngineClosed, EngineDead, QuireError, WeightsError
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import NO_MASKS
from quire.procs.core_client import STOP_SECONDS
from quire.ranks.executor import RankProcesses, RanksExecutor
from quire.ranks.launchers import LocalLauncher
from quire.ranks.messages import RankStep
from quire.ranks.watch import RankTimes

from ...support.started_ranks import ENV, exists, nothing_left, plan, ranks, running, until

FACTS = ExecutorFacts(depth=2, decode_lag=2, num_slots=1, num_blocks=1, block_size=1, max_model_len=1, vocab_size=1)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def test_ranks_are_built_and_sized_in_step(real: None) -> None:
    processes, told = ranks({"loads": 3}, {"loads": 5}, {}), []
    built = processes.build(lambda done, total: told.append((done, total)))
    assert [msgspec.json.decode(payload) for payload in built] == [{"index": i, "bytes": 100 + i} for i in range(3)]
    assert told == sorted(told) and all(total == 8 for _, total in told)
    processes.size([b"a", b"b", b"c"])
    assert processes.wait_ready() == [b"sized a", b"sized b", b"sized c"]
    processes.close()
    processes.close()


def test_progress_is_told_as_the_sum_of_all_ranks() -> None:
    processes, told = ranks({"loads": 3, "waits": {"build": 0.5}}, {"loads": 5, "waits": {"build": 0.5}}), []
    processes.build(lambda done, total: told.append((done, total)))
    assert told[-1] == (8, 8) and {total for _, total in told} == {8}
    processes.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lead", [0, 1])
def test_results_come_from_the_lead_in_the_order_of_the_plans(depth: int, lead: int) -> None:
    with running({}, {}, leads=(lead,)) as processes:
        executor, steps = RanksExecutor(processes, FACTS), []
        for step in range(20):
            executor.submit(plan(step, prompt=step))
            executor.release(step, NO_MASKS)
            if step >= depth - 1:
                steps.append(executor.collect())
        steps += [executor.collect() for _ in range(depth - 1)]
        assert [result.step for result in steps] == [result.num_computed for result in steps] == list(range(20))
        assert {result.moved for result in steps} == {lead}
        until(lambda: all("collect 19" in log for log in executor.control("log", {})), "a rank dropped a step")
        assert [rank.received for rank in processes._watch.ranks] == [19, 19]
        executor.shutdown()


def test_a_rank_launches_a_step_while_another_one_runs() -> None:
    with running({"waits": {"collect": 0.5}}, {"waits": {"collect": 0.5}}) as processes:
        executor = RanksExecutor(processes, FACTS)
        for step in (0, 1):
            executor.submit(plan(step))
        assert [executor.collect().step for _ in range(2)] == [0, 1]
        until(lambda: all(len(log) == 4 for log in processes.ask("log", {})(None)), "a rank dropped a step")
        expected = ["submit 0", "submit 1", "collect 0", "collect 1"]
        assert processes.ask("log", {})(None) == [expected, expected]


def test_a_rank_that_is_slower_than_the_lead_keeps_its_depth() -> None:
    with running({}, {"waits": {"collect": 0.2}}) as processes:
        executor = RanksExecutor(processes, FACTS)
        for step in range(6):
            executor.submit(plan(step))
            assert executor.collect().step == step
        until(lambda: len(processes.ask("log", {})(None)[1]) == 12, "a rank dropped a step")
        (_, log) = processes.ask("log", {})(None)
        assert isinstance(log, list)
        in_flight = [sum({"submit": 1, "collect": -1}[entry.split()[0]] for entry in log[:end]) for end in range(12)]
        assert max(in_flight) == 2


def test_a_step_with_a_grammar_is_collected_after_its_release() -> None:
    masks = np.arange(6, dtype=np.int32).reshape(2, 3)
    with running({}, {}) as processes:
        executor = RanksExecutor(processes, FACTS)
        executor.submit(plan(0))
        executor.submit(plan(1, grammar=2))
        assert executor.collect().step == 0
        assert not processes.ask("log", {})(None)[0].count("collect 1")
        executor.release(1, masks)
        result = executor.collect()
        assert result.step == 1 and result.tokens.tolist() == masks.tolist()


def test_a_control_gives_the_values_of_all_ranks_and_the_caller_s_error_ends_nothing() -> None:
    with running({}, {}, {}) as processes:
        table = np.arange(3, dtype=np.int32)
        values: list[Any] = processes.ask("echo", {"a": [1, None], "table": table})(None)
        assert [(value["index"], value["a"], value["table"].tolist()) for value in values] == [
            (index, [1, None], [0, 1, 2]) for index in range(3)
        ]
        with pytest.raises(ConfigError, match="unknown control 'dance'"):
            RanksExecutor(processes, FACTS).control("dance", {})
        processes.send(RankStep(plan(7)))
        assert processes.collect().step == 7


def test_a_control_with_a_limit_names_the_ranks_that_do_not_answer() -> None:
    """Their late replies belong to no later operation."""
    with running({}, {}) as processes:
        os.kill(processes.pids[1], signal.SIGSTOP)
        wait = RanksExecutor(processes, FACTS).ask("echo", {"a": 1})
        assert processes.ask("echo", {"a": 0}, [0])(None) == [{"index": 0, "a": 0}]
        with pytest.raises(TimeoutError, match=r"^rank 1 \(tp 1, pid \d+\)$"):
            wait(0.0)
        os.kill(processes.pids[1], signal.SIGCONT)
        assert processes.ask("echo", {"a": 2})(None) == [{"index": 0, "a": 2}, {"index": 1, "a": 2}]
        assert processes.ask("echo", {"a": 3})(60.0) == [{"index": 0, "a": 3}, {"index": 1, "a": 3}]


def test_a_close_need_not_wait() -> None:
    """Ranks are told to end, and end by themselves. The server gives the core more time than that."""
    with running({"waits": {"close": 0.3}}) as processes:
        processes.close(wait=False)
        assert exists(processes.pids[0])
        until(lambda: not exists(processes.pids[0]), "the end of the rank")
    assert STOP_SECONDS > RankTimes().stop


def test_ranks_have_the_environment_of_their_parent_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_PARENT", "1")
    with running({}, {}) as processes:
        assert processes.ask("variable", {"name": "OF_THE_PARENT"})(None) == ["1", "1"]
        assert processes.ask("variable", {"name": "PYTHONPATH"})(None) == [ENV["PYTHONPATH"]] * 2


def test_plans_larger_than_the_socket_arrive(real: None) -> None:
    with running({}, {}) as processes:
        for step in range(4):
            processes.send(RankStep(plan(step, prompt=500_000)))
        assert [processes.collect().num_computed for _ in range(4)] == [500_000] * 4


def use(processes: RankProcesses) -> None:
    """Bring ranks to all places, until one fails."""
    processes.build(lambda done, total: None)
    processes.size([b"", b""])
    processes.wait_ready()
    executor = RanksExecutor(processes, FACTS)
    for step in range(3):
        executor.submit(plan(step, grammar=1))
        executor.release(step, np.ones((1, 1), np.int32))
        executor.collect()
    while True:
        executor.control("log", {})


PLACES = ["build", "size", "submit", "release", "collect", "control"]


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_is_told_with_its_rank_and_its_words(place: str, caplog: pytest.LogCaptureFixture) -> None:
    step = 1 if place in ("submit", "release", "collect") else -1
    processes = ranks({}, {"raises": {place: "ZeroDivisionError"}, "step": step})
    with caplog.at_level(logging.ERROR, "quire"), pytest.raises(EngineDead) as caught:
        use(processes)
    words = f"rank 1 (tp 1, pid {processes.pids[1]}) failed: ZeroDivisionError: no luck in {place}"
    assert str(caught.value) == words and "Traceback" in caplog.text
    for call in (
        processes.collect,
        lambda: processes.ask("log", {})(None),
        lambda: processes.size([b"", b""]),
        lambda: processes.build(print),
        lambda: processes.send(RankStep(plan(9))),
    ):
        with pytest.raises(EngineDead) as again:
            call()
        assert str(again.value) == words and again.value is not caught.value
    processes.close()
    with pytest.raises(EngineDead, match="no luck"):
        processes.collect()


@pytest.mark.parametrize("place, kind", [("build", WeightsError), ("size", ConfigError), ("collect", ConfigError)])
def test_an_error_that_the_user_can_fix_keeps_its_class(place: str, kind: type[QuireError]) -> None:
    processes = ranks({}, {"raises": {place: kind.__name__}})
    with pytest.raises(kind) as caught:
        use(processes)
    assert str(caught.value) == f"no luck in {place}"
    processes.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_exits_without_a_word_is_told_with_its_code(place: str) -> None:
    step = 1 if place in ("submit", "release", "collect") else -1
    processes = ranks({}, {"exits": {place: 7}, "step": step})
    with pytest.raises(EngineDead) as caught:
        use(processes)
    assert str(caught.value).startswith(f"rank 1 (tp 1, pid {processes.pids[1]}) exited with code 7")
    processes.close()


def test_a_library_that_exits_in_the_collector_ends_the_rank() -> None:
    with running({"raises": {"collect": "SystemExit"}}) as processes:
        processes.send(RankStep(plan(0)))
        with pytest.raises(EngineDead, match="SystemExit: no luck in collect"):
            processes.collect()


def test_after_close_every_call_says_so() -> None:
    with running({}, {}) as processes:
        executor = RanksExecutor(processes, FACTS)
        executor.submit(plan(0))
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(EngineClosed):
            executor.submit(plan(1))
        with pytest.raises(EngineClosed):
            executor.control("log", {})


def test_a_module_that_does_not_exist_is_told() -> None:
    processes = RankProcesses(LocalLauncher("quire.no_such_module", ENV), [b"{}", b"{}"], ["rank 0", "rank 1"])
    with pytest.raises(EngineDead, match=r"rank \d \(pid \d+\) failed: ModuleNotFoundError: .*quire.no_such_module"):
        processes.build(print)
    processes.close()


def test_by_hand_a_rank_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "quire.ranks.process"]
    done = subprocess.run(command, env=os.environ | ENV, capture_output=True, text=True)
    assert done.returncode == 1 and "quire serve" in done.stderr and "Traceback" not in done.stderr
