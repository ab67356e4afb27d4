"""New weights on their way to a rank: a folder of safetensors, or tensors that another process sends to rank 0.

Tensors that are sent are kept in files of a folder of their own until the update ends. So both ways are proved and
loaded alike, and a process that stops in the middle has changed nothing.
"""

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from quire.contracts.errors import ConfigError, InvalidParameter
from quire.distributed.transfer_group import TransferGroup

INIT_KEYS = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int}
UPDATE_KEYS = {"names": list, "dtype_names": list, "shapes": list}


class NewWeights:
    """The new weights of an update, on one rank.

    backend   "files": `update` names a folder, as all ranks see it. "gloo": rank 0 receives tensors
    first     True: this is rank 0 of the engine
    """

    def __init__(self, backend: str, *, first: bool) -> None:
        self._backend, self._first = backend, first
        self._group: TransferGroup | None = None
        self._folder = ""
        self._own: Path | None = None
        self._num_files = 0

    def join(self, info: dict[str, Any]) -> None:
        """Join the group of a trainer. info: {"master_address", "master_port", "rank_offset", "world_size"}."""
        if self._backend == "files":
            return
        _check(info, INIT_KEYS, "init_info")
        if not 0 < info["rank_offset"] < info["world_size"]:
            raise InvalidParameter(
                f"init_info: rank_offset={info['rank_offset']} must be above 0, the trainer's rank, and below "
                f"world_size={info['world_size']}; the engine takes one place.",
                param="init_info",
            )
        if not self._first:
            return
        try:
            self._group = TransferGroup(
                info["master_address"],
                info["master_port"],
                rank=info["rank_offset"],
                size=info["world_size"],
            )
        except RuntimeError as error:
            raise ConfigError(f"the group of the weights was not joined: {_first_line(error)}.") from error

    def start(self) -> None:
        """Begin an update."""
        if self._backend == "gloo" and self._first and self._group is None:
            raise ConfigError("the engine has joined no group: call /init_weight_transfer_engine first.")
        self.end()

    def update(self, info: dict[str, Any]) -> None:
        """Take a folder {"path"}, or receive tensors {"names", "dtype_names", "shapes"}, in this order."""
        if self._backend == "files":
            _check(info, {"path": str}, "update_info")
            if self._folder not in ("", info["path"]):
                raise InvalidParameter(f"an update has one folder, and {self._folder} was named.", param="update_info")
            if not Path(info["path"]).is_dir():
                raise InvalidParameter(f"{info['path']} is no folder that the engine can see.", param="update_info")
            self._folder = info["path"]
            return
        _check(info, UPDATE_KEYS, "update_info")
        every = [info[name] for name in UPDATE_KEYS]
        if len({len(one) for one in every}) > 1:
            raise InvalidParameter("update_info: names, dtype_names and shapes differ in number.", param="update_info")
        dtypes = [getattr(torch, str(name).removeprefix("torch."), None) for name in info["dtype_names"]]
        for name, dtype, shape in zip(info["names"], dtypes, info["shapes"], strict=True):
            sizes = all(isinstance(size, int) and size >= 0 for size in shape)
            if not isinstance(dtype, torch.dtype) or not sizes or math.prod(shape) > 1 << 40:
                raise InvalidParameter(f"update_info: {name}: no such dtype, or no shape.", param="update_info")
        if self._first:
            self._receive(info["names"], dtypes, info["shapes"])

    def _receive(self, names: list[str], dtypes: list[Any], shapes: list[Any]) -> None:
        from safetensors.torch import save_file

        assert self._group is not None, "no update begins before"
        try:
            found = {
                name: self._group.receive(tuple(shape), dtype)
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            }
        except RuntimeError as error:
            self._group = None
            raise ConfigError(
                f"tensors did not come ({_first_line(error)}): the weights stay as they are. Join a group again."
            ) from error
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="quire-weights-"))
        save_file(found, self._own / f"part-{self._num_files:05}.safetensors")
        self._num_files += 1

    @property
    def staged(self) -> str | None:
        """Folder of the update; None: this rank knows of none."""
        return self._folder or (None if self._own is None else str(self._own))

    def end(self) -> None:
        """Forget the update, and remove the files of tensors that were sent."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        self._folder, self._own, self._num_files = "", None, 0


def _check(info: dict[str, Any], keys: dict[str, type], param: str) -> None:
    if set(info) != set(keys) or not all(isinstance(info[name], kind) for name, kind in keys.items()):
        wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in keys.items())
        raise InvalidParameter(f"{param}: give {wanted}, and no more.", param=param)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
