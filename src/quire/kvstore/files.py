"""KV blocks as files, one per block and rank, which outlive the engine and which other engines find.

    <folder>/<namespace, 16 hex digits>/<rank>/<2 hex digits>/<key, hex>.kv
    header   64 bytes, little-endian: magic, version, crc32 of the page, its length, sha256 of namespace, rank and key
    page     as in the arena

A file is written aside and renamed, so no reader sees half of it. A file that is truncated, foreign or corrupt is a
miss and is deleted; so is what stands in the place of a file and is none, such as a link or a pipe. The least recently
used files go when the folder of the rank exceeds its size; a read renews the time of a file. Knows keys and bytes.
Knows nothing of devices. Never imports torch.
"""

import errno
import logging
import os
import stat
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from quire.contracts.errors import ConfigError
from quire.kvstore.private_folder import (
    ANY_FILE,
    ANY_FOLDER,
    OWN_FILE,
    OWN_FOLDER,
    check_private,
    make_folder,
    why_shared,
)

LOG = logging.getLogger("quire").getChild("kv")
MAGIC, VERSION = b"QUIREKV\0", 1
HEADER = struct.Struct("<8sIIQ32s8x")  # magic, version, crc32, length, digest
SUFFIX = ".kv"
STALE_SECONDS = 600.0  # a file that was begun and not renamed for so long is of an engine that ended
OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # no wait for a pipe, nothing behind a link
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
RETRY_SECONDS = 60.0  # a disk that was full is tried again after so long
RESCAN = 8  # the folder is read again when a part of its size, 1 / RESCAN, was written: other engines write, too


class FileSystem:
    """The calls by which `BlockFiles` reads and writes whole files. Tests plant faults in a subclass.

    mode    permissions of new files
    """

    mode = OWN_FILE

    def read(self, path: str, header: bytearray, page: memoryview) -> int:
        """Read a file into `header` and `page`; return the number of bytes, one more than fit if there are more.

        Raises OSError, also for what is no regular file: no pipe is waited for, and no link is followed. A file that
        other users may write is refused (EPERM), unless new files are such files.
        """
        descriptor = os.open(path, OPENED)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EINVAL, "no regular file", path)
            if self.mode == OWN_FILE and why_shared(about):
                raise OSError(errno.EPERM, why_shared(about), path)
            extra, views, total = bytearray(1), [memoryview(header), page], 0
            views.append(memoryview(extra))
            while views and (count := os.readv(descriptor, views)):
                total += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if views:
                    views[0] = views[0][count:]
            with suppress(OSError):  # another user's file
                os.utime(descriptor)
            return total
        finally:
            os.close(descriptor)

    def write(self, path: str, header: bytes, page: memoryview) -> None:
        """Write a new file."""
        with open(os.open(path, NEW, self.mode), "wb", buffering=0) as file:
            for part in (memoryview(header), page):
                while part:
                    part = part[file.write(part) or 0 :]


