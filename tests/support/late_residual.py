"""A spy of the launches of experts whose residual comes late: kernels, and the join before the last of them."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class LateResidual:
    """A residual that is NaN until it is joined.

    late       the residual to pass to the experts
    launched   (name of a kernel, True: launched as a dependent kernel) or ("join", `waits`), in order
    waits      result of `join`: True if it waits for another stream
    """

    def __init__(self, residual: Tensor, *, waits: bool) -> None:
        self.late, self.waits = torch.full_like(residual, torch.nan), waits
        self.launched: list[tuple[str, bool]] = []
        self._residual = residual

    def join(self) -> bool:
        """Bring the residual, as the experts ask for it."""
        self.launched.append(("join", self.waits))
        self.late.copy_(self._residual)
        return self.waits

    def watch(self, module: ModuleType, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Note the launches of these kernels of a module, as on a GPU with dependent launches."""
        for name in names:
            monkeypatch.setattr(module, name, _Watched(name, getattr(module, name), self.launched))
        monkeypatch.setattr(module.pdl, "in_use", lambda: True)


class _Watched:
    def __init__(self, name: str, kernel: Any, launched: list[tuple[str, bool]]) -> None:
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, launch_pdl: bool = False, **options: Any) -> None:
            assert given[-1] == launch_pdl, "the kernel and its launch"
            self._launched.append((self._name, launch_pdl))
            self._kernel[grid](*given[:-1], False, **options)

        return launch
