"""The state that a router keeps over a restart: the backends that an operator drains. A JSON file.

    {"draining": ["http://10.0.0.1:8000"]}

Everything else is found again: backends by their names, health by checks, homes of sessions by hashing.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from quire.contracts.errors import ConfigError

LOG = logging.getLogger("quire")


class _State(msgspec.Struct):
    draining: list[str] = []


class RouterState:
    """The state in a file; without a file nothing is kept. Raises `ConfigError` for a file that is no state."""

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file)
        self.draining = frozenset[str]()
        if self._file is None:
            return
        if not os.access(self._file.resolve().parent, os.W_OK):
            raise ConfigError(f"--state-file {file}: its folder must be there, and writable: make it, or name another.")
        if not self._file.exists():
            return
        try:
            self.draining = frozenset(msgspec.json.decode(self._file.read_bytes(), type=_State).draining)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--state-file {file} cannot be read: {error}: remove it, and drain backends again."
            ) from None

    def keep(self, draining: Iterable[str]) -> str:
        """Write the drained backends, whole or not at all. Return the reason why they could not be written, or ""."""
        self.draining = frozenset(draining)
        if self._file is None:
            return ""
        new = self._file.with_name(self._file.name + ".new")
        try:
            new.write_bytes(msgspec.json.encode(_State(sorted(self.draining))))
            os.replace(new, self._file)
        except OSError as error:
            LOG.warning("the state was not written to %s: %s: a restart forgets it.", self._file, error.strerror)
            return str(error.strerror)
        return ""
