"""The folder on this machine of a model that a user named by a local path or an id of the Hugging Face hub.

A model of the hub is downloaded in two parts: first its small files, then its weights if their headers pass. No torch.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from quire.config.bundled import NAME, bundled_model
from quire.config.engine import EngineConfig
from quire.contracts.errors import ModelNotFound, WeightsError
from quire.weights.files import Checkpoint, read_checkpoint, weight_files
from quire.weights.hub import Repository

# Files that a model needs beside its weights; never pickles.
TEXTS = ("*.json", "*.jinja", "tokenizer*", "LICENSE*")
WEIGHTS = ("*.safetensors",)
HEADERS = ("*.json",)  # of a model that is described, not run; the headers of its weights are read apart
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_folders(config: EngineConfig, *, only: Sequence[str] = TEXTS) -> tuple[Path, Path]:
    """Return (model folder, tokenizer folder) of an engine. Download models that are on the hub, without their weights.

    only   glob patterns of the files to download
    An empty model name means the bundled model. Raises ModelNotFound in one line for an unknown path or id, a gated
    repository or a failed download.
    """
    folder, tokenizer = _resolve(config.model.model, config, only), config.model.tokenizer
    return folder, _resolve(tokenizer, config, only) if tokenizer else folder


def absent_weights(config: EngineConfig, folder: Path) -> Repository | None:
    """Return the hub repository with the weights that `folder` lacks; None when no weights must be downloaded."""
    needed = config.load.load_format != "dummy" and config.device.device != "mock"
    return _absent(config, folder) if needed else None


def fetch_weights(config: EngineConfig, folder: Path, check: Callable[[Checkpoint], None]) -> None:
    """Download the weights that `folder` lacks; first call `check` with their headers, which may raise.

    Raises ModelNotFound, WeightsError for damaged headers, and the errors of `check`.
    """
    repository = absent_weights(config, folder)
    if repository is not None:
        checkpoint = repository.read_headers(folder)
        with repository.named(folder):
            check(checkpoint)
        replace(repository, revision=folder.name).download(WEIGHTS)


def read_headers(config: EngineConfig, folder: Path) -> Checkpoint:
    """Read the safetensors headers of a model in `folder`, or on the hub when `folder` has no weights.

    Raises WeightsError like `read_checkpoint`, or ModelNotFound.
    """
    repository = _absent(config, folder)
    return read_checkpoint(folder) if repository is None else repository.read_headers(folder)


def _resolve(model: str, config: EngineConfig, only: Sequence[str]) -> Path:
    found = _find(model, config)
    return found if isinstance(found, Path) else found.download(only)


def _find(model: str, config: EngineConfig) -> Path | Repository:
    """Return the folder or the hub repository called `model`; the bundled folder for ""."""
    if not model:
        return bundled_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model == NAME:  # the name under which it is served
        return bundled_model()
    if path.is_file():
        raise ModelNotFound(f"{model} is a file: give the folder that holds config.json and the .safetensors files.")
    if not _HUB_ID.fullmatch(model) or model.count("/") != 1:
        raise ModelNotFound(f"{model!r} does not exist: give a folder, or a model id of the hub like Qwen/Qwen3-0.6B.")
    return Repository(model, config.model.revision, config.load)


def _absent(config: EngineConfig, folder: Path) -> Repository | None:
    """Return the repository whose weights `folder` lacks; None for a folder that the user named or that is complete."""
    found = _find(config.model.model, config)
    if isinstance(found, Path):
        return None
    try:
        weight_files(folder)
    except WeightsError:
        return found
    return None
