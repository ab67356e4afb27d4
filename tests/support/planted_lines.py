"""Faults on the connections of every share in this process."""

from functools import partial

import pytest

from quire.kvnet.block_share import BlockShare
from quire.kvnet.faults import FAULTS, Faults, FaultyLine

PAGE_FAULTS = FAULTS["page"].split()[1:]
PHASES = [f"{place}={fault}" for place in ("hello", "hear", "tell") for fault in ("killed", "frozen")]


def plant(monkeypatch: pytest.MonkeyPatch, *plans: str) -> None:
    """Make every share of the test send through connections with these faults. Frozen ones are silent for 2 s."""
    faults = Faults(plans, frozen=2.0)
    monkeypatch.setattr(BlockShare, "line", staticmethod(partial(FaultyLine, faults=faults)))
