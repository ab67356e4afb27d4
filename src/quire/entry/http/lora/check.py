"""The adapters that a server's options name, read once without a server.

Nothing is downloaded: what is on the hub alone is told, not checked.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.adapters.slots import adapter_rules
from quire.assemble.obtain import read_args
from quire.config.adapters import read_modules
from quire.config.engine import EngineConfig
from quire.config.serve import ServerConfig
from quire.config.speculators import resolve_speculators
from quire.contracts.errors import AdapterError, ModelNotFound
from quire.entry.adapters import check_name, local_folder
from quire.weights.adapter_files import CONFIG, AdapterFiles, read_adapter
from quire.weights.folder import HEADERS, resolve_folders

Fits = Callable[[AdapterFiles], None]  # raises `AdapterError` for an adapter that does not fit the model


def check_adapters(config: ServerConfig) -> list[str]:
    """Return sentences about the adapters of the options `lora_modules` and `lora_folder`.

    Raises `AdapterError` or `ModelNotFound` for one at which the start of a server would end. An adapter of
    `lora_folder` is read at its first request, so its fault is a sentence.
    """
    modules, folder = read_modules(config.lora.lora_modules), config.lora.lora_folder
    if not modules and folder is None:
        return []
    fits, lines = _fits(config.engine)
    for name, path in modules.items():
        check_name(name)
        if (found := local_folder(path)) is None:
            lines.append(f"The adapter {name} was not checked: {path} is no folder here, but may be an id on the hub.")
        else:
            fits(read_adapter(found))
            lines.append(f"The adapter {name} is in {found}.")
    return lines if folder is None else lines + _of_folder(Path(folder).expanduser(), fits)


def _fits(config: EngineConfig) -> tuple[Fits, list[str]]:
    """Return the check of adapters against the model, and a sentence if the model cannot be read."""
    if config.device.device == "mock":
        return lambda files: None, []
    try:
        config = replace(config, load=replace(config.load, offline=True))
        config = resolve_speculators(config, resolve_folders(config, only=HEADERS)[0])
        args = read_args(config, resolve_folders(config, only=HEADERS)[0])
    except ModelNotFound:
        return lambda files: None, ["The model is not here, so adapters were not compared with it."]
    return adapter_rules(args, config.adapters).check, []


def _of_folder(folder: Path, fits: Fits) -> list[str]:
    """Return sentences about the adapters in a folder of adapters."""
    if not folder.is_dir():
        return [f"{folder}, the folder of adapters, does not exist yet."]
    named = sorted(one.parent for one in folder.glob(f"*/{CONFIG}") if not one.parent.name.startswith("."))
    lines = [f"{len(named)} adapters are in {folder}."]
    for one in named:
        try:
            fits(read_adapter(one))
        except AdapterError as error:
            lines.append(f"The adapter {one.name} cannot be used: {error}")
    return lines
