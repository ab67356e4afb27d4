"""A side stream of a CUDA device, for short work beside long work that does not depend on it.

Memory rules, since PyTorch's allocator reuses memory per stream:

- A tensor allocated on the side stream must not be used after the next fork: the next work there may overwrite it.
- The caller keeps every tensor that was allocated before the fork, and is read on the side stream, until the join.
"""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device. A device has only one: cuBLAS keeps 32 MiB for every stream that it has seen.

    It has high priority: otherwise its programs would wait behind the thousands of programs of a long kernel. CUDA
    graphs are captured on another stream, of default priority.
    """
    return torch.cuda.Stream(device, priority=-1)


class Fork(AbstractContextManager["Fork"]):
    """Runs kernels on a side stream beside the main stream. With `side` None, everything runs on the main stream.

    `with fork.beside:` launches kernels on the side stream. They start after all kernels launched before the fork.
    `fork.join()` makes the main stream wait for them; the end of `with Fork(side) as fork:` does so at the latest.
    """

    def __init__(self, side: torch.cuda.Stream | None) -> None:
        self._side, self._main = side, None if side is None else torch.cuda.current_stream(side.device)
        self.beside = nullcontext() if side is None else torch.cuda.stream(side)
        if side is not None and self._main is not None:
            side.wait_stream(self._main)

    def __exit__(self, *_: object) -> None:
        self.join()

    def join(self) -> bool:
        """Make the main stream wait for the side stream. Return True if this call did so, False if an earlier call did.

        After True the next kernel follows two streams: it cannot use programmatic dependent launch.
        """
        main, self._main = self._main, None
        if main is not None and self._side is not None:
            main.wait_stream(self._side)
        return main is not None
