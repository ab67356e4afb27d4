"""Sizes of the parallelism of an engine, the part of a rank, and the groups of ranks. Pure arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

MOST_RANKS = 4096  # of a plan


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes of parallelism.

    tp        ranks that each hold a slice of every layer (tensor parallelism)
    pp        stages that each hold a range of layers (pipeline parallelism)
    dp        replicas of attention, each with its own requests (data parallelism)
    layers    number of layers of each stage; (): divided equally, see `stages`
    experts   True: each of the tp x dp ranks of a stage holds whole experts; False: a slice of every expert
    round_robin   True: whole experts go to the ranks in turn; False: each rank has neighbours
    redundant     slots of a layer for copies of hot experts; None: experts are not balanced, every one has its place
    dcp           neighbours among the tp ranks that divide the tokens of each context; 1: each rank has all of them
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    experts: bool = False
    layers: tuple[int, ...] = ()
    round_robin: bool = False
    redundant: int | None = None
    dcp: int = 1

    def __str__(self) -> str:
        sizes = (("-tp", self.tp), ("-pp", self.pp), ("-dp", self.dp), ("-dcp", self.dcp))
        words = [f"{flag} {size}" for flag, size in sizes if size != 1]
        words += ["--enable-expert-parallel"] * self.experts
        return " ".join(words + ["--expert-placement-strategy round_robin"] * self.round_robin) or "one device"

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks among which the whole experts of a layer are divided; 1 without `experts`."""
        return self.tp * self.dp if self.experts else 1

    @property
    def replica(self) -> int:
        """Number of ranks of a replica."""
        return self.tp * self.pp

    @property
    def lead(self) -> int:
        """Number in its replica of the rank that sends results: the first one of the last stage."""
        return (self.pp - 1) * self.tp

    @property
    def together(self) -> "Parallel":
        """Sizes of the ranks that exchange tensors: of a replica that shares nothing with others, else of all."""
        return self if self.lockstep else replace(self, dp=1)

    @property
    def lockstep(self) -> bool:
        """True when replicas share experts, so that they take every step together."""
        return self.dp > 1 and self.experts


ALONE = Parallel()


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The part of a model that a rank holds. Ranges are half-open; `experts` has a start, an end and a stride.

    Item p of `experts` is expert p of the `num_experts`, or p - num_experts: a copy of a hot one.

    number     counts the ranks of a stage first, then stages, then replicas (of attention)
    place      index in the tensor-parallel group, whose ranks divide heads and widths as the kinds of layers say
    dcp        ranks that divide the tokens of a context; see `Parallel`
    """

    number: int
    replica: int
    stage: int
    place: int
    layers: tuple[int, int]
    experts: tuple[int, int, int]
    first: bool
    last: bool
    tp: int = 1
    whole_experts: bool = False
    num_experts: int = 0
    dcp: int = 1

    @property
    def part(self) -> int:
        """Index of the rank among those that divide the tokens of a context."""
        return self.place % self.dcp

    @property
    def expert_ids(self) -> Sequence[int]:
        """Numbers of the rank's experts, in the order in which they are stacked; at the start, if they are balanced."""
        slots = range(*self.experts)
        return slots if max(slots, default=0) < self.num_experts else [slot % self.num_experts for slot in slots]


def share(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of `count` items that part `index` holds. The first parts hold the remainder, one item each."""
    each, left = divmod(count, parts)
    first = index * each + min(index, left)
    return first, first + each + (index < left)


def vocabulary_share(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of a vocabulary of `size` ids that part `index` holds.

    Parts begin at multiples of 4, because the sampler draws noise for four ids at a time. They are equal where that is
    possible, else they begin at multiples of 64 (of 4 in a small vocabulary), and the first ones are larger.
    """
    if size % (4 * parts) == 0:
        return index * (size // parts), (index + 1) * (size // parts)
    unit = 64 if size >= 64 * parts else 4
    first, end = share(-(-size // unit), parts, index)
    return min(first * unit, size), min(end * unit, size)


def tp_members(parallel: Parallel) -> Iterator[list[int]]:
    """Yield the numbers of the ranks of each tensor-parallel group."""
    for first in range(0, parallel.size, parallel.tp):
        yield list(range(first, first + parallel.tp))


def dcp_members(parallel: Parallel) -> Iterator[list[int]]:
    """Yield the numbers of the ranks of each group that divides contexts, in the order of their parts."""
    for first in range(0, parallel.size if parallel.dcp > 1 else 0, parallel.dcp):
        yield list(range(first, first + parallel.dcp))


def pp_members(parallel: Parallel) -> Iterator[list[int]]:
    """Yield the numbers of the ranks of each pipeline, in the order of stages."""
    each = parallel.tp * parallel.pp
    for replica in range(parallel.dp):
        for place in range(parallel.tp):
            yield [replica * each + stage * parallel.tp + place for stage in range(parallel.pp)]


def expert_members(parallel: Parallel) -> Iterator[list[int]]:
    """Yield the numbers of the ranks of each group that divides whole experts: those of a stage, of all replicas."""
    each = parallel.tp * parallel.pp
    for stage in range(parallel.pp if parallel.experts else 0):
        yield [
            replica * each + stage * parallel.tp + place
            for replica in range(parallel.dp)
            for place in range(parallel.tp)
        ]


def ep_members(parallel: Parallel) -> Iterator[list[int]]:
    """Yield `expert_members` where replicas share experts; a single replica's tp group sums experts' results."""
    yield from expert_members(parallel) if parallel.lockstep else ()


def mover_members(parallel: Parallel) -> Iterator[list[int]]:
    """Yield all ranks where experts move between them: layers of all stages move in one order."""
    yield from [list(range(parallel.size))] if parallel.redundant is not None else ()
