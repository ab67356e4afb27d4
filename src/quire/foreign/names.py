"""Names of a model's parameters in its checkpoint: transformers renames those of older files while it loads them."""

from collections.abc import Callable, Collection

from quire.foreign.leaves import ExpertsForm
from quire.foreign.skeleton import Skeleton
from quire.quantization.formats import MARKS

GATE_UP, DOWN = "layers.{i}.mlp.experts.gate_up", "layers.{i}.mlp.experts.down"


def stored_names(skeleton: Skeleton, stored: Collection[str]) -> Callable[[str], str]:
    """Return a function from the name of a parameter in transformers' model to its name in the checkpoint.

    stored   names of the tensors in the checkpoint; (): not known, then names stay
    Tensors that transformers stacks (experts) have the names that it gives them before.
    """
    own = {name for name, _ in (*skeleton.model.named_parameters(), *skeleton.model.named_buffers())}
    stored = frozenset(map(_unquantized, stored))
    found = {name: name for name in stored if name in own}
    renames, prefix = _renames(skeleton) if len(found) < len(stored) else [], skeleton.model.base_model_prefix
    for name in stored:
        if name not in own:
            renamed = name
            for one in renames:
                renamed = one(renamed)
            renamed = f"{prefix}.{renamed}" if renamed not in own and f"{prefix}.{renamed}" in own else renamed
            found.setdefault(renamed, name)
    return lambda name: found.get(name, name)


def _unquantized(name: str) -> str:
    """Return the name that a tensor of a quantized weight would have without quantization ("X.qweight": "X.weight")."""
    mark = next((one for one in MARKS if one.startswith(".") and name.endswith(one)), "")
    return f"{name.removesuffix(mark)}.weight" if mark else name


def _renames(skeleton: Skeleton) -> list[Callable[[str], str]]:
    """Return the functions by which transformers renames the tensors of a checkpoint of this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    every = [one for one in get_model_conversion_mapping(skeleton.model) if isinstance(one, WeightRenaming)]
    return [lambda name, one=one: str(one.rename_source_key(name)[0]) for one in every]  # type: ignore[misc]


def expert_names(
    skeleton: Skeleton, layer: int, name: str, stored: Callable[[str], str], form: ExpertsForm
) -> list[tuple[str, str, str]]:
    """Return the names under which checkpoints may have the experts of a layer, as rows of a name map.

    name     of the module below the layer, whose number is `layer`
    stored   name of a parameter -> its name in the checkpoint
    transformers tells which tensors of a checkpoint it stacks. Files may also have the stacks themselves.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = list[tuple[str, str, str]]()
    for own, parameter in (("gate_up_proj", GATE_UP), ("down_proj", DOWN)):
        whole, sides = f"{skeleton.at}.{{i}}.{name}.{own}", ("gate", "up") if parameter == GATE_UP else ("",)
        stack = stored(whole.replace("{i}", str(layer))).replace(f".{layer}.", ".{i}.", 1)
        found.append((stack, parameter, form.stored))
        found += [(f"{stack}_bias", f"{parameter}_bias", form.stored)] * form.biased
        for one in get_model_conversion_mapping(skeleton.model):
            (target, *more) = one.target_patterns if isinstance(one, WeightConverter) else ("", "")
            if target and not more and whole.endswith(target.rstrip("$")) and len(one.source_patterns) == len(sides):
                begin = whole[: len(whole) - len(target.rstrip("$"))]
                for source, side in zip(one.source_patterns, sides, strict=True):
                    each = begin + source.rstrip("$").replace("*", "0").replace("{e}", "0")
                    each = stored(each.replace("{i}", str(layer))).replace(f".{layer}.", ".{i}.", 1)
                    head, _, tail = each.rpartition(".0.")  # the number of the expert
                    each = f"{head}.{{e}}.{tail}"
                    found.append((each, parameter, f"{{e}}.{side}"))
                break
    return found
