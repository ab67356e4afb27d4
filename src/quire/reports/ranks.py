"""A rank of a planned engine as plain values: its groups, its exchanges, the slices of tensors that it reads."""

from collections.abc import Iterator
from typing import Any

from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel, Rank
from quire.contracts.params import Param
from quire.plan.collectives import algorithm, groups
from quire.plan.kinds import mixers
from quire.plan.meetings import described
from quire.plan.memory import as_gib
from quire.quantization.formats import raw_tensors
from quire.reports.engine import PlanReport


def describe_one(report: PlanReport, number: int) -> dict[str, Any]:
    """Return rank `number` as plain values. Raises ConfigError for a rank that the plan does not have.

    routing_table   of whole experts: expert -> [number of the rank that has it, its slot there]; else []. An expert's
                    slot is its place in the stacked weights of its rank, whose expert map has -1 for other experts
    copies   second and further copies of experts: [expert, number of the rank, slot]
    slices   each slice of a stored tensor that the loader reads: `start` to `end` (not included) along `axis`, of
             `total`. For quantized tensors these count stored elements, such as packed words and scales
    """
    every, parallel = report.holdings.held, report.plan.mesh.parallel
    if not 0 <= number < len(every):
        raise ConfigError(f"--rank {number} does not exist: this plan has the ranks 0 to {len(every) - 1}.")
    rank, held = every[number]
    own = [one | {"members": members} for one in groups(parallel) for members in one["members"] if number in members]
    return {
        **described(report.plan.meetings),
        "parallel": str(parallel),
        "ranks": len(every),
        "replicas": parallel.dp,
        **report.describe_rank(rank, held),
        "latent": any("compressed" in kind.facts() for kind in mixers(report.plan.args)),
        **_routing(report, rank),
        "groups": own,
        "collectives": report.exchanges(rank),
        "slices": [one for param in report.holdings.params_of(rank) for one in slices_of(report, param)],
    }


def rank_name(rank: Rank, parallel: Parallel) -> str:
    """Return the name of a rank for people: "rank 3 (replica 1, tp 1)"."""
    places = (
        ("replica", rank.replica, parallel.dp),
        ("tp", rank.place, parallel.tp),
        ("stage", rank.stage, parallel.pp),
    )
    words = ", ".join(f"{name} {index}" for name, index, size in places if size > 1)
    return f"rank {rank.number}" + f" ({words})" * bool(words)


def rank_lines(report: PlanReport) -> dict[str, str]:
    """Return two lines about the ranks of a running engine by their titles; {} for one device.

    "ranks": their number, groups and way of exchange; "each rank": its weights, KV cache and buffers.
    """
    parallel = report.plan.mesh.parallel
    every = [report.describe_rank(rank, held) for rank, held in report.holdings.held]
    if parallel.size == 1:
        return {}
    share = "in lock-step, which share experts" if parallel.lockstep else "which share nothing"
    replicas = [f"{parallel.dp} replicas {share}"] * (parallel.dp > 1)
    found = ("tp", parallel.tp), ("dcp", parallel.dcp), ("pp", parallel.pp)
    sizes = [f"{name} {size}" for name, size in found if size > 1]
    way = algorithm("all-reduce", report.plan.machine.device)[0].removesuffix(" ring")
    lines: dict[str, list[int]] = {}
    for rank in every:
        parts = (("bytes", "weights"), ("kv_bytes", "KV cache"), ("buffers", "buffers"))
        words = ", ".join(f"{as_gib(rank[key])} of {what}" for key, what in parts if rank[key])
        lines.setdefault(words, []).append(rank["number"])
    ranks = ", ".join((*replicas, *sizes, *["whole experts"] * parallel.experts, way))
    return {
        "ranks": f"{parallel.size} ranks: {ranks}",
        "each rank": "; ".join(
            f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {words}{' each' * (len(numbers) > 1)}"
            for words, numbers in lines.items()
        ),
    }


def _routing(report: PlanReport, rank: Rank) -> dict[str, list[list[int]]]:
    """Return the places of the experts of the rank's layers at the start: routing_table and copies."""
    places, copies = dict[int, list[int]](), list[list[int]]()
    for other, _ in report.holdings.held if rank.whole_experts else ():
        for slot, expert in enumerate(other.expert_ids if other.stage == rank.stage else ()):
            if expert in places:
                copies.append([expert, other.number, slot])
            else:
                places[expert] = [other.number, slot]
    return {"routing_table": [places[expert] for expert in sorted(places)], "copies": copies}


def slices_of(report: PlanReport, param: Param) -> Iterator[dict[str, Any]]:
    """Yield the slices of stored tensors that fill a rank's parameter, see `describe_one`."""
    for raw in raw_tensors(param):
        for part in raw.parts:
            yield {
                "parameter": param.name,
                "tensor": part.stored,
                "file": report.holdings.files.get(part.stored),
                "axis": part.axis,
                "start": part.start,
                "end": part.start + part.count,
                "total": part.matrix[part.axis],
                "shape": part.shape,
                **({"expert": part.expert, "transposed": part.transposed} if part.expert >= 0 else {}),
            }
