"""Outputs of gate and of up that lie in turns in the panels of a weight: see `panel_sizes`."""

import torch
from torch import Tensor

from quire.kernels.native.library import loaded


def gated_outputs(cols: int, lanes: int) -> int:
    """Return the number of outputs of the panels, with padding, of a weight of `cols` outputs packed for gates."""
    return 2 * lanes * -(-cols // 2 // lanes)


def ungated(y: Tensor, cols: int, lanes: int) -> Tensor:
    """[T, outputs of the panels] -> [T, cols]: the outputs of gate, then those of up, without padding. In C.

    y is contiguous, on the CPU;  lanes  those of the library's vectors
    """
    found = y.new_empty(len(y), cols)
    assert y.is_contiguous() and y.shape[1] == gated_outputs(cols, lanes), "y has all outputs of the panels"
    threads = torch.get_num_threads()
    loaded().quire_linear_ungate(
        y.data_ptr(), found.data_ptr(), len(y), cols // 2, y.shape[1], y.element_size(), threads
    )
    return found
