"""Adapters (LoRA) by name: from the names and paths that users give to adapters whose files were summed.

Knows files and names. Whether an adapter fits the model, the core tells.
"""

import re
from pathlib import Path
from typing import Any

from quire.config.engine import LoadConfig
from quire.contracts.adapters import NO_ADAPTERS, Adapter, LoRARequest
from quire.contracts.errors import AdapterError, InvalidParameter, ModelNotFound, shown
from quire.weights.adapter_files import CONFIG, WEIGHTS, identify, read_adapter_config
from quire.weights.hub import Repository

MAX_NAME = 256
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Stamp = tuple[tuple[int, int], ...]  # time of change and bytes of each file


class AdapterFolders:
    """Finds adapters by path or hub id, and remembers the sums of files that have not changed since."""

    def __init__(self, load: LoadConfig) -> None:
        self._load = load
        self._known: dict[str, tuple[Stamp, Adapter]] = {}  # by path as it was given

    def find(self, name: str, path: str) -> Adapter:
        """Return the adapter in a folder, or in a repository of the hub. Reads its files, which may take seconds.

        Raises `AdapterError` that names the fix, `ModelNotFound` for a repository that cannot be had.
        """
        check_name(name)
        folder = self._folder(path)
        stamp = tuple((one.st_mtime_ns, one.st_size) for one in map(Path.stat, self._files(folder)))
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            self._known[path] = known = stamp, identify(name, folder)
        return Adapter(name, str(folder), known[1].digest)

    @staticmethod
    def _files(folder: Path) -> list[Path]:
        return [path for name in (CONFIG, WEIGHTS) if (path := folder / name).is_file()]

    def _folder(self, path: str) -> Path:
        """Return the folder of an adapter. In a repository the config is checked before the weights."""
        if (folder := local_folder(path)) is not None:
            return folder
        repository = Repository(path, None, self._load)
        read_adapter_config(repository.download([CONFIG]))
        return repository.download([CONFIG, WEIGHTS])


def check_name(name: str) -> None:
    """Raise `AdapterError` for a name that no adapter may have."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise AdapterError(f"adapter name {shown(name)}: give 1 to {MAX_NAME} printable characters.")


def local_folder(path: str) -> Path | None:
    """Return the folder of an adapter on this machine; None: the path is an id of the hub. Raises `ModelNotFound`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not _HUB_ID.fullmatch(path):
        raise ModelNotFound(f"{path!r} does not exist: give the folder of an adapter, or its id on the hub.")
    return None


def read_requests(given: Any, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each of `count` prompts, from the argument `lora_request`: one for all, or a list."""
    every = list(given) if isinstance(given, list | tuple) else [given] * count
    for one in every:
        if one is not None and not isinstance(one, LoRARequest):
            raise InvalidParameter(
                f"lora_request must be a LoRARequest, or a list of them, not {type(one).__name__}.",
                param="lora_request",
            )
    if len(every) != count:
        raise InvalidParameter(
            f"{count} prompts and {len(every)} lora requests: give one for all, or one each.", param="lora_request"
        )
    return every


class NamedAdapters:
    """The adapters that requests of an offline engine have named. enabled: the engine serves adapters"""

    def __init__(self, load: LoadConfig, *, enabled: bool) -> None:
        self._folders, self._enabled = AdapterFolders(load), enabled
        self._names: dict[str, Adapter] = {}

    def find(self, request: LoRARequest) -> tuple[Adapter, bool]:
        """Return the adapter of a request, and True if no request has named its content before.

        A path that is left out is that of the last request of the name.
        """
        if not self._enabled:
            raise InvalidParameter(NO_ADAPTERS, param="lora_request")
        known = self._names.get(request.lora_name)
        if not request.lora_path:
            if known is None:
                raise InvalidParameter(
                    f"adapter {shown(request.lora_name)} is unknown: give its folder as lora_path.",
                    param="lora_request",
                )
            return known, False
        found = self._folders.find(request.lora_name, request.lora_path)
        self._names[request.lora_name] = found
        return found, known is None or known.digest != found.digest
