"""Proof that the way from one or two linear layers to the next one is an activation of `quire.kernels.activation`."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quire.foreign.leaves import LINEAR
from quire.foreign.numbers import NotEvaluated, ancestors, evaluate, inputs_of
from quire.foreign.trace import TracedGraph, key_of, kind_of
from quire.kernels.activation import ACTS, POINTWISE, ref

TOKENS = 3


@dataclass(frozen=True)
class Half:
    """An activation between linear layers.

    sources   leaves before it: gate and up, or one of both
    swapped   up comes before gate in the only source
    reads     node of the linear layer behind it
    """

    act: str
    sources: tuple[int, ...]
    reads: fx.Node
    gated: bool = True
    swapped: bool = False


def find_halves(traced: TracedGraph) -> list[Half]:
    """Return the activations of a layer that equal one of ours on random numbers."""
    linears = [node for node in traced.graph.nodes if kind_of(node) == LINEAR]
    found = (_half(traced, node, linears) for node in linears)
    return [half for half in found if half is not None]


def _half(traced: TracedGraph, node: fx.Node, linears: list[fx.Node]) -> Half | None:
    x = node.args[0]
    assert isinstance(x, fx.Node), "a layer reads a tensor"
    reached = ancestors([x], linears)
    sources = [one for one in linears if one in reached]
    rest = reached.difference(sources)
    if x in sources or len(sources) not in (1, 2) or any(kind_of(one) for one in rest):
        return None
    if any(user not in reached for one in sources for user in one.users) or len({one.args[0] for one in sources}) > 1:
        return None
    made = torch.Generator().manual_seed(4)
    widths = [int(one.args[2]) for one in sources]  # type: ignore[arg-type]
    outputs = [3 * torch.randn(1, TOKENS, width, generator=made) for width in widths]
    hidden = inputs_of(traced)["hidden"]
    values = dict(zip(sources, outputs, strict=True)) | {hidden: torch.zeros(1, TOKENS, hidden.meta["val"].shape[2])}
    try:
        (truth,) = evaluate([x], values)
    except (NotEvaluated, RuntimeError, KeyError):
        return None
    keys = tuple(map(key_of, sources))
    if len(sources) == 2 and widths[0] == widths[1]:
        return _of_two(truth, outputs, keys, node)
    return _of_one(truth, outputs[0], keys, node) if len(sources) == 1 else None


def _of_two(truth: Tensor, outputs: list[Tensor], keys: tuple[int, ...], node: fx.Node) -> Half | None:
    for act in ACTS:
        for gate, up in ((0, 1), (1, 0)):
            if _close(ref.gated(outputs[gate][0], act, outputs[up][0]), truth):
                return Half(act, (keys[gate], keys[up]), node)
    return None


def _of_one(truth: Tensor, output: Tensor, keys: tuple[int, ...], node: fx.Node) -> Half | None:
    first, second = output[0].chunk(2, -1)
    if truth.shape[-1] == first.shape[-1]:
        for act in ACTS:
            for swapped, (gate, up) in enumerate(((first, second), (second, first))):
                if _close(ref.gated(gate, act, up), truth):
                    return Half(act, keys, node, swapped=bool(swapped))
        return None
    act = next((act for act in POINTWISE if _close(ref.pointwise(output[0], act), truth)), "")
    return Half(act, keys, node, gated=False) if act else None


def _close(ours: Tensor, truth: Tensor) -> bool:
    return ours.shape == truth[0].shape and torch.allclose(ours, truth[0], atol=1e-5, rtol=1e-4)
