"""Every test here runs in Triton's interpreter, repaired; and the processes that tests start."""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..support.forks import Forks
from ..support.full import FULL


def pytest_pycollect_makemodule() -> None:
    """Repair the interpreter before a module of tests is imported. Processes that import none need no PyTorch."""
    repair()


@functools.cache
def repair() -> None:
    from quire.kernels import triton_runtime

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

    It returns the names of the kernels. With --full these may be more than the test names. Kernels that are known to
    compile are launched alone, and a warning says how many were not known.
    """

    def compile_all(module: str, part: str = "main") -> set[str]:
        pytest.importorskip("triton")
        (code,), said = compiling.run(tmp_path / module, f"tests.interpreted.{module}", [[]], part)
        assert code == 0, said
        keys = [line.split()[1] for line in said.splitlines() if line.startswith("kernel ")]
        if path := os.environ.get("RECORD_KERNELS"):
            with open(path, "a") as file:
                file.writelines(f"{module} {key}\n" for key in keys)
        elif keys and not FULL:
            warnings.warn(f"{len(keys)} kernels of {module} are new: run tools/record_kernels.py", stacklevel=2)
        return {line.split()[1] for line in said.splitlines() if line.startswith("compiled ")}

    return compile_all
