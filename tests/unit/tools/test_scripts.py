"""Scripts run in a small project, with an interpreter that only writes its arguments down."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def project(root: Path, python: Path, interpreter: str, *scripts: str) -> None:
    """Make a project with copies of some scripts, whose checks pass, and an interpreter."""
    (root / "scripts").mkdir(parents=True)
    for name in scripts:
        shutil.copy(SCRIPTS / name, root / "scripts" / name)
    if "check" not in scripts:
        program(root / "scripts" / "check", "exit 0\n")
    (root / "pyproject.toml").write_text("")
    program(python, interpreter)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def call(root: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "scripts" / command[0], *command[1:]],
        cwd=root,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(root), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("first", "second", "arguments", "code"),
    [
        (0, 0, (), 0),
        (5, 0, (), 5),
        (0, 5, (), 5),
        (0, 5, ("-k", "pool"), 0),
        (5, 0, ("-k", "pool"), 0),
        (5, 5, ("-k", "poool"), 5),
        (1, 0, ("-k", "pool"), 1),
        (5, 1, ("-k", "pool"), 1),
        (0, 1, ("tests/unit/kv",), 0),
        (5, 0, ("tests/unit/kv", "-k", "poool"), 5),
        (1, 0, ("tests/e2e/test_llm.py",), 0),
    ],
)
def test_a_run_without_tests_is_red(
    first: int, second: int, arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    for folder in ("openai2", "anthropic"):
        (venv / folder).mkdir(parents=True)
    runs = f"*tests/unit*) exit {first} ;; *tests/e2e*) exit {second} ;;"
    interpreter = f'case "$*" in {runs} *pip*) exit 0 ;; esac\nexit 9\n'
    project(tmp_path / "p", venv / "bin" / "python", interpreter, "test", "venv.sh")
    assert call(tmp_path / "p", "test", *arguments, QUIRE_VENV=str(venv)).returncode == code


@pytest.mark.parametrize(("types", "rules", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_types_and_rules_are_checked_beside_each_other_and_both_are_told(
    types: int, rules: int, code: int, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    interpreter = (
        f'case "$*" in *--strict*) echo types >&2; exit {types} ;; *unit/house*) echo rules; exit {rules} ;; esac\n'
    )
    project(tmp_path / "p", venv / "bin" / "python", interpreter, "check", "venv.sh")
    done = call(tmp_path / "p", "check", QUIRE_VENV=str(venv))
    assert (done.returncode, done.stdout) == (code, "rules\ntypes\n")


def test_rules_of_the_text_come_first(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    project(tmp_path / "p", venv / "bin" / "python", 'case "$*" in *ruff*) exit 3 ;; esac\n', "check", "venv.sh")
    assert call(tmp_path / "p", "check", QUIRE_VENV=str(venv)).returncode == 3


CLIENTS = """
while [ $# -gt 0 ]; do
  if [ "$1" = --target ]; then mkdir "$2" && touch "$2/first"; [ -e whole ] && touch "$2/second" || exit 1; fi
  shift
done
"""


def test_a_client_lies_in_its_folder_when_it_is_whole(tmp_path: Path) -> None:
    venv, root = tmp_path / "venv", tmp_path / "p"
    project(root, venv / "bin" / "python", CLIENTS, "test", "venv.sh")
    (venv / "anthropic.part").mkdir(parents=True)  # of a run that was killed
    done = call(root, "test", QUIRE_VENV=str(venv))
    assert done.returncode == 0 and done.stderr.count("could not be installed: its tests are skipped.") == 2
    assert not [*venv.glob("openai2*"), *venv.glob("anthropic*")]
    (root / "whole").touch()
    assert call(root, "test", QUIRE_VENV=str(venv)).returncode == 0
    for name in ("openai2", "anthropic"):
        assert {path.name for path in (venv / name).iterdir()} == {"first", "second"}


INSTALLS = """
while [ $# -gt 0 ]; do
  if [ "$1" = --target ]; then mkdir -p "$2" && touch "$2/first"; target=$2; fi
  shift
done
[ ! -e ended ] && exit 1
touch "$target/second"
"""


def test_an_interrupted_installation_is_made_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    project(tmp_path / "p", python, INSTALLS, "gpu")
    program(tmp_path / "p" / ".whl" / "a.whl", "")
    site = tmp_path / "p" / "quire-site"
    assert call(tmp_path / "p", "gpu", "run", "true", QUIRE_PYTHON=str(python)).returncode == 1
    assert not site.exists()
    (tmp_path / "p" / "ended").touch()
    listed = call(tmp_path / "p", "gpu", "run", "ls", str(site), QUIRE_PYTHON=str(python))
    assert listed.stdout.split() == ["first", "second"], listed.stderr
