"""Ranks that die, stop or hang, and parents that do: every caller is told, and nothing stays behind."""

import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.contracts.errors import EngineClosed, EngineDead
from quire.contracts.protocols import ExecutorFacts
from quire.ranks.executor import RankProcesses, RanksExecutor
from quire.ranks.messages import RankStep

from ...support import template_process
from ...support.started_ranks import (
    ENV,
    MODULE,
    children,
    exists,
    held,
    nothing_left,
    plan,
    ranks,
    running,
    state,
    until,
)
from ...support.template_process import SWITCH

FACTS = ExecutorFacts(depth=2, decode_lag=2, num_slots=1, num_blocks=1, block_size=1, max_model_len=1, vocab_size=1)
LONG = 1000.0
AT_ONCE = 5.0  # ten times the promised half second


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def later(action: Callable[[], None], seconds: float = 0.3) -> None:
    """Run `action` beside the test."""
    threading.Timer(seconds, action).start()


def wait_in(processes: RankProcesses, place: str) -> None:
    """Call the method that waits for the ranks in `place`."""
    processes.build(lambda done, total: None)
    if place == "build":
        return
    processes.size([b"", b""])
    processes.wait_ready()
    if place == "control":
        processes.ask("log", {})(None)
    elif place == "idle":
        while True:
            time.sleep(0.01)
            processes.send(RankStep(plan(0)))
    else:
        processes.send(RankStep(plan(0)))
        processes.collect()


PLACES = ["build", "size", "submit", "collect", "control", "idle"]


def test_a_killed_rank_that_started_as_a_product_s_is_told(real: None) -> None:
    test_a_killed_rank_is_told_to_whoever_waits("collect")


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_rank_is_told_to_whoever_waits(place: str) -> None:
    processes = ranks({"waits": {place: LONG}}, {"waits": {place: LONG}})
    killed: list[float] = []

    def kill() -> None:
        os.kill(processes.pids[1], signal.SIGKILL)
        killed.append(time.monotonic())

    later(kill)
    with pytest.raises(EngineDead) as caught:
        wait_in(processes, place)
    print(f"told after {time.monotonic() - killed[0]:.3f} s")
    assert time.monotonic() - killed[0] < AT_ONCE
    assert str(caught.value).startswith(f"rank 1 (tp 1, pid {processes.pids[1]}) was killed by SIGKILL")
    until(lambda: not {*children(os.getpid())} & {*processes.pids}, "a rank is left", AT_ONCE)  # without `close`
    for pid in processes.pids:
        with pytest.raises(ChildProcessError):  # reaped
            os.waitpid(pid, os.WNOHANG)
    with pytest.raises(EngineDead, match="SIGKILL"):
        processes.send(RankStep(plan(1)))
    processes.close()


@pytest.mark.parametrize("place", ["build", "collect", "idle"])
def test_a_stopped_rank_is_killed_and_told(place: str) -> None:
    processes = ranks({"waits": {place: LONG}}, {"waits": {place: LONG}}, stopped=0.6, beat=0.1)
    later(lambda: os.kill(processes.pids[0], signal.SIGSTOP))
    with pytest.raises(EngineDead) as caught:
        wait_in(processes, place)
    told = f"rank 0 (tp 0, pid {processes.pids[0]}) is stopped (SIGSTOP, or a debugger) and has sent nothing for "
    assert str(caught.value).startswith(told)
    processes.close()