class BlockFiles:
    """The files of a rank. Any thread may read and any other one write.

    page_bytes    bytes of a page
    most_bytes    size of the rank's files together, headers included
    system        calls to the file system
    shared        other users may write into the folder, and use the files
    full          reason why no file can be written at present, such as a full disk; "": files can be written
    num_foreign   files that were deleted because they were truncated, foreign, corrupt or no regular files
    """

    def __init__(
        self,
        folder: Path,
        namespace: bytes,
        rank: str,
        *,
        page_bytes: int,
        most_bytes: int,
        system: FileSystem | None = None,
        shared: bool = False,
    ) -> None:
        """Make the folders. Raises ConfigError if they cannot be used, or if others may write there and must not."""
        self.full, self.num_foreign, self._retry = "", 0, 0.0
        self._digest = namespace + b"\0" + rank.encode() + b"\0"
        self._folder, self._page_bytes, self._most = rank_folder(folder, namespace, rank), page_bytes, most_bytes
        self._system, self._name = system or FileSystem(), os.urandom(8).hex()  # other engines write here, too
        self._ages: OrderedDict[str, int] = OrderedDict()  # path -> bytes, least recently used first
        self._total = self._written = self._number = 0
        self._lock = threading.Lock()
        self._system.mode, self._folder_mode = (ANY_FILE, ANY_FOLDER) if shared else (OWN_FILE, OWN_FOLDER)
        try:
            make_folder(self._folder, self._folder_mode)
            if not shared:
                inner = [Path(entry.path) for entry in os.scandir(self._folder) if entry.is_dir(follow_symlinks=False)]
                for one in (self._folder.parent.parent, self._folder.parent, self._folder, *inner):
                    check_private(one)
            self._scan()
        except OSError as error:
            raise ConfigError(
                f"kv_offload_dir={str(folder)!r} cannot be used: {error}. Name a folder in which this user may write."
            ) from error

    def read(self, key: bytes, page: memoryview) -> bool:
        """Read the block with this key into `page`. Returns False for a miss; `page` may then hold anything."""
        path, header = block_path(self._folder, key), bytearray(HEADER.size)
        try:
            length = self._system.read(path, header, page)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno == errno.EPERM:
                self._remove(path, str(error.strerror))
            elif not self._remove_foreign(path):
                LOG.warning("a KV block could not be read from %s: %s", path, error)
            return False
        whole = length == HEADER.size + self._page_bytes
        if not whole or bytes(header) != self._header(key, page):
            self.num_foreign += 1
            LOG.warning(
                "%s is %s: deleted. The block is computed again.",
                path,
                "not a KV block of this engine, or corrupt"
                if whole
                else f"{length} bytes long, not {HEADER.size + self._page_bytes}",
            )
            self._delete(path)
            return False
        with self._lock:
            if path in self._ages:
                self._ages.move_to_end(path)
        return True

    def write(self, key: bytes, page: memoryview) -> bool:
        """Write a block, unless its file exists. Returns False, and sets `full`, when the disk takes no more.

        A full disk is tried again after RETRY_SECONDS.
        """
        if self.full and time.monotonic() < self._retry:
            return False
        path, size = block_path(self._folder, key), HEADER.size + self._page_bytes
        if os.path.lexists(path) and not self._remove_foreign(path):
            return True
        self._number += 1
        aside = f"{self._folder}/{self._name}-{self._number}.part"
        try:
            self._make_room(size)
            self._system.write(aside, self._header(key, page), page)
            self._make_inner(os.path.dirname(path))
            os.replace(aside, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(aside)
            if isinstance(error, IsADirectoryError):  # this key has no place; others have
                return False
            self.full = f"{self._folder}: {os.strerror(error.errno) if error.errno else error}"
            self._retry = time.monotonic() + RETRY_SECONDS
            return False
        self.full = ""
        with self._lock:
            self._ages[path] = size
            self._total += size
            self._written += size
        return True

    def _header(self, key: bytes, page: memoryview) -> bytes:
        return HEADER.pack(MAGIC, VERSION, zlib.crc32(page), self._page_bytes, sha256(self._digest + key).digest())

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until another one of `size` bytes fits."""
        if self._written * RESCAN > self._most:
            self._scan()
        with self._lock:
            while self._ages and self._total + size > self._most:
                path, bytes_there = self._ages.popitem(last=False)
                self._total -= bytes_there
                with suppress(OSError):
                    os.unlink(path)

    def _scan(self) -> None:
        """Read the names, sizes and times of the rank's files. Delete files that were begun long ago."""
        found = []
        for entry in entries(self._folder):
            with suppress(OSError):  # another engine has deleted it
                about = entry.stat(follow_symlinks=False)
                if entry.name.endswith(SUFFIX):
                    found.append((about.st_mtime_ns, entry.path, about.st_size))
                elif time.time() - about.st_mtime > STALE_SECONDS:
                    os.unlink(entry.path)
        with self._lock:
            self._ages = OrderedDict((path, size) for _, path, size in sorted(found))
            self._total, self._written = sum(self._ages.values()), 0

    def _remove_foreign(self, path: str) -> bool:
        """Remove what stands at `path` and is no regular file, and tell so. Return True if there was something."""
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                return False
        except OSError:
            return False
        self._remove(path, "is no regular file")
        return True

    def _remove(self, path: str, why: str) -> None:
        """Remove what stands in the place of a file, and tell so. A folder stays."""
        self.num_foreign += 1
        self._delete(path)
        done = "stays there" if os.path.lexists(path) else "removed"
        LOG.warning("%s %s: %s. The block is computed again.", path, why, done)

    def _make_inner(self, folder: str) -> None:
        """Make a folder in the rank's; a link or a file in its place is removed. Nothing behind a link is touched."""
        try:
            os.mkdir(folder, self._folder_mode)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                os.unlink(folder)
                os.mkdir(folder, self._folder_mode)

    def _delete(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path)
        with self._lock:
            self._total -= self._ages.pop(path, 0)


def rank_folder(folder: Path, namespace: bytes, rank: str) -> Path:
    """Return the folder of a rank's files."""
    return folder.expanduser() / namespace.hex()[:16] / rank


def block_name(key: bytes) -> str:
    """Return the name of a block's file."""
    return key.hex() + SUFFIX


def block_path(folder: Path, key: bytes) -> str:
    """Return the path of a block in the folder of a rank."""
    name = block_name(key)
    return f"{folder}/{name[:2]}/{name}"


def entries(folder: Path) -> "Iterator[os.DirEntry[str]]":
    """Yield the files of a rank's folder and of the folders in it."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
                continue
            with suppress(FileNotFoundError), os.scandir(entry.path) as inner:
                yield from inner
