"""The wheel carries the package whole, and runs from a folder outside of the project."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
import rules

from ...support.full import only_full

BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
VERSION = "99.0"  # that of the copy which is built: what runs is the wheel, not the project
COMPILER = '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
BUILD = """
import sys, setuptools.build_meta
setuptools.build_meta.build_wheel(sys.argv[1], {"--build-option": ["--compression=stored"]})
"""
LEVELS = "import quire.kernels.native.levels as n; print(*(n.shipped(flags).name for flags in n.LEVELS.values()))"
has_levels = platform.system() == "Linux" and platform.machine() == "x86_64"


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """An empty folder, in memory if it can be: a thousand files are built, packed and installed."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return what a command prints. The sources of this project are not on its path."""
    environment = os.environ | {"PYTHONPATH": "", "TMPDIR": str(cwd)} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def copy_project(folder: Path) -> None:
    shutil.copytree(rules.ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in BUILT_FROM:
        shutil.copy(rules.ROOT / name, folder)


@pytest.fixture(scope="module")
def wheel(room: Path) -> Path:
    """The wheel of a copy of this project, built with a compiler that takes no time."""
    copy_project(room / "project")
    for name in ("pyproject.toml", "src/quire/__init__.py"):
        path = room / "project" / name
        path.write_text(path.read_text().replace(f'"{quire.__version__}"', f'"{VERSION}"'))
    left = room / "project" / "build" / "lib" / "quire" / "gone.py"  # of an earlier build
    left.parent.mkdir(parents=True)
    left.touch()
    (room / "bin").mkdir()
    (room / "bin" / "cc").write_text(COMPILER)
    (room / "bin" / "cc").chmod(0o755)
    path = f"{room / 'bin'}{os.pathsep}{os.environ['PATH']}"
    said = run(sys.executable, "-c", BUILD, room / "dist", cwd=room / "project", PATH=path)
    assert not has_levels or "native kernels in the wheel: quire-v4-" in said
    return next((room / "dist").iterdir())


@pytest.fixture(scope="module")
def installed(room: Path, wheel: Path) -> Path:
    """The folder into which pip has installed the wheel."""
    flags = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target")
    run(sys.executable, "-m", "pip", "install", *flags, room / "site", wheel, cwd=room)
    return room / "site"


def test_the_wheel_is_the_package(wheel: Path) -> None:
    """A wheel with kernels is for one system and any Python. Nothing else is in it, such as a test."""
    tag = "linux_x86_64" if has_levels else "any"
    assert wheel.name == f"quire-{VERSION}-py3-none-{tag}.whl"
    names = {re.sub(r"-\w{20}\.so$", ".so", name) for name in zipfile.ZipFile(wheel).namelist()}
    files = {p for p in rules.PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    expected = {path.relative_to(rules.PACKAGE.parent).as_posix() for path in files}
    levels = {f"quire/kernels/native/prebuilt/quire-{level}.so" for level in ("v3", "v4")} if has_levels else set()
    assert {name for name in names if ".dist-info/" not in name} == expected | levels
    assert f"quire-{VERSION}.dist-info/licenses/LICENSE" in names


def test_the_wheel_runs_outside_of_the_project(installed: Path, room: Path) -> None:
    site = {"PYTHONPATH": str(installed)}
    assert run(installed / "bin" / "quire", "--version", cwd=room, **site) == f"quire {VERSION}\n"
    assert run(installed / "bin" / "quire", "explain", cwd=room, **site).startswith("quire-tiny  qwen3")
    if has_levels:  # the names of the libraries are those of the installed sources
        assert re.fullmatch(r"quire-v4-\w+\.so quire-v3-\w+\.so\n", run(sys.executable, "-c", LEVELS, cwd=room, **site))


ANSWER = """
import shutil
shutil.which = lambda name: None
from quire import LLM, SamplingParams
from quire.kernels.native.library import library
with LLM() as llm:
    print(llm.generate(["The json module"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text)
print(library()._name)
"""


@only_full
def test_a_wheel_from_the_sdist_answers_in_an_empty_environment_without_a_compiler(tmp_path: Path) -> None:
    """pip builds, and installs everything that Quire needs; takes minutes and the network."""
    copy_project(tmp_path / "project")
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", build, tmp_path, cwd=tmp_path / "project")
    (sdist,) = tmp_path.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, sdist, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", built, cwd=tmp_path)
    said = run(python, "-c", ANSWER, cwd=tmp_path, QUIRE_CACHE_DIR=str(tmp_path / "cache"))
    *answer, library = said.splitlines()
    assert "".join(answer).strip() and (not has_levels or "prebuilt/quire-v" in library)
