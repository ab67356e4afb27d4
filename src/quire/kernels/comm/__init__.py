"""Exchange of data between the GPUs of a host by memory that all of them map (symmetric memory).

A rank's buffer lies at another address on each rank; `Peers` has the addresses as this rank sees them. `exchange` has
the rows of experts; `triton` has sums. A sum:

    1. writes this rank's part into its own buffer,
    2. meets the same block of the other ranks: signals of int32, set and taken by compare-and-swap at system scope,
    3. reads the parts of all ranks, in the order of ranks, and sums them in float32: every rank has the same bits.

There is no end barrier: a rank may write the next part while another one still reads this part. So neighbouring calls
use different buffers: a call that follows has met all ranks, and each of them had finished the call before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 3  # the first call of a step has its own; the others take turns


@dataclass(frozen=True)
class Peers:
    """Addresses, in this rank's address space, of the memory by which all ranks exchange data.

    buffers   [ranks] int64: address of each rank's buffer: BUFFERS x `room` bytes for sums, `exchange.Layout` for rows
    signals   [ranks] int64: address of each rank's int32 signals, which are 0 between two calls
    rank      number of this rank
    room      largest size of a message, or of the layout, in bytes
    blocks    largest number of programs of a call, the same on all ranks. All of them must run at the same time
    """

    buffers: Tensor
    signals: Tensor
    rank: int
    room: int
    blocks: int
