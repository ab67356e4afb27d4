"""The sums of stored bytes in Triton are those of the reference: rows, columns, unaligned slices, several tiles."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from quire.kernels.sums import ref, triton


def test_slices_have_the_sums_of_the_reference() -> None:
    random = np.random.default_rng(0)
    held = torch.from_numpy(random.integers(0, 256, 80_000, np.uint8))
    at = held.data_ptr() + (-held.data_ptr()) % 4
    slices = [  # offset in `held`, bytes, base, length, stride
        (0, 70_000, 0, 70_000, 0),
        (4, 8_000, 12, 80, 400),
        (3, 999, 5, 37, 111),
        (0, 1, 4095, 1, 0),
        (0, 4_100, 1 << 33, 4_100, 0),
    ]
    keys = random.integers(-(2**63), 2**63, (len(slices), 2), np.int64)
    rows = [np.array([*row, *key], np.int64) for (_, _, *row), key in zip(slices, keys, strict=True)]
    spans = [(at + offset, size, row) for (offset, size, *_), row in zip(slices, rows, strict=True)]
    sums = torch.zeros((len(slices), 2), dtype=torch.int64)
    triton.add(spans, sums)
    expected = [ref.add(address, size, 0, row) for address, size, row in spans]
    assert [tuple(one) for one in sums.numpy().view(np.uint64).tolist()] == expected


def test_they_compile_for_hopper() -> None:
    script, environment = Path(__file__).with_name("compile_sums.py"), os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["_sum_kernel"] * 2
