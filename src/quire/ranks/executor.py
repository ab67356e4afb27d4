"""The ranks of an engine as processes: starts them, builds them in step, sends every plan to all, takes the results.

The engine core makes all decisions. Every rank gets the same messages in the same order. Knows nothing of models and
devices; the payloads are between the engine's assembly and its ranks.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from quire.contracts.adapters import AdapterLoaded
from quire.contracts.errors import QuireError
from quire.contracts.protocols import Executor, ExecutorFacts, Wait
from quire.contracts.step import I32, FinishedCopy, StepPlan, StepResult
from quire.procs.failures import rebuilt
from quire.procs.messages import Loading
from quire.procs.wire import encode
from quire.ranks.launchers import Launcher
from quire.ranks.messages import (
    RankBuilt,
    RankControl,
    RankCopied,
    RankMasks,
    RankReady,
    RankReply,
    RankSize,
    RankStart,
    RankStep,
    ToRank,
)
from quire.ranks.watch import RankTimes, RankWatch, WatchedRank

TIMES = RankTimes()
P = TypeVar("P", RankBuilt, RankReady)
R = TypeVar("R", FinishedCopy, AdapterLoaded)


class RankProcesses:
    """The processes of an engine's ranks. One thread uses them; any thread may call `close`.

    Order of calls: `build`, `size`, `wait_ready`, then `send`, `collect` and `control`. When a rank fails, all ranks
    are killed and every later call raises the error. The processes end with this object, closed or not, and with this
    process.

    launcher starts the processes, on this host or on several
    starts   parameters of each rank for `build_rank`, encoded, in the order of the ranks
    names    names of the ranks in error messages: "rank 1 (tp 1)"
    first    number of the first of these ranks in the engine
    leads    indices of the ranks that send step results: one of each replica
    inherit  file descriptors that every rank inherits under the same numbers
    arrived  set when a step result arrives, and when the ranks have ended
    pids     process ids, in the order of the ranks
    """

    def __init__(
        self,
        launcher: Launcher,
        starts: Sequence[bytes],
        names: Sequence[str],
        *,
        first: int = 0,
        leads: Sequence[int] = (0,),
        inherit: Sequence[int] = (),
        times: RankTimes = TIMES,
        arrived: threading.Event | None = None,
    ) -> None:
        assert all(0 <= lead < len(starts) for lead in leads) and len(starts) == len(names)
        started = launcher.start(range(first, first + len(names)), inherit)
        ranks = [WatchedRank(name, *one) for name, one in zip(names, started, strict=True)]
        self._watch = RankWatch(ranks, times, arrived)
        # The watch does not refer to this object, so that collecting this object as garbage ends the processes.
        weakref.finalize(self, self._watch.close)  # runs at exit, too
        self.pids = tuple(rank.child.pid for rank in ranks)
        self._num_controls, self._leads = 0, tuple(leads)
        self._replies: dict[int, dict[int, RankReply]] = {}  # number of an operation -> replies by rank
        for index, payload in enumerate(starts):
            with suppress(QuireError):  # `build` raises it
                self._send((index,), RankStart(payload, index in leads, times.beat, names[index], times.hang))

    def build(self, on_loading: Callable[[int, int], None]) -> list[bytes]:
        """Wait until all ranks have loaded their weights; return their `RankBuilt` payloads. Raises a rank's error.

        on_loading   called with (bytes loaded, bytes to load), summed over the ranks, once every rank has reported
        """
        return self._payloads(RankBuilt, on_loading)

    def size(self, payloads: Sequence[bytes]) -> None:
        """Send each rank its memory sizes, encoded."""
        for index, payload in enumerate(payloads):
            self._send((index,), RankSize(payload))

    def wait_ready(self) -> list[bytes]:
        """Wait until all ranks can run steps; return their `RankReady` payloads. Raises a rank's error."""
        ready = self._payloads(RankReady, lambda done, total: None)
        self._watch.ready = True
        return ready

    def send(self, message: ToRank, ranks: Sequence[int] | None = None) -> None:
        """Send a message to these ranks (None: all). Never waits: a rank that hangs does not hold up the others."""
        ranks = range(len(self._watch.ranks)) if ranks is None else ranks
        if isinstance(message, RankStep):
            for index in ranks:
                self._watch.ranks[index].sent = message.plan.step
        self._send(ranks, message)

    def collect(self, lead: int | None = None) -> StepResult:
        """Wait for the result of the oldest uncollected step of a lead (None: the first one), and return it."""
        return self._watch.result(self._leads[0] if lead is None else lead)

    def copied(self, rank: int) -> list[RankCopied]:
        """Return the reports of copies and loads of a rank that sends no results, since the last call."""
        reports, waiting = list[RankCopied](), self._watch.ranks[rank].copied
        with suppress(queue.Empty):
            while not waiting.empty():
                reports.append(waiting.get_nowait())
        return reports

    def ready(self, lead: int | None = None) -> bool:
        """True when `collect` returns or raises at once."""
        return not self._watch.ranks[self._leads[0] if lead is None else lead].results.empty()

    def ask(
        self, name: str, args: dict[str, Any], ranks: Sequence[int] | None = None
    ) -> Callable[[float | None], list[object]]:
        """Start the operation `name` on ranks (None: all). Return a function that waits for a value per rank.

        It raises the first `UserError` of a rank. See `Executor.ask`.
        """
        self._num_controls += 1
        asked = range(len(self._watch.ranks)) if ranks is None else ranks
        self.send(RankControl(self._num_controls, name, args), asked)
        self._replies[self._num_controls] = {}
        return partial(self._values, self._num_controls, asked)

    def _values(self, number: int, asked: Sequence[int], seconds: float | None) -> list[object]:
        """Wait for the replies of the ranks `asked` to an operation; return their values. See `Executor.ask`."""
        replies, until = self._replies[number], None if seconds is None else time.monotonic() + seconds
        try:
            while len(replies) < len(asked):
                index, message = self._watch.answer(None if until is None else max(0.0, until - time.monotonic()))
                if isinstance(message, RankReply) and message.id in self._replies:  # else of an interrupted call
                    self._replies[message.id][index] = message
        except queue.Empty:
            silent = [str(self._watch.ranks[index]) for index in asked if index not in replies]
            raise TimeoutError(", ".join(silent)) from None
        finally:
            del self._replies[number]
        for index in sorted(replies):
            if (error := replies[index].error) is not None:
                raise rebuilt(error.kind, error.message)
        return [replies[index].value for index in sorted(replies)]

    def check_alive(self) -> None:
        """Raise the error if the ranks have ended."""
        self._watch.check()

    def close(self, *, wait: bool = True) -> None:
        """End and reap all processes. Ready ranks have `RankTimes.stop` seconds to exit before SIGKILL. Idempotent.

        wait   False: return at once
        """
        self._watch.close(wait=wait)

    def _payloads(self, kind: type[P], on_loading: Callable[[int, int], None]) -> list[bytes]:
        """Wait for a message of `kind` from every rank; return their payloads, by rank."""
        payloads: dict[int, bytes] = {}
        shares: dict[int, tuple[int, int]] = {}
        while len(payloads) < len(self._watch.ranks):
            index, message = self._watch.answer()
            if isinstance(message, kind):
                payloads[index] = message.payload
                shares.setdefault(index, (0, 0))
            elif isinstance(message, Loading):
                shares[index] = message.done, message.total
                if len(shares) == len(self._watch.ranks):
                    on_loading(sum(done for done, _ in shares.values()), sum(total for _, total in shares.values()))
        return [payloads[index] for index in sorted(payloads)]

    def _send(self, indices: Sequence[int], message: ToRank) -> None:
        """Send a message to some ranks, without waiting for any of them."""
        self._watch.check()
        data = encode(message)
        try:
            for index in indices:
                self._watch.post(index, data)
        except OSError:
            raise self._watch.wait() from None
        except BaseException:  # Ctrl-C: some ranks have the message, perhaps a half, and others do not
            self._watch.abandon("a message to the ranks was interrupted: make a new engine.")
            raise


