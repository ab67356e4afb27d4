"""Multi-head latent attention (MLA, DeepSeek-V2, 2024): the cache keeps a compressed latent and one rotated key."""

from collections.abc import Iterator
from math import isfinite
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.args.latent import LatentArgs
from quire.contracts.blocks import KVComponent
from quire.contracts.parallel import Rank
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import Call, LayerStep, ParamWriter, StoredRows, added, normed

AT = "layers.{i}.attention."
LATENT_TOKENS = 1024  # of a captured step with prompts: they are absorbed, which costs more the longer they are


class LatentKind:
    """Multi-head latent attention; a `Mixer`."""

    operations = ("latent",)
    prompts = LATENT_TOKENS

    def __init__(self, args: ModelArgs, sizes: LatentArgs) -> None:
        self._args, self._sizes = args, sizes

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield the compressions of queries and of keys and values with their norms, the expansions, and the output."""
        args, sizes, rank = self._args, self._sizes, write.rank
        heads, first = rank.heads[1] - rank.heads[0], rank.heads[0]
        turned, plain = _halves(sizes.rope_dim) if sizes.interleaved else (), args.head_dim - sizes.rope_dim
        order = _behind(plain, turned)
        q = StoredRows(args.num_heads * args.head_dim, first * args.head_dim, heads * args.head_dim, order)
        down = {"q_down": StoredRows(sizes.q_rank)} if sizes.q_rank else {"q": q}
        down["kv"] = StoredRows(sizes.kv_rank + sizes.rope_dim, order=_behind(sizes.kv_rank, turned))
        yield write.param(AT + "down.weight", down, width, shard="" if sizes.q_rank else "rows", layer=layer)
        if sizes.q_rank:
            yield write.norm(AT + "q_norm.weight", layer, sizes.q_rank)
            yield write.param(AT + "q.weight", {"": q}, sizes.q_rank, shard="rows", layer=layer)
        yield write.norm(AT + "kv_norm.weight", layer, sizes.kv_rank)
        up, v_dim = sizes.nope_dim + sizes.v_dim, sizes.v_dim
        rows = {"": StoredRows(args.num_heads * up, first * up, heads * up)}
        yield write.param(AT + "kv_up.weight", rows, sizes.kv_rank, shard="rows", layer=layer)
        values = StoredRows(0, first * v_dim, heads * v_dim)
        yield from write.output(AT + "output.", args.num_heads * v_dim, values, False, layer)

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return the latent and the rotated key, which all heads share."""
        widths = {"latent": self._sizes.kv_rank, "rope": self._sizes.rope_dim}
        return tuple(KVComponent(name, 1, width, dtype, item_bytes) for name, width in widths.items())

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the one head of the cache, which every rank keeps."""
        return 0, 1

    def divides(self, tp: int) -> bool:
        """Return True: every rank keeps the whole latent."""
        return True

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the projections, and attention to the latent itself, or to expanded keys and values."""
        sizes = self._sizes
        yield from normed("attention_norm.weight", ("attention.down.weight",), step.linear)
        if sizes.q_rank:
            yield from normed("attention.q_norm.weight", ("attention.q.weight",), step.linear)
        yield Call("latent.prepare", ("attention.kv_norm.weight",))
        few, many = (f"{than} {sizes.break_even:.0f} query tokens per sequence" for than in ("up to", "more than"))
        if not isfinite(sizes.break_even):
            few = many = ""
        up = Call("latent.project", ("attention.kv_up.weight",), few)
        yield from (up, Call("latent.absorbed", when=few), up)  # keys into queries, values out of sums
        if many:
            yield Call("latent.expanded", up.parameters, many)
        yield from added("attention.output", self._args.output_bias, step)

    def facts(self) -> dict[str, Any]:
        """Return heads and sizes."""
        args = self._args
        return {
            "kind": "latent",
            "heads": args.num_heads,
            "kv_heads": None,
            "head_dim": args.head_dim,
            "value_dim": self._sizes.v_dim,
            "qk_norm": args.qk_norm,
            "bias": args.attention_bias,
        }


def _halves(size: int) -> tuple[int, ...]:
    """Order of rows that are rotated in neighbouring pairs: the first rows of all pairs, then the second rows."""
    return (*range(0, size, 2), *range(1, size, 2))


def _behind(before: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """Order of `before` rows as they are, then rows in `order`; () where `order` is empty."""
    return order and (*range(before), *(before + i for i in order))
