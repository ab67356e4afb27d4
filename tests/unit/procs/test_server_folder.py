"""Folders of servers that were killed are removed by the next one; those of living servers and of others stay."""

import tempfile
from pathlib import Path

import pytest

from quire.procs.server_folder import ServerFolder


def test_the_folder_of_a_killed_server_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.procs.server_folder.MAX_FOLDER", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (others := tmp_path / "quire-weights-x").mkdir()
    living, killed = ServerFolder(), ServerFolder()
    Path(killed.name, "responses.sqlite").write_text("a prompt")
    killed._lock.close()  # as the kernel does
    last = ServerFolder()
    assert {path for path in tmp_path.iterdir()} == {others, Path(living.name), Path(last.name)}
    for folder in (living, last):
        folder.remove()
    assert [*tmp_path.iterdir()] == [others]
