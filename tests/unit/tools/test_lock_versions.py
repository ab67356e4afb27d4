"""The lock files: what pyproject.toml wants, by public versions and hashes, without addresses."""

import re
import tomllib
from typing import Any

import pytest

import lock_versions

WANTED = tomllib.loads((lock_versions.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
LOCKED = lock_versions.REST.read_text() + lock_versions.TORCH.read_text()


def wheel(name: str, version: str, digest: str) -> dict[str, Any]:
    archive = {"hashes": {"sha256": digest}}
    return {"metadata": {"name": name, "version": version}, "download_info": {"archive_info": archive}}


def test_the_files_hold_what_pyproject_wants() -> None:
    assert not list(lock_versions.outdated(WANTED, LOCKED))


def test_every_entry_has_hashes_and_nothing_but() -> None:
    assert "://" not in LOCKED
    for line in LOCKED.splitlines():
        assert re.fullmatch(r"#.*|[a-z0-9-]+==[\w.!]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    entries = lock_versions.LINE.findall(LOCKED)
    assert len(entries) == len(dict(entries)) > len(WANTED)


def test_cuda_packages_lie_apart() -> None:
    rest = dict(lock_versions.LINE.findall(lock_versions.REST.read_text()))
    torch = dict(lock_versions.LINE.findall(lock_versions.TORCH.read_text()))
    assert "torch" in torch and "numpy" in rest and not [name for name in rest if name.startswith(("nvidia", "cuda"))]


def test_wheels_of_several_pythons_are_one_entry() -> None:
    pins: lock_versions.Pins = {}
    lock_versions.merge(pins, [wheel("Some_Name", "1.2", "bb"), wheel("torch", "2.13.0", "cc")])
    lock_versions.merge(pins, [wheel("some.name", "1.2", "aa")])
    rest, torch = lock_versions.split(pins)
    assert rest == ["some-name==1.2 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb"]
    assert torch == ["torch==2.13.0 \\\n    --hash=sha256:cc"]


@pytest.mark.parametrize(("version", "complaint"), [("2.13.0+cpu", "is a local build"), ("2.12.1", "and 2.12.1 for")])
def test_a_local_build_or_a_second_version_is_refused(version: str, complaint: str) -> None:
    pins: lock_versions.Pins = {"torch": ("2.13.0", {"cc"})}
    with pytest.raises(ValueError, match=re.escape(complaint)):
        lock_versions.merge(pins, [wheel("torch", version, "dd")])


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [("numpy>=1.26", ""), ("numpy>=2.10", "at 2.4"), ("numpy>=1,<2.4", "at 2.4"), ("new>=1", "in no lock")],
)
def test_what_the_lock_does_not_meet(wanted: str, complaint: str) -> None:
    found = list(lock_versions.outdated([wanted], "numpy==2.4 \\\n    --hash=sha256:aa\n"))
    assert len(found) == bool(complaint) and complaint in "".join(found)
