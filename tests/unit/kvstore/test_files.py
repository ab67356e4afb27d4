"""Blocks in files: a second engine finds them, a damaged one is a miss and goes, and a full disk ends the writing."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from quire.contracts.errors import ConfigError
from quire.kvstore import disk_tier
from quire.kvstore.disk_tier import FileNames
from quire.kvstore.file_threads import FileThreads
from quire.kvstore.files import HEADER, BlockFiles, FileSystem, block_name, block_path

from ...support.planted_faults import Faults, FaultyFiles

SPACE, RANK, SIZE = bytes(range(32)), "layers0-8.heads0-2", 1024
KEYS = [sha256(bytes([i])).digest() for i in range(12)]


def opened(folder: Path, system: FileSystem | None = None, space: bytes = SPACE, most: int = 1 << 20) -> BlockFiles:
    return BlockFiles(folder, space, RANK, page_bytes=SIZE, most_bytes=most, system=system)


def opened_tier(folder: Path, *ranks: str) -> FileNames:
    return FileNames(folder, SPACE, ranks or [RANK])


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def faulty(*plans: str) -> FaultyFiles:
    return FaultyFiles(Faults(plans))


def page(number: int) -> memoryview:
    return memoryview(bytearray(sha256(bytes([number])).digest() * (SIZE // 32)))


def test_another_engine_finds_what_was_written(tmp_path: Path) -> None:
    first, blank = opened(tmp_path), page(99)
    assert first.write(KEYS[0], page(0)) and first.write(KEYS[0], page(0))
    assert not first.read(KEYS[1], blank)
    second, tier = opened(tmp_path), opened_tier(tmp_path, RANK, RANK)
    assert tier.has(KEYS[0]) and not tier.has(KEYS[1])
    assert second.read(KEYS[0], blank) and blank == page(0)
    assert not opened_tier(tmp_path, RANK, "layers8-16.heads0-2").has(KEYS[0]), "a rank lacks the block"
    tier.discard(KEYS[:2])
    assert not tier.has(KEYS[0])
    tier.close()
    assert not tier.has(KEYS[0]) and not second.read(KEYS[0], blank)
    second.write(KEYS[2], page(2))
    tier.note_written(KEYS[2:3])
    assert tier.has(KEYS[2])
    tier.clear()
    assert not tier.has(KEYS[2])
    tier.close()
    assert not tier.has(KEYS[2]) and not second.read(KEYS[2], blank)


def test_what_other_engines_write_and_delete_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "READ_SECONDS", 0.0)
    first, tier = opened(tmp_path), opened_tier(tmp_path)
    first.write(KEYS[0], page(0))
    until(lambda: tier.has(KEYS[0]))
    os.unlink(block_path(first._folder, KEYS[0]))
    assert not first.read(KEYS[0], page(99)), "a miss, until it is noticed"
    until(lambda: not tier.has(KEYS[0]))


def test_a_block_that_is_written_while_the_folders_are_read_is_found(tmp_path: Path) -> None:
    tier = opened_tier(tmp_path)
    listed = tier._listed

    def written(_: Any = None) -> list[set[str]]:
        found = listed()
        tier.note_written(KEYS[:2])
        tier.discard(KEYS[1:2])
        return found

    tier._listed = written  # type: ignore[method-assign]
    tier._read()
    assert tier.has(KEYS[0]) and not tier.has(KEYS[1])
    tier.close()
    assert tier.has(KEYS[0]) and not tier.has(KEYS[1])


def test_the_core_waits_for_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a network disk that is lost: calls hang, and all files count as gone when they were to be deleted."""
    opened(tmp_path).write(KEYS[0], page(0))
    tier, gone, back = opened_tier(tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr(tier, "_listed", lambda: gone.set() or back.wait(20) and [{block_name(KEYS[0])}])
    monkeypatch.setattr(disk_tier, "CLOSE_SECONDS", 0.01)
    tier._due = 0.0
    assert tier.has(KEYS[0]), "it is being read again"
    assert gone.wait(20)
    tier.discard(KEYS[:1])
    assert not tier.has(KEYS[0]) and not tier.has(KEYS[1])
    tier.clear()
    tier.note_written(KEYS[1:2])
    assert not tier.has(KEYS[1])
    tier.close()
    back.set()
    until(lambda: tier.has(KEYS[1]))
    assert not tier.has(KEYS[0])


@pytest.mark.parametrize("fault", ["short", "long", "corrupt", "foreign"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, fault: str) -> None:
    files = opened(tmp_path, faulty(f"read={fault}"))
    files.write(KEYS[0], page(0))
    assert not files.read(KEYS[0], page(99)) and files.num_foreign == 1
    assert not opened_tier(tmp_path).has(KEYS[0])
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
    files = opened(tmp_path, faulty(f"read={fault}/ok"))
    files.write(KEYS[0], page(0))
    assert not files.read(KEYS[0], page(99)) and files.num_foreign == 0
    assert files.read(KEYS[0], page(99)) == (fault == "error")


@pytest.mark.parametrize("fault", ["full", "half"])
def test_a_full_disk_ends_the_writing_and_not_the_reading(tmp_path: Path, fault: str) -> None:
    files, blank = opened(tmp_path, faulty(f"write=ok/{fault}/ok")), page(99)
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
    left = [i for i, key in enumerate(KEYS) if opened_tier(tmp_path).has(key)]
    assert left == [0, 2, 3, 4, 5], "each of two engines makes room by what it has seen of the folder"


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_offload_dir=.*cannot be used"):
        opened(tmp_path / "file")


def test_a_reset_while_a_file_is_written_does_not_end_the_writing(tmp_path: Path) -> None:
    tier = opened_tier(tmp_path)

    class Reset(FileSystem):
        def write(self, path: str, header: bytes, page: memoryview) -> None:
            super().write(path, header, page)
            tier.clear()
            tier.close()

    files = opened(tmp_path, Reset())
    assert files.write(KEYS[0], page(0)) and not files.full and opened_tier(tmp_path).has(KEYS[0])


def test_a_folder_that_is_lost_is_a_miss_and_ends_the_writing(tmp_path: Path) -> None:
    """A file in the place of the folder stands for a disk that is gone: every call raises an OSError."""
    files, tier = opened(tmp_path, most=2 * (SIZE + HEADER.size)), opened_tier(tmp_path)
    assert files.write(KEYS[0], page(0))
    shutil.rmtree(files._folder)
    files._folder.write_text("")
    tier._read()
    assert not tier.has(KEYS[0]) and not files.read(KEYS[0], page(99))
    assert not files.write(KEYS[1], page(1)) and "Not a directory" in files.full
    tier.discard(KEYS)
    tier.clear()
    tier.close()
    assert not tier._num_clears and not tier._barred


def test_a_file_that_cannot_be_deleted_is_not_used_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a file of another user: this one must not stop the engine, and may hold what was distrusted."""
    files = opened(tmp_path)
    files.write(KEYS[0], page(0))
    files.write(KEYS[1], page(1))
    tier = opened_tier(tmp_path)

    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, "planted", path)

    monkeypatch.setattr(os, "unlink", refused)
    tier.discard(KEYS[:1])
    tier.close()
    assert not tier.has(KEYS[0]) and tier.has(KEYS[1]) and "1 KV blocks could not be deleted" in caplog.text
    tier.clear()
    tier.close()
    tier._read()
    assert not tier.has(KEYS[1]) and not tier._num_clears


def test_a_disk_that_hangs_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import threading; from quire.kvstore.file_threads import FileThreads; began, never = threading.Event(), "
        "threading.Event(); thread = FileThreads('disk'); thread.submit(lambda: began.set() or never.wait()); "
        "assert began.wait(20)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_fault_of_work_comes_with_its_result() -> None:
    thread = FileThreads("disk")
    fault, right = thread.submit(lambda: (1 // 0,)), thread.submit(lambda: (7,))
    assert right.result(20) == (7,) and isinstance(fault.exception(20), ZeroDivisionError)
