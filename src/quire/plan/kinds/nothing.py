"""The half that a layer does not have: layers of Nemotron-H are a mixer or a feed-forward part alone."""

from collections.abc import Iterator
from typing import Any

from quire.args.layers import NoneArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import Call, ExchangedRows, LayerStep, ParamWriter, RankExchange, StateTypes


class NoneKind:
    """No mixer, or no feed-forward part; a `Mixer` and a `FeedForward`."""

    operations: tuple[str, ...] = ()
    prompts = past = num_heads = width = 0
    window = None
    scores = frozenset[str]()

    def __init__(self, args: NoneArgs) -> None:
        pass

    def params(self, write: ParamWriter, layer: int, width: int = 0) -> Iterator[Param]:
        """Yield nothing."""
        yield from ()

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return ()."""
        return ()

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return ()."""
        return ()

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return an empty range."""
        return 0, 0

    def uneven(self, tp: int) -> str:
        """Return ""."""
        return ""

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield nothing."""
        yield from ()

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield nothing."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """Return nothing."""
        return {}
