"""The adapters that a server serves: names from options, from a folder, and from the routes that load them.

A name stands for the content that its files had when they were read. Loading a name anew gives it other content for
later requests; requests that run keep theirs. Reading files happens in threads. Knows nothing of HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from quire.config.adapters import read_modules
from quire.config.serve import ServerConfig
from quire.contracts.adapters import NO_ADAPTERS, Adapter
from quire.contracts.errors import AdapterError, shown
from quire.entry.adapters import AdapterFolders
from quire.weights.adapter_files import CONFIG

Check = Callable[[Adapter], Awaitable[str]]  # an adapter -> the reason why it does not fit the model, or ""


class ServedAdapters:
    """Adapters by name. check: asks the core whether an adapter fits the model"""

    def __init__(self, config: ServerConfig, check: Check) -> None:
        self._modules, self._served = read_modules(config.lora.lora_modules), config.model_names
        self._folder = None if config.lora.lora_folder is None else Path(config.lora.lora_folder).expanduser()
        self._folders, self._check = AdapterFolders(config.engine.load), check
        self._enabled = config.engine.adapters.enable_lora
        self._names: dict[str, Adapter] = {}
        self._reading: dict[str, asyncio.Task[Adapter]] = {}  # of names that were found in the folder

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use, in the order in which they came."""
        return tuple(self._names)

    def get(self, name: str | None) -> Adapter | None:
        """Return the adapter of a name; None: it is no adapter's."""
        return self._names.get(name or "")

    async def start(self) -> None:
        """Read the adapters of the option `lora_modules`. Raises the first error."""
        for name, path in self._modules.items():
            await self.load(name, path)

    async def find(self, name: str | None) -> Adapter | None:
        """Return the adapter of a name, and look for it in the folder of adapters. None: there is none.

        Raises `AdapterError` for one that cannot be used.
        """
        if not name or name in self._served or (known := self._names.get(name)) is not None:
            return None if not name or name in self._served else known
        if self._folder is None or not self._enabled or Path(name).name != name or name.startswith("."):
            return None
        if name not in self._reading:
            try:
                there = (self._folder / name / CONFIG).is_file()
            except OSError:  # such as a name that is too long for a file
                there = False
            if not there:
                return None
            self._reading[name] = asyncio.create_task(self.load(name, str(self._folder / name)))
            self._reading[name].add_done_callback(lambda done: self._reading.pop(name, None))
        return await asyncio.shield(self._reading[name])

    async def load(self, name: str, path: str, *, anew: bool = True) -> Adapter:
        """Read an adapter and give it a name. anew: a name that is known may get other content

        Raises `AdapterError` or `ModelNotFound` with the fix.
        """
        if not self._enabled:
            raise AdapterError(NO_ADAPTERS)
        if name in self._served:
            raise AdapterError(f"adapter {shown(name)} has the name of the served model: give it another name.")
        self._check_new(name, anew)
        adapter = await asyncio.to_thread(self._folders.find, name, path)
        if why := await self._check(adapter):
            raise AdapterError(why)
        self._check_new(name, anew)  # another call may have been faster
        self._names[name] = adapter
        return adapter

    def _check_new(self, name: str, anew: bool) -> None:
        """Raise `AdapterError` for a name that is known and must not get other content."""
        if not anew and name in self._names:
            raise AdapterError(
                f"adapter {shown(name)} is loaded already: unload it before, or send load_inplace true to replace it."
            )

    def unload(self, name: str) -> None:
        """Forget a name. Requests that run keep the adapter. Raises `AdapterError` for an unknown name."""
        if self._names.pop(name, None) is None:
            raise AdapterError(f"adapter {shown(name)} is not loaded: /v1/models lists those that are.")


async def checked(ask: Callable[..., Awaitable[bool | int | str | None]], adapter: Adapter) -> str:
    """Ask a core whether an adapter fits its model; see `Check`. ask: runs an operation of the core"""
    return str(await ask("check_adapter", name=adapter.name, folder=adapter.folder, digest=adapter.digest))
