"""The worker thread of depth 2: it ends with its executor and before the interpreter, whatever nobody has closed."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.contracts.errors import EngineDead
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import NO_MASKS, StepPlan, StepResult
from quire.procs.in_process import GetMasks, InProcessExecutor, Run

SOURCE = Path(__file__).resolve().parents[3] / "src"
NONE = np.zeros(0, np.int32)


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, slots=NONE, num_decodes=0, num_tokens=NONE, num_rows=NONE, outputs=NONE.astype(np.uint8))


def echo(plan: StepPlan, get_masks: GetMasks) -> StepResult:
    return StepResult(step=plan.step, slots=NONE, tokens=NONE.reshape(0, 1), num_accepted=NONE)


def executor(run: Run, depth: int = 2) -> InProcessExecutor:
    return InProcessExecutor(
        run,
        ExecutorFacts(
            depth=depth, decode_lag=depth, num_slots=1, num_blocks=1, block_size=1, max_model_len=1, vocab_size=1
        ),
    )


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "quire-worker"]


@pytest.mark.parametrize("depth", [1, 2])
def test_results_come_in_order_and_a_fault_when_it_is_collected(depth: int) -> None:
    def run(plan: StepPlan, get_masks: GetMasks) -> StepResult:
        if plan.step == 2:
            raise RuntimeError("device lost")
        return echo(plan, get_masks)

    worker = executor(run, depth)
    for step in (0, 1, 2):
        worker.submit(plan(step))
    assert [worker.collect().step for _ in range(2)] == [0, 1]
    with pytest.raises(EngineDead, match="device lost"):
        worker.collect()
    worker.shutdown()
    worker.shutdown()


def test_an_executor_that_nobody_holds_waits_for_its_thread() -> None:
    before, steps = workers(), []

    def slow(plan: StepPlan, get_masks: GetMasks) -> StepResult:
        time.sleep(0.05)
        steps.append(plan.step)
        return echo(plan, get_masks)

    worker = executor(slow)
    assert len(workers()) == len(before) + 1
    worker.submit(plan(7))
    del worker
    gc.collect()
    assert steps == [7] and workers() == before


def test_after_its_thread_has_ended_it_runs_plans_itself() -> None:
    ran: list[threading.Thread] = []

    def run(plan: StepPlan, get_masks: GetMasks) -> StepResult:
        ran.append(threading.current_thread())
        return echo(plan, get_masks)

    worker = executor(run)
    worker.submit(plan(0))
    worker.shutdown()
    worker.submit(plan(1))
    assert [worker.collect().step, worker.collect().step] == [0, 1]
    assert ran[0] is not threading.current_thread() and ran[1] is threading.current_thread()
    seen: list[object] = []
    worker = executor(lambda one, get: (seen.append(get()) if len(one.grammar) else None, echo(one, get))[1])
    worker.shutdown()
    for step in range(3):  # with masks of their own
        worker.submit(masked(step))
        worker.release(step, np.array([[step]], np.int32))
        assert worker.collect().step == step and seen[step] == [[step]]


def masked(step: int) -> StepPlan:
    return msgspec.structs.replace(plan(step), grammar=np.array([3], np.int32))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_samples_when_its_masks_are_there(depth: int) -> None:
    """At depth 2 it computes meanwhile; steps without a grammar wait for no mask."""
    seen: list[object] = []
    begun = threading.Event()

    def run(plan: StepPlan, get_masks: GetMasks) -> StepResult:
        begun.set()
        seen.append((plan.step, get_masks().tolist() if len(plan.grammar) else None))
        return echo(plan, get_masks)

    worker = executor(run, depth)
    worker.submit(plan(0))
    worker.release(0, NO_MASKS)
    for step in (1, 2):
        assert worker.collect().step == step - 1
        begun.clear()
        worker.submit(masked(step))
        assert begun.wait(5.0 * (depth - 1)) == (depth > 1) and len(seen) == step
        worker.release(step, np.full((1, 2), step, np.int32))
    assert worker.collect().step == 2 and seen == [(0, None), (1, [[1, 1]]), (2, [[2, 2]])]
    worker.shutdown()


def test_an_executor_can_be_shut_down_while_a_step_waits_for_masks() -> None:
    worker = executor(lambda plan, get_masks: (get_masks(), echo(plan, get_masks))[1])
    worker.submit(masked(0))
    worker.shutdown()
    assert worker.collect().step == 0 and not workers()


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from test_in_process import echo, executor, plan

def slow(plan, get_masks):
    time.sleep(0.3)
    print("ran", plan.step, flush=True)
    return echo(plan, get_masks)

worker = executor(slow)
worker.submit(plan(0))
"""


def test_the_interpreter_does_not_end_in_the_middle_of_a_step() -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "ran 0\n"), done.stderr
