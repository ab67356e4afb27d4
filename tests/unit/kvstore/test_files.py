"""Blocks in files: a second engine finds them, a damaged one is a miss and goes, and a full disk ends the writing."""

import errno
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from quire.contracts.errors import ConfigError
from quire.kvstore.files import HEADER, BlockFiles, DiskTier, FileSystem, FileThread, block_path

from ...support.faulty_files import FaultyFiles

SPACE, RANK, SIZE = bytes(range(32)), "layers0-8.heads0-2", 1024
KEYS = [sha256(bytes([i])).digest() for i in range(12)]


def opened(folder: Path, system: FileSystem | None = None, space: bytes = SPACE, most: int = 1 << 20) -> BlockFiles:
    return BlockFiles(folder, space, RANK, page_bytes=SIZE, most_bytes=most, system=system)


def page(number: int) -> memoryview:
    return memoryview(bytearray(sha256(bytes([number])).digest() * (SIZE // 32)))


def test_another_engine_finds_what_was_written(tmp_path: Path) -> None:
    first, blank = opened(tmp_path), page(99)
    assert first.write(KEYS[0], page(0)) and first.write(KEYS[0], page(0))
    assert not first.read(KEYS[1], blank)
    second, tier = opened(tmp_path), DiskTier(tmp_path, SPACE, [RANK, RANK])
    assert tier.has(KEYS[0]) and not tier.has(KEYS[1])
    assert second.read(KEYS[0], blank) and blank == page(0)
    assert not DiskTier(tmp_path, SPACE, [RANK, "layers8-16.heads0-2"]).has(KEYS[0]), "a rank lacks the block"
    tier.discard(KEYS[:2])
    assert not tier.has(KEYS[0]) and not second.read(KEYS[0], blank)
    second.write(KEYS[2], page(2))
    tier.clear()
    assert not tier.has(KEYS[2])


@pytest.mark.parametrize("fault", ["short", "long", "corrupt", "foreign"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, fault: str) -> None:
    files = opened(tmp_path, FaultyFiles(reads=[fault]))
    files.write(KEYS[0], page(0))
    assert not files.read(KEYS[0], page(99)) and files.num_foreign == 1
    assert not DiskTier(tmp_path, SPACE, [RANK]).has(KEYS[0])
    assert files.write(KEYS[0], page(0)) and opened(tmp_path).read(KEYS[0], page(99)), "it can be written again"


def test_a_file_of_another_model_or_place_is_foreign(tmp_path: Path) -> None:
    files, other = opened(tmp_path), opened(tmp_path, space=bytes(32))
    other.write(KEYS[0], page(0))
    for key in KEYS[:2]:  # one with the right name in the wrong folder, one with a wrong name
        target = block_path(files._folder, key)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).write_bytes(Path(block_path(other._folder, KEYS[0])).read_bytes())
        assert not files.read(key, page(99))
    assert files.num_foreign == 2 and other.read(KEYS[0], page(99))


@pytest.mark.parametrize("fault", ["lost", "error"])
def test_a_read_that_fails_is_a_miss(tmp_path: Path, fault: str) -> None:
    files = opened(tmp_path, FaultyFiles(reads=[fault, ""]))
    files.write(KEYS[0], page(0))
    assert not files.read(KEYS[0], page(99)) and files.num_foreign == 0
    assert files.read(KEYS[0], page(99)) == (fault == "error")


@pytest.mark.parametrize("fault", ["full", "half"])
def test_a_full_disk_ends_the_writing_and_not_the_reading(tmp_path: Path, fault: str) -> None:
    files, blank = opened(tmp_path, FaultyFiles(writes=["", fault, ""])), page(99)
    assert files.write(KEYS[0], page(0)) and not files.full
    assert not files.write(KEYS[1], page(1)) and "No space left" in files.full
    assert not files.write(KEYS[2], page(2))
    assert files.read(KEYS[0], blank) and blank == page(0)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{KEYS[0].hex()}.kv"], "a part stayed"


def test_the_least_recently_used_files_go(tmp_path: Path) -> None:
    files = opened(tmp_path, most=4 * (SIZE + HEADER.size))
    for i in range(4):
        files.write(KEYS[i], page(i))
        os.utime(block_path(files._folder, KEYS[i]), (i, i))
    assert files.read(KEYS[0], page(99))  # renews it
    again = opened(tmp_path, most=4 * (SIZE + HEADER.size))
    for one, new in ((files, 4), (again, 5)):
        assert one.write(KEYS[new], page(new))
    left = [i for i, key in enumerate(KEYS) if DiskTier(tmp_path, SPACE, [RANK]).has(key)]
    assert left == [0, 2, 3, 4, 5], "each of two engines makes room by what it has seen of the folder"


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_offload_dir=.*cannot be used"):
        opened(tmp_path / "file")


def test_a_reset_while_a_file_is_written_does_not_end_the_writing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, SPACE, [RANK])

    class Reset(FileSystem):
        def write(self, path: str, header: bytes, page: memoryview) -> None:
            super().write(path, header, page)
            tier.clear()

    files = opened(tmp_path, Reset())
    assert files.write(KEYS[0], page(0)) and not files.full and tier.has(KEYS[0])


def test_a_folder_that_is_lost_is_a_miss_and_ends_the_writing(tmp_path: Path) -> None:
    """A file in the place of the folder stands for a disk that is gone: every call raises an OSError."""
    files, tier = opened(tmp_path, most=2 * (SIZE + HEADER.size)), DiskTier(tmp_path, SPACE, [RANK])
    assert files.write(KEYS[0], page(0))
    shutil.rmtree(files._folder)
    files._folder.write_text("")
    assert not tier.has(KEYS[0]) and not files.read(KEYS[0], page(99))
    assert not files.write(KEYS[1], page(1)) and "Not a directory" in files.full
    tier.discard(KEYS)
    tier.clear()


def test_a_file_that_cannot_be_deleted_is_not_used_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """As a file of another user: this one must not stop the engine, and may hold what was distrusted."""
    files, tier = opened(tmp_path), DiskTier(tmp_path, SPACE, [RANK])
    files.write(KEYS[0], page(0))
    files.write(KEYS[1], page(1))

    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, "planted", path)

    monkeypatch.setattr(os, "unlink", refused)
    for _ in range(2):
        tier.discard(KEYS[:1])
    assert not tier.has(KEYS[0]) and tier.has(KEYS[1]) and len(caplog.records) == 1
    tier.clear()
    assert not tier.has(KEYS[1])


def test_a_disk_that_hangs_does_not_keep_the_process_from_ending() -> None:
    code = ("import threading; from quire.kvstore.files import FileThread; began, never = threading.Event(), "
            "threading.Event(); thread = FileThread('disk'); thread.submit(lambda: began.set() or never.wait()); "
            "assert began.wait(20)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_fault_of_work_comes_with_its_result() -> None:
    thread = FileThread("disk")
    fault, right = thread.submit(lambda: (1 // 0,)), thread.submit(lambda: (7,))
    assert right.result(20) == (7,) and isinstance(fault.exception(20), ZeroDivisionError)
