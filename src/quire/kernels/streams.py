"""A second stream of a CUDA device, for short work beside long work that does not depend on it.

What is allocated beside, PyTorch gives away again on that stream alone, after the next fork, which waits for all that
used it: nothing that was allocated beside may be used later. What was allocated before a fork and is read beside, its
caller keeps to the join.
"""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all that runs on a device: cuBLAS keeps 32 MiB for every stream that it has seen. Its programs go first,
    or they would wait behind the thousands of a long kernel; nothing is captured on a stream of that priority."""
    return torch.cuda.Stream(device, priority=-1)


class Fork(AbstractContextManager["Fork"]):
    """What is launched in `with fork.beside:` waits for what was launched before the fork, and what is launched after
    `fork.join()`, at the latest after `with Fork(side) as fork:`, waits for it. Without a side there is one stream."""

    def __init__(self, side: torch.cuda.Stream | None) -> None:
        self._side, self._main = side, None if side is None else torch.cuda.current_stream(side.device)
        self.beside = nullcontext() if side is None else torch.cuda.stream(side)
        if side is not None and self._main is not None:
            side.wait_stream(self._main)

    def __exit__(self, *_: object) -> None:
        self.join()

    def join(self) -> bool:
        """Wait for the side, the first time; whether it was now, so that what is launched next follows two streams."""
        main, self._main = self._main, None
        if main is not None and self._side is not None:
            main.wait_stream(self._side)
        return main is not None
