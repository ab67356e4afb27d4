"""The interfaces of the kinds of layers, and the parts that kinds are written with: parameters, calls of kernels."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from quire.args.layers import LayerArgs
from quire.contracts.blocks import KVComponent, StateComponent
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import Parallel, Rank, share
from quire.contracts.params import Param, Part
from quire.contracts.scheme import Wire
from quire.plan.weight_bytes import ITEM_BYTES

TOKEN = "token"  # a unit of messages
PART = "token of the rank's part of contexts"
LENGTH_BYTES = 4  # of the length at which a state stands
CHOICE_BYTES = 8  # of an expert of a token: its id and its weight
RMS_NORM, LAYER_NORM = "norm.rms_norm", "norm.layer_norm"
SUM = "tp.all_reduce"  # over the ranks that share a layer; then the residual is added
Features = Callable[[str], Collection[str]]  # a linear layer, below the layer ("mlp.down") -> features of its kernel


class StoredRows(NamedTuple):
    """Rows of a stored tensor: their number, the slice that is read (-1: to the end), the order that kernels need."""

    stored: int
    start: int = 0
    taken: int = -1
    order: tuple[int, ...] = ()


class ParamWriter:
    """Writes parameters of a rank.

    names     (parameter, part) -> name of the tensor in the checkpoint
    experts   numbers of the rank's experts, in the order in which they are stacked
    hidden    size of the hidden states
    family    model_type, whose file has the names
    """

    def __init__(
        self,
        names: Mapping[tuple[str, str], str],
        rank: Rank,
        experts: Collection[int],
        hidden: int,
        family: str,
    ) -> None:
        self.names, self.rank, self.experts, self.hidden = names, rank, experts, hidden
        self.family = family

    def naming(self, names: Mapping[tuple[str, str], str]) -> "ParamWriter":
        """Return a writer with other names."""
        return ParamWriter(names, self.rank, self.experts, self.hidden, self.family)

    def share(self, size: int) -> tuple[int, int]:
        """Return start and count of this rank's part of `size` rows or columns."""
        first, end = share(size, self.rank.tp, self.rank.place)
        return first, end - first

    def norm(self, name: str, layer: int = -1, width: int = 0) -> Param:
        """Make the weights of a norm over `width` numbers; 0: over hidden states."""
        return self.param(name, {"": StoredRows(width or self.hidden)}, layer=layer)

    def param(
        self,
        name: str,
        parts: Mapping[str, StoredRows],
        width: int = 0,
        *,
        columns: tuple[int, int] | None = None,
        shard: str = "",
        dtype: str = "",
        layer: int = -1,
    ) -> Param:
        """Make a parameter from the rows of its parts.

        Parts with one name in the checkpoint lie in one tensor, one after the other.

        width     columns of the stored matrix, 0 for a vector
        columns   start and count of the columns that are read; None: all
        Raises UnsupportedModel if the family's file has no name for a part.
        """
        made, before = [], dict[str, int]()  # stored tensor -> rows of its parts so far
        names = {key: self.stored_name(name, key).replace("{i}", str(layer)) for key in parts}
        whole = Counter[str]()
        for key, rows in parts.items():
            whole[names[key]] += rows.stored
        for key, rows in parts.items():
            stored, first = names[key], before.get(names[key], 0)
            before[stored] = first + rows.stored
            shape = (whole[stored], width) if width else (whole[stored],)
            count = rows.stored if rows.taken < 0 else rows.taken
            made.append(
                Part(stored, shape, *columns, axis=1, name=key)
                if columns
                else Part(stored, shape, first + rows.start, count, order=rows.order, name=key)
            )
        total = sum(part.rows for part in made)
        inner = columns[1] if columns else width
        shape = (total, inner) if width else (total,)
        return Param(name.replace("{i}", str(layer)), shape, tuple(made), dtype, shard)

    def convolution(self, name: str, parts: Mapping[str, StoredRows], taps: int, layer: int) -> Param:
        """Make the weights of a convolution of each channel, [channels, 1, taps], of which the rank has some rows."""
        flat = self.param(name, parts, taps, shard="rows", layer=layer)
        made = tuple(structs.replace(part, shape=(part.shape[0], 1, taps)) for part in flat.parts)
        return structs.replace(flat, shape=(flat.shape[0], 1, taps), parts=made)

    def stored_name(self, name: str, part: str) -> str:
        """Return the name in the checkpoint of a part of a parameter. Raises UnsupportedModel if it has none."""
        if (name, part) not in self.names:
            of = f" (part {part})" if part else ""
            raise UnsupportedModel(
                f"model_type {self.family!r} needs a tensor for {name}{of}, which has no name: add a row to "
                f"models/{self.family}.py, or correct the family's row in FAMILIES of args/families.py."
            )
        return self.names[name, part]

    def stacked(self, one: Param) -> Param:
        """Make the parameter that stacks the rank's experts from the parameter of one expert.

        one   names of its parts and of stored tensors have "{e}" in place of the expert's number
        """
        parts = tuple(
            Part(
                part.stored.replace("{e}", str(expert)),
                part.shape,
                part.start,
                part.count,
                part.axis,
                part.order,
                part.name.replace("{e}", str(expert)),
                part.expert if part.expert < 0 else expert,
                part.transposed,
                part.paired,
            )
            for expert in self.experts
            for part in one.parts
        )
        return Param(one.name, (len(self.experts) * one.shape[0], *one.shape[1:]), parts, one.dtype, "experts")

    def output(self, at: str, width: int, heads: StoredRows, bias: bool, layer: int) -> Iterator[Param]:
        """Yield the output projection of a mixer. Only the first rank has the bias, so a sum over ranks adds it once.

        width   numbers of all heads' values; `heads`: those of this rank
        """
        rows = {"": StoredRows(self.hidden)}
        yield self.param(at + "weight", rows, width, columns=(heads.start, heads.taken), shard="columns", layer=layer)
        if bias and self.rank.place == 0:
            yield self.param(at + "bias", rows, layer=layer)


