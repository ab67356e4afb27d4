"""Files of ranks on other hosts: a block is there when every rank says so; every rank deletes what the core drops."""

import time
from hashlib import sha256
from pathlib import Path

import pytest

from quire.contracts.step import DroppedFiles, FileNews
from quire.kvstore import disk_tier
from quire.kvstore.disk_tier import DiskTier, FileNames
from quire.kvstore.files import BlockFiles

SPACE, SIZE = bytes(range(32)), 64
KEYS = [sha256(bytes([i])).digest() for i in range(5)]
HERE, THERE = "layers0-4.heads0-2", "layers4-8.heads0-2"


def written(folder: Path, rank: str, *numbers: int) -> BlockFiles:
    files = BlockFiles(folder, SPACE, rank, page_bytes=SIZE, most_bytes=1 << 20)
    assert all(files.write(KEYS[number], memoryview(bytearray(SIZE))) for number in numbers)
    return files


def told(names: FileNames, rank: int = 1) -> FileNews:
    """Return the news of a rank for the core."""
    names.close()
    came, went = names.take_news()
    return FileNews(rank=rank, came=came, went=went)


def held(tier: DiskTier) -> set[int]:
    return {number for number, key in enumerate(KEYS) if tier.has(key)}


def test_a_block_counts_when_the_ranks_of_all_hosts_have_it(tmp_path: Path) -> None:
    core, other = tmp_path / "here", tmp_path / "there"  # folders of the same name on two hosts
    written(core, HERE, 0, 1, 2)
    theirs = written(other, THERE, 1, 2, 3)
    names = FileNames(other, SPACE, [THERE], tells=True)
    tier = DiskTier(core, SPACE, {0: HERE, 1: THERE}, [told(names)])
    assert held(tier) == {1, 2} and tier.num_found == 2
    names.note_written([KEYS[0]])
    tier.hear(told(names))
    assert held(tier) == {0, 1, 2} and told(names) == FileNews(rank=1), "nothing is told twice"
    tier.discard([KEYS[1]])
    assert held(tier) == {0, 2} and tier.drops
    assert tier.take_dropped(states=True) == (DroppedFiles(keys=(KEYS[1],), states=True),)
    assert not tier.drops and tier.take_dropped(states=True) == ()
    names.discard([KEYS[1]])
    assert told(names).went == (KEYS[1],) and not theirs.read(KEYS[1], memoryview(bytearray(SIZE)))
    tier.discard([KEYS[2]])
    tier.clear()
    assert held(tier) == set() and tier.take_dropped(states=False) == (DroppedFiles(every=True),)
    names.clear()
    assert set(told(names).went) == set(KEYS[2:4])


def test_what_another_engine_writes_on_another_host_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = FileNames(tmp_path, SPACE, [THERE], tells=True)
    tier = DiskTier(tmp_path, SPACE, {4: THERE}, [told(names, 4)])
    assert held(tier) == set() and tier.num_found == 0
    monkeypatch.setattr(disk_tier, "READ_SECONDS", 0.0)
    written(tmp_path, THERE, 3)
    (tmp_path / SPACE.hex()[:16] / THERE / "no block.kv").touch()
    until = time.monotonic() + 20
    names._due = 0.0
    while held(tier) != {3}:
        assert time.monotonic() < until, "nothing is told"
        tier.hear(told(names, 4))


def test_an_engine_on_one_host_tells_and_drops_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, SPACE, {0: HERE, 1: THERE, 2: HERE})
    tier.discard(KEYS)
    tier.clear()
    assert not tier.drops and tier.take_dropped(states=False) == ()
    tier.close()
