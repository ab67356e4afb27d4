"""Garbage collection of the unit tests."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def spared() -> None:
    """Keep the objects of imported modules out of later collections. A full one looks through a million objects of
    PyTorch and transformers for every engine that closes, and for every plan of a large model."""
    gc.collect()
    gc.freeze()
