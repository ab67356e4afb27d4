"""A disk that hangs costs the threads that hang and nothing else; what is no regular file never hangs a thread."""

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import CopyJob, FinishedCopy, Tier
from quire.kvstore import file_threads, files
from quire.kvstore.arena import KVArena
from quire.kvstore.files import BlockFiles, FileSystem, block_path
from quire.kvstore.mover import THREADS, BlockMover

KEYS = [bytes([i]) * 32 for i in range(2 * THREADS["read"])]


class HangingSystem(FileSystem):
    """A file system that hangs while it reads some files, or writes any, until `back` is set."""

    def __init__(self) -> None:
        self.back, self.hangs, self.begun = threading.Event(), set[str](), threading.Semaphore(0)

    def read(self, path: str, header: bytearray, page: memoryview) -> int:
        self._wait(path)
        return super().read(path, header, page)

    def write(self, path: str, header: bytes, page: memoryview) -> None:
        self._wait(".part")
        super().write(path, header, page)

    def _wait(self, path: str) -> None:
        if (path if path == ".part" else Path(path).stem) in self.hangs:
            self.begun.release()
            assert self.back.wait(60)


def mover(folder: Path, system: FileSystem | None = None) -> BlockMover:
    component = KVComponent("k", num_heads=1, head_dim=4, dtype="float32", item_bytes=4)
    geometry = KVGeometry(groups=(KVGroup(block_size=2, layers=(0,), components=(component,)),))
    arena = KVArena(geometry, 2, torch.device("cpu"))
    held = BlockFiles(folder, bytes(32), "r", page_bytes=arena.page_bytes, most_bytes=1 << 20, system=system)
    for key in KEYS:
        held.write(key, memoryview(bytearray(arena.page_bytes)))
    return BlockMover(arena, len(KEYS), held)


def read(number: int, keys: list[bytes]) -> CopyJob:
    targets = np.arange(1, 1 + len(keys), dtype=np.int32)
    none = np.zeros(0, np.int32)
    return CopyJob(id=number, source=Tier.DISK, target=Tier.HOST, keys=tuple(keys), sources=none, targets=targets)


def write(number: int, keys: list[bytes]) -> CopyJob:
    sources, none = np.arange(1, 1 + len(keys), dtype=np.int32), np.zeros(0, np.int32)
    return CopyJob(id=number, source=Tier.HOST, target=Tier.DISK, keys=tuple(keys), sources=sources, targets=none)


def ended(one: BlockMover) -> FinishedCopy:
    for _ in range(2000):
        if reports := one.finished(wait=True):
            (report,) = reports
            return report
    raise AssertionError("the job does not end")


def test_a_thread_that_hangs_gets_no_other_block(tmp_path: Path) -> None:
    system = HangingSystem()
    one = mover(tmp_path, system)
    system.hangs = {KEYS[0].hex()}
    one.begin([read(0, KEYS[:2])])
    assert system.begun.acquire(timeout=20)
    for number in range(1, 4):
        one.begin([read(number, KEYS[1:])])
        report = ended(one)
        assert (report.id, report.failed, report.error) == (number, (), "")
    system.back.set()
    assert ended(one).id == 0


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_disk_that_hangs_altogether_fails_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Jobs whose blocks no thread has begun fail at once. The others end when the disk is back; it serves again."""
    system, count = HangingSystem(), THREADS[way]
    one = mover(tmp_path, system)
    new = [bytes([100 + i]) * 32 for i in range(count + 3)]
    jobs = (read, KEYS) if way == "read" else (write, new)
    make, keys = jobs
    system.hangs = {*(key.hex() for key in keys[:count]), ".part"}
    one.begin([make(0, keys[:count])])
    assert all(system.begun.acquire(timeout=20) for _ in range(count))
    monkeypatch.setattr(file_threads, "HANG_SECONDS", 0.0)
    one.begin([make(1, keys[count : count + 3])])
    report = ended(one)
    assert (report.id, report.failed) == (1, (0, 1, 2)) and "has not answered" in report.error
    assert one.finished() == ()
    monkeypatch.undo()
    system.back.set()
    assert ended(one).failed == ()
    one.begin([make(2, keys[count : count + 3])])
    report = ended(one)
    assert (report.failed, report.error) == ((), "")


def test_blocks_that_were_given_up_are_told_so_after_the_disk_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store would take them for damaged, and delete their files."""
    system, count = HangingSystem(), THREADS["read"]
    one = mover(tmp_path, system)
    system.hangs = {key.hex() for key in KEYS[:count]}
    one.begin([read(0, KEYS[: count + 3])])
    assert all(system.begun.acquire(timeout=20) for _ in range(count))
    monkeypatch.setattr(file_threads, "HANG_SECONDS", 0.0)
    assert one.finished() == ()
    monkeypatch.undo()
    system.back.set()
    report = ended(one)
    assert report.failed == (count, count + 1, count + 2) and "has not answered" in report.error


def folder(path: str) -> None:
    os.makedirs(f"{path}/inner")


def test_a_folder_in_the_place_of_a_file_costs_its_block_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = BlockFiles(tmp_path, bytes(32), "r", page_bytes=8, most_bytes=1 << 20)
    page = memoryview(bytearray(8))
    folder(block_path(held._folder, KEYS[0]))
    assert not held.write(KEYS[0], page) and not held.read(KEYS[0], page) and "stays there" in caplog.text
    assert held.write(KEYS[1], page) and not held.full


def pipe(path: str) -> None:
    os.mkfifo(path)


def link(path: str) -> None:
    target = Path(path).parents[3] / "elsewhere"
    target.write_bytes(b"not ours")
    os.utime(target, (1, 1))
    os.symlink(target, path)


def listener(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as place:
        os.chdir(Path(path).parent)
        place.bind(Path(path).name)


@pytest.mark.parametrize("put", [pipe, link, listener])
def test_what_is_no_regular_file_is_told_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, put: object
) -> None:
    monkeypatch.chdir(tmp_path)
    held = BlockFiles(tmp_path / "kv", bytes(32), "r", page_bytes=8, most_bytes=1 << 20)
    page, path = memoryview(bytearray(b"12345678")), block_path(held._folder, KEYS[0])
    held.write(KEYS[0], page)
    for act in (held.read, held.write):
        os.unlink(path)
        put(path)  # type: ignore[operator]
        assert act(KEYS[0], page) == (act == held.write)
        assert caplog.text.count("is no regular file: removed") == 1 and not os.path.islink(path)
        assert os.path.isfile(path) == (act == held.write)
        caplog.clear()
        if act == held.read:
            held.write(KEYS[0], page)
    assert held.num_foreign == 2 and held.read(KEYS[0], page)
    if put is link:
        elsewhere = next(tmp_path.rglob("elsewhere"))
        assert (elsewhere.stat().st_mtime, elsewhere.read_bytes()) == (1, b"not ours")


def test_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, room = [0.0], [0]

    class Small(FileSystem):
        def write(self, path: str, header: bytes, page: memoryview) -> None:
            room[0] -= 1
            if room[0] < 0:
                raise OSError(28, "No space left on device")
            super().write(path, header, page)

    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    held = BlockFiles(tmp_path, bytes(32), "r", page_bytes=8, most_bytes=1 << 20, system=Small())
    page = memoryview(bytearray(8))
    assert not held.write(KEYS[0], page) and "No space left" in held.full
    room[0] = 5
    assert not held.write(KEYS[0], page), "too soon"
    now[0] += files.RETRY_SECONDS
    assert held.write(KEYS[0], page) and not held.full
