"""Names of a model's parameters in its checkpoint: transformers renames those of older files while it loads them."""

from collections.abc import Callable, Collection

from quire.foreign.skeleton import Skeleton


def stored_names(skeleton: Skeleton, stored: Collection[str]) -> Callable[[str], str]:
    """Return a function from the name of a parameter in transformers' model to its name in the checkpoint.

    stored   names of the tensors in the checkpoint; (): not known, then names stay
    """
    own = set(name for name, _ in skeleton.model.named_parameters())
    found = {name: name for name in stored if name in own}
    for name in stored:
        if name not in own and (renamed := _renamed(skeleton, name)) in own:
            found.setdefault(renamed, name)
    return lambda name: found.get(name, name)


def _renamed(skeleton: Skeleton, name: str) -> str:
    """Return the name that transformers gives a tensor of a checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    for one in get_model_conversion_mapping(skeleton.model):
        if isinstance(one, WeightRenaming):
            name = one.rename_source_key(name)[0]
    prefix = skeleton.model.base_model_prefix
    own = dict.fromkeys(name for name, _ in skeleton.model.named_parameters())
    if name not in own and f"{prefix}.{name}" in own:
        return f"{prefix}.{name}"
    return name
