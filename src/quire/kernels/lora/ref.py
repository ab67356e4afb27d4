"""Products of adapters in PyTorch, adapter by adapter. See `quire.kernels.lora`."""

from torch import Tensor

from quire.kernels.lora import AdapterRows, AdapterWeights

Inner = list[tuple[int, Tensor, Tensor]]  # slot, rows of the step, and their products [rows, modules, R] float32


def shrink(x: Tensor, weights: AdapterWeights, rows: AdapterRows, first: int = 0) -> Inner:
    """Return the products A x of the rows that have an adapter. See `quire.kernels.lora`."""
    inner = Inner()
    for slot, begin, end in rows.groups:
        own = rows.order[begin:end].long() - first
        own = own[(own >= 0) & (own < len(x))]
        if len(own) and int(weights.ranks[slot]):
            read = x[own].float() if x.dim() == 3 else x[own, None].float()
            inner.append((slot, own, (weights.a[slot].float() @ read[..., None])[..., 0]))
    return inner


def prepare(weights: AdapterWeights) -> None:
    """Do nothing: no table must be there before the first product."""


def fuses(weights: AdapterWeights) -> bool:
    """Return False: the activation follows in a call of its own."""
    return False


def expand(y: Tensor, inner: Inner, weights: AdapterWeights, rows: AdapterRows, first: int = 0) -> None:
    """Add the products B of inner to y in place. See `quire.kernels.lora`."""
    for slot, own, products in inner:
        for run in weights.runs:
            made = products[:, run.module] @ weights.b[slot, run.row : run.row + run.rows].float().t()
            y[own, run.first : run.first + run.rows] += made.to(y.dtype)
