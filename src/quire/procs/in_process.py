"""The executor that runs a worker in this process, in the caller's thread or in a thread of its own."""

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import I32, NO_MASKS, StepPlan, StepResult
from quire.procs.async_executor import Controls, LaunchingExecutor

GetMasks = Callable[[], I32]  # waits for the grammar masks of a step and returns them
Run = Callable[[StepPlan, GetMasks], StepResult]
Plans = queue.SimpleQueue[StepPlan | None]
Masks = queue.SimpleQueue[I32]
Done = queue.SimpleQueue[StepResult | Exception]


class InProcessExecutor(LaunchingExecutor):
    """Executor of a worker in this process.

    With depth 1 a step plan runs in the caller's thread: in `submit`, or in `release` if it needs grammar masks. With
    depth 2 a worker thread runs the plan while the engine core makes the next plan, and waits there for the masks.

    The thread ends on `shutdown`, with the executor object, and before the interpreter exits: a thread that computes
    during the exit aborts the process. Plans submitted after that run in the caller's thread.
    """

    def __init__(self, run: Run, facts: ExecutorFacts, controls: Controls | None = None) -> None:
        self._runner = _Runner(run, threaded=facts.depth > 1)
        super().__init__(self._runner, facts, controls)

    def shutdown(self, *, wait: bool = True) -> None:
        """Stop the worker thread, if any; idempotent."""
        self._runner.stop()
        self._controls = {}


class _Runner:
    """Runs plans as they are submitted, and keeps their results. `collect` raises the fault of a failed plan."""

    def __init__(self, run: Run, *, threaded: bool) -> None:
        self._run = run
        self._plans, self._masks, self._done = Plans(), Masks(), Done()
        self._waiting: StepPlan | None = None
        self._alone = threading.Event()  # set: there is no thread; read without a lock
        self.stop: Callable[[], object] = self._alone.set
        if threaded:
            # The thread holds the queues, not this object, so that collecting this object as garbage stops the thread.
            queues = (self._plans, self._masks, self._done)
            thread = threading.Thread(target=_work, args=(run, *queues), name="quire-worker", daemon=True)
            thread.start()
            # `finalize` runs at exit, too
            self.stop = weakref.finalize(self, _stop, self._plans, self._masks, thread, self._alone)
        else:
            self._alone.set()

    def submit(self, plan: StepPlan) -> None:
        if not self._alone.is_set():
            self._plans.put(plan)
        elif len(plan.grammar):
            self._waiting = plan
        else:
            self._done.put(_attempt(self._run, plan, self._masks.get))

    def release(self, masks: I32) -> None:
        self._masks.put(masks)
        if self._waiting is not None:
            plan, self._waiting = self._waiting, None
            self._done.put(_attempt(self._run, plan, self._masks.get))

    def collect(self) -> StepResult:
        result = self._done.get()
        if isinstance(result, Exception):
            raise result
        return result


def _stop(plans: Plans, masks: Masks, thread: threading.Thread, alone: threading.Event) -> None:
    masks.put(NO_MASKS)  # a step that waits for its masks continues without masks
    plans.put(None)
    if thread is not threading.current_thread():  # the garbage collector may run there
        thread.join()
        with suppress(queue.Empty):  # later steps get masks of their own
            while True:
                masks.get_nowait()
    alone.set()


def _attempt(run: Run, plan: StepPlan, get_masks: GetMasks) -> StepResult | Exception:
    try:
        return run(plan, get_masks)
    except Exception as fault:  # any error of the device stops the engine, with its cause, at `collect`
        return fault


def _work(run: Run, plans: Plans, masks: Masks, done: Done) -> None:
    while (plan := plans.get()) is not None:
        done.put(_attempt(run, plan, masks.get))
