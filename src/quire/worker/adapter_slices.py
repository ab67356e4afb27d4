"""The matrices of an adapter as a slot holds them: read from files, cut and ordered as the layers of a rank are."""

from pathlib import Path

import torch
from torch import Tensor

from quire.adapters.slots import AdaptedLinear, AdapterRules, SlotPlan
from quire.contracts.adapters import Adapter
from quire.contracts.errors import AdapterError
from quire.kernels.pack.convert import ordered
from quire.layers.adapters import HeldAdapter
from quire.weights.adapter_files import AdaptedModule, AdapterFiles, digest_of, read_adapter
from quire.weights.files import AGAIN, StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_held(
    adapter: Adapter, rules: AdapterRules, plan: SlotPlan, dtype: torch.dtype, *, pinned: bool
) -> HeldAdapter:
    """Read this rank's part of an adapter. pinned: memory that a GPU reads without help

    Raises `AdapterError` if the adapter does not fit, or its files are not those that were summed.
    """
    folder = Path(adapter.folder)
    if digest_of(folder) != adapter.digest:
        raise AdapterError(
            f"the files of adapter {adapter.name!r} in {folder} have changed since they were read: load it anew."
        )
    files = read_adapter(folder)
    rules.check(files)
    numbers = torch.zeros(plan.size, dtype=dtype, pin_memory=pinned)
    ranks = torch.zeros(len(plan.linears), dtype=torch.int32, pin_memory=pinned)
    for index, linear in enumerate(plan.linears):
        ranks[index] = _fill(linear, files, plan.rank, numbers)
    return HeldAdapter(numbers, ranks)


def _fill(linear: AdaptedLinear, files: AdapterFiles, rank: int, numbers: Tensor) -> int:
    """Write the matrices of a linear layer to the slot's numbers. Return the largest rank of its modules, 0 if none."""
    count = len(linear.modules)
    a = numbers[linear.at_a : linear.at_a + count * rank * linear.width].view(count, rank, linear.width)
    b = numbers[linear.at_b : linear.at_b + linear.rows * rank].view(linear.rows, rank)
    found: dict[int, tuple[AdaptedModule, Tensor]] = {}
    for number, module in enumerate(linear.modules):
        if (own := files.modules.get(module.tail)) is not None:
            a[number, : own.rank] = _read(own.a).narrow(1, module.first, module.taken)
            found[number] = own, _read(own.b).float() * own.scale
    for run in linear.runs:
        if run.module in found:
            own, whole = found[run.module]
            rows = whole if run.part.axis else whole.narrow(0, run.part.start, run.part.count)
            b[run.first : run.first + run.rows, : own.rank] = ordered(rows, run.part)
    return max((own.rank for own, _ in found.values()), default=0)


def _read(stored: StoredTensor) -> Tensor:
    """Return a stored matrix. Raises `AdapterError` for one with numbers that are not finite."""
    found = torch.frombuffer(stored.read(), dtype=DTYPES[stored.dtype]).view(stored.shape)
    if not found.isfinite().all():
        raise AdapterError(f"{stored.file}: {stored.name} has numbers that are not finite: {AGAIN}")
    return found
