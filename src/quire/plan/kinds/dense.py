"""A gated MLP, down(act(gate(x)) * up(x)), or one without a gate, down(max(up(x), 0)^2)."""

from collections.abc import Iterator

from quire.args.layers import DenseArgs
from quire.contracts.params import Param
from quire.kernels.activation import UNGATED
from quire.plan.kinds.interfaces import (
    SUM,
    Call,
    ExchangedRows,
    LayerStep,
    ParamWriter,
    RankExchange,
    StoredRows,
    added,
    normed,
    product,
    weights,
)


class DenseKind:
    """An MLP; a `FeedForward`.

    at   its name below the layer, with a dot behind
    """

    def __init__(self, args: DenseArgs, at: str = "mlp.") -> None:
        self._at, self._width, self._bias = at, args.width, args.bias
        self._act, self._plain = args.act, args.gate_scale == 1

    @property
    def width(self) -> int:
        """Numbers between gate and down."""
        return self._width

    def params(self, write: ParamWriter, layer: int) -> Iterator[Param]:
        """Yield the fused gate and up, and down."""
        own, at = write.share(self._width), "layers.{i}." + self._at
        halves = dict.fromkeys(("up",) if self._act in UNGATED else ("gate", "up"), StoredRows(self._width, *own))
        yield write.param(at + "gate_up.weight", halves, write.hidden, shard="rows", layer=layer)
        if self._bias:
            yield write.param(at + "gate_up.bias", halves, shard="rows", layer=layer)
        rows = {"": StoredRows(write.hidden)}
        yield write.param(at + "down.weight", rows, self._width, columns=own, shard="columns", layer=layer)
        if self._bias and write.rank.place == 0:  # once in the sum of the ranks
            yield write.param(at + "down.bias", rows, layer=layer)

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projection with its activation, and the projection back."""
        yield from gated(self._at, self._bias, step, "mlp_norm.weight", self._act, self._plain)
        yield from added(f"{self._at}down", self._bias, step)

    def product(self, step: LayerStep) -> Iterator[Call]:
        """Yield the same calls without the way to the residual stream."""
        yield from gated(self._at, self._bias, step, "mlp_norm.weight")
        yield product(f"{self._at}down", self._bias, ())
        if step.sliced:
            yield Call(SUM)

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of its outputs."""
        return rows.summed("feed-forward output")


def gated(
    at: str, bias: bool, step: LayerStep, norm: str = "", act: str = "silu", plain: bool = True
) -> Iterator[Call]:
    """Yield the projection to gate and up with its activation, after a norm if there is one.

    plain   False: the gate has a factor, which no kernel fuses
    """
    fused = plain and act not in UNGATED and "gated" in step.linear(f"{at}gate_up")
    names, run = weights(f"{at}gate_up", bias), "_gated" * fused
    call, norm = Call(f"linear.run{run}", names), norm * step.before
    if norm and run:
        yield from normed(norm, names, step, run)
    else:
        yield from (Call(step.norm, (norm,)), call) if norm else (call,)
    if not run:
        yield Call("activation.pointwise" if act in UNGATED else "activation.gated")
