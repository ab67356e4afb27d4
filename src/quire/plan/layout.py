"""The parameters of one rank and the checkpoint slices from which they are read, computed from the config alone.

The loader fills these parameters, layers take their sizes from them, `quire explain` prints them. No torch.
"""

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from quire.args.checkpoint import ModelArgs
from quire.args.eagle import EagleArgs
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import ALONE, Rank, share, vocabulary_share
from quire.contracts.params import Param, Part
from quire.models.names import NameMap
from quire.plan.placement import ranks
from quire.quantization.formats import raw_tensors, spare_names


class _Rows(NamedTuple):
    """Rows of a stored tensor: their number, the slice that is read (-1: to the end), the order that kernels need."""

    stored: int
    start: int = 0
    taken: int = -1
    order: tuple[int, ...] = ()


def layout(args: ModelArgs, rank: Rank | None = None, experts: Sequence[int] | None = None) -> tuple[Param, ...]:
    """Return every parameter that `rank` holds, in the order of the layers.

    rank      None: the only rank of an engine on one device
    experts   numbers of the rank's experts, in the order in which they are stacked; None: `rank.expert_ids`
    """
    rank = rank or alone(args)
    made = _Layout(args, rank, rank.expert_ids if experts is None else experts)
    return tuple(made.params())


def alone(args: ModelArgs) -> Rank:
    """Return the only rank of an engine on one device."""
    return next(ranks(args, ALONE))


def stored_names(params: Iterable[Param]) -> Iterator[str]:
    """Yield the checkpoint names of these parameters' tensors.

    Also yields tensors that checkpoints store beside quantized parameters, and that need not be read.
    """
    for param in params:
        yield from (part.stored for raw in raw_tensors(param) for part in raw.parts)
        yield from spare_names(param)


def checkpoint_names(model_type: str) -> dict[tuple[str, str], str]:
    """Return (parameter, part) -> checkpoint name. Raises UnsupportedModel if models/<model_type>.py does not exist."""
    module = f"quire.models.{model_type}"
    try:
        rows: NameMap = importlib.import_module(module).NAME_MAP
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnsupportedModel(
            f"model_type {model_type!r} has a row in FAMILIES of args/checkpoint.py and no names "
            f"of tensors: write models/{model_type}.py, like models/qwen3.py."
        ) from None
    found = {(parameter, part): stored for stored, parameter, part in rows}
    twice = [name for name, times in Counter(row[1:] for row in rows).items() if times > 1]
    assert not twice, f"models/{model_type}.py names the tensor of {twice[0]} twice: leave one row out"
    return found


def parameters_per_token(args: ModelArgs) -> float:
    """Return the number of weights that multiply each token: all of a dense model, of experts only the chosen ones."""
    chosen = args.moe.routing.top_k / args.moe.routing.num_experts if args.moe else 1.0
    return sum(prod(param.shape) * (chosen if param.shard == "experts" else 1.0) for param in layout(args))


