"""The indexer of sparse latent attention (DSA, DeepSeek-V3.2, 2025): it chooses the tokens that a token attends to."""

from collections.abc import Iterator

from quire.args.latent import IndexArgs, LatentArgs
from quire.contracts.blocks import KVComponent
from quire.contracts.params import Param
from quire.plan.kinds.interfaces import Call, ParamWriter, StoredRows, halves

AT = "layers.{i}.attention.index."
SCALE_BYTES = 4  # of a key in an 8-bit cache


class IndexKind:
    """The indexer of a layer. Every rank has it whole, so all of them choose the same tokens."""

    def __init__(self, latent: LatentArgs, args: IndexArgs) -> None:
        self._latent, self._sizes = latent, args

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield projections of queries, of the key with its norm, and of the weights of heads. width: of the input."""
        sizes, rotated = self._sizes, self._latent.rope_dim
        order = (*halves(rotated), *range(rotated, sizes.head_dim)) if sizes.interleaved else ()
        queries = StoredRows(sizes.num_heads * sizes.head_dim, order=order)
        yield write.param(AT + "q.weight", {"": queries}, self._latent.q_rank, layer=layer)
        key = {"": StoredRows(sizes.head_dim, order=order)}
        yield write.param(AT + "k.weight", key, width, layer=layer)
        for name in ("weight", "bias"):
            yield write.param(f"{AT}k_norm.{name}", key, layer=layer)
        yield write.param(AT + "heads.weight", {"": StoredRows(sizes.num_heads)}, width, layer=layer)

    def components(self, dtype: str, item_bytes: int) -> tuple[KVComponent, ...]:
        """Return the key of a token; behind it the scale of its codes, if the cache has 8 bits."""
        key = KVComponent("index", 1, self._sizes.head_dim, dtype, item_bytes)
        if not dtype.startswith("float8"):
            return (key,)
        return key, KVComponent("index_scale", 1, 1, "float32", SCALE_BYTES)

    def calls(self) -> Iterator[Call]:
        """Yield the calls of its kernels, behind the norms of attention's input and compressed queries."""
        yield from (Call("linear.run", (f"attention.index.{name}.weight",)) for name in ("q", "k"))
        yield Call("linear.run_float", ("attention.index.heads.weight",))
        yield Call("index.prepare", ("attention.index.k_norm.weight", "attention.index.k_norm.bias"))
        yield Call("index.choose")
