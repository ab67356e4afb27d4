"""An engine of several ranks: a process for each, their plans, sizes that fit all of them, and the executor."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain

import msgspec

from quire.assemble.launcher import open_launcher, open_meeting
from quire.assemble.loaded import Loading, Outside, Parts, RankTiers
from quire.assemble.offload import check_host_memory, namespace
from quire.assemble.rank_child import RankFacts, RankMeasured, RankSizes, RankTask, packed, unpacked
from quire.plan.cuda_memory import DeviceMemory
from quire.plan.engine import EnginePlan
from quire.plan.memory import MemoryPlan, shared_sizes
from quire.plan.placement import hosts_note
from quire.plan.sizing import resolve_sizing
from quire.platforms.cpu import read_cpu_facts
from quire.ranks.executor import RankProcesses, RanksExecutor
from quire.ranks.launchers import Place
from quire.reports.ranks import rank_name


def assemble_ranks(
    plans: Sequence[EnginePlan],
    *,
    on_loading: Loading,
    end_phase: Callable[[str], None],
    arrived: threading.Event | None = None,
) -> list[Parts]:
    """Start a process for every plan and build the engine in them. Return the parts of each replica of attention.

    arrived   set when a result of a replica arrives
    Raises the first `UserError` of a rank.
    """
    parallel, loading = plans[0].mesh.parallel, _first_ends("processes", end_phase, on_loading)
    together = parallel.together.size  # ranks that start, end and fail together
    with ExitStack() as meetings, ExitStack() as started:
        launcher = open_launcher(plans[0])
        started.callback(launcher.close)
        places = launcher.place(len(plans))
        made: list[RankProcesses] = []
        for first in range(0, len(plans), together):
            own = slice(first, first + together)
            meeting, inherit = meetings.enter_context(open_meeting(launcher, places[own]))
            starts = [packed(task) for task in _tasks(plans, places, own, meeting)]
            names = [rank_name(plan.mesh.rank, parallel) for plan in plans[own]]
            made.append(
                RankProcesses(
                    launcher,
                    starts,
                    names,
                    first=first,
                    inherit=inherit,
                    arrived=arrived,
                    leads=range(parallel.lead, together, parallel.replica),
                )
            )
            started.callback(made[-1].close)
        built = chain(*(one.build(_part_of(loading, part, len(made))) for part, one in enumerate(made)))
        measured = [unpacked(data, RankMeasured) for data in built]
        end_phase("weights")
        memory = [_share(one.memory, place, places) for one, place in zip(measured, places, strict=True)]
        # All replicas have equally many blocks: a request fits into each of them.
        sizes = shared_sizes([resolve_sizing(plan, one) for plan, one in zip(plans, memory, strict=True)])
        check_host_memory(size for size, place in zip(sizes, places, strict=True) if place.local)
        groups = [slice(first, first + together) for first in range(0, len(plans), together)]
        spaces = [namespace(plans[own], [one.sums for one in measured[own]]) for own in groups]
        for one, own, space in zip(made, groups, spaces, strict=True):
            outside = [Outside(space, place.address) for place in places[own]]
            both = zip(sizes[own], outside, strict=True)
            one.size([packed(RankSizes(memory=size, outside=facts)) for size, facts in both])
        parts = [
            replace(part, namespace=space)
            for one, own, space in zip(made, groups, spaces, strict=True)
            for part in _parts(plans[own], one, sizes[own], places)
        ]
        started.pop_all()
    end_phase("ranks")
    return parts


def _tasks(plans: Sequence[EnginePlan], places: Sequence[Place], own: slice, meeting: str) -> Iterator[RankTask]:
    """Yield the task of each rank that meets the others. `own`: their part of `plans` and `places`."""
    cores = read_cpu_facts().cores
    for plan, place in zip(plans[own], places[own], strict=True):
        beside = sum(other.host == place.host for other in places)
        if not place.local:  # its host has found the model itself, and needs no token of the hub
            plan = _elsewhere(plan, place.folders)
        yield RankTask(
            plan=plan,
            meeting=meeting,
            threads=max(1, (plan.config.device.num_threads or cores) // beside),
            gpu=0 if plan.machine.shared else place.device,
            hosts=tuple(other.host for other in places[own]),
        )


def _elsewhere(plan: EnginePlan, folders: Sequence[str]) -> EnginePlan:
    """Return the plan of a rank of another host. folders: see `Place`"""
    own, drafting = folders[0] if folders else plan.folder, plan.drafting
    if drafting.model is not None:
        drafting = msgspec.structs.replace(drafting, model=_elsewhere(drafting.model, folders[1:]))
    config = replace(plan.config, load=replace(plan.config.load, hf_token=None))
    return msgspec.structs.replace(plan, folder=own, drafting=drafting, config=config)


def _parts(
    plans: Sequence[EnginePlan], processes: RankProcesses, sizes: Sequence[MemoryPlan], places: Sequence[Place]
) -> list[Parts]:
    """Wait until ranks that start together are ready. Return the parts of each of their replicas.

    places   of all ranks of the engine
    """
    ready = [unpacked(data, RankFacts) for data in processes.wait_ready()]
    parallel, hosts, found = plans[0].mesh.parallel, tuple(place.host for place in places), []
    for first in range(0, len(plans), parallel.replica):
        lead = first + parallel.lead
        facts, own = ready[lead], range(first, first + parallel.replica)
        found.append(
            Parts(
                plan=plans[lead],
                model=None,
                worker=None,
                depth=max(facts.depth, parallel.pp),
                num_stages=parallel.pp,
                memory=sizes[lead],
                prompt_chunk=facts.prompt_chunk,
                plans=dict(facts.plans),
                notes=(*facts.notes, *filter(None, [hosts_note(parallel, hosts)])),
                hosts=hosts,
                tiers=RankTiers(
                    shards=tuple(shard for rank in own for shard in ready[rank].shards),
                    files=tuple(news for rank in own for news in ready[rank].files),
                ),
                executor=partial(RanksExecutor, processes, ranks=own, lead=lead),
            )
        )
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


def _share(memory: DeviceMemory | int, place: Place, places: Sequence[Place]) -> DeviceMemory | int:
    """Return the memory of a rank. The ranks of a CPU share what is free after all have loaded their weights."""
    if not isinstance(memory, int):
        return memory
    beside = sum(other.host == place.host for other in places)
    return (read_cpu_facts().free_memory if place.local else memory) // beside
