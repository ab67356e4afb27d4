"""An engine of several ranks: a process for each, their plans, sizes that fit all of them, and the executor."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from quire.assemble.parts import Loading, Parts
from quire.assemble.rank_child import RankFacts, RankTask
from quire.config.env import rank_variables
from quire.config.resolve import shared_sizes
from quire.config.resolve_cuda import DeviceMemory
from quire.models.plan import EnginePlan, resolve_sizing
from quire.models.rank_report import rank_name
from quire.platforms.cpu import read_cpu_facts
from quire.procs.launchers import LocalLauncher
from quire.procs.ranks import RankProcesses, RanksExecutor

MODULE = "quire.assemble.rank_child"


def assemble_ranks(plans: Sequence[EnginePlan], *, on_loading: Loading, end_phase: Callable[[str], None],
                   arrived: threading.Event | None = None) -> list[Parts]:  # fmt: skip
    """Start a process for every plan and build the engine in them. Return the parts of each replica of attention.

    arrived   set when a result of a replica arrives
    Raises the first `UserError` of a rank.
    """
    parallel, cpu = plans[0].mesh.parallel, read_cpu_facts()
    threads = max(1, (plans[0].config.device.num_threads or cpu.cores) // parallel.size)
    together = parallel.together.size  # ranks that start, end and fail together
    groups = [plans[first : first + together] for first in range(0, len(plans), together)]
    launcher, loading = LocalLauncher(MODULE, rank_variables()), _first_ends("processes", end_phase, on_loading)
    with ExitStack() as meetings, ExitStack() as started:
        made: list[RankProcesses] = []
        for members in groups:
            meeting, inherit = meetings.enter_context(_meeting())
            starts = [msgspec.json.encode(RankTask(plan=plan, meeting=meeting, threads=threads,
                                                   gpu=plan.mesh.rank.number)) for plan in members]  # fmt: skip
            names = [rank_name(plan.mesh.rank, parallel) for plan in members]
            made.append(RankProcesses(launcher, starts, names, inherit=inherit, arrived=arrived,
                                      leads=range(parallel.lead, together, parallel.replica)))  # fmt: skip
            started.callback(made[-1].close)
        found = [one.build(_part_of(loading, part, len(made))) for part, one in enumerate(made)]
        end_phase("weights")
        parts = [_sized(members, one, measured, len(plans))
                 for members, one, measured in zip(groups, made, found, strict=True)]  # fmt: skip
        started.pop_all()
    end_phase("ranks")
    return list(chain(*parts))


def _sized(plans: Sequence[EnginePlan], processes: RankProcesses, measured: Sequence[bytes], num_ranks: int,
           ) -> list[Parts]:  # fmt: skip
    """Size the KV caches of ranks that fit each other, and finish them. Return the parts of each replica.

    num_ranks   of all replicas, which share the memory of a CPU
    """
    memory = [msgspec.json.decode(data, type=DeviceMemory | int) for data in measured]
    sizes = shared_sizes([resolve_sizing(plan, _share(one, num_ranks))
                          for plan, one in zip(plans, memory, strict=True)])  # fmt: skip
    ready = [msgspec.json.decode(data, type=RankFacts)
             for data in processes.size([msgspec.json.encode(size) for size in sizes])]  # fmt: skip
    parallel, found = plans[0].mesh.parallel, []
    for first in range(0, len(plans), parallel.replica):
        lead = first + parallel.lead
        facts, own = ready[lead], range(first, first + parallel.replica)
        found.append(Parts(
            plan=plans[lead], model=None, worker=None, depth=max(facts.depth, parallel.pp), num_stages=parallel.pp,
            memory=sizes[lead], prompt_chunk=facts.prompt_chunk, plans=dict(facts.plans), notes=facts.notes,
            executor=partial(RanksExecutor, processes, ranks=own, lead=lead),
        ))  # fmt: skip
    return found


def _part_of(on_loading: Loading, part: int, parts: int) -> Loading:
    """Return `on_loading` for one of equal parts that are waited for one after the other."""
    return lambda done, total: on_loading(part * total + done, parts * total)


def _first_ends(phase: str, end_phase: Callable[[str], None], on_loading: Loading) -> Loading:
    """Return `on_loading`, which also ends a phase at its first call: all ranks have begun to read weights."""
    left = [phase]

    def loading(done: int, total: int) -> None:
        while left:
            end_phase(left.pop())
        on_loading(done, total)

    return loading


@contextmanager
def _meeting() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the path of the file through which ranks meet, and the descriptors that they inherit for it.

    On Linux the file has no name outside these processes: nothing of it is left, however they end.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-ranks")
        try:
            yield f"/proc/self/fd/{descriptor}", (descriptor,)
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="quire-ranks-", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder, "meeting")), ()


def _share(measured: DeviceMemory | int, ranks: int) -> DeviceMemory | int:
    """Return the memory of a rank. The ranks of a CPU share what is free after all have loaded their weights."""
    return read_cpu_facts().free_memory // ranks if isinstance(measured, int) else measured
