"""Processes that stand for ranks."""

from collections.abc import Iterator

import pytest

from ...support.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes forked by one that has imported PyTorch."""
    made = Forks(interpreted=True)
    yield made
    made.close()
