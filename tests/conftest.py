"""Fixtures of all tests: shared data outside the repository, and the switch for the long products."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from .support.full import FULL

ROOT = Path(__file__).resolve().parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines differ; a slow one is no bug. The same examples in every run, but for those of the long products: what is red
# was made red by a change.
settings.register_profile("quire", deadline=None, print_blob=True, derandomize=not FULL)
settings.register_profile(
    "faults", settings.get_profile("quire"), phases=(Phase.explicit, Phase.generate)
)  # no shrinking
settings.load_profile("quire")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one PyTorch thread in a module of small models: a second thread takes longer to start than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real configurations, templates and trained models: ../shared or $QUIRE_TEST_SHARED; skips without them."""
    folder = Path(os.environ.get("QUIRE_TEST_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no shared test data at {folder}; set QUIRE_TEST_SHARED")
    return folder


@pytest.fixture(scope="session")
def full() -> bool:
    """True with QUIRE_FULL=1: the long products run, and pairwise covers become full ones."""
    return FULL
