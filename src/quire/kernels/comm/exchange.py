"""The experts' exchange by pull over symmetric memory: rows go to the ranks of their experts, results come back.

Every rank of the group has one symmetric buffer, a `Layout`. An exchange is two kernels around the experts kernel:

dispatch   1. writes this rank's rows, and how many they are, into its own buffer;
           2. meets the same program of all other ranks (barrier A);
           3. reads from all buffers, its own too, the rows that have an expert here. They become local tensors for the
              experts kernel: row r * bound + i is row i of rank r. It also zeroes these rows of its own y. Rows that
              are quantized for the link stay so: the experts kernel takes them.
experts    add their results to y, in the symmetric buffer, if they overwrite their residual; else y is copied there.
combine    1. meets the same program of all other ranks (barrier B);
           2. adds to each own row the results of the ranks that have an expert of the row, in the order of ranks, in
              float32, rounded once. So the result depends neither on time nor on the number of rows.

No length comes from the host: counts are on the device, and grids depend on `bound` alone, the most rows that a rank
brings. So a CUDA graph can replay a step with any counts up to its bound. Rows without an expert here do not cross
the link; neither do rows from a rank's count on. Both get id -1 and weight 0. Their x is not written, nor is their y
zeroed: experts kernels compute row by row, and combine does not read these rows of y.

Rows of a replica with several ranks (tensor parallelism): each rank has all of them and publishes every n-th, so row t
is row t // n of the n-th rank's buffer that comes at t % n. Every rank of the replica combines all rows.

A meeting is of one program with the programs of the same number. So a program reads only rows that programs of its
number wrote: tiles of rows go round robin to programs on all ranks, and each program has a count of its own.

Two barriers suffice with single buffers. Kernels of a rank run one after the other, and all ranks launch the same
kernels with the same grids, dispatch and combine in turn. "Before" is the order that meetings give:
- The next dispatch writes counts, x, ids and weights while no rank reads them: this rank's combine has ended, so every
  other rank had come to barrier B, so its dispatch, which read them, had ended.
- dispatch zeroes y after barrier A: every other rank had come to this barrier, so its combine before, which read y, had
  ended. The experts kernel and copies write y later still.
- combine reads y after barrier B: every other rank had come to it, so its experts kernel had ended.
- A rank without rows has the same grids and meets as often, so all of this holds for it, across layers and steps too.
- Signals are 0 or 1, set by one program and taken by another, in turn; so no signal is lost between unequal grids.
A buffer therefore belongs to one stream of calls with one `Layout`: another layout needs its own buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.kernels.comm import Peers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGN = 16  # bytes, of every offset and of every row of x and y
PROGRAMS = 128  # most programs of a kernel, each with a count of its own
MOST = {"": 0, "e4m3": 448, "int8": 127}  # values of a wire -> largest magnitude; 0: as the rows are


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of the symmetric buffer of a rank, the same on all ranks of a group.

    ranks        ranks of the group
    rows         most rows that a rank brings to an exchange
    hidden       columns of a row;  top_k  experts of a row
    item_bytes   bytes of an activation
    wire         form of the rows on the link

    A buffer in order, every part aligned:

        counts    [PROGRAMS] int32: number of this rank's rows, for each program
        x         [rows, hidden] activations, or 8-bit numbers
        scales    [rows, scales of a row] float32
        ids       [rows, top_k] int32
        weights   [rows, top_k] float32
        y         [ranks * rows, hidden] activations: this rank's results; those for rank r begin at row r * bound
    """

    ranks: int
    rows: int
    hidden: int
    top_k: int
    item_bytes: int
    wire: Wire = AS_THEY_ARE

    def __post_init__(self) -> None:
        whole = self.wire.group or ALIGN // (1 if self.wire.values else self.item_bytes)
        assert self.hidden % whole == 0, f"rows of {self.hidden} do not divide into parts of {whole}"

    def offsets(self) -> dict[str, int]:
        """Return the byte offset of each part by its name, and that of the "end"."""
        sizes = {
            "counts": 4 * PROGRAMS,
            "x": self.rows * self.hidden * (1 if self.wire.values else self.item_bytes),
            "scales": self.rows * self.wire.num_scales(self.hidden) * 4,
            "ids": self.rows * self.top_k * 4,
            "weights": self.rows * self.top_k * 4,
            "y": self.ranks * self.rows * self.hidden * self.item_bytes,
        }
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = at
            at += -(-size // ALIGN) * ALIGN
        return found | {"end": at}

    @property
    def num_bytes(self) -> int:
        """Bytes of a rank's buffer."""
        return self.offsets()["end"]


@dataclass(frozen=True)
class Slots:
    """This rank's end of the exchanges of a group, for `dispatch` and `combine`.

    peers    addresses of the buffers of all ranks, of their signals, and this rank's number
    memory   [layout.num_bytes] uint8: this rank's buffer
    each     ranks of a replica, which are neighbours: all of them have the replica's rows
    """

    peers: Peers
    layout: Layout
    memory: Tensor
    each: int = 1

    def y(self, bound: int, dtype: torch.dtype) -> Tensor:
        """Return the results [ranks * bound, hidden] of an exchange in this rank's buffer."""
        at, size = self.layout.offsets()["y"], self.layout.ranks * bound * self.layout.hidden
        return self.memory[at:].view(dtype)[:size].view(-1, self.layout.hidden)
