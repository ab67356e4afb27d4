"""Gated delta rule (Yang et al., 2024): a matrix for each head, which each token fades, corrects and reads."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from msgspec import structs

from quire.args.delta import DeltaArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param, Part
from quire.plan.kinds.interfaces import (
    RMS_NORM,
    Call,
    ExchangedRows,
    LayerStep,
    ParamWriter,
    RankExchange,
    StateTypes,
    StoredRows,
    added,
    counted,
    read,
)

AT = "layers.{i}.delta."


class DeltaKind:
    """A recurrent layer with the gated delta rule; a `Mixer`.

    A rank has some of the key heads, with all heads that they serve. Where decays and gates come through few numbers
    (`DeltaArgs.low_rank`), each rank has all of these: the first of both projections is whole, the second is cut.
    """

    operations = ("delta",)
    prompts = past = 0
    window = None
    scores = frozenset[str]()

    def __init__(self, args: DeltaArgs) -> None:
        self._args = args

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the projections, the convolution, the rates of decay, the norm of heads, and the output."""
        args, own = self._args, self._rows(write)
        if args.low_rank:
            yield self._projection(write, "input.weight", ("q", "k", "v"), width, layer)
            yield self._projection(write, "rates.weight", ("b", "f", "g"), width, layer)
            for name, side in (("decays", "a"), ("gates", "z")):
                at = AT + f"{name}.weight"
                yield write.param(at, {"": own[side]}, args.low_rank, shard="rows", layer=layer)
        else:
            yield self._projection(write, "input.weight", ("q", "k", "v", "z"), width, layer)
            yield self._projection(write, "rates.weight", ("b", "a"), width, layer)
        yield write.convolution(AT + "rule.conv", {side: own[side] for side in "qkv"}, args.taps, layer)
        for name, side in (("rate", "b"), ("shift", "a")):
            yield write.param(AT + f"rule.{name}", {"": own[side]}, dtype="float32", shard="rows", layer=layer)
        yield write.param(AT + "rule.norm", {"": StoredRows(args.value_dim)}, layer=layer)
        yield from write.output(AT + "output.", args.heads * args.value_dim, own["v"], False, layer)

    def _rows(self, write: ParamWriter) -> dict[str, StoredRows]:
        """Return the rows of each side of a rank: queries, keys, values, gates (z), strengths (b) and decays (a).

        Of `low_rank` numbers, those from which decays (f) and gates (g) are computed.
        """
        args, (first, count) = self._args, write.share(self._args.key_heads)
        per = args.heads // args.key_heads
        sizes = {"q": args.key_dim, "k": args.key_dim, "v": per * args.value_dim, "z": per * args.value_dim}
        sizes |= {"b": per, "a": per * args.decays}
        rows = {side: StoredRows(args.key_heads * size, first * size, count * size) for side, size in sizes.items()}
        return rows | dict.fromkeys("fg", StoredRows(args.low_rank))

    def _projection(self, write: ParamWriter, name: str, sides: tuple[str, ...], width: int, layer: int) -> Param:
        """Make a projection of several sides, in whichever order the checkpoint has their rows."""
        rows = self._rows(write)
        own = {side: rows[side] for side in sides}
        param = write.param(AT + name, own, width, shard="rows", layer=layer)
        if not self._args.by_head:
            return param
        heads = range(write.share(self._args.key_heads)[1])
        each = {side: rows.stored // self._args.key_heads for side, rows in own.items()}
        before, parts = 0, list[Part]()
        for part, (side, size) in zip(param.parts, each.items(), strict=True):
            first = write.share(self._args.key_heads)[0]
            at = [(first + head) * sum(each.values()) + before for head in heads]
            parts += [structs.replace(part, start=at[i], count=size, name=f"{side}{i}") for i in heads]
            before += size
        return structs.replace(param, parts=tuple(parts))

    @property
    def num_heads(self) -> int:
        """Heads that ranks divide: key heads, with those that they serve."""
        return self._args.key_heads

    @property
    def width(self) -> int:
        """Numbers of its first projection, of all ranks."""
        args = self._args
        return 2 * (args.key_heads * args.key_dim + args.heads * args.value_dim)

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return (): it keeps nothing of a token."""
        return ()

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return the last inputs of the convolution, and the matrices of the heads; with drafts, pending rows, too."""
        args = self._args
        first, end = (0, args.key_heads) if rank is None else share(args.key_heads, rank.tp, rank.place)
        heads = (end - first) * (args.heads // args.key_heads)
        channels = 2 * (end - first) * args.key_dim + heads * args.value_dim
        return (
            types.inputs("columns", args.taps - 1, channels),
            types.matrices(heads, args.key_dim, args.value_dim),
            *types.pending(channels + heads * (args.decays + 1)),
        )

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the key heads of a rank."""
        return share(self._args.key_heads, tp, place)

    def uneven(self, tp: int) -> str:
        """Return the key heads, in words."""
        return (
            "" if self._args.key_heads % tp == 0 else counted(self._args.key_heads, "key head") + " of recurrent layers"
        )

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projections, the recurrence, and the output."""
        norm, both = "attention_norm.weight", ("delta.input.weight", "delta.rates.weight")
        fused = all("norm" in step.linear(name.removesuffix(".weight")) for name in both) and step.norm == RMS_NORM
        if not step.before or fused:
            yield from chain.from_iterable(read(norm, (name,), step) for name in both)
        else:  # one norm for both
            yield from (Call(step.norm, (norm,)), *(Call("linear.run", (name,)) for name in both))
        if self._args.low_rank:
            yield from (Call("linear.run", (f"delta.{name}.weight",)) for name in ("decays", "gates"))
        yield Call("delta.mix", tuple(f"delta.rule.{name}" for name in ("conv", "rate", "shift", "norm")))
        yield from added("delta.output", False, step, half="attention")

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of its outputs."""
        yield from rows.summed("output of recurrent layers")

    def facts(self) -> dict[str, Any]:
        """Return heads and sizes."""
        args = self._args
        return {
            "kind": "Kimi delta" if args.low_rank else "gated delta",
            "heads": args.heads,
            "key_heads": args.key_heads,
            "key_dim": args.key_dim,
            "value_dim": args.value_dim,
            "taps": args.taps,
        }
