"""The matrices of an adapter as a slot holds them: read from files, cut and ordered as the layers of a rank are."""

from pathlib import Path

import torch
from torch import Tensor

from quire.adapters.slots import AdaptedLinear, AdapterRules, SlotPlan
from quire.contracts.adapters import Adapter
from quire.contracts.errors import AdapterError
from quire.kernels.pack.convert import ordered
from quire.layers.adapters import HeldAdapter
from quire.weights.adapter_files import PARAMETERS, AdapterFiles, digest_of, read_adapter, stamp_of
from quire.weights.files import AGAIN, StoredTensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_held(
    adapter: Adapter, rules: AdapterRules, plan: SlotPlan, dtype: torch.dtype, *, pinned: bool
) -> HeldAdapter:
    """Read this rank's part of an adapter. pinned: memory that a GPU reads without help

    Raises `AdapterError` if the adapter does not fit, or its files are not those that were summed.
    """
    folder = Path(adapter.folder)
    stamp = stamp_of(folder)
    changed = AdapterError(
        f"the files of adapter {adapter.name!r} in {folder} have changed since they were read: load it anew."
    )
    if digest_of(folder) != adapter.digest:
        raise changed
    files = read_adapter(folder)
    rules.check(files)
    numbers = torch.zeros(plan.size, dtype=dtype, pin_memory=pinned)
    matrices = _Matrices(files, rules)
    ranks = [_fill(linear, matrices, plan.rank, numbers) for linear in plan.linears]
    held = torch.tensor(ranks, dtype=torch.int32)
    if stamp_of(folder) != stamp:  # while they were read
        raise changed
    if not numbers.isfinite().all():
        raise AdapterError(
            f"adapter {adapter.name!r} in {folder} has numbers that {str(dtype).removeprefix('torch.')} cannot hold: "
            "use --dtype bfloat16 or float32."
        )
    return HeldAdapter(numbers, held.pin_memory() if pinned else held)


class _Matrices:
    """The matrices of an adapter by the tails of modules."""

    def __init__(self, files: AdapterFiles, rules: AdapterRules) -> None:
        self._files, self._rules = files, rules
        self._read: dict[str, Tensor] = {}  # of the parameter of experts that was read last

    def of(self, tail: str) -> tuple[Tensor, Tensor] | None:
        """Return A [r, inputs] and B [outputs, r] with the scale in it; None: no adapter of the module."""
        if (own := self._files.modules.get(tail)) is not None:
            return _read(own.a), _read(own.b).float() * own.scale
        return self._of_expert(tail) if ".experts." in tail else None

    def _of_expert(self, tail: str) -> tuple[Tensor, Tensor] | None:
        """Return the matrices of an expert from those for a parameter of all experts; see `weights.adapter_files`."""
        _, layer, _, expert, side = tail.split(".")
        parameter = PARAMETERS[side == "down"]
        stack = self._rules.stack_of(self._files, int(layer), parameter)
        if stack is None:
            return None
        rank, scale = stack.ranks[parameter]
        a, b = self._stored(stack.a, stack.b)
        b = b.unflatten(1, (rank, -1))[:, :, int(expert)]
        if self._rules.gated(int(layer)) and side != "down":
            half = int(side == "up")
            b = b.unflatten(0, (-1, 2))[:, half] if self._rules.paired else b.chunk(2)[half]
        return a[int(expert) * rank : (int(expert) + 1) * rank], b.float() * scale

    def _stored(self, *tensors: StoredTensor) -> list[Tensor]:
        if any(one.name not in self._read for one in tensors):
            self._read = {one.name: _read(one) for one in tensors}
        return [self._read[one.name] for one in tensors]


def _fill(linear: AdaptedLinear, matrices: _Matrices, rank: int, numbers: Tensor) -> int:
    """Write the matrices of a linear layer to the slot's numbers. Return the largest rank of its modules, 0 if none."""
    count = len(linear.modules)
    a = numbers[linear.at_a : linear.at_a + count * rank * linear.width].view(count, rank, linear.width)
    b = numbers[linear.at_b : linear.at_b + linear.rows * rank].view(linear.rows, rank)
    found: dict[int, Tensor] = {}
    for number, module in enumerate(linear.modules):
        if (own := matrices.of(module.tail)) is not None:
            first, found[number] = own
            a[number, : len(first)] = first.narrow(1, module.first, module.taken)
    for run in linear.runs:
        if run.module in found:
            whole = found[run.module]
            rows = whole if run.part.axis else whole.narrow(0, run.part.start, run.part.count)
            b[run.first : run.first + run.rows, : whole.shape[1]] = ordered(rows, run.part)
    return max((whole.shape[1] for whole in found.values()), default=0)


def _read(stored: StoredTensor) -> Tensor:
    """Return a stored matrix. Raises `AdapterError` for one with numbers that are not finite."""
    found = torch.frombuffer(stored.read(), dtype=DTYPES[stored.dtype]).view(stored.shape)
    if not found.isfinite().all():
        raise AdapterError(f"{stored.file}: {stored.name} has numbers that are not finite: {AGAIN}")
    return found
