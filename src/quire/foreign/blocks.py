"""Modules of a decoder of transformers: its layers, the norm behind them, and the rows of positions that they read."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from quire.args.checkpoint import ModelArgs
from quire.args.foreign import ForeignLeaf, ForeignLinear, ForeignNorm, ForeignTensor
from quire.args.layers import ForeignArgs, NormArgs
from quire.foreign.arguments import QKV, gate_name
from quire.foreign.find import inspected
from quire.foreign.heads import HeadsWay, ProvenHeads
from quire.foreign.inspect import Inspected, Kind, extras_at, traced_ends, traced_layer
from quire.foreign.leaves import LINEAR
from quire.foreign.numbers import ancestors, inputs_of, outputs_of
from quire.foreign.program import LayerRun, Program, compiled
from quire.foreign.rewrite import put_attention, put_gate, put_leaves
from quire.foreign.steps import Activated, Attends, ChosenExperts, PlainAttention, PreparedAttention
from quire.foreign.trace import TracedGraph, copied, key_of, kind_of
from quire.layers.context import Build, StepContext
from quire.layers.linear import ActivatedLinear, GatedLinear, Linear
from quire.layers.moe import Experts
from quire.layers.norm import HeadNorm, Norm


class KeptTensor(nn.Module):
    """A parameter that operations of PyTorch read."""

    value: Tensor

    def __init__(self, at: str, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.at, self.shape, self.device = at, shape, device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the parameter to the layer's device. See `Loads`."""
        value = tensors["value"].to(self.device)
        self.value = value if self.shape else value.view(())  # files have numbers as vectors of one


class PlainNorm(Norm):
    """A norm without weights."""

    def __init__(self, args: NormArgs, width: int, build: Build) -> None:
        super().__init__("", args, build)
        self.weight = self.stored = torch.ones(width, dtype=build.dtype, device=build.device)


class ForeignBlock(nn.Module):
    """A layer of transformers' code."""

    experts = None
    shares_experts = False

    def __init__(self, program: Program, leaves: Iterable[nn.Module], attention: Attends) -> None:
        super().__init__()
        self.program, self.attention = program, attention
        self.leaves = nn.ModuleList(leaves)

    def forward(self, hidden: Tensor, turns: Any, ctx: StepContext, kv: Any) -> Tensor:
        """LayerRun the layer on hidden [T, hidden] and return [T, hidden]; it may reuse the memory of `hidden`."""
        given = hidden if self.program.flat else hidden[None]
        extras = _extras(turns, self.program)
        (out,) = self.program(LayerRun(ctx, kv, turns), hidden=given, positions=ctx.positions[None], **extras)
        result: Tensor = out if self.program.flat else out[0]
        return result

    def join(self, ctx: StepContext) -> None:
        """Do nothing: the layer exchanges nothing with replicas."""


def _extras(turns: Any, program: Program) -> dict[str, Tensor]:
    names = [name for name in program.inputs if name.startswith("extra")]
    return {name: turns[-1][int(name.removeprefix("extra")) - 1] for name in names}


class Entry(nn.Module):
    """The operations between the embedding and the first layer."""

    def __init__(self, program: Program, leaves: dict[str, nn.Module]) -> None:
        super().__init__()
        self.program, self.leaves = program, nn.ModuleList(leaves.values())

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's hidden states [T, hidden] of embedded tokens at positions [T]."""
        given = hidden if self.program.flat else hidden[None]
        (out,) = self.program(LayerRun(None, None, None), hidden=given, positions=positions[None])
        result: Tensor = out if self.program.flat else out[0]
        return result


