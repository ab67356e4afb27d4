"""The names of the files of a disk tier: the engine core's part, and that of a rank on another host.

    core                         the files of the ranks on its own host, as a thread reads their folders
                                 the files of each rank on another host, as its news say; see `FileNews`
    rank on another host         the files of its own folder; deletes those that the core drops (`DroppedFiles`)

A block counts as there when every rank has it. A file that is gone since is a miss when it is read, for all ranks.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from quire.contracts.step import DroppedFiles, FileNews, Tier
from quire.kvstore.file_threads import FileThreads, Lost
from quire.kvstore.files import SUFFIX, block_name, entries, rank_folder

LOG = logging.getLogger("quire").getChild("kv")
READ_SECONDS = 5.0  # names that other engines have written are found after so long
CLOSE_SECONDS = 10.0


class FileNames:
    """Names of the files that ranks of this host have.

    A thread reads the folders again from time to time, and deletes files; nobody waits for either. So a file of
    another engine is found a little later.
    """

    def __init__(self, folder: Path, namespace: bytes, ranks: Iterable[str], *, tells: bool = False) -> None:
        """tells: changes are kept for `take_news`."""
        self._folders = [rank_folder(folder, namespace, rank) for rank in dict.fromkeys(ranks)]
        self._names, self._written = set[str](), set[str]()  # the second: since the folders were last read
        self._tells, self._news = tells, dict[str, bool]()  # name -> True: it came, False: it went
        self._barred = set[str]()  # files to delete, and those that cannot be, such as those of another user
        self._num_clears, self._due = 0, 0.0  # clears still to come; time of the next reading
        self._thread, self._lock = FileThreads("quire-kv-names"), threading.Lock()
        self._read()

    def __len__(self) -> int:
        return len(self._names)

    def has(self, key: bytes) -> bool:
        """True when every rank seems to have a file for the block."""
        self._look()
        name = block_name(key)
        return name in self._names and name not in self._barred and not self._num_clears

    def note_written(self, keys: Iterable[bytes]) -> None:
        """Count on files that every rank has written."""
        names = set(map(block_name, keys))
        with self._lock:
            self._know(names, set())
            self._written |= names

    def take_news(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the keys of blocks that came, and of those that went, since the last call."""
        self._look()
        with self._lock:
            news, self._news = self._news, {}
        came, went = ([name for name, there in news.items() if there == which] for which in (True, False))
        return _keys(came), _keys(went)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Delete the files of blocks. They count as gone from now on."""
        if names := set(map(block_name, keys)):
            with self._lock:
                self._barred |= names
            self._thread.submit(partial(self._delete, names))

    def clear(self) -> None:
        """Delete the files of all blocks of these ranks. Files that are being written stay."""
        with self._lock:
            self._num_clears += 1
        self._thread.submit(partial(self._delete, None))

    def close(self) -> None:
        """Wait until files are deleted, some seconds at most."""
        with suppress(TimeoutError):
            self._thread.submit(tuple).result(CLOSE_SECONDS)

    def _look(self) -> None:
        """Have the thread read the folders again, if it is time."""
        if time.monotonic() > self._due:
            self._due = float("inf")
            self._thread.submit(self._read)

    def _know(self, came: set[str], went: set[str]) -> None:
        """Change the names, with the lock."""
        came, went = came - self._names, went & self._names
        self._names = self._names - went if went else self._names
        self._names |= came
        if self._tells:
            self._news.update(dict.fromkeys(went, False) | dict.fromkeys(came, True))

    def _read(self) -> Lost:
        began = time.monotonic()
        with self._lock:
            self._written = set()
        found = set.intersection(*self._listed())
        with self._lock:
            found |= self._written
            self._know(found, self._names - found)
        now = time.monotonic()
        self._due = now + max(READ_SECONDS, 50 * (now - began))
        return ()

    def _delete(self, some: set[str] | None) -> Lost:
        """Delete the files of some blocks, or (None) of all, for `clear`."""
        names, left = set.union(*self._listed()) if some is None else some, dict[str, OSError]()
        for path in [f"{folder}/{name[:2]}/{name}" for folder in self._folders for name in names]:
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                left[os.path.basename(path)] = error
        if left:
            LOG.warning(
                "%d KV blocks could not be deleted, and are not used any more: %s", len(left), next(iter(left.values()))
            )
        with self._lock:
            self._know(set(), names)
            self._barred = self._barred - names | left.keys()
            self._num_clears -= some is None
        return ()

    def _listed(self) -> list[set[str]]:
        """Return the names of the files of every rank."""
        found = [set[str]() for _ in self._folders]
        for folder, names in zip(self._folders, found, strict=True):
            with suppress(OSError):  # a disk that is lost
                names.update(entry.name for entry in entries(folder) if entry.name.endswith(SUFFIX))
        return found


class DiskTier:
    """The disk tier as the core sees it: the blocks that all ranks have in files. See `kv.sharing.KeyedTier`.

    ranks   number of each rank -> name of its folder
    news    the first news of each rank on another host
    """

    tier, takes = Tier.DISK, True

    def __init__(self, folder: Path, namespace: bytes, ranks: Mapping[int, str], news: Iterable[FileNews] = ()) -> None:
        self._elsewhere = {one.rank: set(one.came) for one in news}
        here = [name for rank, name in ranks.items() if rank not in self._elsewhere]
        self._here = FileNames(folder, namespace, here) if here else None
        self._dropped: (
            dict[bytes, None] | None
        ) = {}  # keys that ranks on other hosts are still to be told of; None: all

    @property
    def num_found(self) -> int:
        """Number of blocks that all ranks have."""
        held = list(self._elsewhere.values())
        if self._here is None:
            return len(set.intersection(*held))
        return sum(self._here.has(key) for key in set.intersection(*held)) if held else len(self._here)

    def has(self, key: bytes) -> bool:
        """True when every rank seems to have a file for the block."""
        return (self._here is None or self._here.has(key)) and all(key in held for held in self._elsewhere.values())

    def holders(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Return (): files are found by key."""
        return ()

    def holder(self, key: bytes) -> str:
        """Return "": files are this engine's."""
        return ""

    def note_written(self, keys: Iterable[bytes]) -> None:
        """Count on files that every rank has written. Ranks on other hosts have said so before."""
        if self._here is not None:
            self._here.note_written(keys)

    def hear(self, news: FileNews) -> None:
        """Hear which files a rank on another host has."""
        self._elsewhere[news.rank].difference_update(news.went)
        self._elsewhere[news.rank].update(news.came)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Delete the files of blocks. They count as gone from now on."""
        keys = tuple(keys)
        if self._here is not None:
            self._here.discard(keys)
        for held in self._elsewhere.values():
            held.difference_update(keys)
        if self._elsewhere and self._dropped is not None:
            self._dropped.update(dict.fromkeys(keys))

    def clear(self) -> None:
        """Delete the files of all blocks of these ranks. Files that are being written stay."""
        if self._here is not None:
            self._here.clear()
        for held in self._elsewhere.values():
            held.clear()
        self._dropped = None if self._elsewhere else {}

    @property
    def drops(self) -> bool:
        """True when ranks on other hosts are still to be told of files that they delete."""
        return self._dropped != {}

    def take_dropped(self, *, states: bool) -> tuple[DroppedFiles, ...]:
        """Return the files that ranks on other hosts delete, for the next plan."""
        dropped, self._dropped = self._dropped, {}
        if dropped == {}:
            return ()
        return (DroppedFiles(keys=tuple(dropped or ()), every=dropped is None, states=states),)

    def close(self) -> None:
        """Wait until files are deleted, some seconds at most."""
        if self._here is not None:
            self._here.close()


def _keys(names: Iterable[str]) -> tuple[bytes, ...]:
    """Return the keys of blocks by the names of their files. Another name is of no block."""
    found = list[bytes]()
    for name in names:
        with suppress(ValueError):
            found.append(bytes.fromhex(name.removesuffix(SUFFIX)))
    return tuple(found)
