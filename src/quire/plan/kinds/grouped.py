"""Grouped-query attention (Ainslie et al., 2023): query heads share the keys and values of fewer KV heads."""

from collections.abc import Iterator
from typing import Any

from msgspec import structs

from quire.args.layers import GroupedArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank, share
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import (
    RMS_NORM,
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
    head_order,
    read,
    weights,
)

AT = "layers.{i}.attention."
SQUARE_BYTES = 4  # of a sum of squares


class GroupedKind:
    """Grouped-query attention; a `Mixer`."""

    operations = ("heads", "attention")
    prompts = past = 0

    def __init__(self, args: GroupedArgs) -> None:
        self._args = args

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the fused q, k and v, the norms of heads, and the output."""
        args, (tp, place), dim = self._args, (write.rank.tp, write.rank.place), self._args.head_dim
        order, kv_heads = head_order(args.rotary_dim, dim, interleaved=args.interleaved), self.kv_heads(tp, place)

        def rows(heads: int, own: tuple[int, int], order: tuple[int, ...]) -> StoredRows:
            return StoredRows(heads * dim, own[0] * dim, (own[1] - own[0]) * dim, order)

        parts = {
            "q": rows(args.num_heads, share(args.num_heads, tp, place), order),
            "k": rows(args.num_kv_heads, kv_heads, order),
            "v": rows(args.num_kv_heads, kv_heads, ()),
        }
        assert args.values != "keys" or not order, "values have the order of keys"
        own = {side: parts[side] for side in args.projected}
        if args.gated:
            stored, start, taken, _ = own["q"]
            own["q"] = StoredRows(2 * stored, 2 * start, 2 * taken)
        yield self._by_head(write.param(AT + "qkv.weight", own, width, shard="rows", layer=layer), order)
        if args.input_bias:
            yield self._by_head(write.param(AT + "qkv.bias", own, shard="rows", layer=layer), order)
        for side in self._normed:
            yield write.param(AT + f"head_norm.{side}", {"": StoredRows(dim, order=order)}, layer=layer)
        for side in ("q", "k") if args.qk_norm == "whole" else ():
            yield write.param(AT + f"wide_norm.{side}", {"": parts[side]}, layer=layer)
        if args.scores.sinks:
            first, end = share(args.num_heads, tp, place)
            rows_of_sinks = StoredRows(args.num_heads, first, end - first)
            yield write.param(AT + "sinks.weight", {"": rows_of_sinks}, dtype="float32", layer=layer)
        yield from write.output(AT + "output.", args.num_heads * dim, parts["q"], args.output_bias, layer)

    def _by_head(self, param: Param, order: tuple[int, ...]) -> Param:
        """Return a fused parameter whose gates, stored behind each query head, come behind all of its other parts."""
        if not self._args.gated:
            return param
        (both, *others), dim = param.parts, self._args.head_dim
        heads = range(both.count // (2 * dim))
        at = [both.start + 2 * dim * head for head in heads]
        queries = (structs.replace(both, start=at[i], count=dim, order=order, name=f"q{i}") for i in heads)
        gates = (structs.replace(both, start=at[i] + dim, count=dim, name=f"gate{i}") for i in heads)
        return structs.replace(param, parts=(*queries, *others, *gates))

    @property
    def _normed(self) -> tuple[str, ...]:
        """The sides whose heads have a norm with weights."""
        return tuple(side for side in self._args.projected if side != "v") if self._args.qk_norm == "head" else ()

    @property
    def window(self) -> int | None:
        """Its window, as of `KVGroup`; None: a token attends to all before it."""
        return self._args.window

    @property
    def scores(self) -> frozenset[str]:
        """Features of attention kernels that its scores need."""
        args, window = self._args, self._args.window or 0
        asked = {
            "window": window > 0,
            "chunked": window < 0,
            "soft_cap": args.scores.soft_cap is not None,
            "sinks": args.scores.sinks,
        }
        return frozenset(name for name in asked if asked[name])

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._args.num_heads

    @property
    def width(self) -> int:
        """Numbers of all query heads."""
        return self._args.num_heads * self._args.head_dim

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return keys and values, each [kv head][token][head_dim]."""
        first, end = (0, self._args.num_kv_heads) if rank is None else self.kv_heads(rank.tp, rank.place)
        return tuple(KVComponent(name, end - first, self._args.head_dim, dtype, item_bytes) for name in ("k", "v"))

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return (): all that it keeps grows with the request."""
        return ()

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the KV heads of a rank; several ranks hold the same heads when there are fewer heads than ranks."""
        kv = min(self._args.num_kv_heads, tp)
        return share(self._args.num_kv_heads, kv, place * kv // tp)

    def uneven(self, tp: int) -> str:
        """Return the attention heads or the KV heads, in words."""
        if self._args.num_heads % tp:
            return counted(self._args.num_heads, "attention head")
        kv = self._args.num_kv_heads
        return "" if kv % tp == 0 or tp % kv == 0 else counted(kv, "KV head")

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projection, the preparation of heads, attention, and the output."""
        args = self._args
        yield from read("attention_norm.weight", weights("attention.qkv", args.input_bias), step)
        if args.qk_norm == "whole":
            sides = [Call(RMS_NORM, (f"attention.wide_norm.{side}",)) for side in ("q", "k")]
            yield from [Call(SUM, when="squares of queries and keys")] if step.sliced else sides
        yield Call("heads.prepare", tuple(f"attention.head_norm.{side}" for side in self._normed))
        yield Call("attention.paged_attention", ("attention.sinks.weight",) if args.scores.sinks else ())
        if args.gated:
            yield Call("activation.opened")
        yield from added("attention.output", args.output_bias, step)

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of its outputs, and of squares where a norm is over all heads."""
        if self._args.qk_norm == "whole" and rows.parallel.tp > 1:
            yield RankExchange("all-reduce", "squares of queries and keys", "tp", 2 * SQUARE_BYTES)
        yield from rows.summed("attention output")

    def facts(self) -> dict[str, Any]:
        """Return heads and sizes."""
        args = self._args
        return {
            "kind": "grouped-query",
            "heads": args.num_heads,
            "kv_heads": args.num_kv_heads,
            "head_dim": args.head_dim,
            "value_dim": args.head_dim,
            "qk_norm": args.qk_norm,
            "soft_cap": args.scores.soft_cap,
            "sinks": args.scores.sinks,
            "bias": args.input_bias,
            "values": args.values,
            "gated": args.gated,
        }