class ForeignRotary:
    """The rows of positions that layers read: cos and sin of each rotation of ours, then the module's extra tensors.

    The rotations are read off from the module, as `foreign.heads` does.
    """

    def __init__(
        self,
        extras: Program,
        turns: list[Callable[..., tuple[Tensor, Tensor]]],
        device: torch.device,
        dtype: torch.dtype,
        width: int,
    ) -> None:
        self._extras, self._turns, self._device, self._width = extras, turns, device, width
        self._dtype = dtype

    def rows(self, positions: Tensor, dtype: torch.dtype) -> Any:
        """Return cos and signed sin [T, D] of positions [T] for each rotation; last the extra tensors."""
        hidden = torch.empty(1, 1, 1, dtype=self._dtype, device=self._device).expand(1, len(positions), self._width)
        run = LayerRun(None, None, None)
        extras = self._extras(run, hidden=hidden, positions=positions[None])
        return (*(turn(positions, extras, dtype) for turn in self._turns), tuple(extras))


class ForeignModules:
    """Makes the modules of a rank; see `quire.layers.context.DecoderModules`."""

    def __init__(self, found: Inspected, args: ModelArgs, build: Build) -> None:
        self.found, self.args, self.build = found, args, build
        assert args.foreign is not None, "the model is one of transformers"
        own = [one.mixer.operations for one in args.layers if isinstance(one.mixer, ForeignArgs)]
        plain = not any(own) and not args.foreign.entry_operations
        # Without operations of the module graphs only say what calls what, so those of the inspection are used again.
        self.dtype = torch.float32 if plain else build.dtype
        self._graphs: dict[int, TracedGraph] = {}  # of each kind of layer, by its number
        self._entry: TracedGraph | None = None

    def _traced(self, number: int) -> TracedGraph:
        """Return the graph of a kind of layer."""
        if number not in self._graphs:
            kind = self.found.kinds[number]
            again = self.dtype != torch.float32
            self._graphs[number] = traced_layer(self.found, kind.layers[0], self.dtype) if again else kind.traced
        return self._graphs[number]

    def _traced_entry(self) -> TracedGraph:
        """Return the graph from embedded tokens to the first layer."""
        found = self.found
        if self._entry is None:
            again = self.dtype != torch.float32
            made = traced_ends(found.skeleton, found.stubs, found.extras, self.dtype)[0] if again else found.entry
            self._entry = made
        return copied(self._entry)

    def norm(self) -> nn.Module:
        """Return the norm behind the last layer."""
        assert self.args.foreign is not None
        return self._norm(self.args.foreign.norm, "norm")

    def block(self, layer: int) -> nn.Module:
        """Return a layer of the model."""
        own = self.args.layers[layer].mixer
        assert isinstance(own, ForeignArgs), "all layers are of transformers"
        kind = self.found.kinds[own.kind]
        traced = copied(self._traced(own.kind))
        made = {leaf.name: self._leaf(leaf, f"layers.{layer}.{leaf.name}", own) for leaf in own.leaves}
        group = self.build.group_of(layer)
        attends = self._attends(own, group)
        head_norm = self._head_norm(own, layer, attends)
        turn = own.turn if own.prepared else len(self.found.turns)
        if own.prepared:
            step: Any = PreparedAttention(made[QKV], attends, turn, head_norm)  # type: ignore[arg-type]
        else:
            step = PlainAttention(attends, turn)
        put_attention(traced, step, prepared=own.prepared)
        for half in kind.halves:
            put_gate(traced, key_of(half.reads), Activated(made[gate_name(traced, half)]))  # type: ignore[arg-type]
        experts = self._experts(layer)
        chosen = None if experts is None else ChosenExperts(experts, self.build.groups.tp)
        put_leaves(traced, *self._by_key(traced, made), chosen)
        program = compiled(traced.graph, traced.inputs, self._constants(traced, made), self.build.device, own.kind)
        leaves = made | {"head_norm": head_norm, "experts": experts}
        return ForeignBlock(program, [one for one in leaves.values() if one is not None], attends)

    def _experts(self, layer: int) -> Experts | None:
        own = self.args.layers[layer].experts
        return None if own is None else Experts(f"layers.{layer}.mlp.experts", own, self.build)

    def entry(self) -> nn.Module | None:
        """Return the operations between the embedding and the first layer; None: there are none."""
        assert self.args.foreign is not None
        if not self.args.foreign.entry_operations:
            return None
        entry = self._traced_entry()
        hidden, *_ = outputs_of(entry)
        made = {leaf.name: self._leaf(leaf, f"entry.{leaf.name}", None) for leaf in self.args.foreign.entry}
        _only_output(entry.graph, hidden)
        put_leaves(entry, *self._by_key(entry, made))
        program = compiled(entry.graph, entry.inputs, self._constants(entry, made), self.build.device)
        return Entry(program, made)

    def rotary(self) -> ForeignRotary:
        """Return the rows of positions that the layers read."""
        entry = self._traced_entry()
        outputs = outputs_of(entry)[1:]
        extras = compiled(entry.graph, entry.inputs, self._constants(entry, {}), self.build.device, outputs=outputs)
        turns: list[Any] = [self._turn(kind) for kind in self.found.turns]
        if any(isinstance(one.mixer, ForeignArgs) and not one.mixer.prepared for one in self.args.layers):
            dim = self.args.attending[0].head_dim
            device = self.build.device
            turns.append(
                lambda positions, extras, dtype: (
                    torch.ones(len(positions), dim, dtype=dtype, device=device),
                    torch.zeros(len(positions), dim, dtype=dtype, device=device),
                )
            )
        width = inputs_of(entry)["hidden"].meta["val"].shape[2]
        return ForeignRotary(extras, turns, self.build.device, self.dtype, int(width))

    def _turn(self, kind: Kind) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return a function that reads cos and sin off the module's way of keys, which norms are left out of."""
        traced = copied(self._traced(self.found.kinds.index(kind)))
        heads = kind.heads
        assert isinstance(heads, ProvenHeads)
        way = HeadsWay(traced, lambda positions: extras_at(self.found, positions))
        for node in way.norms:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        (attend,) = [node for node in traced.graph.nodes if kind_of(node) == "attend"]
        key: fx.Node = attend.args[1]  # type: ignore[assignment]
        needed = ancestors([key], [])
        graph = traced.graph
        names = list(traced.inputs)
        places = list[tuple[str, int]]()
        hidden = inputs_of(traced)["hidden"]
        for node in [node for node in graph.nodes if kind_of(node) == LINEAR and node in needed]:
            with graph.inserting_before(hidden):
                new = graph.placeholder(f"outputs{key_of(node)}")
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            places.append((f"outputs{key_of(node)}", int(node.args[2])))  # type: ignore[arg-type]
        names = [name for name, _ in places] + names
        program = compiled(graph, names, self._constants(traced, {}), self.build.device, outputs=[key])
        return _ReadTurn(program, heads, places, self.build.device, self.dtype)

    def _attends(self, own: ForeignArgs, group: int) -> Attends:
        tp = 1 if self.build.groups.tp is None else self.build.groups.tp.size
        return Attends(
            kernels=self.build.kernels,
            group=group,
            window=self.build.window(group),
            num_heads=own.num_heads // tp,
            num_kv_heads=max(1, own.num_kv_heads // tp),
            head_dim=own.head_dim,
            scale=own.attention.factor,
            soft_cap=own.scores.soft_cap,
        )

    def _head_norm(self, own: ForeignArgs, layer: int, attends: Attends) -> HeadNorm | None:
        if not own.head_norm:
            return None
        form = own.head_norm[0]
        args = NormArgs(eps=form.eps, plus_one=form.plus_one)
        at = f"layers.{layer}.attention.head_norm"
        return HeadNorm(at, attends.num_heads, attends.num_kv_heads, args, self.build.device)

    def _leaf(self, leaf: ForeignLeaf, at: str, own: ForeignArgs | None) -> nn.Module:
        if isinstance(leaf, ForeignLinear):
            gates = {gate.source: gate for gate in own.gates} if own is not None else {}
            gate = gates.get(leaf.name)
            if gate is None:
                return Linear(at, self.build)
            return (GatedLinear if gate.gated else ActivatedLinear)(at, self.build, gate.act)
        if isinstance(leaf, ForeignNorm):
            return self._norm(leaf, at)
        assert isinstance(leaf, ForeignTensor)
        return KeptTensor(at, leaf.shape, self.build.device)

    def _norm(self, leaf: ForeignNorm, at: str) -> Norm:
        args = NormArgs(eps=leaf.eps, plus_one=leaf.plus_one, centered=leaf.centered)
        return Norm(at, args, self.build) if leaf.stored else PlainNorm(args, leaf.width, self.build)

    def _by_key(self, traced: TracedGraph, made: dict[str, nn.Module]) -> tuple[dict[int, Linear], dict[int, Norm]]:
        leaves = {key: made.get(leaf.name) for key, leaf in enumerate(traced.leaves)}
        linears = {key: one for key, one in leaves.items() if isinstance(one, Linear)}
        return linears, {key: one for key, one in leaves.items() if isinstance(one, Norm)}

    def _constants(self, traced: TracedGraph, made: dict[str, nn.Module]) -> dict[str, Callable[[], Tensor]]:
        found: dict[str, Callable[[], Tensor]] = {}
        for name, value in traced.constants.items():
            own = value.to(self.build.device)
            found[name] = lambda own=own: own
        for name, module in made.items():
            if isinstance(module, KeptTensor):
                found[name] = lambda module=module: module.value
        return found


class _ReadTurn:
    """cos and signed sin of positions, read off from the module; see `heads._turn`.

    It runs the module's way of keys twice: with 1 in the first dimension of each pair, and in the second.
    """

    def __init__(
        self,
        program: Program,
        heads: ProvenHeads,
        places: list[tuple[str, int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        order = torch.tensor(heads.order, device=device)
        seconds = torch.zeros(len(order), dtype=torch.bool, device=device)
        seconds[order[len(order) // 2 :]] = True
        self._program, self._order, self._seconds = program, order, seconds
        self._outputs = [self._rows(places, heads, ones.to(dtype)) for ones in (~seconds, seconds)]
        self._hidden = torch.empty(1, 1, 1, dtype=dtype, device=device)

    @staticmethod
    def _rows(places: list[tuple[str, int]], heads: ProvenHeads, ones: Tensor) -> dict[str, Tensor]:
        """Return the outputs [1, 1, rows] of the projections in which each key has `ones`."""
        found = {name: ones.new_zeros(1, 1, rows) for name, rows in places}
        for start in heads.k.starts:
            found[f"outputs{heads.k.linear}"][..., start : start + heads.k.size] = ones
        return found

    def __call__(self, positions: Tensor, extras: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        one, two = (self._run(outputs, positions, extras) for outputs in self._outputs)
        cos, sin = torch.where(self._seconds, two, one), torch.where(self._seconds, one, two)
        return cos[:, self._order].to(dtype).contiguous(), sin[:, self._order].to(dtype).contiguous()

    def _run(self, outputs: dict[str, Tensor], positions: Tensor, extras: list[Tensor]) -> Tensor:
        count = len(positions)
        values = {name: one.expand(1, count, -1) for name, one in outputs.items()}
        given = {f"extra{i}": one for i, one in enumerate(extras, 1)}
        hidden, run = self._hidden.expand(1, count, 1), LayerRun(None, None, None)
        (out,) = self._program(run, hidden=hidden, positions=positions[None], **given, **values)
        first: Tensor = out[0, 0]
        return first


def _only_output(graph: fx.Graph, node: fx.Node) -> None:
    (output,) = [one for one in graph.nodes if one.op == "output"]
    output.args = (node,)
    graph.eliminate_dead_code()


def foreign_modules(folder: Path, args: ModelArgs, build: Build) -> ForeignModules:
    """Return the modules of a rank for the model in a folder."""
    return ForeignModules(inspected(folder), args, build)
