"""The executor that runs one worker in this process, in the caller's thread or in one of its own."""

import queue
import threading
import weakref
from collections.abc import Callable

from quire.contracts.errors import EngineDead
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import StepPlan, StepResult


class InProcessExecutor:
    """Depth 1 runs a plan when it is submitted; depth 2 runs it in a worker thread while the core plans the next.

    The thread ends with the executor, closed or not, and before the interpreter: one that computes while the
    interpreter ends would abort the process. Plans that come later run in the caller's thread.
    """

    def __init__(self, run: Callable[[StepPlan], StepResult], facts: ExecutorFacts) -> None:
        self._run = run
        self._facts = facts
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = threading.Event()  # without a thread; its state is read without a lock
        if facts.depth == 1:
            self._alone.set()
        else:
            # The thread knows the queues and not this object, so that an executor nobody holds any more stops it.
            self._thread = threading.Thread(
                target=_work, args=(run, self._plans, self._done), name="quire-worker", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _stop, self._plans, self._thread, self._alone)  # runs at exit, too

    def submit(self, plan: StepPlan) -> None:
        """Run or queue one step. A fault is kept for `collect`."""
        if self._alone.is_set():
            self._done.put(_attempt(self._run, plan))
        else:
            self._plans.put(plan)

    def release(self, step: int, late: dict[int, bytes]) -> None:
        """Nothing waits for masks yet."""
        assert not late, "this executor takes no grammar masks"

    def collect(self) -> StepResult:
        """The oldest step's result; raises `EngineDead` with the cause when the step failed as a whole."""
        result = self._done.get()
        if isinstance(result, Exception):
            raise EngineDead(f"the step failed: {type(result).__name__}: {result}") from result
        return result

    def control(self, message: str) -> object:
        """No message is known yet."""
        raise ValueError(f"unknown control message {message!r}")

    def facts(self) -> ExecutorFacts:
        """Sizes and resolved plans."""
        return self._facts

    def shutdown(self) -> None:
        """Stop the worker thread; idempotent."""
        if self._thread is not None and not self._alone.is_set():
            _stop(self._plans, self._thread, self._alone)


def _stop(plans: "queue.SimpleQueue[StepPlan | None]", thread: threading.Thread, alone: threading.Event) -> None:
    plans.put(None)
    if thread is not threading.current_thread():  # where the garbage collector may run
        thread.join()
    alone.set()


def _attempt(run: Callable[[StepPlan], StepResult], plan: StepPlan) -> StepResult | Exception:
    try:
        return run(plan)
    except Exception as fault:  # whatever the device raises stops the engine, with its cause, at collect
        return fault


def _work(
    run: Callable[[StepPlan], StepResult],
    plans: "queue.SimpleQueue[StepPlan | None]",
    done: "queue.SimpleQueue[StepResult | Exception]",
) -> None:
    while (plan := plans.get()) is not None:
        done.put(_attempt(run, plan))
