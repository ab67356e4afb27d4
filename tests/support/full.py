"""Tests and rows that only `scripts/test --full` (QUIRE_FULL=1) makes. Without it they are not collected at all."""

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

FULL = os.environ.get("QUIRE_FULL") == "1"

Row = TypeVar("Row")
Test = TypeVar("Test", bound=Callable[..., Any])


def full_rows(rows: Iterable[Row]) -> list[Row]:
    """Return rows of a parametrized test that only the full run has: `[*ALWAYS, *full_rows(MORE)]`."""
    return list(rows) if FULL else []


def only_full(test: Test) -> Test | None:
    """Keep a test for the full run; elsewhere its name is None, which pytest does not collect."""
    return test if FULL else None
