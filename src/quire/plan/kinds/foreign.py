"""A layer of transformers' code whose attention is ours: the whole layer is one `Mixer`, with all of its parameters."""

from collections.abc import Iterable, Iterator
from typing import Any

from quire.args.foreign import ForeignEnds, ForeignLeaf, ForeignLinear, ForeignNorm, ForeignRows
from quire.args.layers import ForeignArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param, Part
from quire.plan.kinds.experts import ExpertsKind
from quire.plan.kinds.grouped import GroupedKind
from quire.plan.kinds.interfaces import (
    LAYER_NORM,
    RMS_NORM,
    SUM,
    Call,
    ExchangedRows,
    LayerStep,
    ParamWriter,
    RankExchange,
    StateTypes,
    StoredRows,
    weights,
)
from quire.plan.kinds.stored_experts import StoredExperts

LAYER = "layers.{i}."
HEADS = ("q", "k", "v")  # parts of a linear layer whose blocks are heads


class ForeignKind:
    """A layer of transformers; a `Mixer`."""

    operations = ("heads", "attention")
    prompts = past = 0

    def __init__(self, args: ForeignArgs) -> None:
        self._args, self._attention = args, GroupedKind(args.attention)
        self.window, self.scores = self._attention.window, self._attention.scores

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._args.num_heads

    @property
    def width(self) -> int:
        """The most numbers of a token between two linear layers."""
        return max(_rows(one) for one in self._args.leaves if isinstance(one, ForeignLinear))

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the parameters of all leaves of the layer."""
        yield from leaf_params(self._args.leaves, write.rank, LAYER, layer)
        for side, norm in zip("qk", self._args.head_norm, strict=False):
            stored, shape = f"{norm.stored.replace('{i}', str(layer))}.weight", (norm.width,)
            part = Part(stored, shape, 0, norm.width, order=self._args.order)
            yield Param(f"layers.{layer}.attention.head_norm.{side}", shape, (part,))

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return keys and values."""
        return self._attention.components(dtype, item_bytes, rank)

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return (): all that it keeps grows with the request."""
        return ()

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the KV heads of a rank. Ranks share them evenly."""
        return self._attention.kv_heads(tp, place)

    def uneven(self, tp: int) -> str:
        """Return the heads that ranks cannot share evenly, in words."""
        return self._attention.uneven(tp)

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the calls of our kernels; operations of PyTorch between them are in `facts`."""
        gates = {gate.source: gate for gate in self._args.gates}
        for leaf in self._args.leaves:
            if isinstance(leaf, ForeignNorm):
                yield Call(LAYER_NORM if leaf.centered else RMS_NORM, (f"{leaf.name}.weight",))
            elif isinstance(leaf, ForeignLinear):
                gate = gates.get(leaf.name)
                fused = gate is not None and gate.gated and "gated" in step.linear(leaf.name)
                yield Call("linear.run_gated" if fused else "linear.run", weights(leaf.name, leaf.bias))
                if leaf.shard == "columns" and step.sliced:
                    yield Call(SUM)
                if gate is not None and not fused:
                    yield Call("activation.gated" if gate.gated else "activation.pointwise")
        yield Call("heads.prepare", tuple(f"attention.head_norm.{side}" for side in "qk"[: len(self._args.head_norm)]))
        yield Call("attention.paged_attention")

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of each linear layer whose inputs ranks share."""
        for leaf in self._args.leaves:
            if isinstance(leaf, ForeignLinear) and leaf.shard == "columns":
                yield from rows.summed(leaf.name)

    def facts(self) -> dict[str, Any]:
        """Return heads and sizes, the parts of the layer that are ours, and the operations that are the module's."""
        args = self._args
        return self._attention.facts() | {
            "foreign": {
                "apart": args.apart,
                "operations": list(args.operations),
                "linears": [leaf.name for leaf in args.leaves if isinstance(leaf, ForeignLinear)],
                "gates": [gate.act for gate in args.gates],
            }
        }


def _rows(leaf: ForeignLinear) -> int:
    return sum(len(rows.starts) * rows.size for _, rows in leaf.parts)


def leaf_params(leaves: Iterable[ForeignLeaf], rank: Rank, at: str, layer: int = -1) -> Iterator[Param]:
    """Yield the parameters of leaves. at: begin of their names, with a dot behind, or ""."""
    for leaf in leaves:
        name = f"{at}{leaf.name}".replace("{i}", str(layer))
        if isinstance(leaf, ForeignLinear):
            yield from _linear(leaf, name, rank, layer)
        elif isinstance(leaf, ForeignNorm):
            yield from norm_params(leaf, name, layer)
        else:
            stored = leaf.stored.replace("{i}", str(layer))
            shape = leaf.shape or (1,)
            first, end = share(shape[0], rank.tp, rank.place) if leaf.shard else (0, shape[0])
            part = Part(stored, shape, first, end - first)
            yield Param(f"{name}.value", part.local_shape, (part,), shard=leaf.shard, dtype=leaf.dtype)


