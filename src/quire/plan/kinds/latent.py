"""Multi-head latent attention (MLA, DeepSeek-V2, 2024): the cache keeps a compressed latent and one rotated key.

With an indexer (`index.py`) it reads only the tokens that the indexer, or that of an earlier layer, has chosen.
"""

from collections.abc import Iterator
from math import floor, isfinite
from typing import Any

from msgspec import structs

from quire.args.latent import LatentArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.parallel import Rank
from quire.contracts.params import Param
from quire.kernels.latent_rows import DS_MLA, TAIL, latent_row
from quire.plan.kinds.index import IndexKind
from quire.plan.kinds.interfaces import (
    PART,
    Call,
    ExchangedRows,
    LayerStep,
    ParamWriter,
    RankExchange,
    StateTypes,
    StoredRows,
    added,
    counted,
    halves,
    normed,
    read,
)

AT = "layers.{i}.attention."
FEW, MANY = "up to", "more than"  # beginnings of conditions: a number of rows or tokens
NEVER = 1 << 30  # query rows: a number for JSON
LATENT_CONTEXT = 32768  # tokens before the largest step: their expansion fills the workspace
LATENT_TOKENS = 1024  # of a captured step with prompts: they are absorbed, which costs more the longer they are


class LatentKind:
    """Multi-head latent attention; a `Mixer`."""

    prompts, past, window = LATENT_TOKENS, LATENT_CONTEXT, None

    def __init__(self, args: LatentArgs) -> None:
        self._sizes = args
        own = args.index is not None and not args.index.shared
        self._index = IndexKind(args, args.index) if args.index is not None and own else None

    @property
    def operations(self) -> tuple[str, ...]:
        """Kernel operations that it needs."""
        return ("latent", "index") if self._index is not None else ("latent",)

    @property
    def scores(self) -> frozenset[str]:
        """Features of attention kernels that its scores need."""
        return frozenset({"chosen"}) if self._sizes.index is not None else frozenset()

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the compressions of queries and of keys and values with their norms, the expansions, and the output."""
        sizes, (first, heads) = self._sizes, write.share(self._sizes.num_heads)
        turned, plain = halves(sizes.rope_dim) if sizes.interleaved else (), sizes.nope_dim
        order = _behind(plain, turned)
        q = StoredRows(sizes.num_heads * sizes.head_dim, first * sizes.head_dim, heads * sizes.head_dim, order)
        down = {"q_down": StoredRows(sizes.q_rank)} if sizes.q_rank else {"q": q}
        down["kv"] = StoredRows(sizes.kv_rank + sizes.rope_dim, order=_behind(sizes.kv_rank, turned))
        yield write.param(AT + "down.weight", down, width, shard="" if sizes.q_rank else "rows", layer=layer)
        if sizes.q_rank:
            yield write.norm(AT + "q_norm.weight", layer, sizes.q_rank)
            yield write.param(AT + "q.weight", {"": q}, sizes.q_rank, shard="rows", layer=layer)
        yield write.norm(AT + "kv_norm.weight", layer, sizes.kv_rank)
        up, v_dim = sizes.nope_dim + sizes.v_dim, sizes.v_dim
        rows = {"": StoredRows(sizes.num_heads * up, first * up, heads * up)}
        yield write.param(AT + "kv_up.weight", rows, sizes.kv_rank, shard="rows", layer=layer)
        if self._index is not None:
            yield from self._index.params(write, layer, width)
        values = StoredRows(0, first * v_dim, heads * v_dim)
        yield from write.output(AT + "output.", sizes.num_heads * v_dim, values, False, layer)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._sizes.num_heads

    @property
    def width(self) -> int:
        """Numbers of all query heads."""
        return self._sizes.num_heads * self._sizes.head_dim

    def _compressed(self) -> dict[str, Any]:
        """Return the sizes of latents, and the number of query tokens from which they are expanded."""
        break_even = min(self._sizes.break_even, NEVER)
        sizes = structs.asdict(self._sizes) | {"break_even": break_even}
        del sizes["num_heads"], sizes["rope"], sizes["index"]  # among `facts`, and a line of its own
        return sizes

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return the latent and the rotated key, which all heads share, and the key of the indexer."""
        if dtype == DS_MLA:
            row = latent_row(self._sizes.kv_rank, self._sizes.rope_dim)
            rows = (KVComponent("latent", 1, row.size, "uint8", 1),)
            return rows if self._index is None else (*rows, *self._index.components("float8_e4m3fn", 1))
        widths = {"latent": self._sizes.kv_rank, "rope": self._sizes.rope_dim}
        own = tuple(KVComponent(name, 1, width, dtype, item_bytes) for name, width in widths.items())
        return own if self._index is None else (*own, *self._index.components(dtype, item_bytes))

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return (): all that it keeps grows with the request."""
        return ()

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the one head of the cache, which every rank keeps."""
        return 0, 1

    def uneven(self, tp: int) -> str:
        """Return the attention heads, in words."""
        return counted(self._sizes.num_heads, "attention head") if self._sizes.num_heads % tp else ""

    @property
    def _ways(self) -> tuple[str, str]:
        """The sequences whose rows attend to latents, and to keys and values made of them; "", "": all attend alike."""
        sizes = self._sizes
        if not isfinite(sizes.break_even):
            return "", ""
        few, many = (f"{than} {floor(sizes.break_even)} query tokens per sequence" for than in (FEW, MANY))
        return few, many

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projections, and attention to the latent itself, or to expanded keys and values."""
        sizes = self._sizes
        yield from read("attention_norm.weight", ("attention.down.weight",), step)
        if sizes.q_rank:
            yield from normed("attention.q_norm.weight", ("attention.q.weight",), step)
        yield Call("latent.prepare", ("attention.kv_norm.weight",))
        if self._index is not None:
            yield from self._index.calls()
        yield from self._attended(step.divided)
        yield from added("attention.output", False, step)

    def _attended(self, divided: bool) -> Iterator[Call]:
        """Yield the calls of attention: to the latent itself, to expanded keys and values, or to chosen latents."""
        sizes, (few, many) = self._sizes, self._ways
        absorbs, absorbed, expanded = few, few, many
        if sizes.index is not None:
            short, long = (f"{than} {sizes.index.top_k} tokens of context" for than in (FEW, MANY))
            absorbs = f"{few}, or {long}" if few else ""
            absorbed, expanded = (f"{rows}, and {short}" if rows else short for rows in (few, many))
        up = Call("latent.project", ("attention.kv_up.weight",), absorbs)
        yield up  # keys into queries
        if divided:
            yield Call("dcp.all_gather", when=absorbed)
        yield Call("latent.absorbed", when=absorbed)
        if divided:
            yield from (Call("dcp.all_to_all", when=absorbed), Call("latent.join", when=absorbed))
        if sizes.index is not None:
            yield Call("latent.chosen", when=long)
        yield up  # values out of sums
        if many and divided:
            yield Call("dcp.all_gather", when=expanded)
        if many:
            yield Call("latent.expanded", up.parameters, expanded)

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the exchanges of ranks that divide contexts, and the sum of its outputs."""
        sizes, ranks = self._sizes, rows.parallel.dcp
        if ranks > 1:
            (few, many), heads, width = self._ways, sizes.num_heads // rows.parallel.tp, sizes.kv_rank + sizes.rope_dim
            queries, parts = heads * width * rows.item_bytes, ranks * heads * (sizes.kv_rank * rows.item_bytes + TAIL)
            yield RankExchange("all-gather", "absorbed queries", "dcp", queries, when=few)
            yield RankExchange("all-to-all", "sums of parts of contexts", "dcp", parts, when=few)
            if many:
                where = "latents of contexts (fewer bytes in an 8-bit cache)"
                yield RankExchange("all-gather", where, "dcp", width * rows.item_bytes, PART, many)
        yield from rows.summed("attention output")

    def facts(self) -> dict[str, Any]:
        """Return heads and sizes."""
        sizes = self._sizes
        return {
            "kind": "latent",
            "heads": sizes.num_heads,
            "kv_heads": None,
            "head_dim": sizes.head_dim,
            "value_dim": sizes.v_dim,
            "qk_norm": "",
            "bias": False,
            "compressed": self._compressed(),
            "index": None if sizes.index is None else structs.asdict(sizes.index),
        }


def _behind(before: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """Order of `before` rows as they are, then rows in `order`; () where `order` is empty."""
    return order and (*range(before), *(before + i for i in order))
