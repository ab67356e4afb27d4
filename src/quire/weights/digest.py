"""Digest of the stored bytes that an engine reads, by which engines know that they have the same weights.

The loader sums each slice that it reads (`quire.kernels.sums`): in a CPU's memory its threads do, beside reading; on a
GPU a kernel sums a unit's tensors before the layer packs them. `join_sums` adds the slices of all ranks. A slice that
several ranks read counts once, so the digest is that of the whole tensors, whatever the cut. Slices that overlap
otherwise (a block of scales that the cut divides) make it one of this cut.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from quire.contracts.errors import WeightsError
from quire.contracts.params import Part
from quire.kernels.native import library
from quire.kernels.sums import native, ref
from quire.kernels.sums import triton as on_gpu
from quire.kernels.sums.ref import I64
from quire.kernels.triton_runtime import missing
from quire.weights.files import StoredTensor
from quire.weights.slices import slice_bytes

IDENTITY = 5  # numbers that name a slice: two of the tensor, axis, start, count
DIFFERENT = (
    "the ranks of this engine have read different weights of one model: its folders differ from host to host, or it "
    "was replaced meanwhile: copy one folder to all hosts, and start again."
)
Slices = list[tuple[int, Tensor]]  # index of a slice, and its bytes on the device


class SliceSums:
    """Sums of the slices that a loader reads.

    role     name of the model among those of the engine ("model", "draft")
    device   of the loaded tensors
    """

    def __init__(self, role: str, device: torch.device) -> None:
        self._role, self._lock = role, Lock()
        self._names: list[tuple[int, ...]] = []
        self._rows: list[I64] = []
        self._totals: list[tuple[int, int]] = []
        self._on_device: list[tuple[list[int], Tensor]] = []
        self._add: Callable[..., tuple[int, int]] = ref.add if library.missing() else native.add
        self.on_device = device.type == "cuda" and not missing()

    def slice(self, stored: StoredTensor, part: Part) -> int:
        """Take a slice that will be read; return its index."""
        expert = (part.expert,) if part.expert >= 0 else ()  # experts count as tensors: ranks read any of them
        keys = _keys(self._role, stored.name, stored.dtype, *stored.shape, *expert)
        own = slice_bytes(stored, part)
        self._names.append((*keys, own.axis, own.first, own.taken))
        self._rows.append(np.array([own.base, own.length, own.row, *_signed(keys)], np.int64))
        self._totals.append((0, 0))
        return len(self._names) - 1

    def add(self, index: int, address: int, num_bytes: int, position: int) -> None:
        """Add bytes of a slice in host memory. Any thread may call.

        position   index in the slice of the first of them
        """
        low, high = self._add(address, num_bytes, position, self._rows[index])
        with self._lock:
            before = self._totals[index]
            self._totals[index] = before[0] + low, before[1] + high

    def add_on_device(self, slices: Slices) -> None:
        """Add whole slices in the memory of a GPU, on the current stream."""
        if slices:
            sums = torch.zeros((len(slices), 2), dtype=torch.int64, device=slices[0][1].device)
            on_gpu.add([(held.data_ptr(), held.nbytes, self._rows[index]) for index, held in slices], sums)
            self._on_device.append(([index for index, _ in slices], sums))

    def report(self) -> bytes:
        """Return the slices with their sums, for `join_sums`. Waits for the device."""
        for indices, sums in self._on_device:
            for index, (low, high) in zip(indices, sums.tolist(), strict=True):
                self._totals[index] = self._totals[index][0] + low, self._totals[index][1] + high
        self._on_device.clear()
        return b"".join(map(_entry, self._names, self._totals))


def fact(name: str, value: object) -> bytes:
    """Return an entry of a report for what is no slice of a tensor. value: anything that JSON can hold."""
    digest = sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return _entry((*_keys(name), 0, 0, 1), tuple(np.frombuffer(digest[:16], np.uint64).tolist()))


def join_sums(reports: Sequence[bytes]) -> bytes:
    """Return the digest of what the ranks have read, from the reports of all of them.

    Raises WeightsError if two of them have read other bytes of the same slice.
    """
    entries = np.frombuffer(b"".join(reports), np.uint64).reshape(-1, IDENTITY + 2)
    entries = np.unique(entries, axis=0)  # sorted by tensor, axis and start
    before, after = entries[:-1], entries[1:]
    if (before[:, :IDENTITY] == after[:, :IDENTITY]).all(1).any():
        raise WeightsError(DIFFERENT)
    same = (before[:, :2] == after[:, :2]).all(1)
    if (same & ((before[:, 2] != after[:, 2]) | (after[:, 3] < before[:, 3] + before[:, 4]))).any():
        return sha256(b"slices" + entries.tobytes()).digest()
    return sha256(b"tensors" + entries[:, IDENTITY:].sum(0, dtype=np.uint64).tobytes()).digest()


def _entry(name: tuple[int, ...], sums: tuple[int, ...]) -> bytes:
    return np.array([*name, *(one % 2**64 for one in sums)], np.uint64).tobytes()


def _keys(*name: object) -> tuple[int, int]:
    """Return the two keys of a tensor."""
    digest = sha256(json.dumps(name).encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def _signed(keys: tuple[int, int]) -> list[int]:
    return np.array(keys, np.uint64).view(np.int64).tolist()  # type: ignore[no-any-return]
