"""Writes requirements.lock and requirements-torch.lock: every version that an installation of Quire needs, with hashes.

    python tools/lock_versions.py              the newest versions that pyproject.toml allows
    python tools/lock_versions.py --check      exit code 1 when pyproject.toml does not allow what the files hold
    python tools/lock_versions.py --versions   the versions alone, without CUDA packages, as constraints

pip resolves, from its index alone: folders and further indexes that pip is configured with may hold other builds of a
version, such as torch's for CPUs (`+cpu`), and the hashes of those are not the public ones. The files name no index.
requirements-torch.lock holds torch as the index has it, with the CUDA packages that it needs on Linux. A CPU needs none
of them: there the same version comes from PyTorch's index for CPUs, without hashes of ours.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REST, TORCH = ROOT / "requirements.lock", ROOT / "requirements-torch.lock"
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC = range(34, 4, -1)  # 2.34 or later: Ubuntu 22.04, Debian 12
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
OF_TORCH = re.compile(r"(torch|triton|(nvidia|cuda)-.+)==")  # torch, and what it needs on a GPU alone
LINE = re.compile(r"^([\w.-]+)==([\w.!]+) *\\$", re.MULTILINE)
HEAD = """\
# Made by `python tools/lock_versions.py`: do not edit. Linux on x86-64, Python {pythons}.
"""
USE = {
    REST: """\
# Everything but torch and its CUDA packages (requirements-torch.lock). To install exactly this:
#     pip install --require-hashes --no-deps -r requirements-torch.lock -r requirements.lock
#     pip install --no-deps .
# Without a GPU, instead of requirements-torch.lock: the same version of torch from PyTorch's index for CPUs, which has
# builds of its own and so hashes of its own (pip install --no-deps "torch==VERSION").
""",
    TORCH: """\
# torch as the public index has it, and what its CUDA build needs. Installed together with requirements.lock, see there.
""",
}

Pins = dict[str, tuple[str, set[str]]]  # name -> version, hashes


def main(arguments: list[str]) -> int:
    """Write the files, or compare them with pyproject.toml."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if arguments == ["--check"]:
        complaints = list(outdated(wanted, REST.read_text() + TORCH.read_text()))
        print("\n".join(complaints) or "the lock files hold what pyproject.toml allows")
        return int(bool(complaints))
    if arguments == ["--versions"]:
        found = LINE.findall(REST.read_text() + TORCH.read_text())
        print(
            "\n".join(
                f"{name}=={version}" for name, version in found if name == "torch" or not OF_TORCH.match(f"{name}==")
            )
        )
        return 0
    pins = resolve(wanted)
    for file, lines in zip((REST, TORCH), split(pins), strict=True):
        file.write_text(HEAD.format(pythons=", ".join(PYTHONS)) + USE[file] + "\n".join(lines) + "\n")
        print(f"{file.name}: {len(lines)} packages")
    return 0


def resolve(wanted: Iterable[str]) -> Pins:
    """Versions that suit the first Python, and their hashes for all; raises CalledProcessError with what pip said."""
    pins: Pins = {}
    for python in PYTHONS:
        exact = [f"{name}==={version}" for name, (version, _) in pins.items()]
        merge(pins, report([*wanted, *exact], python)["install"])
    return pins


def merge(pins: Pins, installed: Iterable[Mapping[str, Any]]) -> None:
    """Add one report's wheels. Raises ValueError for a local version or one that differs from an earlier report's."""
    for item in installed:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        version, digest = item["metadata"]["version"], item["download_info"]["archive_info"]["hashes"]["sha256"]
        if "+" in version:
            raise ValueError(f"{name} {version} is a local build: pip's index must be a public one.")
        known, hashes = pins.setdefault(name, (version, set()))
        if known != version:
            raise ValueError(f"{name} is {known} for one Python and {version} for another.")
        hashes.add(digest)


def report(requirements: Iterable[str], python: str) -> Any:
    """Return the packages that pip would install for a Python on Linux, by its own report; nothing is installed."""
    own = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            out,
            "--target",
            folder,
            "--only-binary=:all:",
            "--python-version",
            python,
        ]
        subprocess.run(
            [*command, *(f"--platform={name}" for name in PLATFORMS), *requirements],
            check=True,
            env=own | {"PIP_CONFIG_FILE": os.devnull},
        )
        return json.loads(out.read_text())


def split(pins: Pins) -> tuple[list[str], list[str]]:
    """The entries of the two files, sorted by name."""
    entries = []
    for name, (version, hashes) in sorted(pins.items()):
        entries.append(" \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{one}" for one in sorted(hashes))]))
    return [one for one in entries if not OF_TORCH.match(one)], [one for one in entries if OF_TORCH.match(one)]


def outdated(wanted: Iterable[str], text: str) -> Iterable[str]:
    """A line for each requirement that the lock files' text does not meet."""
    pinned = dict(LINE.findall(text))
    for requirement in wanted:
        found = re.match(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", requirement)
        assert found, requirement
        name, low, high = found.groups()
        version = pinned.get(name.replace("_", "-").lower())
        if version is None:
            yield f"{name} is in no lock file: run tools/lock_versions.py"
        elif not _key(low) <= _key(version) or (high and not _key(version) < _key(high)):
            yield f"{name} is locked at {version}, pyproject.toml wants {requirement}: run tools/lock_versions.py"


def _key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
