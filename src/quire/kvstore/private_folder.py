"""Folders and files of KV blocks belong to one user: whoever can write them can change an engine's answers.

A block's key says which tokens it belongs to, and a checksum finds damage. Neither proves who wrote the block.
"""

import os
import pwd
import stat
from pathlib import Path

from quire.contracts.errors import ConfigError

OWN_FILE, OWN_FOLDER = 0o600, 0o700
ANY_FILE, ANY_FOLDER = 0o666, 0o777  # less the umask: of folders that several users share
WRITABLE = stat.S_IWGRP | stat.S_IWOTH
FLAG = "--kv-offload-dir-shared"


def make_folder(folder: Path, mode: int) -> None:
    """Make a folder and those above it that are missing, all with this mode less the umask. Raises OSError."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        one.mkdir(mode, exist_ok=True)


def check_private(folder: Path) -> None:
    """Raise ConfigError if other users than this one and root may write into a folder."""
    if why := why_shared(folder.stat()):
        raise ConfigError(
            f"kv_offload_dir: {folder} {why}. Whoever writes KV blocks there changes what this engine answers: take "
            f"the right away (chmod -R go-w), name a folder of your own, or allow it with {FLAG}."
        )


def why_shared(about: os.stat_result) -> str:
    """Return the reason why other users than this one and root may write a file or folder; "": they may not."""
    if about.st_uid not in (os.geteuid(), 0):
        return f"belongs to the user {_user(about.st_uid)}"
    if about.st_mode & WRITABLE:
        return f"has mode {stat.S_IMODE(about.st_mode):04o}, so that other users may write into it"
    return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
