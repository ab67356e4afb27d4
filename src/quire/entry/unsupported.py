"""Methods and arguments of vLLM's `LLM` that Quire's does not have. Each is refused by name, with its replacement."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.contracts.errors import InvalidParameter
from quire.contracts.unknown_fields import read_refused

METHODS = {name: row.reason for name, row in read_refused(Path(__file__).with_name("refused_methods.txt")).items()}
ARGUMENTS = read_refused(Path(__file__).with_name("refused_arguments.txt"))  # of methods


def check_arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `InvalidParameter` for the first argument in `given` that `method` does not have.
    Arguments of vLLM in `ARGUMENTS` are accepted with a value without effect."""
    name = method.__qualname__
    for argument, value in given.items():
        if (refused := ARGUMENTS.get(argument)) is None:
            own = method.__kwdefaults__ or {}
            near = difflib.get_close_matches(argument, own, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(own)}."
            raise InvalidParameter(f"{name} has no parameter {argument!r}: {hint}", param=argument)
        if not refused.accepts(value):
            raise InvalidParameter(f"{name}: {argument} is not implemented: {refused.reason}.", param=argument)


def no_attribute(kind: str, name: str) -> AttributeError:
    """Return the `AttributeError` for attribute `name` of class `kind`; vLLM's own methods get a hint."""
    if name in METHODS:
        return AttributeError(f"{kind}.{name} is not implemented: {METHODS[name]}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")
