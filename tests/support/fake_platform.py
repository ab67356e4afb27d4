"""A platform that Quire does not have: a device named "fake", with the kernels in PyTorch alone.

It brings what docs/add-a-platform.md lists: a name of PyTorch's, facts, and rows of kernels. Its tensors are in the
memory of the CPU: `FakeDevice` takes the place of the device's own extension of PyTorch, and counts them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import rename_privateuse1_backend

from quire.assemble import engine
from quire.kernels.supports import SUPPORTS
from quire.platforms.detect import DevicePlan
from quire.reports.engine import PHASES

NAME = "fake"
CPU = torch.device("cpu")


class FakeDevice(TorchFunctionMode):
    """Puts tensors of the device "fake" into the memory of the CPU.

    placed   calls that asked for the device
    """

    def __init__(self) -> None:
        super().__init__()
        self.placed = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {name: self._own(value) for name, value in (kwargs or {}).items()}
        return function(*map(self._own, args), **given)

    def _own(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            self.placed += 1
            return CPU
        return value


def bring(patch: pytest.MonkeyPatch, *, kernels: bool = True) -> AbstractContextManager[FakeDevice]:
    """Make "fake" the device that engines find. Return the context in which they may run.

    kernels   True: the platform has rows for the references, which are PyTorch's operations
    """
    if torch._C._get_privateuse1_backend_name() != NAME:
        rename_privateuse1_backend(NAME)
    found = DevicePlan(device=NAME, reason="of a test")
    patch.setattr(engine, "resolve_device", lambda asked: found)
    patch.setitem(PHASES, NAME, PHASES["cpu"])
    if kernels:
        for op, rows in SUPPORTS.items():
            own = {name: replace(row, devices=row.devices | {NAME}) for name, row in rows.items() if "ref" in name}
            patch.setitem(SUPPORTS, op, {**rows, **own})
    return FakeDevice()