class RankReports(Generic[R]):
    """Joins reports of the ranks about jobs: a job has ended when all ranks say so.

    joined   makes one report of those of all ranks
    """

    def __init__(self, num_ranks: int, joined: Callable[[Sequence[R]], R]) -> None:
        self._num_ranks = num_ranks
        self._joined: Callable[[Sequence[R]], R] = joined
        self._reports: dict[int, list[R]] = {}

    def join(self, reports: Iterable[R]) -> tuple[R, ...]:
        """Take reports of any rank. Return those of jobs that all ranks have reported now."""
        found = []
        for report in reports:
            some = self._reports.setdefault(report.id, [])
            some.append(report)
            if len(some) == self._num_ranks:
                found.append(self._joined(self._reports.pop(report.id)))
        return tuple(found)


def joined_copies(some: Sequence[FinishedCopy]) -> FinishedCopy:
    """Return the report of all ranks about a copy job: a block that one rank lacks has failed."""
    return FinishedCopy(
        id=some[0].id,
        failed=tuple(sorted({block for one in some for block in one.failed})),
        num_bytes=sum(one.num_bytes for one in some),
        seconds=max(one.seconds for one in some),
        error=_first_error(some),
    )


def joined_loads(some: Sequence[AdapterLoaded]) -> AdapterLoaded:
    """Return the report of all ranks about the load of an adapter: it has failed if one rank's has."""
    return AdapterLoaded(
        id=some[0].id,
        error=_first_error(some),
        seconds=max(one.seconds for one in some),
        read=any(one.read for one in some),
    )


