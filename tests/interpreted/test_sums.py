"""The sums of stored bytes in Triton are those of the reference: rows, columns, unaligned slices, several tiles."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.args.checkpoint import parse_checkpoint_config
from quire.kernels.sums import ref, triton
from quire.plan.layout import layout
from quire.weights.digest import SliceSums, join_sums
from quire.weights.load import load_weights

from ..support.filled_models import Taken, stored_tensors
from ..support.tiny_models import Tiny, tiny_config


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


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    assert compiled("compile_sums") == {"_sum_kernel"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_a_unit_that_is_summed_where_it_lies_has_the_same_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As on a GPU: slices of the stored type in one launch per unit, before its rows are put in order."""
    args = parse_checkpoint_config(tiny_config(Tiny(family="deepseek_v3")))
    save_file(stored_tensors(layout(args)), tmp_path / "model.safetensors")

    def digest() -> bytes:
        taken: Any = Taken(args, layout(args), dtype, in_place=True)
        return join_sums([load_weights(taken, tmp_path, summed_as="model", num_threads=1).sums])

    before, made = digest(), SliceSums.__init__

    def on_device(self: SliceSums, *given: Any) -> None:
        made(self, *given)
        self.on_device = True

    monkeypatch.setattr(SliceSums, "__init__", on_device)
    assert digest() == before