class Call(NamedTuple):
    """A call of a kernel function, or an exchange between ranks.

    function     operation and function ("linear.run"), or group of ranks and exchange ("tp.all_reduce")
    parameters   parameters that the call reads; names without the layer's, such as "attention.qkv.weight"
    when         condition of the call, in words; "": always
    """

    function: str
    parameters: tuple[str, ...] = ()
    when: str = ""


class RankExchange(NamedTuple):
    """An exchange between the ranks of a group.

    message_bytes   size of a rank's buffer for each token or row (see `per`). The bytes on the wire differ, because
                    they depend on the algorithm
    when            condition of the exchange, in words; "": in every step
    """

    kind: str
    where: str
    group: str
    message_bytes: int
    per: str = TOKEN
    when: str = ""


class ExchangedRows(NamedTuple):
    """The rows that layers exchange between ranks.

    hidden, item_bytes   numbers of a row, and bytes of a number
    spread               phase -> name of the dispatcher that brings tokens to the experts of other replicas
    wire                 form of rows on the way to experts
    """

    hidden: int
    item_bytes: int
    parallel: Parallel
    spread: Mapping[str, str]
    wire: Wire

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * self.item_bytes

    def summed(self, where: str) -> Iterator[RankExchange]:
        """Yield the sum of results over the ranks that share a layer, if several do."""
        if self.parallel.tp > 1:
            yield RankExchange("all-reduce", where, "tp", self.num_bytes)


class LayerStep(NamedTuple):
    """The way in which the steps of an engine run a layer.

    linear    name of a linear layer -> features of its kernel, which say what it fuses into one call
    routing   the option `routing`: "model", or "uniform" and "zipf", which draw experts and call no router
    sliced    each rank has a slice of the layer: results of attention and of the MLP are summed over ranks
    spread    phase -> name of the dispatcher that brings tokens to the experts of other replicas; {}: none does
    layer     the layer, which says where norms are; None: one before each half
    norm      function of the norms of hidden states
    divided   ranks divide the tokens of contexts
    """

    linear: Features
    routing: str = "model"
    sliced: bool = False
    spread: Mapping[str, str] = {}
    layer: LayerArgs | None = None
    norm: str = RMS_NORM
    divided: bool = False

    @property
    def before(self) -> bool:
        """True if each half has a norm before it."""
        return self.layer is None or self.layer.before

    @property
    def plain(self) -> bool:
        """True if the result of a half is added to the residual stream as it is."""
        return self.layer is None or not (self.layer.after or self.layer.residual != 1)


class StateTypes(NamedTuple):
    """Types of what layers keep of a request whatever its length.

    activations   dtype of the inputs that are kept: columns of convolutions, and pending rows
    matrix        dtype of the matrices of heads, "float32" or "bfloat16"
    drafts        most drafts that a decode verifies: with some, layers keep pending rows
    """

    activations: str
    matrix: str = "float32"
    drafts: int = 0

    def inputs(self, name: str, rows: int, width: int) -> StateComponent:
        """Return a component of so many rows of inputs."""
        return StateComponent(name, (rows, width), self.activations, ITEM_BYTES[self.activations])

    def matrices(self, heads: int, dim: int, width: int) -> StateComponent:
        """Return the component with a matrix [dim, width] for each head."""
        return StateComponent("matrix", (heads, dim, width), self.matrix, ITEM_BYTES[self.matrix])

    def pending(self, width: int) -> tuple[StateComponent, ...]:
        """Return room for the pending rows of a decode with drafts, if any are verified (`quire.kernels.states`).

        width   numbers of a pending row
        """
        if not self.drafts:
            return ()
        return self.inputs("pending", 1 + self.drafts, width), StateComponent("at", (1,), "int32", LENGTH_BYTES)


