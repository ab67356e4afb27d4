"""From what a user typed to a folder on this machine: a local path, or a model id of the Hugging Face hub.

Knows the hub client and its errors. No torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from quire.config.bundled import NAME, bundled_model
from quire.config.engine import EngineConfig, LoadConfig
from quire.contracts.errors import ModelNotFound

# What a model needs; never pickles, other frameworks' weights or second copies of the same weights.
ALLOWED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "LICENSE*")
IGNORED = ("consolidated*", "original/*", "*/*.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_folders(config: EngineConfig, *, only: Sequence[str] = ALLOWED) -> tuple[Path, Path]:
    """The folders of an engine's model and of its tokenizer, downloaded when they are ids of the hub.

    only   patterns of the files that are needed
    Without a model it is the bundled one. Raises ModelNotFound.
    """
    model, tokenizer = config.model.model, config.model.tokenizer
    folder = resolve_model_folder(model, config, only=only) if model else bundled_model()
    return folder, resolve_model_folder(tokenizer, config, only=only) if tokenizer else folder


def resolve_model_folder(model: str, config: EngineConfig, *, only: Sequence[str] = ALLOWED) -> Path:
    """The folder of `model`, downloading it when it is a hub id.

    only   patterns of the files that are needed
    Raises ModelNotFound in one line for a path or id that leads nowhere, a gated repository or a failed download.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model == NAME:  # the name under which it is served
        return bundled_model()
    if path.is_file():
        raise ModelNotFound(f"{model} is a file: give the folder that holds config.json and the .safetensors files.")
    if not _HUB_ID.fullmatch(model) or model.count("/") != 1:
        raise ModelNotFound(f"{model!r} does not exist: give a folder, or a model id of the hub like Qwen/Qwen3-0.6B.")
    return _download(model, config.load, config.model.revision, only)


def _download(model: str, load: LoadConfig, revision: str | None, only: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(
            model, revision=revision, cache_dir=load.download_dir, token=load.hf_token, local_files_only=load.offline,
            allow_patterns=list(only), ignore_patterns=list(IGNORED)))
    except errors.GatedRepoError:
        reason = f"is gated: accept its terms at https://huggingface.co/{model} and log in with `hf auth login`."
    except errors.RepositoryNotFoundError:
        reason = "is neither a folder here nor a repository on the hub (or it is private: log in with `hf auth login`)."
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision!r}: name a branch, tag or commit of https://huggingface.co/{model}."
    except errors.LocalEntryNotFoundError:
        if load.offline:
            reason = "is not a folder and was not downloaded before: run it once without --offline, or give a folder."
        else:
            reason = "is not a folder, and the hub cannot be reached: check the network, or give a folder."
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        reason = f"could not be downloaded (the hub answered {status}): try again later."
    except Exception as error:  # the hub client also lets through errors of whichever HTTP library it is built on
        detail = (str(error).splitlines() or [""])[0]
        reason = f"could not be downloaded ({type(error).__name__}: {detail}): try again later."
    raise ModelNotFound(f"{model!r} {reason}")
