"""Short convolution (LFM2): a gated convolution over a few tokens, and no matrix."""

from collections.abc import Iterator
from typing import Any

from quire.args.shortconv import ShortConvArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import (
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

AT = "layers.{i}.conv."


class ShortConvKind:
    """A recurrent layer with a short convolution; a `Mixer`. A rank has some of the channels."""

    operations = ("shortconv",)
    prompts = past = 0
    window = None
    scores = frozenset[str]()

    def __init__(self, args: ShortConvArgs) -> None:
        self._args = args

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the projection, the convolution, and the output."""
        args, (first, count) = self._args, write.share(self._args.width)
        sides = dict.fromkeys("bcx", StoredRows(args.width, first, count))
        yield write.param(AT + "input.weight", sides, width, shard="rows", layer=layer)
        if args.bias:
            yield write.param(AT + "input.bias", sides, shard="rows", layer=layer)
        yield write.convolution(AT + "taps.conv", {"": sides["x"]}, args.taps, layer)
        if args.bias:
            yield write.param(AT + "taps.bias", {"": sides["x"]}, shard="rows", layer=layer)
        yield from write.output(AT + "output.", args.width, sides["x"], args.bias, layer)

    @property
    def num_heads(self) -> int:
        """Channels, which ranks divide as the heads of other kinds."""
        return self._args.width

    @property
    def width(self) -> int:
        """Numbers of its first projection, of all ranks."""
        return 3 * self._args.width

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return (): it keeps nothing of a token."""
        return ()

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return the last inputs of the convolution; with drafts, pending rows, too."""
        first, end = (0, self._args.width) if rank is None else self.kv_heads(rank.tp, rank.place)
        return types.inputs("columns", self._args.taps - 1, end - first), *types.pending(end - first)

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the channels of a rank."""
        return share(self._args.width, tp, place)

    def uneven(self, tp: int) -> str:
        """Return the channels, in words."""
        return "" if self._args.width % tp == 0 else counted(self._args.width, "convolution channel")

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projection, the convolution, and the output."""
        bias = self._args.bias
        yield from read("attention_norm.weight", weights("conv.input", bias), step)
        yield Call("shortconv.mix", ("conv.taps.conv", *["conv.taps.bias"] * bias))
        yield from added("conv.output", bias, step, half="attention")

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of its outputs."""
        yield from rows.summed("output of recurrent layers")

    def facts(self) -> dict[str, Any]:
        """Return its sizes."""
        args = self._args
        return {"kind": "short convolution", "width": args.width, "taps": args.taps, "bias": args.bias}
