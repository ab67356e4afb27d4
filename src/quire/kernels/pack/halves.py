"""Outputs of gate and of up that lie in turns in the panels of a weight: see `panel_sizes`."""

from torch import Tensor


def gated_outputs(cols: int, lanes: int) -> int:
    """Return the number of outputs of the panels, with padding, of a weight of `cols` outputs packed for gates."""
    return 2 * lanes * -(-cols // 2 // lanes)


def ungated(y: Tensor, cols: int, lanes: int) -> Tensor:
    """[T, outputs of the panels] -> [T, cols]: the outputs of gate, then those of up, without padding."""
    halves = y.view(len(y), y.shape[1] // (2 * lanes), 2, lanes).transpose(1, 2)
    return halves.flatten(2)[:, :, : cols // 2].flatten(1)
