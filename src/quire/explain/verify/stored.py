"""A reference in a file, for `quire verify --dump` and `--against`: values of transformers that another machine reads.

    norms, projections   of each row of each stage: its length, and its products with WIDTH seeded vectors of +-1
    logits               [N, V] float32 of the N greedy tokens
    told                 JSON: the fields of `StoredReference` that are no tensors

The file is of safetensors. Rows are compared by their projections: the length of the difference of two rows is, on
average, the length of the difference of their projections, whatever number of the rows differs.
"""

import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.contracts.errors import ConfigError
from quire.weights.files import read_checkpoint

VERSION = 1
WIDTH = 16  # vectors of a projection; the length of a difference is found to about a fifth
KEY, DIGEST = "quire reference", "digest"  # of the file's metadata
IGNORED = ("_name_or_path", "transformers_version")  # keys of config.json that change no number
AGAIN = "write it again with --dump, or copy it again"


@dataclass(frozen=True, kw_only=True)
class StoredReference:
    """A reference.

    model        name of the model
    versions     library -> its version, where the reference was taken, and the machine
    config       config.json of the checkpoint
    checkpoint   name of each tensor of the checkpoint -> digest of its bytes
    num_prompt   tokens of the prompt
    token_ids    prompt and greedy tokens
    stages       names of the stages
    coded        True: activations or the KV cache are rounded to codes on purpose
    norms        [S, T] of S stages and T tokens: all but the last one of `token_ids`
    projections  [S, T, WIDTH]
    logits       [N, V] of the greedy tokens
    """

    model: str
    versions: dict[str, str]
    config: dict[str, Any]
    checkpoint: dict[str, str]
    num_prompt: int
    token_ids: list[int]
    stages: list[str]
    coded: bool
    norms: Tensor
    projections: Tensor
    logits: Tensor
    version: int = VERSION

    def write(self, path: Path) -> None:
        """Write the reference to a file, whole or not at all. Raises ConfigError if that fails."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        told = json.dumps({name: value for name, value in vars(self).items() if name not in TENSORS})
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, part, {KEY: told, DIGEST: _digest(told, tensors)})
            part.replace(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise ConfigError(f"--dump {path}: the file cannot be written ({error}): choose another place.") from None


TENSORS = ("norms", "projections", "logits")


def check_dump(path: Path) -> None:
    """Raise ConfigError unless a reference can be written to `path`: over another one, but over no other file."""
    if not path.name or path.is_dir():
        raise ConfigError(f"--dump {path}: this is a folder: give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--dump {path}: there is no folder {path.absolute().parent}.")
    if path.exists() and not _is_reference(path):
        raise ConfigError(f"--dump {path}: this file is no reference of `quire verify`, and stays: give another name.")


def _is_reference(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def read(path: Path) -> StoredReference:
    """Read a reference. Raises ConfigError for a file that is none, or that is damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        there = "this is a folder: give a file of --dump" if path.is_dir() else "there is no such file"
        raise ConfigError(f"--against {path}: {there}.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except OSError as error:
        raise ConfigError(f"--against {path}: the file cannot be read ({error.strerror}).") from None
    except SafetensorError as error:
        raise ConfigError(f"--against {path}: the file is cut, or none of safetensors ({error}): {AGAIN}.") from None
    if KEY not in metadata:
        raise ConfigError(f"--against {path}: the file is no reference of `quire verify`: {AGAIN}.")
    if metadata.get(DIGEST) != _digest(metadata[KEY], tensors):
        raise ConfigError(f"--against {path}: the file is damaged, its numbers are not those written: {AGAIN}.")
    told = json.loads(metadata[KEY])
    if told["version"] != VERSION:
        raise ConfigError(
            f"--against {path}: the file has form {told['version']}, and this version of Quire reads form {VERSION}: "
            "write it again with --dump of this version."
        )
    return StoredReference(**told, **tensors)


def take(
    model: str, folder: Path, token_ids: list[int], num_prompt: int, stages: dict[str, Tensor], *, coded: bool
) -> StoredReference:
    """Return the reference of a checkpoint. stages: results [T, width] of transformers, by stage"""
    libraries = {name: importlib.metadata.version(name) for name in ("transformers", "torch", "safetensors")}
    return StoredReference(
        model=model,
        versions=libraries | {"python": platform.python_version(), "machine": platform.machine()},
        config=json.loads((folder / "config.json").read_text()),
        checkpoint=digests(folder),
        num_prompt=num_prompt,
        token_ids=token_ids,
        stages=list(stages),
        coded=coded,
        norms=torch.stack([rows.double().norm(dim=-1).float() for rows in stages.values()]),
        projections=torch.stack([projected(rows) for rows in stages.values()]),
        logits=stages["logits"][num_prompt - 1 :],
    )


def projected(rows: Tensor) -> Tensor:
    """Return products [T, WIDTH] of rows [T, width] with vectors of +-1, over the root of WIDTH.

    The signs are hashes of their places (splitmix64), so that every machine has the same ones.
    """
    with np.errstate(over="ignore"):
        hashed = np.arange(1, rows.shape[1] * WIDTH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            hashed = (hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)
    signs = torch.from_numpy((hashed >> np.uint64(63)).astype(np.float64).reshape(-1, WIDTH))
    return (rows.double() @ (2 * signs - 1) / WIDTH**0.5).float()


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of the bytes of each tensor of a checkpoint, by name."""
    tensors = read_checkpoint(folder).tensors.values()
    return {one.name: blake2b(one.read(), digest_size=8, person=one.dtype.encode()).hexdigest() for one in tensors}


def check_checkpoint(stored: StoredReference, folder: Path, where: Path) -> None:
    """Raise ConfigError unless the reference is of the checkpoint in `folder`. where: file of the reference"""
    config, theirs = (
        {key: value for key, value in one.items() if key not in IGNORED}
        for one in (json.loads((folder / "config.json").read_text()), stored.config)
    )
    begin = f"{where} is a reference of another checkpoint than {folder}:"
    for key in sorted(config.keys() | theirs.keys()):
        if config.get(key) != theirs.get(key):
            raise ConfigError(f"{begin} config.json has {key} {config.get(key)!r} here and {theirs.get(key)!r} there.")
    own = digests(folder)
    there = stored.checkpoint
    differ = [name for name in sorted(own.keys() | there.keys()) if own.get(name) != there.get(name)]
    if differ:
        name = differ[0]
        how = "is not here" if name not in own else "is not there" if name not in there else "has other numbers"
        raise ConfigError(f"{begin} tensor {name} {how}, as do {len(differ) - 1} more.")


def _digest(told: str, tensors: dict[str, Tensor]) -> str:
    found = blake2b(told.encode(), digest_size=16)
    for name in sorted(tensors):
        found.update(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}".encode())
        found.update(tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()
