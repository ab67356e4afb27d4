"""The digest of weights that are loaded on a GPU is that of a CPU: whatever is converted, cut, and in place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.parallel import ALONE, Parallel
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks
from quire.weights.digest import join_sums
from quire.weights.load import load_weights

from ..support.filled_models import Taken, stored_tensors
from ..support.tiny_models import Tiny, tiny_config

ARGS = parse_checkpoint_config(tiny_config(Tiny(family="qwen3_moe")))


def digest(folder: Path, device: str, dtype: torch.dtype, parallel: Parallel = ALONE) -> bytes:
    """The digest of all ranks; some have experts in place."""
    everything, reports = frozenset(stored_names(layout(ARGS))), []
    for rank in ranks(ARGS, parallel):
        taken: Any = Taken(ARGS, layout(ARGS, rank), dtype, device, everything, in_place=rank.place == 1)
        reports.append(load_weights(taken, folder, summed_as="model", num_threads=1).sums)
    return join_sums(reports)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_digest_of_a_cpu(device: torch.device, tmp_path: Path, stored: torch.dtype) -> None:
    made = {name: one.to(stored) for name, one in stored_tensors(layout(ARGS)).items()}
    save_file(
        {name: one.bfloat16() if "norm" in name else one for name, one in made.items()}, tmp_path / "model.safetensors"
    )
    whole = digest(tmp_path, "cpu", torch.float32)
    for parallel in (ALONE, Parallel(tp=2), Parallel(pp=2)):
        for dtype in (torch.float32, torch.bfloat16):
            assert digest(tmp_path, str(device), dtype, parallel) == whole, (parallel, dtype)
