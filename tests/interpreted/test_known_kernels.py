"""Kernels that are known to compile are not compiled; those with another source, and those of other checks, are."""

import shutil
from pathlib import Path

import pytest
import torch

from ..support.forks import Forks
from ..support.full import FULL
from . import known_kernels


def launches() -> None:
    """Launch a kernel three times, each time as on another GPU: unknown, known, and known with another source."""
    from quire.kernels.expert_copies import triton_slots

    from . import compiling

    keys = list[str]()
    setattr(compiling, "key_of", lambda *given: keys.append(known_kernels.key_of(*given)) or keys[-1])  # noqa: B010
    gpu, kernel = compiling.AbsentGpu(), triton_slots._take_kernel
    slots, ids = torch.zeros(8, 1, dtype=torch.int32), torch.zeros(64, 2, dtype=torch.int32)
    for number in range(3):
        gpu.known, gpu.room = frozenset(keys), gpu.HOPPER - number
        if number == 2:
            kernel._unsafe_update_src(kernel.src + "\n    # another")
        triton_slots.take(ids, slots, torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64), 0)


def test_a_kernel_is_compiled_when_its_source_has_changed(compiling: Forks, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    codes, said = compiling.run(tmp_path / "said", __name__, [[]], "launches")
    assert codes == [0], said
    name, first, again, once_more, last = said.splitlines()
    assert name == again == once_more == "compiled _take_kernel"
    assert first.split()[0] == last.split()[0] == "kernel" and first != last


@pytest.mark.skipif(FULL, reason="with --full no kernel is known")
@pytest.mark.parametrize("changed", ["compile_slots.py", "compiling.py"])
def test_kernels_are_compiled_when_their_checks_have_changed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(known_kernels.SWITCH, raising=False)
    monkeypatch.setattr(known_kernels, "RECORD", tmp_path / "known_kernels.json")
    known_kernels.record({"compile_slots": {"b", "a"}})
    assert known_kernels.known("compile_slots") == {"a", "b"} and not known_kernels.known("compile_sums")
    for name in ("compile_slots.py", "compiling.py"):
        shutil.copy(known_kernels.HERE / name, tmp_path)
    monkeypatch.setattr(known_kernels, "HERE", tmp_path)
    assert known_kernels.known("compile_slots") == {"a", "b"}
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\n# another check\n")
    assert not known_kernels.known("compile_slots")
