"""A gated MLP and a mixture of experts beside each other: norms of both results are added."""

from collections.abc import Iterator

from quire.args.layers import BesideArgs
from quire.contracts.params import Param
from quire.plan.kinds.dense import DenseKind
from quire.plan.kinds.experts import ExpertsKind
from quire.plan.kinds.interfaces import RMS_NORM, Call, ExchangedRows, LayerStep, ParamWriter, RankExchange, joined

NORMS = ("dense_after", "experts_norm", "experts_after")


class BesideKind:
    """A gated MLP and experts; a `FeedForward`."""

    def __init__(self, args: BesideArgs) -> None:
        self._dense, self._experts = DenseKind(args.dense), ExpertsKind(args.experts)

    @property
    def width(self) -> int:
        """Numbers between gate and down of the MLP."""
        return self._dense.width

    def params(self, write: ParamWriter, layer: int) -> Iterator[Param]:
        """Yield the parameters of both, and the norms around them."""
        yield from self._dense.params(write, layer)
        for name in NORMS:
            yield write.norm(f"layers.{{i}}.mlp.{name}.weight", layer)
        yield from self._experts.params(write, layer)

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the calls of the MLP, then those of the experts, each with the norm of its result."""
        yield from self._dense.product(step)
        yield Call(RMS_NORM, ("mlp.dense_after.weight",))
        yield Call(RMS_NORM, ("mlp.experts_norm.weight",))
        yield from self._experts.routed(step)
        yield Call(RMS_NORM, ("mlp.experts_after.weight",), "with the sum of both")
        yield from joined("mlp", step)

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the exchanges of both."""
        yield from rows.summed("MLP output")
        yield from self._experts.exchanges(rows)
