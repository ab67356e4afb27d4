"""Proof that a layer's way from its projections to attention is one that `quire.kernels.heads` computes.

That is: queries, keys and values are rows of projections of one input; heads of queries and keys may be normed, then
they are rotated by pairs of dimensions. Each claim is read off from numbers, and then tested on random ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quire.foreign.leaves import ATTEND, LINEAR, NORM, NormForm, norm_form
from quire.foreign.numbers import NotEvaluated, ancestors, evaluate, inputs_of, named_values
from quire.foreign.trace import TracedGraph, key_of, kind_of
from quire.kernels.norm import ref as norms
from quire.kernels.rope import ref as ropes

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
Extras = Callable[[Tensor], list[Tensor]]  # positions [T] -> extra tensors of a layer, positions first


@dataclass(frozen=True)
class Side:
    """ProvenHeads of queries, keys or values: the linear layer that projects them, and the first row of each head."""

    linear: int
    starts: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class ProvenHeads:
    """The way from projections to attention.

    order   order of the dimensions of a query or key head that kernels need
    factor  queries are multiplied by it, beside the rotation
    norms   leaves that norm queries and keys; (): none
    turn    cos and signed sin [T, D] of positions [T]
    """

    q: Side
    k: Side
    v: Side
    order: tuple[int, ...]
    norms: tuple[int, ...]
    factor: float
    turn: Callable[[Tensor], tuple[Tensor, Tensor]]


class HeadsWay:
    """The part of a traced layer between its projections and its call of attention."""

    def __init__(self, traced: TracedGraph, extras: Extras) -> None:
        self.traced, self.extras = traced, extras
        (self.attend,) = [node for node in traced.graph.nodes if kind_of(node) == ATTEND]
        self.sides: list[fx.Node] = list(self.attend.args[:3])  # type: ignore[arg-type]
        stops = [node for node in traced.graph.nodes if kind_of(node) == LINEAR]
        self.reached = ancestors(self.sides, stops)
        self.linears = [node for node in stops if node in self.reached]
        self.norms = [node for node in traced.graph.nodes if node in self.reached and kind_of(node) == NORM]

    def run(
        self, outputs: dict[fx.Node, Tensor], positions: Tensor, *, normed: bool, sides: slice = slice(3)
    ) -> list[Tensor]:
        """Return queries, keys and values [heads, T, D] of the projections' outputs [T, rows] at positions [T].

        normed   False: norms change nothing
        """
        tokens = len(positions)
        hidden = inputs_of(self.traced)["hidden"].meta["val"].shape[2]
        names = ["positions", *(f"extra{i}" for i in range(1, len(self.traced.inputs)))]
        extras = dict(zip(names, self.extras(positions), strict=False))
        values = named_values(self.traced, {"hidden": torch.zeros(1, tokens, hidden), **extras})
        values |= {node: one[None] for node, one in outputs.items()}

        def leaf(node: fx.Node, args: tuple[Tensor, ...]) -> Tensor:
            return self.norm(node, args[0]) if normed else args[0]

        return [one[0] for one in evaluate(self.sides[sides], values, leaf)]

    def norm(self, node: fx.Node, x: Tensor) -> Tensor:
        """Return the norm of a leaf, with random weights."""
        form, weight = self.form(node), self.weight(node, x.shape[-1])
        if form.centered:
            return norms.layer_norm(x, weight + form.plus_one, form.eps)
        return norms.rms_norm(x, weight + form.plus_one, form.eps)

    def form(self, node: fx.Node) -> NormForm:
        """Return the form of a norm."""
        found = norm_form(self.traced.leaves[key_of(node)].module)
        assert found is not None, "it is a leaf"
        return found

    def weight(self, node: fx.Node, width: int) -> Tensor:
        """Return random weights of a norm."""
        return 1 + 0.3 * torch.randn(width, generator=torch.Generator().manual_seed(7 + key_of(node)))


def find_heads(traced: TracedGraph, extras: Extras) -> ProvenHeads | str:
    """Return the way from projections to attention, or the reason why no kernel of ours computes it."""
    way = HeadsWay(traced, extras)
    if len({node.args[0] for node in way.linears}) != 1:
        return "queries, keys and values are projections of different inputs"
    if any(user not in way.reached for node in way.linears for user in node.users):
        return "its projections are used by more than attention"
    if len({traced.leaves[key_of(node)].module.bias is None for node in way.linears}) != 1:
        return "some of its projections have a bias, and others do not"
    try:
        return _find(way)
    except (NotEvaluated, RuntimeError, IndexError, ValueError) as error:
        return f"its way to attention is not understood ({type(error).__name__})"


def _find(way: HeadsWay) -> ProvenHeads | str:
    read = _rows(way)
    if isinstance(read, str):
        return read
    (q, k, v), factor = read
    if k.shape[0] != v.shape[0] or q.shape[0] % k.shape[0] or q.shape[1] != k.shape[1] or q.shape[1] != v.shape[1]:
        return "values are narrower than keys" if q.shape[1] == k.shape[1] else "heads of queries and keys differ"
    repeated = _repeats(torch.cat((k, v), 1))
    k, v = k[::repeated], v[::repeated]
    pairs = _pairs(way, q, 0)
    if isinstance(pairs, str) or pairs != _pairs(way, k, 1):
        return pairs if isinstance(pairs, str) else "queries and keys are rotated in other pairs"
    found = _norms(way)
    if isinstance(found, str):
        return found
    order = _order(pairs, q.shape[1])
    sides = [_side(way, one) for one in (q, k, v)]
    words = next((one for one in sides if isinstance(one, str)), None)
    if words is not None:
        return words
    turn = lambda positions: _turn(way, k, order, pairs, positions)  # noqa: E731
    heads = ProvenHeads(*sides, order, found, factor, turn)  # type: ignore[arg-type]
    return heads if _equal(way, heads, (q, k, v)) else "norms, rotation and other operations are in another order"


def _outputs(way: HeadsWay, values: Callable[[int, int], Tensor]) -> dict[fx.Node, Tensor]:
    """Return outputs of the projections: `values(first, count)` of their rows, which have numbers in order."""
    found, first = dict[fx.Node, Tensor](), 0
    for node in way.linears:
        count = int(node.args[2])  # type: ignore[arg-type]
        found[node] = values(first, count)
        first += count
    return found


def _rows(way: HeadsWay) -> tuple[list[Tensor], float] | str:
    """Return for each side the row of the projections that each dimension of each head is, [heads, D].

    Also returns the factor on queries, which keys do not have.

    A row's number is its output, at position 0, where nothing is rotated.
    """
    at = torch.zeros(1, dtype=torch.int64)
    ones = way.run(_outputs(way, lambda first, count: torch.ones(1, count)), at, normed=False)
    numbers = _outputs(way, lambda first, count: torch.arange(first, first + count, dtype=torch.float32)[None])
    found = way.run(numbers, at, normed=False)
    if any((one.abs() < 1e-6).any() for one in ones):
        return "heads are rotated at position 0, too"
    rows = [(one / scale)[:, 0] for one, scale in zip(found, ones, strict=True)]
    if any((one - one.round()).abs().max() > 1e-2 for one in rows):
        return "heads are sums of several rows of projections"
    factor = float(ones[0].flatten()[0] / ones[1].flatten()[0])
    if ones[2].ne(1).any() or any(one.ne(one.flatten()[0]).any() for one in ones[:2]):
        return "dimensions of a head have factors of their own"
    return [one.round().long() for one in rows], factor


def _repeats(rows: Tensor) -> int:
    """Return how often each head of keys and values comes one after the other."""
    count = len(rows)
    for times in range(count, 1, -1):
        if count % times == 0 and torch.equal(rows, rows[::times].repeat_interleave(times, 0)):
            return times
    return 1


def _scattered(way: HeadsWay, rows: Tensor, values: Tensor) -> dict[fx.Node, Tensor]:
    """Return outputs of the projections in which each head of a side has `values` [T, D]."""
    total = sum(int(node.args[2]) for node in way.linears)  # type: ignore[arg-type]
    whole = torch.zeros(len(values), total)
    whole[:, rows.flatten()] = values.repeat(1, len(rows))
    return _outputs(way, lambda first, count: whole[:, first : first + count])


def _pairs(way: HeadsWay, rows: Tensor, side: int) -> list[tuple[int, int]] | str:
    """Return the pairs of dimensions that are rotated together, in order."""
    dim, pairs = rows.shape[1], set[tuple[int, int]]()
    for position in (1, 7, 12):
        at = torch.full((dim,), position)
        (out,) = way.run(_scattered(way, rows, torch.eye(dim)), at, normed=False, sides=slice(side, side + 1))
        if (out - out[:1]).abs().max() > 1e-4:
            return "heads are rotated by different angles"
        turned = out[0].abs() > 1e-6
        for one, other in (turned & ~torch.eye(dim, dtype=torch.bool)).nonzero().tolist():
            pairs.add((min(one, other), max(one, other)))
    used = [one for pair in pairs for one in pair]
    return sorted(pairs) if len(used) == len(set(used)) else "dimensions are rotated in other groups than pairs"


def _order(pairs: list[tuple[int, int]], dim: int) -> tuple[int, ...]:
    """Return the order in which pairs are half of a head apart. Dimensions that are not rotated fill both halves."""
    used = {one for pair in pairs for one in pair}
    rest = [one for one in range(dim) if one not in used]
    middle = len(rest) // 2
    return (*(one for one, _ in pairs), *rest[:middle], *(one for _, one in pairs), *rest[middle:])


def _norms(way: HeadsWay) -> tuple[int, ...] | str:
    """Return the leaves that norm heads of queries and of keys; (): none does."""
    if not way.norms:
        return ()
    own = [[node for node in way.norms if node in ancestors([side], way.linears)] for side in way.sides]
    if [len(one) for one in own] != [1, 1, 0]:
        return "it norms more than its queries and keys once"
    forms = [way.form(one[0]) for one in own[:2]]
    if forms[0] != forms[1] or forms[0].centered:
        return "its queries and keys have a layer normalization, or norms that differ"
    shapes = [one[0].meta["val"].shape[-1] for one in own[:2]]
    if any(shape != way.attend.args[0].meta["val"].shape[-1] for shape in shapes):  # type: ignore[union-attr]
        return "it norms all heads together"
    return tuple(key_of(one[0]) for one in own[:2])


def _side(way: HeadsWay, rows: Tensor) -> Side | str:
    """Return the heads of a side as blocks of rows of one linear layer."""
    starts, size = rows[:, 0], rows.shape[1]
    if not torch.equal(rows, starts[:, None] + torch.arange(size)):
        return "heads are no blocks of rows of a projection"
    first = 0
    for node in way.linears:
        count = int(node.args[2])  # type: ignore[arg-type]
        if first <= int(starts.min()) and int(starts.max()) < first + count:
            return Side(key_of(node), tuple((starts - first).tolist()), size)
        first += count
    return "heads come from several projections"


def _turn(
    way: HeadsWay, rows: Tensor, order: tuple[int, ...], pairs: list[tuple[int, int]], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [T, D] of positions [T], in the order of the kernels, read off from the module.

    The first dimension of each pair is 1 and the second 0, then the other way round.
    """
    dim, count = rows.shape[1], len(positions)
    seconds = torch.zeros(dim)
    seconds[[other for _, other in pairs]] = 1
    reads = slice(1, 2)
    (one,) = way.run(_scattered(way, rows, (1 - seconds).expand(count, -1)), positions, normed=False, sides=reads)
    (two,) = way.run(_scattered(way, rows, seconds.expand(count, -1)), positions, normed=False, sides=reads)
    own, other = one[0], two[0]
    cos = torch.where(seconds.bool(), other, own)
    partner = torch.arange(dim)
    for a, b in pairs:
        partner[a], partner[b] = b, a
    paired = torch.isin(torch.arange(dim), torch.tensor([one for pair in pairs for one in pair], dtype=torch.int64))
    sin = torch.where(seconds.bool(), own, other) * paired
    return cos[:, list(order)], sin[:, list(order)]


def _equal(way: HeadsWay, heads: ProvenHeads, rows: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Compare with our operations on random numbers, at random positions."""
    made = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 64, (6,), generator=made)
    outputs = _outputs(way, lambda first, count: torch.randn(6, count, generator=made))
    truth = way.run(outputs, positions, normed=True)
    whole = torch.cat(list(outputs.values()), 1)
    cos, sin = heads.turn(positions)
    order = list(heads.order)
    for side, (own, true) in enumerate(zip(rows, truth, strict=True)):
        x = whole[:, own]
        if side < 2:
            if heads.norms:
                node = next(node for node in way.norms if key_of(node) == heads.norms[side])
                x = way.norm(node, x)
            x = ropes.apply_rope(x[..., order].contiguous(), cos, sin) * (heads.factor if side == 0 else 1.0)
            true = true[..., order]
        true = true.transpose(0, 1)
        if true.shape[1] != x.shape[1]:
            true = true[:, :: true.shape[1] // x.shape[1]]
        if not torch.allclose(x, true, **CLOSE):
            return False
    return True
