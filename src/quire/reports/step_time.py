"""Floors of the steps of a GPU, part by part: bytes over bandwidth, or operations over rate where these take longer.

A floor is no forecast: it tells which part of a step would be slowest, and what no implementation can beat. Parts
follow each other; exchanges hide behind nothing. No torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import comb
from typing import Any, NamedTuple

from quire.contracts.parallel import Rank, share
from quire.plan.collectives import EDITED, LOGGED, SAMPLED
from quire.plan.draft_exchanges import DECODE, FIRST, LATER, PROMPTS, draft_layers
from quire.plan.engine import EnginePlan
from quire.plan.kinds.experts import CROSSING, EVERY, SHARED, WHEN
from quire.plan.kinds.interfaces import PART, TOKEN
from quire.plan.kinds.latent import FEW, MANY
from quire.plan.memory import MemoryPlan
from quire.plan.placement import held_of, ranks
from quire.reports.gpu_rates import HOST_GPUS, GpuRates, rates_of
from quire.reports.holdings import Holdings
from quire.reports.step_costs import Cost, Layers, StepWork, total

USUAL = 4096  # tokens of context of the first step that is shown
MIXERS = {False: "weights of attention", True: "weights of attention and recurrent layers"}
EXPERTS, BETWEEN = "routed experts", "exchanges across hosts"
COPIES = "copies of layers from host memory, beyond the time of all other parts"
Exchange = Mapping[str, Any]  # a `Collective` as plain values


class StepPart(NamedTuple):
    """A part of a step. seconds: None where no rate was measured"""

    name: str
    num_bytes: float
    operations: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The steps of a rank, part by part.

    exchanges   of the rank in a step, those of drafters included
    """

    holdings: Holdings
    rank: Rank
    rates: GpuRates
    exchanges: list[Exchange]

    @property
    def plan(self) -> EnginePlan:
        """The plan of a rank."""
        return self.holdings.plan

    @cached_property
    def model(self) -> Layers:
        """The layers of the model."""
        return self._layers(self.holdings, self.rank, range(*self.rank.layers))

    @cached_property
    def drafter(self) -> Layers | None:
        """The layers that draft; None: this rank has none."""
        found, args = draft_layers(self.plan), self.plan.args
        if found is None or not self.rank.last:
            return None
        if found.plan is self.plan:
            behind = range(args.num_layers, args.num_layers + len(found.layers))
            return self._layers(self.holdings, self.rank, behind)
        rank = list(ranks(found.plan.args, found.parallel))[self.rank.number]
        return self._layers(Holdings(plan=found.plan), rank, range(len(found.layers)))

    def _layers(self, holdings: Holdings, rank: Rank, numbers: range) -> Layers:
        return Layers(holdings=holdings, rank=rank, numbers=numbers, rates=self.rates)

    def drafts(self, requests: int) -> int:
        """Return the drafts of each of so many decodes; of those that are chosen by gain the most."""
        speculation = self.plan.speculation
        if speculation is None or not requests:
            return 0
        most = speculation.auto[-1] if speculation.auto else speculation.num_drafts
        return next((k for size, k in reversed(speculation.by_batch) if size <= requests), most)

    def decode(self, requests: int, context: int) -> list[StepPart]:
        """Return the parts of a step of decodes, with their drafts."""
        drafts = self.drafts(requests)
        batch = StepWork(requests, 1 + drafts, context)
        made = Cost()
        if self.drafter is not None and self.plan.speculation is not None:
            args = self.plan.args
            others = replace(self.drafter, reuses=args.prediction.shared_choice(args.layers) is not None)
            later = others.passed(StepWork(requests, 1, context)).times(max(0, drafts - 1))
            made = total((self.drafter.passed(batch), later, self._draft_head(requests).times(drafts)))
        return self._parts(batch, batch.tokens, made, prompts=False)

    def prompts(self, requests: int, tokens: int, context: int) -> list[StepPart]:
        """Return the parts of a step with so many tokens of each prompt. Each has `context` tokens after the step."""
        batch = StepWork(requests, tokens, context)
        made = Cost() if self.drafter is None else self.drafter.passed(batch)
        return self._parts(batch, requests, made, prompts=True)

    def _draft_head(self, rows: int) -> Cost:
        assert self.drafter is not None
        method = self.plan.speculation.method if self.plan.speculation else ""
        return (self.model if method in ("mtp", "eagle") else self.drafter).head(rows)

    def _parts(self, batch: StepWork, sampled: int, drafts: Cost, *, prompts: bool) -> list[StepPart]:
        model, args = self.model, self.plan.args
        costs = {
            EXPERTS: model.weights(["experts"], batch),
            MIXERS[args.keeps_states]: model.weights(["attention"], batch),
            "dense layers, shared experts, routers": model.weights(["others"], batch),
            "head": model.head(sampled) if self.rank.last else Cost(),
            "attention over the KV cache": model.reading(batch),
            "states of recurrent layers": model.states(batch),
            "passes that draft": drafts,
        }
        parts = [*(StepPart(name, *cost) for name, cost in costs.items()), *self._exchanged(batch, sampled, prompts)]
        hidden, copied = sum(one.seconds or 0 for one in parts), self.copied
        parts.append(StepPart(COPIES, copied.num_bytes, 0, max(0.0, copied.seconds - hidden)))
        return [one for one in parts if one.num_bytes]

    @cached_property
    def copied(self) -> Cost:
        """Copies of layers from host memory in a step. They run beside all other parts."""
        num_bytes = self.holdings.host_layers(self.rank).num_bytes
        return Cost(num_bytes, 0, num_bytes / self.rates.host)

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def _exchanged(self, batch: StepWork, sampled: int, prompts: bool) -> Iterator[StepPart]:
        """Yield the exchanges inside a host, then those between hosts."""
        near, seconds, far = 0.0, 0.0, 0.0
        for one in self._of_step(prompts):
            rows = batch.requests * (1 if one["drafts"] == LATER else batch.rows)
            if one["per"] == PART:
                rows = batch.requests * batch.context // self.plan.mesh.parallel.dcp
            moved = one["times"] * one["message_bytes"] * self._received(one, rows, sampled, batch.requests)
            if self._leaves(one["group"]):
                far += moved
                continue
            near += moved
            alone = not one["where"].startswith("ids and weights")  # these travel with the tokens
            seconds += moved / self.rates.link + self.rates.exchange * one["times"] * alone
        yield StepPart("exchanges", near, 0, seconds)
        yield StepPart(BETWEEN, far, 0, None)

    def _of_step(self, prompts: bool) -> Iterator[Exchange]:
        """Yield the exchanges of a step: of decodes, or of prompts, without filters and log-probabilities."""
        passes, other = ("", PROMPTS) if prompts else ("", FIRST, LATER), WHEN[("decode" if prompts else "prefill",)]
        for one in self.exchanges:
            rare = one["when"] in (EDITED, LOGGED, other) or one["when"].startswith(FEW if prompts else MANY)
            if one["drafts"] in passes and not rare:
                yield one

    def _received(self, one: Exchange, rows: int, sampled: int, decodes: int) -> float:
        """Return the number of messages of a row that a rank receives in an exchange."""
        parallel = self.plan.mesh.parallel
        size = {"ep": parallel.expert_ranks, "tp": parallel.tp, "dcp": parallel.dcp}.get(one["group"], 2)
        first, end = share(rows, parallel.tp, 0)
        if one["per"] == CROSSING:
            return (end - first) * (size - 1) * self._hit
        counts = {TOKEN: rows, SHARED: end - first, EVERY: rows * parallel.dp, SAMPLED: sampled, DECODE: decodes}
        counts[PART] = rows
        ways = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": (size - 1) / size, "send": 0, "receive": 1}
        ways["all-to-all"] = ways["reduce-scatter"]
        return counts.get(one["per"], 0) * ways.get(one["kind"], size - 1)

    @cached_property
    def _hit(self) -> float:
        """Probability that a token has an expert on a given rank, if its router chooses at random."""
        moe, own = self.plan.args.moe, len(self.rank.expert_ids)
        assert moe is not None
        experts, top = moe.routing.num_experts, moe.routing.top_k
        return 1 - comb(max(0, experts - own), top) / comb(experts, top)

    def _leaves(self, group: str) -> bool:
        """Return True if ranks of a group are on other hosts."""
        parallel, hosts = self.plan.mesh.parallel, self.plan.config.hosts.nnodes
        host = min(HOST_GPUS, parallel.size // hosts)
        widths = {"tp": parallel.tp, "dcp": parallel.dcp, "ep": parallel.size}
        return widths.get(group, parallel.replica) > host


def describe_steps(
    holdings: Holdings, memory: MemoryPlan | str, exchanges: Callable[[Rank], list[Exchange]]
) -> dict[str, Any] | None:
    """Return the floors of steps of the slowest rank as plain values; None on a CPU.

    rank    its number
    rates   of the GPU; None: none are known, and there are no steps
    stages  of a pipeline: a token passes the steps of all of them
    steps   kind ("decode", "prompts"), requests of a replica, tokens of each in the step, context of each after it,
            drafts of each, `full` where the KV cache has room for no more requests, parts, seconds of the parts that
            have some, and the slowest part
    """
    plan = holdings.plan
    if plan.machine.device != "cuda":
        return None
    rates, parallel = rates_of(plan.machine.words), plan.mesh.parallel
    known = {"rank": 0, "stages": parallel.pp, "replicas": parallel.dp, "rates": rates and asdict(rates)}
    if rates is None:
        return known | {"steps": []}
    kinds = {held_of(plan.args, rank): rank for rank, _ in reversed(holdings.held)}
    steps = [
        list(_steps(RankSteps(holdings=holdings, rank=rank, rates=rates, exchanges=exchanges(rank)), memory))
        for rank in kinds.values()
    ]
    slowest = max(zip(steps, kinds.values(), strict=True), key=lambda one: one[0][0]["seconds"])
    return known | {"rank": slowest[1].number, "steps": slowest[0]}


def _steps(rank: RankSteps, memory: MemoryPlan | str) -> Iterator[dict[str, Any]]:
    """Yield steps of decodes at the usual context and at the longest, then a step of prompts."""
    config, plan = rank.plan.config, rank.plan
    most, tokens = config.scheduler.sequences(), config.scheduler.token_budget()
    most = most if isinstance(memory, str) else memory.num_slots or most
    length = plan.args.max_position_embeddings if isinstance(memory, str) else memory.max_model_len
    length = config.model.max_model_len or length
    refused = isinstance(memory, str)  # no KV cache fits: a longer context would tell nothing
    for context in sorted({min(USUAL, length), min(USUAL, length) if refused else length}):
        room = most if isinstance(memory, str) else max(1, min(most, memory.num_tokens // context))
        requests = -(-room // plan.mesh.parallel.pp)  # a stage of a pipeline has those of a slot
        yield _step("decode", requests, rank.drafts(requests), context, rank.decode(requests, context)) | {
            "full": room < most
        }
    chunk = min(tokens, length)
    context = max(chunk, min(USUAL, length))
    requests = tokens // chunk
    yield _step("prompts", requests, 0, context, rank.prompts(requests, chunk, context)) | {"tokens": chunk}


def _step(kind: str, requests: int, drafts: int, context: int, parts: list[StepPart]) -> dict[str, Any]:
    timed = [one for one in parts if one.seconds is not None]
    return {
        "kind": kind,
        "requests": requests,
        "tokens": 1 + drafts,
        "drafts": drafts,
        "context": context,
        "full": False,
        "seconds": sum(one.seconds or 0 for one in timed),
        "slowest": max(timed, key=lambda one: one.seconds or 0).name,
        "parts": [
            one._asdict() | {"num_bytes": round(one.num_bytes), "operations": round(one.operations)} for one in parts
        ],
    }
