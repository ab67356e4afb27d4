"""Counts a GPU's launches in Triton's interpreter: its kernels, and PyTorch's operations that are no views."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

VIEWS = ("detach", "slice", "select", "view", "as_strided", "expand", "split", "chunk", "unsqueeze", "t", "transpose")
MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "alias", "permute", "split_with_sizes")


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self.inside = found, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside and name not in VIEWS + MEMORY:
            self._found[name] += 1
        return func(*args, **kwargs or {})


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count what runs inside by name."""
    found, call = Counter[str](), GridExecutor.__call__
    operations = _Operations(found)

    def counted(self: Any, *given: Any, **more: Any) -> Any:
        found[self.fn.__name__] += 1
        operations.inside = True  # the interpreter's own operations
        try:
            return call(self, *given, **more)
        finally:
            operations.inside = False

    with patch.object(GridExecutor, "__call__", counted), operations:
        yield found
