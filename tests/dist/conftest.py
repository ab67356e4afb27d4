"""Engines whose ranks are processes over gloo. No test asserts a time; limits are ten times the expected or more."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..support.many_ranks import Left, nothing_left

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if GLOO else "this PyTorch has no gloo"
    reason = reason or ("" if sys.platform == "linux" else "what is left is counted in /proc")
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Ranks share the cores."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    """The processes and temporary files of this test, of which none may be left."""
    with nothing_left(tmp_path / "tmp") as found:
        yield found
