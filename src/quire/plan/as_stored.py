"""Facts about a checkpoint that the names and shapes of its tensors tell.

They are its place in another one, the layers that predict several tokens (MTP), and the form of experts.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from quire.args.checkpoint import ModelArgs
from quire.args.layers import AttentionArgs
from quire.args.prediction import SKIPPED
from quire.args.wrappers import place_of
from quire.models.names import EACH, STACKED_FORMS
from quire.plan.layout import layer_names
from quire.quantization.formats import MARKS

MATRICES = ("gate_up", "down")  # of experts
Shapes = Callable[[str], Sequence[int]]


def as_stored(args: ModelArgs, stored: Collection[str], shape_of: Shapes | None = None) -> ModelArgs:
    """Return the arguments of a model with what the names of its stored tensors tell.

    These are the place of a language model in the checkpoint around it, the presence of layers that predict several
    tokens, and the form in which experts are stored.
    stored     names of the checkpoint's tensors
    shape_of   function that returns the shape of a stored tensor: it decides between forms with the same names. None:
               the first of them
    """
    return _with_experts(_with_prediction(_with_place(args, stored), stored), stored, shape_of)


def with_prediction(args: ModelArgs, **changes: int) -> ModelArgs:
    """Return the arguments of a model with changed fields of `ModelArgs.prediction`, its notes, and its layers.

    A layer is added as a copy of the model's last layer that attends, with experts if such a layer has experts.
    """
    made, count = structs.replace(args.prediction, **changes), args.num_layers
    own, extra = args.layers[:count], args.layers[count:]
    fit = (one for one in reversed(own) if isinstance(one.mixer, AttentionArgs))
    behind = extra or tuple(sorted(fit, key=lambda one: one.experts is None)[:1])
    notes = (note for note in args.notes if not note.startswith(SKIPPED))
    return replace(
        args,
        layers=(*own, *(behind * made.layers)[: made.layers]),
        prediction=made,
        notes=(*notes, *(made.notes(count) if not made.drafting else ())),
    )


def _with_prediction(args: ModelArgs, stored: Collection[str]) -> ModelArgs:
    """Return the arguments with the layers that predict several tokens and are stored under names of their own.

    Checkpoints of Qwen3-Next have no key for them in config.json; others have the key, and lost the layers.
    """
    begin = f"{args.prediction.root}layers."
    if not args.prediction.root or not stored:
        return args
    places = {name.removeprefix(begin).partition(".")[0] for name in stored if name.startswith(begin)}
    return args if len(places) == args.extra_layers else with_prediction(args, layers=len(places))


def _with_place(args: ModelArgs, stored: Collection[str]) -> ModelArgs:
    if args.wrapper is None:
        return args
    root, head = place_of(stored, (args.wrapper.root, args.wrapper.head))
    return replace(args, wrapper=structs.replace(args.wrapper, root=root, head=head))


def _with_experts(args: ModelArgs, stored: Collection[str], shape_of: Shapes | None) -> ModelArgs:
    """Return the arguments with the form of the stored experts. If none is stored, the loader tells what is missing.

    Layers that predict several tokens, if they have names of their own, may have another form than the model's.
    """
    if args.moe is None or not args.expert_layers:
        return args
    first, own = _form(args, args.expert_layers[0], stored, shape_of), args.num_layers
    last = _form(args, own, stored, shape_of) if args.prediction.root and args.extra_layers else first
    forms = [first if layer < own else last for layer in range(len(args.layers))]
    layers = (
        one if one.experts is None else one.with_experts(structs.replace(args.moe, stored=form or one.experts.stored))
        for one, form in zip(args.layers, forms, strict=True)
    )
    return replace(args, layers=tuple(layers))


def _form(args: ModelArgs, layer: int, stored: Collection[str], shape_of: Shapes | None) -> str:
    """Return the form of the stored experts of a layer; "": none is stored."""
    found = _forms(args, layer, stored)
    form = next(iter(found), "")
    if len(found) > 1 and shape_of is not None:
        form = next((one for one in found if one != EACH and _fits(args, one, map(shape_of, found[one]))), form)
    return form


def _forms(args: ModelArgs, layer: int, stored: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return form -> tensors of a layer with experts, of the forms whose tensors are stored."""
    names = layer_names(args, layer)
    found = dict[str, tuple[str, ...]]()
    for form in (EACH, *STACKED_FORMS):
        parts = ("{e}.gate", "{e}.") if form == EACH else (form, form)
        own = [(f"layers.{{i}}.mlp.experts.{one}", part) for one, part in zip(MATRICES, parts, strict=True)]
        tensors = tuple(names.get(one, "").replace("{i}", str(layer)).replace("{e}", "0") for one in own)
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
