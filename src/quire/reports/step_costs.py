"""Bytes that layers of a rank read in a step, and operations that they make. Pure arithmetic, no torch.

Experts are those that n tokens hit if routers choose at random: E (1 - (1 - top / E)^n) of E.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from msgspec import structs

from quire.args.latent import LatentArgs
from quire.args.layers import GroupedArgs, MixerArgs
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param
from quire.plan.engine import state_types
from quire.plan.kinds import mixer
from quire.plan.kv_geometry import kv_components, state_groups
from quire.reports.gpu_rates import GpuRates
from quire.reports.holdings import Holdings

MIXERS = ("attention", "delta", "mamba", "conv")  # names of their parameters below a layer
SCORES = ("attention.index.q.weight", "attention.index.heads.weight")  # parameters of a layer's scores
MOST_ALIKE = 16  # tokens of a request that choose mostly the same tokens: those of a decode with drafts


class StepWork(NamedTuple):
    """The tokens of a replica in a step.

    rows      tokens of each request in the step
    context   tokens of each request after the step
    """

    requests: int
    rows: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.requests * self.rows


class Cost(NamedTuple):
    """Bytes that are read, operations, and seconds of whichever takes longer, matrix by matrix."""

    num_bytes: float = 0
    operations: float = 0
    seconds: float = 0.0

    def times(self, count: int) -> "Cost":
        """Return the cost of so many passes."""
        return Cost(self.num_bytes * count, self.operations * count, self.seconds * count)


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs."""
    found = list(costs)
    return Cost(*(sum(column) for column in zip(*found, strict=True))) if found else Cost()


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layers of a rank: of a model, of a prediction layer, of a draft model or EAGLE head.

    holdings   of the plan that has the layers
    numbers    of the layers
    reuses     True: their indexers choose nothing; rows attend to the tokens that an earlier pass has chosen
    """

    holdings: Holdings
    rank: Rank
    numbers: range
    rates: GpuRates
    reuses: bool = False

    @cached_property
    def _params(self) -> tuple[Param, ...]:
        return self.holdings.with_one_expert(self.rank)

    @cached_property
    def by_kind(self) -> dict[str, tuple[Param, ...]]:
        """Parameters of the layers: "experts" (one of each layer), "attention" (mixers) and "others"."""
        found: dict[str, list[Param]] = {"experts": [], "attention": [], "others": []}
        for param in self._params:
            parts = param.name.split(".")
            if parts[0] != "layers" or int(parts[1]) not in self.numbers or (self.reuses and scores(param.name)):
                continue
            mixes = parts[2].startswith(MIXERS)
            found["experts" if param.shard == "experts" else "attention" if mixes else "others"].append(param)
        return {kind: tuple(params) for kind, params in found.items()}

    def weights(self, kinds: Sequence[str], batch: StepWork) -> Cost:
        """Return the cost of the matrices of some kinds (`by_kind`) in a step."""
        return total(cost for _, cost in self.matrices(kinds, batch))

    def matrices(self, kinds: Sequence[str], batch: StepWork) -> Iterator[tuple[Param, Cost]]:
        """Yield the parameters of some kinds (`by_kind`) in a step; experts stand for all of their layer."""
        yield from ((param, self._matrix(param, batch.tokens)) for kind in kinds for param in self.by_kind[kind])

    def head(self, rows: int) -> Cost:
        """Return the cost of the head for so many rows; of a tied head the embedding."""
        named = {param.name: param for param in self._params}
        param = named.get("head.weight", named.get("embed.weight"))
        return self._matrix(param, rows) if param is not None and rows else Cost()

    def passed(self, batch: StepWork) -> Cost:
        """Return the cost of a pass of all layers, without a head."""
        return total((self.weights(tuple(self.by_kind), batch), self.reading(batch), self.states(batch)))

    def _matrix(self, param: Param, tokens: int) -> Cost:
        size, share_of = prod(param.shape), 1.0
        if param.shard == "experts":
            moe, parallel = self.holdings.plan.args.moe, self.holdings.plan.mesh.parallel
            assert moe is not None
            slots, own = moe.routing.num_experts + (parallel.redundant or 0), len(self.rank.expert_ids)
            tokens *= parallel.dp if parallel.lockstep else 1
            share_of = own * (1 - (1 - moe.routing.top_k / slots) ** tokens)
            tokens_each = tokens * moe.routing.top_k / slots
            operations = 2 * size * own * tokens_each
        else:
            operations = 2 * size * tokens
        scheme, rates = param.scheme, self.rates
        rate = rates.narrow.get(scheme.values, rates.products) if scheme and scheme.inputs else rates.products
        read = self.holdings.num_bytes(param) * share_of
        return Cost(read, operations, max(read / rates.memory, operations / rate))

    # --- what a layer keeps of requests -------------------------------------------------------------------------------

    def reading(self, batch: StepWork) -> Cost:
        """Return the cost of attention: the KV cache is read once for all rows of a request, as far as these see it."""
        layers = self.holdings.plan.args.layers
        every = Counter(_reusing(one, self.reuses) for number in self.numbers for one in layers[number].mixers)
        return total(self._attention(one, batch).times(count) for one, count in every.items())

    def states(self, batch: StepWork) -> Cost:
        """Return the cost of the states of recurrent layers, which a step reads and writes."""
        plan = self.holdings.plan
        held = sum(one.slot_bytes for one in state_groups(plan.args, self.rank, state_types(plan)))
        read = 2 * held * batch.requests * (self.numbers.start < plan.args.num_layers)
        return Cost(read, 0, read / self.rates.memory)

    def _attention(self, args: MixerArgs, batch: StepWork) -> Cost:
        if not isinstance(args, GroupedArgs | LatentArgs):
            return Cost()
        read = batch.requests * sum(count * size for count, size in self._tokens(args, batch))
        operations = batch.requests * self._operations(args, batch)
        return Cost(read, operations, max(read / self.rates.memory, operations / self.rates.products))

    def _tokens(self, args: GroupedArgs | LatentArgs, batch: StepWork) -> Iterator[tuple[float, int]]:
        """Yield (tokens of a request that are read, bytes of a token) of each component of the KV cache of a layer.

        Chosen tokens (DSA) count once for all rows of a decode, which choose mostly alike. Chunks of a prompt read all.
        """
        of = args.kv_from if isinstance(args, GroupedArgs) else -1
        kept = self.holdings.plan.args.layers[of].mixer if of >= 0 else args
        window = mixer(args).window
        seen = min(batch.context, abs(window) + batch.rows - 1) if window is not None else batch.context
        for one in kv_components(kept, self.holdings.plan.cache.dtype, self.rank):
            chosen = _chosen(args, batch)
            of_index = one.name.startswith("index")
            count = 0 if of_index and not chosen else chosen if chosen and not of_index else seen
            yield count / self.rank.dcp, one.num_heads * one.head_dim * one.item_bytes

    def _operations(self, args: GroupedArgs | LatentArgs, batch: StepWork) -> float:
        """Return the operations of attention of a request in a layer, of the cheaper form of latents."""
        first, end = share(args.num_heads, self.rank.tp, self.rank.place)
        heads, every = end - first, _pairs(batch)
        if isinstance(args, GroupedArgs):
            window = mixer(args).window
            seen = every if window is None else _pairs(batch, abs(window))
            return 4 * heads * args.head_dim * seen
        index, absorbed = args.index, 2 * heads * (2 * args.kv_rank + args.rope_dim)
        if index is not None and batch.context > index.top_k:
            scores = 0 if index.shared else 2 * index.num_heads * index.head_dim
            choosing = batch._replace(rows=min(batch.rows, batch.context - index.top_k))
            return scores * _pairs(choosing) + absorbed * _pairs(batch, index.top_k)
        up = 2 * heads * (args.nope_dim + args.v_dim) * args.kv_rank * (batch.context - batch.rows)
        expanded = 2 * heads * (args.nope_dim + args.rope_dim + args.v_dim)
        return min(every * absorbed, every * expanded + up)


def scores(name: str) -> bool:
    """Return True for a parameter that an indexer needs for scores alone: keys are written without it."""
    return ".".join(name.split(".")[2:]) in SCORES


def _reusing(args: MixerArgs, reuses: bool) -> MixerArgs:
    """Return a mixer as it is, or, if it reuses a choice, with an indexer of another layer, which scores nothing."""
    if not reuses or not isinstance(args, LatentArgs) or args.index is None:
        return args
    return structs.replace(args, index=structs.replace(args.index, shared=True))


def _pairs(batch: StepWork, most: int | None = None) -> float:
    """Return the number of pairs of a request's row and a token that it sees. most: tokens of a row; None: all"""
    limit = batch.context if most is None else most
    few = max(0, min(batch.rows, limit - (batch.context - batch.rows)))  # first rows, which see all before them
    return few * (batch.context - batch.rows + (few + 1) / 2) + (batch.rows - few) * limit


def _chosen(args: GroupedArgs | LatentArgs, batch: StepWork) -> int:
    """Return the tokens that an indexer lets the rows of a request read; 0: there is none, or it lets them read all."""
    if not isinstance(args, LatentArgs) or args.index is None or batch.context <= args.index.top_k:
        return 0
    return args.index.top_k if batch.rows <= MOST_ALIKE else min(batch.context, args.index.top_k * batch.rows)
