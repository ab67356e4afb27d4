"""The executor that runs one worker in this process, in the caller's thread or in one of its own."""

import queue
import threading
import weakref
from collections.abc import Callable

from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import StepPlan, StepResult
from quire.procs.launching import LaunchingExecutor

Run = Callable[[StepPlan], StepResult]
Plans = queue.SimpleQueue[StepPlan | None]
Done = queue.SimpleQueue[StepResult | Exception]


class InProcessExecutor(LaunchingExecutor):
    """Depth 1 runs a plan when it is submitted; depth 2 runs it in a worker thread while the core plans the next.

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
        self._plans, self._done = Plans(), Done()
        self._alone = threading.Event()  # without a thread; its state is read without a lock
        self.stop: Callable[[], object] = self._alone.set
        if threaded:
            # The thread knows the queues and not this object, so that a runner nobody holds any more stops it.
            queues = (self._plans, self._done)
            thread = threading.Thread(target=_work, args=(run, *queues), name="quire-worker", daemon=True)
            thread.start()
            self.stop = weakref.finalize(self, _stop, self._plans, thread, self._alone)  # runs at exit, too
        else:
            self._alone.set()

    def submit(self, plan: StepPlan) -> None:
        if self._alone.is_set():
            self._done.put(_attempt(self._run, plan))
        else:
            self._plans.put(plan)

    def collect(self) -> StepResult:
        result = self._done.get()
        if isinstance(result, Exception):
            raise result
        return result


def _stop(plans: Plans, thread: threading.Thread, alone: threading.Event) -> None:
    plans.put(None)
    if thread is not threading.current_thread():  # where the garbage collector may run
        thread.join()
    alone.set()


def _attempt(run: Run, plan: StepPlan) -> StepResult | Exception:
    try:
        return run(plan)
    except Exception as fault:  # whatever the device raises stops the engine, with its cause, at collect
        return fault


def _work(run: Run, plans: Plans, done: Done) -> None:
    while (plan := plans.get()) is not None:
        done.put(_attempt(run, plan))
