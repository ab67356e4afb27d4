"""Every test here runs in Triton's interpreter, repaired; and the processes that tests start."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.kernels import triton_runtime

from ..support.forks import Forks
from ..support.triton_interpreter import repair_interpreter

if triton_runtime.INTERPRETED:
    repair_interpreter()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Forks]:
    """Processes whose kernels are interpreted, forked by one that has imported PyTorch."""
    forks = Forks(interpreted=True)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def compiling() -> Iterator[Forks]:
    """Processes whose kernels are compiled for GPUs that are not there, forked by one that has imported PyTorch."""
    forks = Forks(interpreted=False)
    yield forks
    forks.close()


@pytest.fixture
def compiled(compiling: Forks, tmp_path: Path) -> Callable[..., set[str]]:
    """Return a function that runs `main`, or another function, of a module that compiles kernels.

    It returns the names of the kernels. With --full these may be more than the test names.
    """

    def compile_all(module: str, part: str = "main") -> set[str]:
        pytest.importorskip("triton")
        (code,), said = compiling.run(tmp_path / module, f"tests.interpreted.{module}", [[]], part)
        assert code == 0, said
        return {line.split()[1] for line in said.splitlines() if line.startswith("compiled ")}

    return compile_all
