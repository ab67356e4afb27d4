"""Products of adapters in PyTorch, adapter by adapter. See `quire.kernels.lora`."""

from torch import Tensor

from quire.kernels.lora import AdapterRows, AdapterWeights


def add(y: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Add the products of adapters to y in place. See `quire.kernels.lora`."""
    rank = weights.rank
    for slot, first, end in rows.groups:
        if not int(weights.ranks[slot]):
            continue
        own = rows.order[first:end].long()
        inner = x[own].float() @ weights.a[slot].float().t()
        for module, begin, count in weights.runs:
            part = inner[:, module * rank : (module + 1) * rank]
            made = part @ weights.b[slot, begin : begin + count].float().t()
            y[own, begin : begin + count] += made.to(y.dtype)
