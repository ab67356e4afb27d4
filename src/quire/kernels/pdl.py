"""Programmatic dependent launch (compute capability 9.0): a kernel starts while the one before it in the stream ends.

A kernel that takes part is launched with `options(True)` and has the constexpr PDL. It calls two functions:

- `gdc_launch_dependents`, first: lets the next kernel start once all programs of this kernel are running.
- `gdc_wait`: waits until all kernels launched before have ended and their writes are visible. Before it, a kernel reads
  only data that no kernel of a step writes (weights; copies of them from host memory come before a kernel that does not
  take part: `layer_copies.py`), or tables of requests: the first launch of a step writes these
  (`Upload.apply`), and a kernel that does not take part follows it (`build_inputs`). Every program of every kernel that
  takes part waits, so waiting for the predecessor means waiting for all kernels before.

Other kernels, like the first after a join of two streams, start after the end of the kernel before, as usual.
"""

import functools

import torch

from quire.kernels.triton_runtime import INTERPRETED

ENABLED = True


@functools.cache
def _possible() -> bool:
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def in_use() -> bool:
    """Return True if programmatic dependent launch is possible here and enabled."""
    return ENABLED and _possible()


def options(pdl: bool) -> dict[str, bool]:
    """Return the launch options of a kernel: with `pdl` programmatic dependent launch, else none.

    Without `pdl` the option is left out, since the interpreter does not know it.
    """
    return {"launch_pdl": True} if pdl else {}
