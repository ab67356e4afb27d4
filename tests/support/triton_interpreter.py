"""Repairs Triton's interpreter beside NumPy 2.4."""

from typing import Any

import pytest


def allow_scalar_bounds(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter use a loaded scalar as a loop's bound. NumPy 2.4 refuses its int() of an array of one."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter, "_patch_lang_tensor", patched)
