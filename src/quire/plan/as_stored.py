"""Facts about a checkpoint that the names and shapes of its tensors tell: its place in another, the form of experts."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from quire.args.checkpoint import ModelArgs
from quire.args.wrappers import place_of, placed
from quire.models.names import EACH, STACKED_FORMS
from quire.plan.formats import MARKS
from quire.plan.layout import checkpoint_names

MATRICES = ("gate_up", "down")  # of experts
Shapes = Callable[[str], Sequence[int]]


def as_stored(args: ModelArgs, stored: Collection[str], shape_of: Shapes | None = None) -> ModelArgs:
    """Return the arguments of a model with what the names of its stored tensors tell.

    These are the place of a language model in the checkpoint around it, and the form in which experts are stored.
    stored     names of the checkpoint's tensors
    shape_of   function that returns the shape of a stored tensor: it decides between forms with the same names. None:
               the first of them
    """
    return _with_experts(_with_place(args, stored), stored, shape_of)


def _with_place(args: ModelArgs, stored: Collection[str]) -> ModelArgs:
    if args.wrapper is None:
        return args
    root, head = place_of(stored, (args.wrapper.root, args.wrapper.head))
    return replace(args, wrapper=structs.replace(args.wrapper, root=root, head=head))


def _with_experts(args: ModelArgs, stored: Collection[str], shape_of: Shapes | None) -> ModelArgs:
    """Return the arguments with the form of the stored experts. If none is stored, the loader tells what is missing."""
    found = _forms(args, stored) if args.expert_layers else {}
    if args.moe is None or not found:
        return args
    form = next(iter(found))
    if len(found) > 1 and shape_of is not None:
        form = next((one for one in found if one != EACH and _fits(args, one, map(shape_of, found[one]))), form)
    moe = structs.replace(args.moe, stored=form)
    layers = (one if one.experts is None else one.with_experts(moe) for one in args.layers)
    return replace(args, layers=tuple(layers))


def _forms(args: ModelArgs, stored: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return form -> tensors of the first layer with experts, of the forms whose tensors are stored."""
    names, layer = placed(checkpoint_names(args.model_type), args.wrapper), str(args.expert_layers[0])
    found = dict[str, tuple[str, ...]]()
    for form in (EACH, *STACKED_FORMS):
        parts = ("{e}.gate", "{e}.") if form == EACH else (form, form)
        own = [(f"layers.{{i}}.mlp.experts.{one}", part) for one, part in zip(MATRICES, parts, strict=True)]
        tensors = tuple(names.get(one, "").replace("{i}", layer).replace("{e}", "0") for one in own)
        modules, ends = tensors, [""]
        if form == EACH:  # quantized or not
            modules, ends = tuple(one.removesuffix(".weight") for one in tensors), [".weight", *MARKS]
        elif STACKED_FORMS[form].quantized:
            ends = ["_blocks"]
        if all(any(one + end in stored for end in ends) for one in modules):
            found[form] = tensors
    return found


def _fits(args: ModelArgs, form: str, shapes: Iterable[Sequence[int]]) -> bool:
    """True when stacked tensors with these shapes, gate_up and down, are in a form."""
    assert args.moe is not None
    hidden, width = args.hidden_size, args.moe.expert_size
    sizes = ((2 * width, hidden), (hidden, width))  # outputs and inputs
    turn = -1 if STACKED_FORMS[form].transposed else 1
    return all(tuple(shape[1:]) == one[::turn] for shape, one in zip(shapes, sizes, strict=True))
