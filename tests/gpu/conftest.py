"""Tests that need a GPU: skipped, with the reason, where PyTorch sees none; run by `scripts/gpu test`."""

from pathlib import Path

import pytest
import torch

from quire.contracts.errors import ConfigError
from quire.kernels.compile_cache import use_cache_folder
from quire.kernels.triton_runtime import missing
from quire.platforms.cuda import CudaFacts, read_cuda_facts

HERE = Path(__file__).parent


def _missing() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device" if torch.version.cuda else "this PyTorch is a build without CUDA"
    return missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder where it cannot run."""
    reason = _missing()
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def kept_kernels() -> None:
    """Compiled kernels are kept where the product keeps them."""
    use_cache_folder()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU."""
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def facts() -> CudaFacts:
    """Facts about the GPU; skips the test if there is none."""
    try:
        return read_cuda_facts()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def empty_gpu_cache() -> None:
    """A test begins without the memory that the one before it used."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
