"""Mamba 2 (Dao and Gu, 2024): a matrix for each head, which each token fades, adds to and reads."""

from collections.abc import Iterator
from typing import Any

from quire.args.mamba import MambaArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import (
    SUM,
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
    weights,
)

AT = "layers.{i}.mamba."
FLOAT_BYTES = 4  # of squares
SQUARES = "squares of a group's numbers"


class MambaKind:
    """A recurrent layer with Mamba 2; a `Mixer`.

    A rank has some of the heads, with the inputs and outputs of their groups. Ranks have whole groups, or several ranks
    have copies of a group's inputs and outputs and each some of its heads.
    """

    operations = ("mamba",)
    prompts = past = 0
    window = None
    scores = frozenset[str]()

    def __init__(self, args: MambaArgs) -> None:
        self._args = args

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the projection, the convolution, rates, shifts and skips of heads, the norm, and the output."""
        args, own = self._args, self._rows(write)
        sides = {side: own[side] for side in ("z", "x", "b", "c", "t")}
        inner = {side: own[side] for side in ("x", "b", "c")}
        yield write.param(AT + "input.weight", sides, width, shard="rows", layer=layer)
        if args.input_bias:
            yield write.param(AT + "input.bias", sides, shard="rows", layer=layer)
        yield write.convolution(AT + "rule.conv", inner, args.taps, layer)
        if args.conv_bias:
            yield write.param(AT + "rule.bias", inner, shard="rows", layer=layer)
        for name in ("rate", "shift", "skip"):
            yield write.param(AT + f"rule.{name}", {"": own["t"]}, dtype="float32", shard="rows", layer=layer)
        if args.norm:
            yield write.param(AT + "rule.norm", {"": own["x"]}, shard="rows", layer=layer)
        yield from write.output(AT + "output.", args.width, own["x"], args.output_bias, layer)

    def _rows(self, write: ParamWriter) -> dict[str, StoredRows]:
        """Return the rows of each side of a rank: gates (z), values (x), inputs (b), outputs (c) and steps (t)."""
        args, (first, count) = self._args, write.share(self._args.heads)
        begin, end = self._groups(write.rank.tp, write.rank.place)
        heads = StoredRows(args.width, first * args.head_dim, count * args.head_dim)
        groups = StoredRows(args.groups * args.state_dim, begin * args.state_dim, (end - begin) * args.state_dim)
        return {"z": heads, "x": heads, "b": groups, "c": groups, "t": StoredRows(args.heads, first, count)}

    def _groups(self, tp: int, place: int) -> tuple[int, int]:
        """Return the range of groups of a rank; several ranks hold the same group when there are more ranks."""
        count = min(self._args.groups, tp)
        return share(self._args.groups, count, place * count // tp)

    @property
    def num_heads(self) -> int:
        """Heads of all ranks."""
        return self._args.heads

    @property
    def width(self) -> int:
        """Numbers of its first projection, of all ranks."""
        args = self._args
        return 2 * args.width + 2 * args.groups * args.state_dim + args.heads

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return (): it keeps nothing of a token."""
        return ()

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return the last inputs of the convolution, and the matrices of the heads; with drafts, pending rows, too."""
        args = self._args
        tp, place = (1, 0) if rank is None else (rank.tp, rank.place)
        (first, end), (begin, last) = self.kv_heads(tp, place), self._groups(tp, place)
        channels = (end - first) * args.head_dim + 2 * (last - begin) * args.state_dim
        return (
            types.inputs("columns", args.taps - 1, channels),
            types.matrices(end - first, args.state_dim, args.head_dim),
            *types.pending(channels + end - first),
        )

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the heads of a rank."""
        return share(self._args.heads, tp, place)

    def _divides(self, tp: int) -> bool:
        """Return True when `tp` ranks can have whole groups, or parts of a group whose norm they can sum."""
        args = self._args
        if args.heads % tp:
            return False
        return args.groups % tp == 0 or (tp % args.groups == 0 and (not args.norm or self._summed(tp)))

    def uneven(self, tp: int) -> str:
        """Return the heads or their groups, in words."""
        if self._args.heads % tp:
            return counted(self._args.heads, "Mamba head")
        return "" if self._divides(tp) else counted(self._args.groups, "group") + " of Mamba heads"

    def _summed(self, tp: int) -> bool:
        """Return True when ranks sum the squares of a norm: they have parts of the only group."""
        return tp > 1 and self._args.groups == 1 and self._args.norm == "gated"

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projection, the recurrence, and the output."""
        args = self._args
        has = {"conv": True, "bias": args.conv_bias, "rate": True, "shift": True, "skip": True, "norm": bool(args.norm)}
        yield from read("attention_norm.weight", weights("mamba.input", args.input_bias), step)
        yield Call("mamba.mix", tuple(f"mamba.rule.{name}" for name, there in has.items() if there))
        if step.sliced and args.groups == 1 and args.norm == "gated":
            yield Call(SUM, when=SQUARES)
        yield from added("mamba.output", args.output_bias, step, half="attention")

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of its outputs, and of squares where a norm is over the heads of all ranks."""
        if self._summed(rows.parallel.tp):
            yield RankExchange("all-reduce", SQUARES, "tp", FLOAT_BYTES)
        yield from rows.summed("output of recurrent layers")

    def facts(self) -> dict[str, Any]:
        """Return heads and sizes."""
        args = self._args
        return {
            "kind": "Mamba 2",
            "heads": args.heads,
            "groups": args.groups,
            "head_dim": args.head_dim,
            "state_dim": args.state_dim,
            "taps": args.taps,
        }