def test_a_stop_of_a_moment_is_no_fault() -> None:
    with running({}, {}, beat=0.1) as processes:
        os.kill(processes.pids[1], signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(processes.pids[1], signal.SIGCONT)
        processes.send(RankStep(plan(0)))
        assert processes.collect().step == 0


def test_sending_to_a_stopped_rank_whose_buffer_is_full_does_not_wait() -> None:
    with running({}, {}, stopped=LONG) as processes:
        os.kill(processes.pids[1], signal.SIGSTOP)
        for step in range(3):
            processes.send(RankStep(plan(step, prompt=500_000)), ranks=(1,))
        rank = processes._watch.ranks[1]
        assert rank.frames.full and rank.received == -1
        os.kill(processes.pids[1], signal.SIGCONT)
        until(lambda: rank.received == 2, "the steps did not arrive")
        assert not rank.frames.full


def test_a_rank_that_is_stopped_while_its_buffer_is_full_is_named() -> None:
    with running({}, {}, stopped=1.0, beat=0.1) as processes:
        os.kill(processes.pids[1], signal.SIGSTOP)
        executor = RanksExecutor(processes, FACTS)
        executor.submit(plan(0, prompt=500_000))
        with pytest.raises(EngineDead, match=r"rank 1 .* is stopped .* \(step 0 not acknowledged\)"):
            while True:
                executor.check_alive()
                time.sleep(0.01)


def test_a_hung_group_of_ranks_holds_up_no_other() -> None:
    """Operations are sent to both before either is waited for; plans go on meanwhile."""
    with running({}, stopped=LONG) as hung, running({}) as other:
        os.kill(hung.pids[0], signal.SIGSTOP)
        for step in range(3):
            hung.send(RankStep(plan(step, prompt=500_000)))
            other.send(RankStep(plan(step)))
            assert other.collect().step == step
        waits = [one.ask("echo", {"call": 1}) for one in (hung, other)]
        assert waits[1](None) == [{"index": 0, "call": 1}]
        os.kill(hung.pids[0], signal.SIGCONT)
        assert waits[0](None) == [{"index": 0, "call": 1}]


def test_answers_to_operations_are_not_mixed() -> None:
    with running({}, {}) as processes:
        waits = [processes.ask("echo", {"call": call}, (call % 2,)) for call in range(4)]
        expected = [[{"index": call % 2, "call": call}] for call in (3, 2, 1, 0)]
        assert [wait(None) for wait in reversed(waits)] == expected


def test_a_long_step_is_no_fault_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    slow = {"waits": {"collect": 1.3, "submit": 1.3}}
    with running(slow, slow, beat=0.05, stopped=1.0, silent=1.0, hang=0.1) as processes:
        processes.send(RankStep(plan(0)))
        assert processes.collect().step == 0
    assert "rank 1 (tp 1) hangs: step 0 (0 decodes, " in (told := capfd.readouterr().err)
    assert "MainThread: fake_rank.py:" in told and "< ranks/server.py:" in told


def test_a_rank_that_holds_python_s_lock_is_a_fault_only_after_the_longer_time() -> None:
    with running({}, {"holds": 1.2}, beat=0.05, stopped=0.5, silent=30.0, leads=(1,)) as processes:
        processes.send(RankStep(plan(0)))
        assert processes.collect().step == 0
    with running({}, {"holds": LONG}, beat=0.05, stopped=0.5, silent=1.0, leads=(1,)) as processes:
        processes.send(RankStep(plan(3)))
        with pytest.raises(EngineDead, match=r"rank 1 .* runs, but has sent nothing for \d+ s"):
            processes.collect()


SUSPENDED = """
import os, signal, sys
sys.path[:0] = [{root!r}]
from tests.support.started_ranks import plan, running
from quire.ranks.messages import RankStep
with running({{}}, {{}}, beat=0.1, stopped=1.0, silent=1.0) as processes:
    for pid in {pids}:
        os.kill(pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    processes.send(RankStep(plan(5)))
    print(processes.collect().step, flush=True)
"""


@pytest.mark.parametrize("pids", ["()", "print(*processes.pids, flush=True) or processes.pids"])
def test_a_suspended_parent_is_no_fault_of_its_ranks(pids: str) -> None:
    """Alone, or with its ranks: then nothing has arrived meanwhile."""
    program = SUSPENDED.format(root=str(Path(__file__).resolve().parents[3]), pids=pids)
    with template_process.start(
        ["-c", program], env=os.environ | ENV, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        stopped = [] if pids == "()" else [int(word) for word in parent.stdout.readline().split()]
        until(lambda: state(parent.pid) == "T", "the parent does not stop")
        time.sleep(1.5)
        parent.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert parent.stdout.readline() == "5\n"
        assert parent.wait() == 0


ORPHANS = """
import os, sys, time
sys.path[:0] = [{root!r}]
from tests.support.started_ranks import plan, ranks, running
from quire.ranks.messages import RankStep
{work}
"""
IMPORTING = """
from tests.support.started_ranks import ENV
from quire.ranks.launchers import LocalLauncher
from quire.ranks.executor import RankProcesses
processes = RankProcesses(LocalLauncher("slow_to_import", ENV), [b"", b""], ["rank 0", "rank 1"])
print(*processes.pids, flush=True)
processes.build(print)
"""
BUILDING = """
processes = ranks({"waits": {"build": 1000.0}}, {"waits": {"build": 1000.0}})
print(*processes.pids, flush=True)
processes.build(print)
"""
COMPUTING = """
with running({"waits": {"submit": 1000.0}}, {"waits": {"collect": 1000.0}}) as processes:
    processes.send(RankStep(plan(0)))
    print(*processes.pids, flush=True)
    processes.collect()
"""
FORKED = """
with running({}, {}) as processes:
    if (pid := os.fork()) == 0:  # holds the ends of the sockets
        os.close(1)
        time.sleep(1000)
        os._exit(0)
    print(*processes.pids, pid, flush=True)
    time.sleep(1000)
"""
NEVER_CLOSED = """
keep = running({}, {})
processes = keep.__enter__()
print(*processes.pids, flush=True)
"""


@pytest.mark.parametrize("work", [IMPORTING, BUILDING, COMPUTING, FORKED, NEVER_CLOSED])
def test_ranks_do_not_outlive_their_parent(work: str) -> None:
    program = ORPHANS.format(root=str(Path(__file__).resolve().parents[3]), work=work)
    variables = {SWITCH: "0"} if work is COMPUTING else {}  # as the product starts them
    with template_process.start(
        ["-c", program],
        env=os.environ | ENV | variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        forked = pids.pop() if work is FORKED else None
        if work is NEVER_CLOSED:
            assert parent.wait() == 0
        else:
            time.sleep(0.5)
            assert all(map(exists, pids))
            parent.kill()
        ended = time.monotonic()
        try:
            until(lambda: not any(map(exists, pids)), "a rank has no parent and runs", 10 * 2.0)
        finally:
            if forked is not None:
                os.kill(forked, signal.SIGKILL)
        print(f"gone after {time.monotonic() - ended:.2f} s")


def test_a_forked_child_of_the_parent_ends_nothing() -> None:
    with running({}, {}) as processes:
        if (pid := os.fork()) == 0:
            try:
                processes.close()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        processes.send(RankStep(plan(1)))
        assert processes.collect().step == 1


def test_interrupts_of_the_terminal_and_of_a_service_manager_do_not_end_ranks() -> None:
    with running({}, {}) as processes:
        for pid in processes.pids:
            assert os.getsid(pid) != os.getsid(0)
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        processes.send(RankStep(plan(1)))
        assert processes.collect().step == 1


def test_an_executor_that_nobody_holds_ends_its_ranks() -> None:
    before = held()
    with running({}, {}) as processes:
        executor: RanksExecutor | None = RanksExecutor(processes, FACTS)
        pids = processes.pids
        assert executor is not None and all(map(exists, pids))
    processes = ranks({}, {})
    pids = processes.pids
    executor = RanksExecutor(processes, FACTS)
    del processes
    executor = None
    gc.collect()
    assert not any(map(exists, pids)) and held() == before


def test_ranks_that_run_end_by_themselves_and_others_are_killed() -> None:
    with running({}, {}) as processes:
        codes = [rank.child for rank in processes._watch.ranks]
    assert [child.ended() for child in codes] == ["exited with code 0"] * 2
    with running({}, {"waits": {"close": LONG}}, stop=0.5) as processes:
        codes = [rank.child for rank in processes._watch.ranks]
    assert [child.ended() for child in codes] == ["exited with code 0", "was killed by SIGKILL"]
    processes = ranks({"waits": {"build": LONG}}, stop=LONG)
    processes.close()


def test_closing_with_a_stopped_rank_or_steps_in_flight_ends() -> None:
    with running({}, {}, stop=0.5) as processes:
        os.kill(processes.pids[0], signal.SIGSTOP)
    with running({"waits": {"collect": LONG}}, {"waits": {"submit": LONG}}, stop=0.5) as processes:
        processes.send(RankStep(plan(0)))
        processes.send(RankStep(plan(1)))


def test_close_in_another_thread_ends_a_wait() -> None:
    with running({"waits": {"collect": LONG}}, stop=0.5) as processes:
        processes.send(RankStep(plan(0)))
        later(processes.close)
        with pytest.raises(EngineClosed):
            processes.collect()


def test_an_interrupted_message_ends_the_engine() -> None:
    """Some ranks have it, and others do not: they would wait for each other."""
    with running({}, {}) as processes:
        frames = processes._watch.ranks[1].frames

        def interrupted(message: bytes) -> None:
            del frames.post  # type: ignore[method-assign]
            raise KeyboardInterrupt

        frames.post = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            processes.send(RankStep(plan(0, prompt=500_000)))
        with pytest.raises(EngineDead, match="interrupted"):
            processes.collect()


def test_an_interrupted_wait_ends_nothing() -> None:
    with running({"waits": {"control": 1.0}}, {}) as processes:
        later(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            processes.ask("echo", {"call": 1})(None)
        assert processes.ask("echo", {"call": 2})(None) == [{"index": 0, "call": 2}, {"index": 1, "call": 2}]


def test_a_process_that_cannot_be_started_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.ranks import launchers as module

    started: list[object] = []

    def start(*args: object, **options: object) -> object:
        if started:
            raise OSError("no more processes")
        started.append(module_start(*args, **options))
        return started[0]

    module_start = module.ChildProcess
    monkeypatch.setattr(module, "ChildProcess", start)
    with pytest.raises(OSError, match="no more processes"):
        RankProcesses(module.LocalLauncher(MODULE, ENV), [b"{}", b"{}"], ["rank 0", "rank 1"])