class Mixer(Protocol):
    """A kind of mixer: it reads the tokens before a token."""

    @property
    def operations(self) -> tuple[str, ...]:
        """Kernel operations that it needs."""

    @property
    def prompts(self) -> int:
        """Most tokens of a step with prompts that is captured as a CUDA graph; 0: no limit."""

    @property
    def window(self) -> int | None:
        """Its window, as of `KVGroup`; None: a token attends to all before it."""

    @property
    def scores(self) -> frozenset[str]:
        """Features of attention kernels that its scores need."""

    @property
    def past(self) -> int:
        """Tokens before those of the step in which a prompt costs the most memory."""

    @property
    def num_heads(self) -> int:
        """Query heads of all ranks."""

    @property
    def width(self) -> int:
        """Numbers of a token's queries, of all ranks."""

    def params(self, write: ParamWriter, layer: int, width: int) -> Iterator[Param]:
        """Yield its parameters on a rank. width: of its input."""

    def components(self, dtype: str, item_bytes: int, rank: Rank | None) -> tuple[KVComponent, ...]:
        """Return what a token keeps in the KV cache of a layer, on a rank; None: of all heads."""

    def states(self, types: StateTypes, rank: Rank | None) -> tuple[StateComponent, ...]:
        """Return what a layer keeps of a request, whatever its length, on a rank; None: of all heads."""

    def kv_heads(self, tp: int, place: int) -> tuple[int, int]:
        """Return the range of KV heads of the rank `place` of `tp`."""

    def uneven(self, tp: int) -> str:
        """Return the parts that `tp` ranks cannot share evenly, such as "6 KV heads"; "": they can share all.

        These are its query heads (`num_heads`), or else parts that ranks may also copy, such as KV heads.
        """

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the calls of its kernels, from the norm before it to its output."""

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield its exchanges between ranks."""

    def facts(self) -> dict[str, Any]:
        """Return plain values about it, for `explain`; as "compressed" those about what it compresses, if anything."""


class FeedForward(Protocol):
    """A kind of feed-forward part: it reads a token alone."""

    @property
    def width(self) -> int:
        """Numbers of a token between its two projections, of all ranks; 0: it has none that every token passes."""

    def params(self, write: ParamWriter, layer: int) -> Iterator[Param]:
        """Yield its parameters on a rank."""

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield the calls of its kernels, from the norm before it to the residual stream."""

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield its exchanges between ranks."""


def counted(count: int, word: str) -> str:
    """Return a number of things in words, such as "1 KV head"."""
    return f"{count} {word}{'s' * (count != 1)}"


def weights(name: str, bias: bool) -> tuple[str, ...]:
    """Return the names of the parameters of a linear layer."""
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)


def normed(norm: str, names: tuple[str, ...], step: LayerStep, run: str = "") -> Iterator[Call]:
    """Yield a norm and the projection of its result. run: "", or "_gated"."""
    if "norm" in step.linear(names[0].rpartition(".")[0]) and step.norm == RMS_NORM:
        yield Call(f"linear.run_norm{run}", (norm, *names))
    else:
        yield from (Call(step.norm, (norm,)), Call(f"linear.run{run}", names))


def read(norm: str, names: tuple[str, ...], step: LayerStep, run: str = "") -> Iterator[Call]:
    """Yield the first projection of a half of a layer, with the norm before it if there is one. run: see `normed`."""
    if step.before:
        yield from normed(norm, names, step, run)
    else:
        yield Call(f"linear.run{run}", names)


def added(name: str, bias: bool, step: LayerStep, half: str = "") -> Iterator[Call]:
    """Yield a projection whose result is added to the residual stream; the slices of ranks are summed before.

    half   half of the layer, "attention" or "mlp"; "": the name begins with it
    """
    yield product(name, bias, () if step.sliced or not step.plain else step.linear(name))
    if step.sliced:
        yield Call(SUM)
    yield from joined(half or name.partition(".")[0], step)


def joined(half: str, step: LayerStep) -> Iterator[Call]:
    """Yield the norm of the result of a half of a layer, "attention" or "mlp", if there is one."""
    if step.layer is not None and step.layer.after:
        last = half == "mlp" and step.layer.scaled and not step.layer.inputs
        yield Call(RMS_NORM, (f"{half}_after.weight", *["factor.weight"] * last))


def product(name: str, bias: bool, features: Collection[str]) -> Call:
    """Return the call of a projection that adds the residual if its kernel can."""
    return Call("linear.run_add" if "add" in features else "linear.run", weights(name, bias))


def halves(size: int) -> tuple[int, ...]:
    """Return the order of rows that are rotated in neighbouring pairs: the first rows of all pairs, then the second."""
    return (*range(0, size, 2), *range(1, size, 2))


def head_order(rotated: int, dim: int, *, interleaved: bool = False) -> tuple[int, ...]:
    """Return the order in which a head's rows are stored for the kernels: row i is the checkpoint's row order[i].

    rotated, dim   number of rotated rows, which come first, and of all rows
    interleaved    rotated pairs are (0, 1), (2, 3), ...
    Returns () if rows keep their order.
    Kernels rotate whole heads, in pairs of a row of the first half and a row of the second. So each half of the head
    begins with a half of the rotated rows; the other rows get angle 0.
    """
    if rotated == dim and not interleaved:
        return ()
    turned = [*range(0, rotated, 2), *range(1, rotated, 2)] if interleaved else list(range(rotated))
    half, rest = rotated // 2, list(range(rotated, dim))
    middle = len(rest) // 2
    return (*turned[:half], *rest[:middle], *turned[half:], *rest[middle:])
