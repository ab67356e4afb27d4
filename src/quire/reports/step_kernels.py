"""The kernels of a step, and a forecast of its time: bytes or operations at the rates that kernels reach, and gaps.

A kernel takes the longer of its bytes over the memory's rate and its operations over the rate of products, each times
the share of the rate that such kernels reach, and a gap, because it waits for the one before it. Results between two
kernels are written once and read once. Exchanges between ranks come as they are counted in `step_time`. No torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from quire.contracts.params import Param
from quire.reports.gpu_rates import GpuRates
from quire.reports.step_costs import Cost, StepWork, total
from quire.reports.step_time import RankSteps

FEW, SOME = 16, 128  # rows of products whose shares differ
AROUND = 4  # kernels of a step that belong to no layer: table changes, sampling, tokens
ATTENTION, STATES, DRAFTS = "attention over the KV cache", "states of recurrent layers", "passes that draft"
BETWEEN, SMALL = "results between kernels", "norms and biases"


class StepKernel(NamedTuple):
    """Kernels of one kind in a step, of all layers together.

    name      of a matrix below its layer, such as "attention.qkv", or words
    times     kernels in a step
    floor     seconds at the whole rates, matrix by matrix; 0 for what a single kernel would not do
    seconds   at the rates that such kernels reach
    """

    name: str
    times: int
    num_bytes: float
    operations: float
    floor: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Operations for each byte that is read."""
        return self.operations / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class StepForecast:
    """A step of a rank.

    work        requests, tokens of each in the step, and context of each after it
    launches    kernels that wait for each other
    copies      seconds of copies of layers from host memory, which run beside all of it
    """

    kind: str
    work: StepWork
    kernels: tuple[StepKernel, ...]
    exchanges: float
    launches: int
    gap: float
    copies: float = 0.0

    @property
    def gaps(self) -> float:
        """Seconds in which kernels wait for each other."""
        return self.launches * self.gap

    @property
    def floor(self) -> float:
        """Seconds at the whole rates, without gaps."""
        return max(sum(one.floor for one in self.kernels) + self.exchanges, self.copies)

    @property
    def seconds(self) -> float:
        """Forecast of the step."""
        return max(sum(one.seconds for one in self.kernels) + self.exchanges + self.gaps, self.copies)


def forecast(rank: RankSteps, count: int, work: StepWork, *, prompts: bool) -> StepForecast:
    """Return a step of a rank, kernel by kernel.

    count     kernels of the layers, see `launches`
    prompts   True: a step of prompts, in which each request samples one token
    """
    made = (rank.prompts if prompts else rank.decode)(*_sizes(work, prompts))
    exchanges = sum(one.seconds or 0 for one in made if one.name.startswith("exchanges"))
    drafts = next((Cost(one.num_bytes, one.operations, one.seconds or 0) for one in made if one.name == DRAFTS), Cost())
    kernels = [one for one in _kernels(rank, work, drafts, prompts) if one.num_bytes]
    kind = "prompts" if prompts else "decode"
    copies = rank.copied.seconds
    return StepForecast(kind, work, tuple(kernels), exchanges, count + AROUND, rank.rates.gap, copies)


def launches(layers: Iterable[Mapping[str, Any]], own: tuple[int, int], prompts: bool) -> int:
    """Return the kernels of a step in the layers `own` (first, end), the embedding and the head.

    layers   as `PlanReport.layers` yields them
    Experts are two kernels, gate and up, then down, and a third that quantizes between them. Exchanges are none.
    """
    found, other = 0, "up to" if prompts else "more than"
    for layer in layers:
        name = layer["layer"]
        if name.isdigit() and int(name) not in range(*own):
            continue
        calls = [one["function"] for one in layer["calls"] if not one["when"].startswith(other)]
        kernels = [one for one in calls if one.startswith(("quire.", "torch."))]
        found += len(kernels) + sum((".experts." in one) + (".experts.scaled." in one) for one in kernels)
    return found


def _sizes(work: StepWork, prompts: bool) -> tuple[int, ...]:
    return (work.requests, work.rows, work.context) if prompts else (work.requests, work.context)


def _kernels(rank: RankSteps, work: StepWork, drafts: Cost, prompts: bool) -> Iterator[StepKernel]:
    model, rates = rank.model, rank.rates
    named: dict[str, tuple[int, Cost, float]] = {}
    between = 0.0
    for param, cost in model.matrices(tuple(model.by_kind), work):
        own = ".".join(param.name.split(".")[2:]).removesuffix(".weight")
        name = own if len(param.shape) > 1 else SMALL
        count, before, spent = named.get(name, (0, Cost(), 0.0))
        share = _share(param, work.tokens, rates, prompts)
        if name == SMALL:
            cost = Cost(cost.num_bytes, 0, cost.num_bytes / rates.memory)
        named[name] = (count + 1, total((before, cost)), spent + cost.seconds / share)
        between += _between(rank, param, work.tokens)
    for name, (count, cost, spent) in named.items():
        yield StepKernel(name, count, *cost, spent)
    head = model.head(work.requests if prompts else work.tokens) if rank.rank.last else Cost()
    rows = work.requests if prompts else work.tokens
    yield StepKernel("head", 1, *head, head.seconds / _rows(rows, rates))
    read, held = model.reading(work), model.states(work)
    share = rates.reached.prompt_attention if prompts else rates.reached.attention
    yield StepKernel(ATTENTION, len(model.numbers), *read, read.seconds / share)
    yield StepKernel(STATES, 1, *held, held.seconds)
    yield StepKernel(DRAFTS, 1, *drafts, drafts.seconds)
    yield StepKernel(BETWEEN, 1, between, 0, 0, between / rates.memory)


def _between(rank: RankSteps, param: Param, tokens: int) -> float:
    """Return the bytes of a matrix's inputs and results, each written by a kernel and read by the next."""
    if len(param.shape) < 2:
        return 0.0
    moe = rank.plan.args.moe
    top = moe.routing.top_k if moe is not None and param.shard == "experts" else 1
    rows, columns = param.shape[-2:]
    return 2 * 2.0 * tokens * top * (rows + columns)


def _share(param: Param, tokens: int, rates: GpuRates, prompts: bool) -> float:
    reached, scheme = rates.reached, param.scheme
    narrow = scheme is not None and bool(scheme.inputs)
    if param.shard == "experts":
        return (reached.narrow_experts if narrow else reached.prompt_experts) if prompts else reached.experts
    if prompts:
        return reached.prompts
    return _rows(tokens, rates) * (reached.packed if scheme is not None and not narrow else 1)


def _rows(rows: int, rates: GpuRates) -> float:
    reached = rates.reached
    return reached.few if rows <= FEW else reached.some if rows <= SOME else reached.many


def active_parameters(params: Iterable[Param], top: float) -> tuple[int, int]:
    """Return (all, active) parameters, active ones being those that a token is multiplied with.

    top   share of the experts that a token has
    """
    every, active, found = 0, 0.0, list(params)
    untied = any(one.name == "head.weight" for one in found)
    for one in found:
        size = prod(one.shape)
        every += size
        active += size * (top if one.shard == "experts" else not (untied and one.name == "embed.weight"))
    return every, round(active)
