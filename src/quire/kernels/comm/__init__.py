"""Exchange of data between the GPUs of a host by memory that all of them map (symmetric memory).

A rank's buffer lies at another address on each rank; `Peers` has the addresses as this rank sees them. A call:

    1. writes this rank's part into its own buffer,
    2. meets the same block of the other ranks: signals of int32, set and taken by compare-and-swap at system scope,
    3. reads the parts of all ranks, in the order of ranks, and sums them in float32: every rank has the same bits.

There is no end barrier: a rank may write the next part while another one still reads this part. So neighbouring calls
use different buffers: a call that follows has met all ranks, and each of them had finished the call before.
"""

from dataclasses import dataclass

from torch import Tensor

BUFFERS = 3  # the first call of a step has its own; the others take turns


@dataclass(frozen=True)
class Peers:
    """Addresses, in this rank's address space, of the memory by which all ranks exchange data.

    buffers   [ranks] int64: address of each rank's buffer of BUFFERS x `room` bytes
    signals   [ranks] int64: address of each rank's int32 signals, which are 0 between two calls
    rank      number of this rank
    room      largest size of a message in bytes
    blocks    largest number of programs of a call
    """

    buffers: Tensor
    signals: Tensor
    rank: int
    room: int
    blocks: int
