"""Writer of a checkpoint in safetensors: tensors of another one, copied or quantized, one at a time.

The headers are known before any number is, so a file is written in its final form and memory holds one tensor.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from quire.contracts.errors import ConfigError, WeightsError
from quire.kernels.pack.matrix import MOST_POWER, float_scales
from quire.kernels.pack.nearest import largest, quantized, relative_error
from quire.kernels.pack.store import stored_tensors
from quire.quantization.rules import Rule
from quire.quantization.written_schemes import Stored, scale_type
from quire.weights.files import INDEX, StoredTensor
from quire.weights.load import DTYPES


class WriteItem(NamedTuple):
    """A tensor of a checkpoint and the tensors to write for it.

    rule     its quantization; None for a copy
    beside   other tensors of its fused matrix, which share the factor of NVFP4: some engines have one for the matrix
    """

    source: StoredTensor
    rule: Rule | None
    stored: tuple[Stored, ...]
    beside: tuple[StoredTensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that are written."""
        return sum(stored.num_bytes for stored in self.stored)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Result of `write_checkpoint`: bytes before and after, the number of quantized tensors, and the files' names.

    worst   name of the tensor that quantization changed most
    error   relative change of that tensor: norm of the change / norm of the tensor
    """

    bytes_before: int
    bytes_after: int
    num_quantized: int
    worst: str
    error: float
    files: tuple[str, ...]


def write_checkpoint(
    items: Sequence[WriteItem], out: Path, limit: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Written:
    """Write tensors, quantized or copied, to safetensors files of at most `limit` bytes in the folder `out`.

    Several files get an index.

    progress   called with (bytes read, bytes in all)
    Raises WeightsError for a tensor with NaN or infinity. Files that are already written stay.
    """
    shards, total, done = list(_shards(items, limit)), sum(item.source.num_bytes for item in items), 0
    count, placed, errors = len(shards), dict[str, str](), dict[str, float]()
    names = [
        f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for i in range(1, count + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        with (out / name).open("wb") as file:
            places = _write_header(file, [stored for item in shard for stored in item.stored])
            for item in shard:
                if item.rule is None:
                    file.seek(places[item.stored[0].name])
                    file.write(item.source.read())
                else:
                    errors[item.source.name] = _write_quantized(item, item.rule, file, places)
                done += item.source.num_bytes
                progress(done, total)
        placed |= dict.fromkeys(places, name)
    after = sum(item.num_bytes for item in items)
    if count > 1:
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": after}, "weight_map": placed}, indent=2) + "\n")
    worst = max(errors, key=lambda name: errors[name], default="")
    return Written(
        bytes_before=total,
        bytes_after=after,
        num_quantized=len(errors),
        worst=worst,
        error=errors.get(worst, 0.0),
        files=tuple(names),
    )


def _shards(items: Sequence[WriteItem], limit: int) -> Iterator[list[WriteItem]]:
    """Yield the items of each file: as many as fit, at least one."""
    shard, size = list[WriteItem](), 0
    for item in items:
        if shard and size + item.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.num_bytes
    if shard:
        yield shard


def _write_header(file: BinaryIO, stored: Sequence[Stored]) -> dict[str, int]:
    """Write the header of a file, and return the byte at which each tensor begins.

    Wide types come first: then every tensor begins at a multiple of its type's bytes, as readers of slices need.
    """
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    places, at = dict[str, int](), 0
    for one in sorted(stored, key=lambda one: -DTYPES[one.dtype].itemsize):
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": (at, at + one.num_bytes)}
        places[one.name] = at
        at += one.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    return {name: place + 8 + len(raw) for name, place in places.items()}


def _write_quantized(item: WriteItem, rule: Rule, file: BinaryIO, places: dict[str, int]) -> float:
    """Quantize a matrix and write its tensors. Return its relative error."""
    scales = DTYPES[scale_type(rule, item.source.dtype)]
    source = item.source
    weight = _read(source)
    most = max(map(largest, (weight, *map(_read, item.beside)))) if rule.scheme.factor else 0.0
    matrix = quantized(weight, rule.scheme, scales=scales, most=most)
    if not float_scales(matrix).isfinite().all():
        raise WeightsError(
            f"{item.source.file.name}: {item.source.name} has numbers that are not finite, or too "
            "large: download it again."
        )
    if matrix.scale.dtype == torch.uint8 and (matrix.scale > MOST_POWER).any():
        raise ConfigError(
            f"{source.name} has numbers of 14 and more, which are too large for MXFP4: use another --scheme, or "
            f"--ignore {source.name.removesuffix('.weight')}."
        )
    found = stored_tensors(matrix, rule.format, scales)
    for stored in item.stored:
        tensor = found[stored.role].contiguous()
        assert tuple(tensor.shape) == stored.shape and tensor.dtype == DTYPES[stored.dtype], stored.name
        file.seek(places[stored.name])
        file.write(tensor.view(torch.uint8).numpy().data)
    return relative_error(weight, matrix)


def _read(source: StoredTensor) -> Tensor:
    return torch.frombuffer(source.read(), dtype=DTYPES[source.dtype]).view(source.shape)


def copy_files(source: Path, out: Path) -> None:
    """Copy a model's files except its weights and config.json: tokenizer, templates, licence."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not _is_weights(path.name):
            shutil.copyfile(path, out / path.name)


def _is_weights(name: str) -> bool:
    endings = (
        ".safetensors",
        ".safetensors.index.json",
        ".bin",
        ".bin.index.json",
        ".pt",
        ".pth",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
    )
    return name == "config.json" or name.endswith(endings)
