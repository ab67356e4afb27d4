"""Recordings of native kernels: recorded once and replayed in one call, like a CUDA graph. C code: recording.h.

Between two native kernels Python checks shapes, allocates an output and calls C, and meanwhile no memory is read: a
twelfth of a step, with one request on 2 cores.
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

CHUNK = 4 << 20  # bytes of a chunk of buffers, at least
ALIGN = 64
T = TypeVar("T")
EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default}


class Buffers:
    """Memory for the outputs of recorded kernels, shared by recordings that never run at the same time.

    Each recording takes the memory from its beginning on, so a replay overwrites the outputs of other recordings.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self.rewind()

    def rewind(self) -> None:
        """Mark all memory as free, for the next recording."""
        self._used = [0] * len(self._chunks)

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor in the first chunk of memory with room, or in a new chunk.

        A new chunk doubles the memory, so that recordings of more and more rows waste little. Pages that are never
        written take no memory.
        """
        size = math.prod(shape) * dtype.itemsize
        fits = (i for i, chunk in enumerate(self._chunks) if self._used[i] + size <= len(chunk))
        at = next(fits, len(self._chunks))
        if at == len(self._chunks):
            self._chunks.append(memory.empty((max(size, CHUNK, sum(map(len, self._chunks))),), torch.uint8))
            self._used.append(0)
        start = self._used[at]
        self._used[at] += -(-size // ALIGN) * ALIGN
        return self._chunks[at][start : start + size].view(dtype).view(shape)


class KernelRecording:
    """A recording of native kernels, which `replay` runs again.

    address    address of the C structure
    obstacle   the reason why the recording cannot be replayed, or ""

    A replay reads and writes the tensors of the recorded run: the caller copies new inputs into them.
    """

    def __init__(self, room: int, buffers: Buffers) -> None:
        """Make an empty recording. room: most kernels; buffers: memory of all outputs."""
        self._words = np.zeros(-(-loaded().quire_recording_bytes(room) // 8), np.int64)
        self._words[1] = room
        self._buffers = buffers
        self.address = self._words.ctypes.data
        self.obstacle = "nothing is recorded"

    def record(self, run: Callable[[], T]) -> T:
        """Call `run` and record the native kernels that it runs in this thread. Return the result of `run`."""
        watch, switch = _Watch(self._buffers), loaded().quire_record
        self._buffers.rewind()
        with watch:
            try:
                switch(self.address)
                result = run()
            finally:  # no Python code before it: an interrupt would leave recording on, to a recording that is gone
                switch(None)
        self.obstacle = watch.foreign and f"{watch.foreign} is not native"
        if self._words[0] < 0:
            self.obstacle = "there are more kernels than expected"
        return result

    def replay(self) -> None:
        """Run the recorded kernels again, on the tensors of the recorded run."""
        assert not self.obstacle, self.obstacle
        loaded().quire_replay(self.address)

    def __len__(self) -> int:
        return int(self._words[0])


class _Watch(TorchDispatchMode):
    """Allocates outputs from the buffers, and notices operations of PyTorch, which cannot be recorded."""

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
    """Return True if `view` shares memory with `base`: the operation computed nothing."""
    if not (isinstance(view, Tensor) and isinstance(base, Tensor)):
        return False
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
