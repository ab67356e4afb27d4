"""The executor that runs one worker in this process, in the caller's thread or in one of its own."""

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import I32, NO_MASKS, StepPlan, StepResult
from quire.procs.launching import LaunchingExecutor

Late = Callable[[], I32]  # waits for the masks of a step
Run = Callable[[StepPlan, Late], StepResult]
Plans = queue.SimpleQueue[StepPlan | None]
Masks = queue.SimpleQueue[I32]
Done = queue.SimpleQueue[StepResult | Exception]


class InProcessExecutor(LaunchingExecutor):
    """Depth 1 runs a plan when it is submitted, or when its masks are there; depth 2 runs it in a worker thread, which
    waits for masks when it comes to need them, while the core plans the next.

    The thread ends with the executor, closed or not, and before the interpreter: one that computes while the
    interpreter ends would abort the process. Plans that come later run in the caller's thread.
    """

    def __init__(self, run: Run, facts: ExecutorFacts) -> None:
        self._runner = _Runner(run, threaded=facts.depth > 1)
        super().__init__(self._runner, facts)

    def shutdown(self) -> None:
        """Stop the worker thread; idempotent."""
        self._runner.stop()


class _Runner:
    """Runs plans as they are submitted, and keeps what came of them; a fault is raised when it is collected."""

    def __init__(self, run: Run, *, threaded: bool) -> None:
        self._run = run
        self._plans, self._masks, self._done = Plans(), Masks(), Done()
        self._waiting: StepPlan | None = None
        self._alone = threading.Event()  # without a thread; its state is read without a lock
        self.stop: Callable[[], object] = self._alone.set
        if threaded:
            # The thread knows the queues and not this object, so that a runner nobody holds any more stops it.
            queues = (self._plans, self._masks, self._done)
            thread = threading.Thread(target=_work, args=(run, *queues), name="quire-worker", daemon=True)
            thread.start()
            # runs at exit, too
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

    def release(self, late: I32) -> None:
        self._masks.put(late)
        if self._waiting is not None:
            plan, self._waiting = self._waiting, None
            self._done.put(_attempt(self._run, plan, self._masks.get))

    def collect(self) -> StepResult:
        result = self._done.get()
        if isinstance(result, Exception):
            raise result
        return result


def _stop(plans: Plans, masks: Masks, thread: threading.Thread, alone: threading.Event) -> None:
    masks.put(NO_MASKS)  # a step that waits for its own goes on without
    plans.put(None)
    if thread is not threading.current_thread():  # where the garbage collector may run
        thread.join()
        with suppress(queue.Empty):  # a step that runs elsewhere from now on has masks of its own
            while True:
                masks.get_nowait()
    alone.set()


def _attempt(run: Run, plan: StepPlan, late: Late) -> StepResult | Exception:
    try:
        return run(plan, late)
    except Exception as fault:  # whatever the device raises stops the engine, with its cause, at collect
        return fault


def _work(run: Run, plans: Plans, masks: Masks, done: Done) -> None:
    while (plan := plans.get()) is not None:
        done.put(_attempt(run, plan, masks.get))
