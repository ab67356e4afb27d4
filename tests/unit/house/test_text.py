"""No file speaks of the machine or the place it was written at; helper modules of tests are in one folder."""

import subprocess
import sys
from pathlib import Path

import rules

TEXT = {".py", ".md", ".toml", ".txt", ".json", ".sh", ".yml", ".yaml", ".cfg", ""}
CACHES = {".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__"}
BUILT = {".git", ".venv", "build", "dist"}  # at the top of the project only


def project_files() -> list[Path]:
    """Files git knows or would add; in a copy without git, every file outside caches."""
    if (rules.ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=rules.ROOT, capture_output=True, text=True)
        if listed.returncode == 0:
            return [rules.ROOT / name for name in listed.stdout.split("\0") if name]
    inside = ((path, path.relative_to(rules.ROOT).parts) for path in rules.ROOT.rglob("*"))
    return [path for path, parts in inside if parts[0] not in BUILT and not CACHES & set(parts)]


def test_no_machine_paths_and_no_words_of_the_workplace() -> None:
    complaints = []
    for path in project_files():
        if path.is_file() and path.suffix in TEXT and path.stat().st_size < 300_000:
            name = path.relative_to(rules.ROOT).as_posix()
            complaints += rules.foreign_text(name, path.read_text(encoding="utf-8", errors="replace"))
    assert not complaints, "\n" + "\n".join(complaints)


def test_helper_modules_of_tests_are_in_one_folder() -> None:
    found = [path.name for path in (rules.ROOT / "tests").glob("*.py") if path.name != "conftest.py"]
    assert found == [], "move them to tests/support"


def test_ruff_sees_every_module() -> None:
    """Ruff leaves out folders by name, such as `dist`, unless it is told its own list."""
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    shown = subprocess.run(command, cwd=rules.ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    missing = {path for path in project_files() if path.suffix == ".py" and path.is_file()} - set(map(Path, shown))
    assert not missing, sorted(missing)[:9]
