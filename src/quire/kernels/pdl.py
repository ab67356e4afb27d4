"""Programmatic dependent launch (compute capability 9.0): a kernel starts while the one before it in the stream ends.

A kernel that takes part is launched with `options(True)` and has the constexpr PDL. Before `gdc_wait` it touches only
what no kernel of a step writes (weights); after it, everything launched before has ended and is visible: every program
of every such kernel waits, so what holds for its predecessor holds for all before. `gdc_launch_dependents` comes first:
it lets the next kernel start once all programs of this one run. Kernels that take no part, like the first after a join
of two streams, are launched as ever, after the end of what was before them.
"""

import functools

import torch

from quire.kernels.triton_runtime import INTERPRETED

ENABLED = True


@functools.cache
def _possible() -> bool:
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def in_use() -> bool:
    """Whether kernels that can take part do."""
    return ENABLED and _possible()


def options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel; none where it takes no part, for interpreters know none."""
    return {"launch_pdl": True} if pdl else {}
