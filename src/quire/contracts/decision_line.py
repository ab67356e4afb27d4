"""The place in the code of a decision, for plans that say where they were decided."""

from collections.abc import Callable
from pathlib import Path
from types import FunctionType


def line_of(function: Callable[..., object]) -> str:
    """Return the file and first line of a function of this package: "plan/dispatchers.py:194"."""
    assert isinstance(function, FunctionType)
    code = function.__code__
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno}"
