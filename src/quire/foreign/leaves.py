"""Operations that stand for linear layers, norms and attention in a traced layer, and the modules that call them.

    quire::linear(x, key, rows)         a projection
    quire::norm(x, key)                 a norm over the last dimension
    quire::experts(x, ids, weights, key) the sum of some experts of each row, times their weights
    quire::attend(q, k, v, sinks, key)  q [1, Hq, T, D], k, v [1, Hkv, T, D] -> [1, T, Hq, Dv]
Keys are numbers of leaves in a list. The operations have shapes and no values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINEAR, NORM, ATTEND, EXPERTS = "linear", "norm", "attend", "experts"
USUAL = (1e-5, 1e-6, 1e-8, 0.0)  # epsilons of norms that keep theirs in their code


class Leaf(NamedTuple):
    """A module of a layer that a trace does not enter. name: below the layer."""

    name: str
    kind: str
    module: nn.Module


class NormForm(NamedTuple):
    """A norm as ours compute it; see `NormArgs`."""

    eps: float
    plus_one: bool
    centered: bool


@cache
def operations() -> Any:
    """Define the operations, once, and return their namespace."""
    library = torch.library.Library("quire_foreign", "FRAGMENT")
    library.define("linear(Tensor x, int key, int rows) -> Tensor")
    library.define("norm(Tensor x, int key) -> Tensor")
    library.define("experts(Tensor x, Tensor ids, Tensor weights, int key) -> Tensor")
    library.define("attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, int key) -> Tensor")
    library.impl("linear", lambda x, key, rows: x.new_empty(*x.shape[:-1], rows), "Meta")
    library.impl("norm", lambda x, key: torch.empty_like(x), "Meta")
    library.impl("experts", lambda x, ids, weights, key: torch.empty_like(x), "Meta")
    library.impl("attend", _attend_shape, "Meta")
    operations.library = library  # type: ignore[attr-defined] # it defines the operations as long as it lives
    return torch.ops.quire_foreign


def _attend_shape(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key: int) -> Tensor:
    return v.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def find_leaves(root: nn.Module, stays_float: Callable[[str], bool]) -> list[Leaf]:
    """Return the linear layers, the norms and the experts of a layer, in the order of its modules.

    stays_float   name of a parameter below the root -> True if it is float32 for every dtype of the model: no kernel of
                  a linear layer reads it
    """
    found = list[Leaf]()
    for name, module in root.named_modules():
        if is_linear(module):
            if stays_float(f"{name}.weight"):
                continue
            found.append(Leaf(name, LINEAR, module))
        elif hasattr(module, "_is_expert_parallel"):
            found.append(Leaf(name, EXPERTS, module))
        elif norm_form(module) is not None:
            found.append(Leaf(name, NORM, module))
    return found


def is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer. A class that inherits from `nn.Linear` is compared with it on random numbers."""
    if not isinstance(module, nn.Linear):
        return False
    return type(module) is nn.Linear or _is_like_linear(type(module))


@cache
def _is_like_linear(kind: type[nn.Linear]) -> bool:
    try:
        made, x = kind(6, 5, bias=True), torch.randn(2, 3, 6)
        made.weight.data.normal_()
        made.bias.data.normal_()
        return torch.allclose(made(x), F.linear(x, made.weight, made.bias), atol=1e-5)
    except Exception:  # of whatever another class does in its constructor
        return False


def norm_form(module: nn.Module) -> NormForm | None:
    """Return the form of a norm of ours that equals a module on random numbers; None: it is no such norm."""
    own = dict(module.named_parameters(recurse=False))
    if next(module.children(), None) is not None or set(own) - {"weight", "bias"} or "bias" in own and len(own) < 2:
        return None
    if any(param.dim() != 1 for param in own.values()) or "norm" not in type(module).__name__.lower():
        return None
    return _proven_form(module, own)


def norm_width(module: nn.Module) -> int:
    """Return the width of a norm; 0: it has no weights, and takes any width."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is not None:
        return len(weight)
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else 0


def _proven_form(module: nn.Module, own: dict[str, nn.Parameter]) -> NormForm | None:
    from quire.kernels.norm import ref

    width = norm_width(module) or 48
    made = torch.Generator().manual_seed(0)
    x = torch.randn(3, width, generator=made) * torch.tensor([[1.0], [1e-2], [30.0]])
    values = {name: torch.randn(width, generator=made) for name in own}
    eps = [value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 0.1]
    try:
        with torch.no_grad():
            truth = torch.func.functional_call(module, values, (x,))
    except Exception:
        return None
    weight, bias = values.get("weight"), values.get("bias")
    for form in (
        NormForm(e, one, centered) for e in (*eps, *USUAL) for one in (False, True) for centered in (False, True)
    ):
        if bias is not None and not form.centered or weight is None and form.plus_one:
            continue
        scale = torch.ones(width) if weight is None else weight + form.plus_one
        ours = ref.layer_norm(x, scale, form.eps, bias) if form.centered else ref.rms_norm(x, scale, form.eps)
        if truth.shape == ours.shape and torch.allclose(truth, ours, atol=1e-5, rtol=1e-4):
            return form
    return None


class ExpertsForm(NamedTuple):
    """Experts as our kernels compute them. act, biased, stored: see `MoEArgs`. size: numbers between gate and down."""

    act: str
    biased: bool
    stored: str
    count: int
    size: int


def experts_form(module: Any) -> ExpertsForm | None:
    """Return the form of experts; None: our kernels do not compute them.

    transformers calls experts by an interface, so their form is known but for the activation, which is compared.
    """
    from quire.kernels.activation import ACTS, ref

    form = [getattr(module, name, None) for name in ("has_gate", "is_transposed", "is_concatenated", "has_bias")]
    stored = {(True, False, True): "rows", (True, True, True): "columns", (True, True, False): "paired columns"}
    if tuple(form[:3]) not in stored or getattr(module, "has_post_expert_norm", False):
        return None
    count, *sizes = module.down_proj.shape
    size = sizes[0] if form[1] else sizes[1]
    rows = 3 * torch.randn(4, 2 * size, generator=torch.Generator().manual_seed(8))
    ours = rows if form[2] else torch.cat((rows[:, ::2], rows[:, 1::2]), 1)
    truth = module._apply_gate(rows)
    act = next((act for act in ACTS if torch.allclose(ref.gated(ours, act), truth, atol=1e-5, rtol=1e-4)), "")
    return ExpertsForm(act, bool(form[3]), stored[tuple(form[:3])], count, size) if act else None


@contextmanager
def standing_in(leaves: list[Leaf]) -> Iterator[None]:
    """Let the modules of leaves call the operations above."""
    ops = operations()

    def stub(key: int, leaf: Leaf) -> Callable[[Tensor], Tensor]:
        if leaf.kind == LINEAR:
            rows = leaf.module.out_features
            return lambda x: ops.linear(x, key, rows)
        if leaf.kind == EXPERTS:
            return lambda x, ids, weights: ops.experts(x, ids, weights, key)  # type: ignore[misc]
        return lambda x: ops.norm(x, key)

    for key, leaf in enumerate(leaves):
        leaf.module.forward = stub(key, leaf)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for leaf in leaves:
            del leaf.module.forward