class _Layout:
    """Writes the parameters of a rank, layer by layer."""

    def __init__(self, args: ModelArgs, rank: Rank, experts: Sequence[int]) -> None:
        self.names = checkpoint_names(args.model_type)
        if args.eagle is not None:
            at, fc = args.eagle.at, args.eagle.fc
            self.names = {key: one.replace("{at}", at).replace("{fc}", fc) for key, one in self.names.items()}
        self.args, self.rank, self.owned = args, rank, experts

    def params(self) -> Iterator[Param]:
        """Yield the parameters of embedding, layers, norm and head, as far as the rank has these."""
        args, rank, hidden = self.args, self.rank, self.args.hidden_size
        first, end = vocabulary_share(args.vocab_size, rank.tp, rank.place)
        vocab = _Rows(args.vocab_size, first, end - first)
        if args.eagle is not None:
            yield from self._eagle(args.eagle, vocab)
            return
        if rank.first:
            yield self._param("embed.weight", {"": vocab}, hidden, shard="rows")
        for layer in range(*rank.layers):
            yield from self._block(layer)
        if not rank.last:
            return
        for layer in range(args.num_layers, args.num_layers + args.draft_layers):
            yield from self._draft(layer)
        yield self._param("norm.weight", {"": _Rows(hidden)})
        if not args.tie_word_embeddings:
            yield self._param("head.weight", {"": vocab}, hidden, shard="rows")
        elif not rank.first:  # the embedding lies on another stage: its rows are read here once more
            (part,) = self._param("embed.weight", {"": vocab}, hidden).parts
            yield Param("head.weight", part.local_shape, (part,), shard="rows")

    def _share(self, size: int) -> tuple[int, int]:
        """Start and count of this rank's part of `size` rows or columns."""
        first, end = share(size, self.rank.tp, self.rank.place)
        return first, end - first

    def _param(
        self,
        name: str,
        parts: Mapping[str, _Rows],
        width: int = 0,
        *,
        columns: tuple[int, int] | None = None,
        shard: str = "",
        dtype: str = "",
        layer: int = -1,
    ) -> Param:
        """Make a parameter from the rows of its parts.

        width     columns of the stored matrix, 0 for a vector
        columns   start and count of the columns that are read; None: all
        """
        made = []
        for key, rows in parts.items():
            expert, dot, rest = key.rpartition(".")
            stored = self.names[name, "{e}." + rest if dot else key].replace("{i}", str(layer)).replace("{e}", expert)
            shape = (rows.stored, width) if width else (rows.stored,)
            count = rows.stored if rows.taken < 0 else rows.taken
            made.append(
                Part(stored, shape, *columns, axis=1, name=key)
                if columns
                else Part(stored, shape, rows.start, count, order=rows.order, name=key)
            )
        total = sum(part.rows for part in made)
        inner = columns[1] if columns else width
        shape = (total, inner) if width else (total,)
        return Param(name.replace("{i}", str(layer)), shape, tuple(made), dtype, shard)

    def _block(self, layer: int) -> Iterator[Param]:
        args, hidden = self.args, self.args.hidden_size
        yield self._param("layers.{i}.attention_norm.weight", {"": _Rows(hidden)}, layer=layer)
        yield from self._latent(layer) if args.latent else self._attention(layer, hidden)
        yield self._param("layers.{i}.mlp_norm.weight", {"": _Rows(hidden)}, layer=layer)
        if args.has_experts(layer):
            yield from self._experts(layer)
        else:
            yield from self._mlp("layers.{i}.mlp.", args.intermediate_size, layer, args.mlp_bias)

    def _draft(self, layer: int) -> Iterator[Param]:
        hidden, at = self.args.hidden_size, "layers.{i}."
        yield self._param(at + "token_norm.weight", {"": _Rows(hidden)}, layer=layer)
        yield self._param(at + "state_norm.weight", {"": _Rows(hidden)}, layer=layer)
        yield self._param(at + "join.weight", {"": _Rows(hidden)}, 2 * hidden, layer=layer)
        yield from self._block(layer)
        yield self._param(at + "norm.weight", {"": _Rows(hidden)}, layer=layer)

    def _eagle(self, eagle: EagleArgs, vocab: _Rows) -> Iterator[Param]:
        args, hidden, at = self.args, self.args.hidden_size, "layers.{i}."
        reads = len(eagle.reads(args.num_layers))
        yield self._param(at + "join.weight", {"": _Rows(hidden)}, (reads or 2) * hidden, layer=0)
        if eagle.bias:
            yield self._param(at + "join.bias", {"": _Rows(hidden)}, layer=0)
        for norm in ("token_norm", "state_norm") if reads else ():
            yield self._param(f"{at}{norm}.weight", {"": _Rows(hidden)}, layer=0)
        yield from self._attention(0, 2 * hidden if reads else hidden)
        yield self._param(at + "mlp_norm.weight", {"": _Rows(hidden)}, layer=0)
        yield from self._mlp(at + "mlp.", args.intermediate_size, 0, args.mlp_bias)
        if reads:
            yield self._param("norm.weight", {"": _Rows(hidden)})
            yield self._param("head.weight", {"": vocab}, hidden, shard="rows")
        if reads and args.vocab_size != eagle.vocab_size:
            yield self._param("ids.offsets", {"": _Rows(args.vocab_size)}, dtype="float32")

    def _attention(self, layer: int, width: int) -> Iterator[Param]:
        args, rank, at, dim = self.args, self.rank, "layers.{i}.attention.", self.args.head_dim
        order = head_order(args.rotary_dim, dim)

        def rows(heads: int, own: tuple[int, int], order: tuple[int, ...]) -> _Rows:
            return _Rows(heads * dim, own[0] * dim, (own[1] - own[0]) * dim, order)

        parts = {
            "q": rows(args.num_heads, rank.heads, order),
            "k": rows(args.num_kv_heads, rank.kv_heads, order),
            "v": rows(args.num_kv_heads, rank.kv_heads, ()),
        }
        yield self._param(at + "qkv.weight", parts, width, shard="rows", layer=layer)
        if args.attention_bias:
            yield self._param(at + "qkv.bias", parts, shard="rows", layer=layer)
        if args.qk_norm:
            yield self._param(at + "head_norm.q", {"": _Rows(dim, order=order)}, layer=layer)
            yield self._param(at + "head_norm.k", {"": _Rows(dim, order=order)}, layer=layer)
        yield from self._output(args.num_heads * dim, parts["q"], args.output_bias, layer)

    def _output(self, width: int, heads: _Rows, bias: bool, layer: int) -> Iterator[Param]:
        """The output projection of attention. Only the first rank has the bias, so a sum over ranks adds it once."""
        at, rows = "layers.{i}.attention.output.", {"": _Rows(self.args.hidden_size)}
        yield self._param(at + "weight", rows, width, columns=(heads.start, heads.taken), shard="columns", layer=layer)
        if bias and self.rank.place == 0:
            yield self._param(at + "bias", rows, layer=layer)

    def _latent(self, layer: int) -> Iterator[Param]:
        args, sizes, rank, at = self.args, self.args.latent, self.rank, "layers.{i}.attention."
        assert sizes is not None
        heads, first = rank.heads[1] - rank.heads[0], rank.heads[0]
        turned, plain = _halves(sizes.rope_dim) if sizes.interleaved else (), args.head_dim - sizes.rope_dim
        order = _behind(plain, turned)
        q = _Rows(args.num_heads * args.head_dim, first * args.head_dim, heads * args.head_dim, order)
        down = {"q_down": _Rows(sizes.q_rank)} if sizes.q_rank else {"q": q}
        down["kv"] = _Rows(sizes.kv_rank + sizes.rope_dim, order=_behind(sizes.kv_rank, turned))
        yield self._param(at + "down.weight", down, args.hidden_size, shard="" if sizes.q_rank else "rows", layer=layer)
        if sizes.q_rank:
            yield self._param(at + "q_norm.weight", {"": _Rows(sizes.q_rank)}, layer=layer)
            yield self._param(at + "q.weight", {"": q}, sizes.q_rank, shard="rows", layer=layer)
        yield self._param(at + "kv_norm.weight", {"": _Rows(sizes.kv_rank)}, layer=layer)
        up, v_dim = sizes.nope_dim + sizes.v_dim, sizes.v_dim
        yield self._param(
            at + "kv_up.weight",
            {"": _Rows(args.num_heads * up, first * up, heads * up)},
            sizes.kv_rank,
            shard="rows",
            layer=layer,
        )
        yield from self._output(args.num_heads * v_dim, _Rows(0, first * v_dim, heads * v_dim), False, layer)

    def _mlp(self, at: str, width: int, layer: int, bias: bool = False) -> Iterator[Param]:
        hidden, own = self.args.hidden_size, self._share(width)
        halves = dict.fromkeys(("gate", "up"), _Rows(width, *own))
        yield self._param(at + "gate_up.weight", halves, hidden, shard="rows", layer=layer)
        if bias:
            yield self._param(at + "gate_up.bias", halves, shard="rows", layer=layer)
        rows = {"": _Rows(hidden)}
        yield self._param(at + "down.weight", rows, width, columns=own, shard="columns", layer=layer)
        if bias and self.rank.place == 0:  # once in the sum of the ranks
            yield self._param(at + "down.bias", rows, layer=layer)

    def _experts(self, layer: int) -> Iterator[Param]:
        moe, hidden, at = self.args.moe, self.args.hidden_size, "layers.{i}.mlp."
        assert moe is not None
        num, width = moe.routing.num_experts, moe.expert_size
        yield self._param(at + "router.weight", {"": _Rows(num)}, hidden, layer=layer)
        if moe.routing.bias:
            yield self._param(at + "router.bias", {"": _Rows(num)}, dtype="float32", layer=layer)
        own = (0, width) if self.rank.whole_experts else self._share(width)
        gates = {f"{expert}.{half}": _Rows(width, *own) for expert in self.owned for half in ("gate", "up")}
        downs = {f"{expert}.": _Rows(hidden) for expert in self.owned}
        yield self._param(at + "experts.gate_up", gates, hidden, shard="experts", layer=layer)
        yield self._param(at + "experts.down", downs, width, columns=own, shard="experts", layer=layer)
        if moe.shared_size:
            yield from self._mlp(at + "shared.", moe.shared_size, layer)
        if moe.shared_gate:
            yield self._param(at + "shared_gate.weight", {"": _Rows(1)}, hidden, layer=layer)


def head_order(rotated: int, dim: int) -> tuple[int, ...]:
    """Return the order in which a head's rows are stored for the kernels: row i is the checkpoint's row order[i].

    rotated, dim   number of rotated rows, and of all rows. If they are equal, rows keep their order: returns ()
    Kernels rotate whole heads, in pairs of a row of the first half and a row of the second. So each half of the head
    begins with a half of the rotated rows; the other rows get angle 0.
    """
    if rotated == dim:
        return ()
    half, rest = rotated // 2, list(range(rotated, dim))
    middle = len(rest) // 2
    return (*range(half), *rest[:middle], *range(half, rotated), *rest[middle:])


def _halves(size: int) -> tuple[int, ...]:
    """Order of rows that are rotated in neighbouring pairs: the first rows of all pairs, then the second rows."""
    return (*range(0, size, 2), *range(1, size, 2))


def _behind(before: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """Order of `before` rows as they are, then rows in `order`; () where `order` is empty."""
    return order and (*range(before), *(before + i for i in order))
