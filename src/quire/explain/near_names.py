"""Help with the name of a tensor that a model does not have. No torch."""

import difflib
from collections.abc import Collection, Iterable

from quire.contracts.params import Param

SHOWN = 3  # names


def hint(name: str, known: Collection[str], params: Iterable[Param] = ()) -> str:
    """Return a sentence that helps with a name that no tensor has, with a space before it; "" if nothing is near.

    known    names of stored tensors
    params   parameters that read them: the name of one leads to its tensors
    """
    bare = name.removesuffix(".weight")
    if own := next((one for one in params if bare == one.name.removesuffix(".weight")), None):
        return f" It is made of {_some(list(dict.fromkeys(part.stored for part in own.parts)))}: name one of them."
    if bare.rpartition(".")[2] == "lm_head" and (tied := [one for one in known if "embed_tokens" in one]):
        return f" The head is tied to the embedding, {tied[0]}."
    if inside := [one for one in known if f".{bare}." in f".{one}."]:
        return f" Near: {_some(inside)}."
    near = difflib.get_close_matches(name, known, SHOWN, 0.5)
    return f" Near: {_some(near)}." if near else " `quire weights` lists all."


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
