"""Files of KV blocks belong to one user, and a folder that others may write is refused."""

import os
import stat
from pathlib import Path

import pytest

from quire.contracts.errors import ConfigError
from quire.kvstore import private_folder
from quire.kvstore.files import BlockFiles

PAGE = memoryview(bytearray(8))


def opened(folder: Path, shared: bool = False) -> BlockFiles:
    files = BlockFiles(folder, bytes(32), "rank", page_bytes=8, most_bytes=1 << 20, shared=shared)
    files.write(bytes(32), PAGE)
    return files


@pytest.fixture(autouse=True)
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize(("shared", "modes"), [(False, {0o600, 0o700}), (True, {0o666, 0o777})])
def test_permissions_of_files_and_folders(tmp_path: Path, shared: bool, modes: set[int]) -> None:
    opened(tmp_path / "a" / "kv", shared)
    made = [path for path in (tmp_path / "a").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", *made)} == modes
    assert sum(path.is_file() for path in made) == 1


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int, depth: int) -> None:
    """The folder that was named, and those that an engine finds in it."""
    folder = tmp_path / "kv"
    opened(folder)
    found = folder
    for _ in range(depth):
        found = next(found.iterdir())
    found.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"has mode {mode:04o}, so that other users may write .*chmod -R go-w.*shared"
    ):
        opened(folder)
    assert opened(folder, shared=True).read(bytes(32), PAGE)


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = opened(tmp_path / "kv")
    (path,) = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    path.chmod(0o606)
    assert not files.read(bytes(32), PAGE) and not path.exists()
    assert "has mode 0606, so that other users may write into it: removed" in caplog.text


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    """In a folder that users share, where others may put one."""
    files = opened(tmp_path / "kv", shared=True)
    (path,) = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    (tmp_path / "elsewhere").mkdir()
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert files.write(bytes(32), PAGE) and path.is_file() and not path.parent.is_symlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path / "kv")
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: 12345)
    owner = tmp_path.stat().st_uid
    if owner == 0:
        opened(tmp_path / "kv")  # root may write everywhere
        monkeypatch.setattr(private_folder.Path, "stat", lambda path, stat=Path.stat: _of_user(54321, stat(path)))
    with pytest.raises(ConfigError, match="belongs to the user"):
        opened(tmp_path / "kv")


def _of_user(number: int, about: os.stat_result) -> os.stat_result:
    return os.stat_result((*about[:4], number, *about[5:]))