def _first_error(some: Sequence[FinishedCopy] | Sequence[AdapterLoaded]) -> str:
    return next((one.error for one in some if one.error), "")


class RanksExecutor(Executor):
    """Executor of ranks that are ready. Owns `processes`, also beside executors of other replicas.

    ranks   indices of the ranks of this executor (None: all);  lead  the one that sends results (None: the first)
    """

    def __init__(
        self,
        processes: RankProcesses,
        facts: ExecutorFacts,
        ranks: Sequence[int] | None = None,
        lead: int | None = None,
    ) -> None:
        self._processes, self._facts, self._lead = processes, facts, lead
        self._ranks = range(len(processes.pids)) if ranks is None else ranks
        count = len(self._ranks)
        self._copies, self._loads = RankReports(count, joined_copies), RankReports(count, joined_loads)
        self.pids = tuple(processes.pids[index] for index in self._ranks)

    def submit(self, plan: StepPlan) -> None:
        self._processes.send(RankStep(plan), self._ranks)

    def release(self, step: int, masks: I32) -> None:
        if len(masks):
            self._processes.send(RankMasks(step, masks), self._ranks)

    def collect(self) -> StepResult:
        result = self._processes.collect(self._lead)
        others = [one for rank in self._ranks for one in self._processes.copied(rank)]
        if not (others or result.copied or result.loaded):
            return result
        copied = self._copies.join([*result.copied, *(report for one in others for report in one.copied)])
        loaded = self._loads.join([*result.loaded, *(report for one in others for report in one.loaded)])
        files = (*result.files, *(news for one in others for news in one.files))
        return msgspec.structs.replace(result, copied=copied, loaded=loaded, files=files)

    def ready(self) -> bool:
        return self._processes.ready(self._lead)

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Run an operation on every rank; return the list of its values, by rank."""
        return self.ask(name, args)(None)

    def ask(self, name: str, args: dict[str, Any]) -> Wait:
        return self._processes.ask(name, args, self._ranks)

    def check_alive(self) -> None:
        self._processes.check_alive()

    def facts(self) -> ExecutorFacts:
        return self._facts

    def shutdown(self, *, wait: bool = True) -> None:
        self._processes.close(wait=wait)
