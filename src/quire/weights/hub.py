"""Repositories of the Hugging Face hub: their small files, the headers of their weights, and the weights.

Knows the hub client and its errors. No torch.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.config.engine import LoadConfig
from quire.config.env import hub_offline
from quire.contracts.errors import ModelNotFound, WeightsError
from quire.weights.files import (
    AGAIN,
    Checkpoint,
    HeaderEntry,
    StoredTensor,
    read_checkpoint,
    read_header,
    stored_tensors,
    weight_files,
)

IGNORED = ("consolidated*", "original/*", "*/*.safetensors")  # other frameworks' weights, second copies of the same
ENTRY = ("dtype", "shape", "data_offsets")  # of a tensor in a header
NUM_THREADS = 8  # that ask for headers


@dataclass(frozen=True)
class Repository:
    """A model on the Hugging Face hub at a revision (None: main). `load`: options with the token and cache folder."""

    name: str
    revision: str | None
    load: LoadConfig

    @property
    def offline(self) -> str:
        """Name of the option or variable that forbids network calls (--offline, HF_HUB_OFFLINE); "" if none does."""
        return "--offline" if self.load.offline else "HF_HUB_OFFLINE" if hub_offline() else ""

    def download(self, patterns: Sequence[str]) -> Path:
        """Download the files that match these glob patterns. Return their local folder. Raises ModelNotFound."""
        from huggingface_hub import snapshot_download

        with self._explained():
            return Path(
                snapshot_download(
                    self.name,
                    revision=self.revision,
                    cache_dir=self.load.download_dir,
                    token=self.load.hf_token,
                    local_files_only=self.load.offline,
                    allow_patterns=list(patterns),
                    ignore_patterns=list(IGNORED),
                )
            )

    def read_headers(self, folder: Path) -> Checkpoint:
        """Read the safetensors headers of the repository on the hub; nothing else is downloaded.

        folder   local folder of the repository's small files; its name is the commit
        Raises ModelNotFound where the network is needed and cannot be used, WeightsError as `read_checkpoint`.
        """
        if self.offline:
            raise ModelNotFound(
                f"{self.name!r} is in the cache without all of its weights: run it once without "
                f"{self.offline}, or give a folder."
            )
        from huggingface_hub import HfApi

        with self.named(folder), self._explained():
            found = HfApi(token=self.load.hf_token).list_repo_tree(self.name, revision=folder.name)
            sizes = {entry.path: getattr(entry, "size", 0) for entry in found}
            files = weight_files(folder, sizes)
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                headers = pool.map(lambda path: self._read_header(path, sizes[path.name]), files)
                return read_checkpoint(folder, sizes, dict(zip(files, headers, strict=True)).__getitem__)

    @contextmanager
    def named(self, folder: Path) -> Iterator[None]:
        """Context manager: a WeightsError raised inside names the repository instead of the local `folder`.

        The faulty files are on the hub, not in the local folder.
        """
        try:
            yield
        except WeightsError as error:
            text = str(error).replace(f"{folder}/", f"{self.name}: ").replace(str(folder), self.name)
            raise WeightsError(text.replace(AGAIN, "name a --revision that is whole, or ask its owner.")) from None

    def _read_header(self, path: Path, size: int) -> list[StoredTensor]:
        if path.is_file():
            return read_header(path)
        from huggingface_hub import HfApi
        from huggingface_hub.errors import SafetensorsParsingError

        try:
            found = HfApi(token=self.load.hf_token).parse_safetensors_file_metadata(
                self.name, path.name, revision=path.parent.name
            )
        except SafetensorsParsingError:
            raise WeightsError(f"{path} has a damaged header: {AGAIN}") from None
        entries = {name: {key: getattr(tensor, key) for key in ENTRY} for name, tensor in found.tensors.items()}
        text = {"__metadata__": found.metadata} | entries if found.metadata else entries
        least = 8 + len(json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode())
        header = {
            name: HeaderEntry(one.dtype, list(one.shape), list(one.data_offsets)) for name, one in found.tensors.items()
        }
        return stored_tensors(path, header, 0, size - least)  # the client does not tell how long the header is

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the hub client into a ModelNotFound of one line."""
        from huggingface_hub import errors

        log_in = "log in with `hf auth login`, or set HF_TOKEN"
        try:
            yield
            return
        except (ModelNotFound, WeightsError):
            raise
        except errors.GatedRepoError:
            reason = f"is gated: accept its terms at https://huggingface.co/{self.name} and {log_in}."
        except errors.RepositoryNotFoundError:
            reason = f"is neither a folder here nor a repository on the hub (or it is private: {log_in})."
        except errors.RevisionNotFoundError:
            reason = (
                f"has no revision {self.revision!r}: name a branch, tag or commit of "
                f"https://huggingface.co/{self.name}."
            )
        except errors.LocalEntryNotFoundError:
            reason = "is not a folder, and the hub cannot be reached: check the network, or give a folder."
            if self.offline:
                reason = (
                    "is not a folder and was not downloaded before: run it once without "
                    f"{self.offline}, or give a folder."
                )
        except errors.HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else "no status"
            fix = f"{log_in} with a token that may read it" if status in (401, 403) else "try again later"
            reason = f"could not be downloaded (the hub answered {status}): {fix}."
        except Exception as error:  # the hub client also lets through errors of whichever HTTP library it is built on
            detail = (str(error).splitlines() or [""])[0]
            reason = f"could not be downloaded ({type(error).__name__}: {detail}): try again later."
        raise ModelNotFound(f"{self.name!r} {reason}")
