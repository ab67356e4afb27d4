"""Ranks of these tests are copies of a process that has imported what they need; those of some tests are real."""

import gc
from collections.abc import Iterator

import pytest

from ...support.template_process import SWITCH, quick_starts

IMPORTS = ("numpy", "quire.contracts.step", "quire.ranks.agent", "quire.ranks.server", "quire.ranks.executor")


@pytest.fixture(scope="module", autouse=True)
def copies() -> Iterator[None]:
    """Also leave the objects of other tests out of the collections of these: each of them collects twice."""
    gc.collect()
    gc.freeze()
    with quick_starts(IMPORTS):
        yield
    gc.unfreeze()


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the ranks of this test as the product does."""
    monkeypatch.setenv(SWITCH, "0")
