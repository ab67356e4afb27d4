"""An engine of several ranks: a process for each, their plans, sizes that fit all of them, and the executor."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from quire.procs.ranks import RankProcesses, RanksExecutor

MODULE = "quire.assemble.rank_child"


def assemble_ranks(plans: Sequence[EnginePlan], *, on_loading: Loading, end_phase: Callable[[str], None]) -> Parts:
    """Start a process for the plan of each rank, which loads its part of the model; raises a rank's `UserError`."""
    parallel, cpu = plans[0].mesh.parallel, read_cpu_facts()
    threads = max(1, (plans[0].config.device.num_threads or cpu.cores) // parallel.size)
    lead = (parallel.pp - 1) * parallel.tp
    with _meeting() as (meeting, inherit):
        starts = [msgspec.json.encode(RankTask(plan=plan, meeting=meeting, threads=threads,
                                               gpu=plan.mesh.rank.number)) for plan in plans]  # fmt: skip
        names = [rank_name(plan.mesh.rank, parallel) for plan in plans]
        processes = RankProcesses(MODULE, starts, names, rank_variables(), lead=lead, inherit=inherit)
        try:
            loading = _first_ends("processes", end_phase, on_loading)
            measured = [msgspec.json.decode(data, type=DeviceMemory | int) for data in processes.build(loading)]
            end_phase("weights")
            sizes = shared_sizes([resolve_sizing(plan, _share(one, len(plans)))
                                  for plan, one in zip(plans, measured, strict=True)])  # fmt: skip
            ready = [msgspec.json.decode(data, type=RankFacts)
                     for data in processes.size([msgspec.json.encode(size) for size in sizes])]  # fmt: skip
        except BaseException:
            processes.close()
            raise
    end_phase("ranks")
    facts = ready[lead]
    return Parts(
        plan=plans[lead], model=None, worker=None, depth=max(facts.depth, parallel.pp), num_stages=parallel.pp,
        memory=sizes[lead], prompt_chunk=facts.prompt_chunk, plans=dict(facts.plans), notes=facts.notes,
        executor=lambda about: RanksExecutor(processes, about),
    )  # fmt: skip


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
