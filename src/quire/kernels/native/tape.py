"""Layers recorded once and run again in one call: what a CUDA graph is to a GPU; the C side is tape.h.

Between two native kernels Python checks shapes, makes an output and crosses into C, and meanwhile no memory is read: at
one request on 2 cores a twelfth of a step.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.native import memory
from quire.kernels.native.library import loaded

CHUNK = 4 << 20  # bytes by which room for buffers grows, at least
ALIGN = 64
T = TypeVar("T")
EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default}


class Buffers:
    """Where recorded kernels write. Tapes that never run at once share one: each starts from its beginning."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self.rewind()

    def rewind(self) -> None:
        """Give everything out again."""
        self._used = [0] * len(self._chunks)

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized contiguous tensor, in the first chunk that has room. A new one doubles what is held, so that
        recordings with ever more rows leave little behind; what is not written takes no memory."""
        size = math.prod(shape) * dtype.itemsize
        fits = (i for i, chunk in enumerate(self._chunks) if self._used[i] + size <= len(chunk))
        at = next(fits, len(self._chunks))
        if at == len(self._chunks):
            self._chunks.append(memory.empty((max(size, CHUNK, sum(map(len, self._chunks))),), torch.uint8))
            self._used.append(0)
        start = self._used[at]
        self._used[at] += -(-size // ALIGN) * ALIGN
        return self._chunks[at][start : start + size].view(dtype).view(shape)


class Tape:
    """The native kernels of one recording. `obstacle`: why it cannot be played, or "".

    Everything that is read or written at play was there at recording: inputs are put into the same tensors.
    """

    def __init__(self, room: int, buffers: Buffers) -> None:
        """room: kernels at most; the outputs of all of them come from `buffers`."""
        self._words = np.zeros(-(-loaded().quire_tape_bytes(room) // 8), np.int64)
        self._words[1] = room
        self._buffers = buffers
        self.address = self._words.ctypes.data
        self.obstacle = "nothing is recorded"

    def record(self, run: Callable[[], T]) -> T:
        """Call `run`, and write down what runs in this thread meanwhile.

        Nothing of Python comes between the end and `switch(None)`, so that no interrupt does: kernels that run later
        would be written into a tape that is gone.
        """
        watch, switch = _Watch(self._buffers), loaded().quire_tape_record
        self._buffers.rewind()
        with watch:
            try:
                switch(self.address)
                result = run()
            finally:
                switch(None)
        self.obstacle = watch.foreign and f"{watch.foreign} is not native"
        if self._words[0] < 0:
            self.obstacle = "there are more kernels than expected"
        return result

    def play(self) -> None:
        """Run it again."""
        assert not self.obstacle, self.obstacle
        loaded().quire_tape_play(self.address)

    def __len__(self) -> int:
        return int(self._words[0])


class _Watch(TorchDispatchMode):
    """Gives outputs from the buffers, and notices operations of PyTorch, which no tape has."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.foreign = ""
        self._buffers = buffers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in EMPTY:
            source = args[0] if isinstance(args[0], Tensor) else None
            dtype = kwargs.get("dtype") or (source.dtype if source is not None else torch.get_default_dtype())
            return self._buffers.empty(args[0] if source is None else args[1], dtype)
        result = func(*args, **kwargs)
        if func._schema.is_mutable or not _same_memory(result, args[0]):
            self.foreign = self.foreign or str(func)
        return result


def _same_memory(view: Any, base: Any) -> bool:
    """Whether an operation did nothing to the numbers."""
    if not (isinstance(view, Tensor) and isinstance(base, Tensor)):
        return False
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
