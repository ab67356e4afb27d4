"""The temporary folder of a server: the sockets of its processes, and files that they share, such as stored responses.

A server removes its folder at its end. Where all its processes were killed at once, the next server of the same user
does it: a folder has a file that its server locks, and the kernel ends the lock with the process.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX, ALIVE = "quire-", "alive"
MAX_FOLDER = 80  # a socket's path may have about 100 characters


class ServerFolder:
    """A new folder in that of TMPDIR, or in /tmp where the path would be too long for a socket.

    name   its path
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix=PREFIX)
        if len(self.name) > MAX_FOLDER:
            os.rmdir(self.name)
            self.name = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        new, alive = Path(self.name, f"{ALIVE}.new"), Path(self.name, ALIVE)
        self._lock = new.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(alive)  # nobody finds the file before it is locked
        self._finalizer = weakref.finalize(self, _remove, Path(self.name))
        _remove_dead(Path(self.name).parent)

    def remove(self) -> None:
        """Remove the folder; idempotent. The end of the interpreter does it, too."""
        self._finalizer()
        self._lock.close()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(parent: Path) -> None:
    """Remove the folders of this user's servers of which no process lives."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked by its server, or no folder of a server
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / ALIVE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
