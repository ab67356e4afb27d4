"""Bytes of a stored tensor that a slice reads, and the order in which the loaded rows are kept."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.params import Part
from quire.kernels.pack.convert import ordered
from quire.weights.files import StoredTensor


class SliceBytes(NamedTuple):
    """Place of a slice in its stored tensor: `count` runs of `length` bytes, which begin `row` bytes apart.

    offset   bytes of the tensor before the matrix: those of the experts that are stacked before it; else 0
    base     bytes of the matrix before the first run
    axis     0: the slice is one run of whole stored rows; 1: each stored row has a run
    first, taken   indices along `axis` of the stored matrix
    """

    offset: int
    base: int
    length: int
    row: int
    count: int
    axis: int
    first: int
    taken: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the slice."""
        return self.length * self.count

    def runs(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield the (offset, bytes) of each run in a file in which the tensor begins at byte `start`."""
        begin = start + self.offset + self.base
        for i in range(self.count):
            yield begin + i * self.row, self.length


def slice_bytes(stored: StoredTensor, part: Part) -> SliceBytes:
    """Return the bytes that `part` reads of its tensor."""
    shape, stacked = part.stored_matrix, part.expert >= 0
    size = stored.num_bytes // part.shape[0] if stacked else stored.num_bytes
    offset, row = size * part.expert if stacked else 0, size // shape[0]
    along = 1 - part.axis if part.transposed else part.axis
    if along == 0:
        return SliceBytes(offset, part.start * row, part.count * row, row, 1, 0, part.start, part.count)
    if part.whole:
        return SliceBytes(offset, 0, size, row, 1, 0, 0, shape[0])
    item = row // shape[1]
    return SliceBytes(offset, part.start * item, part.count * item, row, shape[0], 1, part.start, part.count)


def order_rows(whole: Tensor, first: int, part: Part) -> None:
    """Put a loaded slice in the order of the parameter, in its own memory.

    whole   the parameter, or its part that was loaded; from row `first` on, the slice lies there as it was stored
    """
    if not (part.order or part.transposed or part.paired):
        return
    rows = whole.narrow(0, first, part.rows)
    kept = rows.view(torch.uint8).view(*rows.shape[:1], -1) if rows.itemsize == 1 else rows
    made = ordered(kept.view(kept.shape[::-1]).t() if part.transposed else kept, part)
    kept.copy_(made.clone() if made.data_ptr() == kept.data_ptr() else made)


def sliced(tensor: Tensor, part: Part) -> Tensor:
    """Return the rows of a parameter that `part` fills, in the parameter's order, from the whole stored tensor."""
    return ordered(_view(tensor, part), part)


def write_slice(tensor: Tensor, part: Part, rows: Tensor) -> None:
    """Write rows of a parameter to their place in the whole stored tensor. Reverses `sliced`."""
    if part.paired:
        rows = rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    elif part.order:
        rows = rows.unflatten(0, (-1, len(part.order)))[:, torch.tensor(part.order).argsort()].flatten(0, 1)
    _view(tensor, part).copy_(rows)


def _view(tensor: Tensor, part: Part) -> Tensor:
    """Return the slice as a view of the stored tensor, [rows, columns], in the stored order of rows."""
    matrix = tensor[part.expert] if part.expert >= 0 else tensor
    return (matrix.t() if part.transposed else matrix).narrow(part.axis, part.start, part.count)
