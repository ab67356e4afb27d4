"""Libraries of a wheel: chosen by the processor's level, and only where a compiled one would not be better."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.config.env import cache_folder
from quire.entry.cli import check_software
from quire.kernels.native import build, levels, library
from quire.platforms.cpu import read_cpu_flags

needs_library = pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "runs")
V3, V4 = levels.LEVELS["v3"], levels.LEVELS["v4"]
MORE = V4 | {"avx512_vnni", "amx_tile"}


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an installation's libraries. A copy of this machine's library stands for each level."""
    whole = build.build(cache_folder() / "kernels", read_cpu_flags())
    monkeypatch.setattr(build, "_compile", lambda command, library: shutil.copy(whole, library))
    monkeypatch.setattr(levels, "FOLDER", tmp_path / "prebuilt")
    levels.make(levels.FOLDER)
    return levels.FOLDER


@pytest.mark.parametrize(
    ("flags", "level", "lacks"),
    [
        (V3, "v3", []),
        (V3 | {"3dnowprefetch", "sse2", "avx512f"}, "v3", []),
        (V3 | {"avx_vnni"}, "v3", ["-mavxvnni"]),
        (V4 | {"avx_vnni"}, "v4", []),
        (MORE, "v4", ["-mavx512vnni", "-mamx-tile"]),
    ],
)
def test_a_level_and_what_it_lacks(flags: frozenset[str], level: str, lacks: list[str]) -> None:
    assert (levels.level_of(flags), levels.lacking(flags)) == (level, lacks)


def test_a_lesser_processor_has_no_level() -> None:
    assert levels.shipped(V3 - {"fma"}) is None


@needs_library
@pytest.mark.parametrize(
    ("flags", "compiler", "loaded"),
    [
        (V3, True, "prebuilt/quire-v3-"),
        (V4, True, "prebuilt/quire-v4-"),
        (MORE, True, "cache/quire-"),
        (MORE, False, "prebuilt/quire-v4-"),
    ],
)
def test_the_library_that_uses_most_of_the_processor_is_loaded(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], compiler: bool, loaded: str
) -> None:
    monkeypatch.setattr(library, "read_cpu_flags", lambda: flags)
    if not compiler:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    assert library._load(tmp_path / "cache")._name.startswith(str(tmp_path / loaded))


@needs_library
@pytest.mark.parametrize("fault", ["other sources", "damaged", "newer C library"])
def test_a_library_of_the_wheel_that_does_not_fit_is_not_loaded(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(library, "read_cpu_flags", lambda: V3)
    path = levels.shipped(V3)
    assert path is not None
    if fault == "other sources":
        path.rename(path.with_name("quire-v3-00000000000000000000.so"))
    elif fault == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(b"no library that this system can load")
        build.seal(path)
    assert library._load(tmp_path / "cache")._name.startswith(str(tmp_path / "cache" / "quire-"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match="no C compiler"):
        library._load(tmp_path / "cache")


@needs_library
@pytest.mark.parametrize(("flags", "said"), [(V4, "x86-64 v4"), (MORE, "x86-64 v4 (without -mavx512vnni -mamx-tile)")])
def test_the_doctor_names_the_level(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], said: str
) -> None:
    monkeypatch.setattr(check_software, "read_cpu_flags", lambda: flags)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (finding,) = check_software.compiler()
    assert finding.text.endswith(f"the native kernels of the wheel are used, for {said}")
    assert bool(finding.fix) == (flags is MORE)


def test_no_library_is_made_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match="no C compiler"):
        levels.make(tmp_path)


@needs_library
def test_the_lowest_level_needs_no_wider_unit(tmp_path: Path) -> None:
    """Users alone would see an intrinsic of AVX-512 without its guard: tests run on a library of this processor."""
    compiler = next(path for name in build.COMPILERS if (path := shutil.which(name)))
    flags = [flag for flag in build.BASE_FLAGS if flag not in ("-O3", "-shared")]
    command = [compiler, "-O0", *flags, *build.units(V3), "-c", str(build.SOURCE), "-o", str(tmp_path / "v3.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]