def norm_params(leaf: ForeignNorm, name: str, layer: int = -1) -> Iterator[Param]:
    """Yield weight and bias of a norm, as far as it has these."""
    stored, shape = leaf.stored.replace("{i}", str(layer)), (leaf.width,)
    for side in ("weight",) * bool(leaf.stored) + ("bias",) * leaf.bias:
        yield Param(f"{name}.{side}", shape, (Part(f"{stored}.{side}", shape, 0, leaf.width),))


def _linear(leaf: ForeignLinear, name: str, rank: Rank, layer: int) -> Iterator[Param]:
    columns = share(leaf.width, rank.tp, rank.place) if leaf.shard == "columns" else (0, leaf.width)
    made = [part for side, rows in leaf.parts for part in _parts(side, rows, leaf, rank, layer)]
    cut = columns != (0, leaf.width)
    matrix = tuple(
        Part(f"{part.stored}.weight", (part.shape[0], leaf.width), columns[0], columns[1] - columns[0], axis=1)
        if cut
        else Part(
            f"{part.stored}.weight",
            (part.shape[0], leaf.width),
            part.start,
            part.count,
            order=part.order,
            name=part.name,
        )
        for part in made
    )
    total = sum(part.count for part in made)
    yield Param(f"{name}.weight", (total, columns[1] - columns[0]), matrix, shard=leaf.shard)
    if leaf.bias and (leaf.shard != "columns" or rank.place == 0):  # once in the sum of the ranks
        vector = tuple(
            Part(f"{part.stored}.bias", part.shape, part.start, part.count, order=part.order, name=part.name)
            for part in made
        )
        shard = leaf.shard if leaf.shard == "rows" else ""
        yield Param(f"{name}.bias", (total,), vector, shard=shard)


def _parts(side: str, rows: ForeignRows, leaf: ForeignLinear, rank: Rank, layer: int) -> Iterator[Part]:
    """Yield the slices of a stored vector that a part of a linear layer has, neighbouring blocks as one slice."""
    starts, size, order = rows.starts, rows.size, rows.order
    if leaf.shard == "rows" and side in HEADS:  # fewer heads than ranks are copied
        heads = min(len(starts), rank.tp)
        first, end = share(len(starts), heads, rank.place * heads // rank.tp)
        starts = starts[first:end]
    elif leaf.shard == "rows":
        first, end = share(size, rank.tp, rank.place)
        starts, size = (starts[0] + first,), end - first
    stored = rows.stored.replace("{i}", str(layer))
    runs = list[list[int]]()
    for start in starts:
        if runs and runs[-1][-1] + size == start:
            runs[-1].append(start)
        else:
            runs.append([start])
    for number, run in enumerate(runs):
        name = side if len(runs) == 1 else f"{side}{number}"
        yield Part(stored, (rows.total,), run[0], len(run) * size, order=order, name=name)


def first_params(ends: ForeignEnds, write: ParamWriter, vocab: StoredRows, width: int) -> Iterator[Param]:
    """Yield the embedding, and the parameters of the operations between it and the first layer."""
    yield _vocabulary("embed.weight", f"{ends.embed}.weight", vocab, width)
    yield from leaf_params(ends.entry, write.rank, "entry.")


def last_params(ends: ForeignEnds, write: ParamWriter, vocab: StoredRows, width: int, tied: bool) -> Iterator[Param]:
    """Yield the norm behind the layers, and the head."""
    yield from norm_params(ends.norm, "norm")
    if not tied:
        yield _vocabulary("head.weight", f"{ends.head}.weight", vocab, width)
    elif not write.rank.first:  # the embedding lies on another stage: its rows are read here once more
        yield _vocabulary("head.weight", f"{ends.embed}.weight", vocab, width)
    if ends.head_bias:
        yield _vocabulary("head.bias", f"{ends.head}.bias", vocab, 0)


def _vocabulary(name: str, stored: str, vocab: StoredRows, width: int) -> Param:
    shape = (vocab.stored, width) if width else (vocab.stored,)
    part = Part(stored, shape, vocab.start, vocab.taken)
    return Param(name, part.local_shape, (part,), shard="rows")


class ForeignExpertsKind(ExpertsKind):
    """Experts of a layer of transformers, which the module's operations choose; a `FeedForward`."""

    def params(self, write: ParamWriter, layer: int) -> Iterator[Param]:
        """Yield the stacked experts of the rank."""
        experts = StoredExperts(write, self._moe, layer)
        yield experts.gate_up("gate_up", write.hidden)
        yield experts.down("down")
        if self._moe.biased:
            yield experts.gate_up("gate_up_bias")
        if self._moe.biased and write.rank.place == 0:  # once in the sum of the ranks
            yield experts.down("down_bias", bias=True)

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the kernel of experts."""
        yield Call("experts.run", ("mlp.experts.gate_up", "mlp.experts.down"))
        if step.sliced:
            yield Call(SUM)
