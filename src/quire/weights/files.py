"""Safetensors headers and the index of a checkpoint folder, read without the weights.

A safetensors file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}} and
the bytes; offsets count from the end of the header (https://github.com/huggingface/safetensors, format). No torch.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import msgspec

from quire.contracts.errors import WeightsError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # bytes, the format's own limit
MAX_TENSORS = 1 << 17  # of a file; the largest files of published models have some thousands
MAX_NAMES = 1 << 20  # of an index
MAX_NAME = 1024  # characters of a tensor's name
MAX_AXES = 64  # of a tensor, as many as a PyTorch tensor can have
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
AGAIN = "download it again."  # the remedy for damaged files of a folder
LFS_POINTER = b"version "  # the beginning of the text that Git LFS keeps in place of a large file
PICKLES = (".bin", ".pt", ".pth")
DAMAGED = (msgspec.MsgspecError, ValueError, RecursionError)  # errors of text that is no JSON of the expected form
# Names of modules in some checkpoints of a family -> their names in others. OLMo-Hybrid's norms are stored under their
# names in training; transformers renames them, and when it saves a model it names a norm of all layers so. It also
# saves the MLP of Kimi-Linear's first layers under the name of the experts.
RENAMED = (
    (re.compile(r"(?<=\d\.)attention_layer_norm(?=\.weight$)"), "input_layernorm"),
    (re.compile(r"(?<=\d\.)feedforward_layer_norm(?=\.weight$)"), "post_attention_layernorm"),
    (re.compile(r"(?<=\d\.)block_sparse_moe(?=\.(gate|up|down)_proj\.)"), "mlp"),
)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


class HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor in a safetensors header. data_offsets: first byte and end in the file's data."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _Index(msgspec.Struct, frozen=True):
    """The index of a checkpoint: tensor name -> file name."""

    weight_map: dict[str, str]


# A header is decoded level by level. Metadata is not looked into.
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(HeaderEntry)
_INDEX = msgspec.json.Decoder(_Index)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    dtype    in safetensors' spelling (BF16, ...)
    offset   bytes before the tensor: from the start of `file`, or, while `file` is on the hub, from its header's end
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    def read(self) -> bytearray:
        """Return the bytes of the tensor. Raises WeightsError for a file that ends within it."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            raw = bytearray(self.num_bytes)
            if file.readinto(raw) != len(raw):
                raise WeightsError(f"{self.file} ends within {self.name}: {AGAIN}")
        return raw


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint folder by name, in file order, and the files in the order in which they are read."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_checkpoint(
    folder: Path, names: Collection[str] | None = None, read: Callable[[Path], list[StoredTensor]] | None = None
) -> Checkpoint:
    """Read the header of every safetensors file in a folder, and check it against its file and the index.

    names   names of the files that the folder has (default: those on disk)
    read    function that reads the header of a file (default: `read_header`)
    Raises WeightsError naming the file, the tensor and the fix: no safetensors, missing shard, truncated or damaged
    file, a tensor in two files, a tensor that the index promises and no file holds.
    """
    folder = Path(folder)
    placed, files = _read_index(folder), weight_files(folder, names)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for tensor in (read or read_header)(path):
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise WeightsError(f"{tensor.name} is in both {other.file.name} and {path.name}: remove one of them.")
    for name, file_name in placed.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise WeightsError(f"{folder / file_name} has no tensor {name}, which {INDEX} promises: {AGAIN}")
    full = full_names(tensors)
    return Checkpoint(folder, tuple(files), {full[name]: replace(t, name=full[name]) for name, t in tensors.items()})


def weight_files(folder: Path, names: Collection[str] | None = None) -> list[Path]:
    """Return the safetensors files of a checkpoint: those in its index, or without an index those found by name.

    names   names of the files that the folder has (default: those on disk)
    Raises WeightsError when there are no files, or one in the index is missing.
    """
    if names is None:
        names = {path.name for path in folder.glob("*") if path.is_file()}
    files = sorted({folder / name for name in _read_index(folder).values()})
    for path in files:
        if path.name not in names:
            raise WeightsError(f"{path} is missing ({INDEX} names it): {AGAIN}")
    return files or _find_files(folder, names)


def stored_in(folder: Path) -> dict[str, str]:
    """Return a dict of stored tensors: name -> file name, from the index or the files' headers; {} without weights.

    Raises WeightsError like `read_checkpoint`.
    """
    placed = _read_index(Path(folder))
    if placed or not any(Path(folder).glob("*.safetensors")):
        full = full_names(placed)
        return {full[name]: file for name, file in placed.items()}
    return {tensor.name: tensor.file.name for tensor in read_checkpoint(folder).tensors.values()}


def full_names(stored: Collection[str]) -> dict[str, str]:
    """Return a dict: tensor name as stored -> the name that a causal LM's checkpoint has: with the prefix "model.".

    Checkpoints of embedding models lack the prefix. If `stored` has it, or is an EAGLE head, each name keeps its
    beginning. Modules that have several names get one, see RENAMED.
    """
    lacks = "embed_tokens.weight" in stored and not {"fc.weight", "fusion_fc.weight"} & {*stored}
    return {name: known_name(f"model.{name}" if lacks else name) for name in stored}


def known_name(name: str) -> str:
    """Return the name of a tensor of which some checkpoints have another one, see RENAMED."""
    for pattern, known in RENAMED:
        name = pattern.sub(known, name)
    return name


def read_header(path: Path) -> list[StoredTensor]:
    """Read the tensors of a safetensors file, sorted by offset. Raises WeightsError when it is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begins = file.read(8)
        if begins == LFS_POINTER:
            raise WeightsError(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder.")
        length = int.from_bytes(begins, "little")
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            raise WeightsError(f"{path} is truncated (a header of {length} bytes in a file of {size}): {AGAIN}")
        text = file.read(length)
    if text.count(b'"data_offsets"') > MAX_TENSORS:  # a key of every tensor; inside of strings its quotes are escaped
        raise WeightsError(f"{path} has a header of more than {MAX_TENSORS:,} tensors: {AGAIN}")
    try:
        header = _HEADER.decode(text)
        if any(len(name) > MAX_NAME for name in header):
            raise ValueError
    except DAMAGED:
        raise WeightsError(f"{path} has a damaged header: {AGAIN}") from None
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, raw) for name, raw in header.items()}
    tensors = stored_tensors(path, entries, 8 + length, size)
    end = tensors[-1].offset + tensors[-1].num_bytes if tensors else 8 + length
    if end != size:
        raise WeightsError(f"{path} has {size - end} bytes behind its last tensor: {AGAIN}")
    return tensors


def stored_tensors(path: Path, header: Mapping[str, HeaderEntry], data: int, size: int) -> list[StoredTensor]:
    """Return the tensors that a decoded `header` lists, sorted by offset.

    data   offset at which the tensors' bytes begin in the file
    size   bytes of the file
    Raises WeightsError, also for gaps between tensors and for shared bytes, which the format does not allow.
    """
    tensors = [_stored(path, name, entry, data, size) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data
    for tensor in tensors:
        if tensor.offset != end:
            raise WeightsError(
                f"{path}: {tensor.name} begins at byte {tensor.offset}, and the tensor before it ends at {end}: {AGAIN}"
            )
        end += tensor.num_bytes
    return tensors


def _entry(path: Path, name: str, raw: msgspec.Raw) -> HeaderEntry:
    try:
        return _ENTRY.decode(raw)
    except DAMAGED:
        raise WeightsError(_of_entry(path, name)) from None


def _of_entry(path: Path, name: str) -> str:
    return f"{path}: the header entry of {name} is damaged or of an unknown dtype: {AGAIN}"


def _stored(path: Path, name: str, entry: HeaderEntry, data: int, size: int) -> StoredTensor:
    dtype, shape = entry.dtype, tuple(entry.shape)
    known = dtype in ITEM_BYTES and len(shape) <= MAX_AXES and len(entry.data_offsets) == 2
    if not known or min((*shape, *entry.data_offsets)) < 0:
        raise WeightsError(_of_entry(path, name))
    start, end = entry.data_offsets
    exact = prod(shape) * ITEM_BYTES[dtype]
    if end - start != exact:
        raise WeightsError(f"{path}: {name} {list(shape)} {dtype} needs {exact} bytes, has {end - start}: {AGAIN}")
    if data + end > size:
        raise WeightsError(f"{path} is truncated: {name} ends at byte {data + end}, the file at {size}: {AGAIN}")
    return StoredTensor(name, dtype, shape, path, data + start, exact)


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name; {} when there is no index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_HEADER:
            raise ValueError
        placed = _INDEX.decode(path.read_bytes()).weight_map
        if len(placed) > MAX_NAMES or not all(Path(file).name == file for file in set(placed.values())):
            raise ValueError
    except DAMAGED:
        raise WeightsError(f"{path} is damaged: {AGAIN}") from None
    return placed


def _find_files(folder: Path, names: Collection[str]) -> list[Path]:
    """The safetensors files of a folder without an index; a set of shards must be complete."""
    files = sorted(
        folder / name for name in names if name.endswith(".safetensors") and not name.startswith("consolidated")
    )
    if (folder / "model.safetensors") in files:
        return [folder / "model.safetensors"]
    if not files:
        raise WeightsError(_no_files(folder, names))
    for path in files:
        match = _SHARD.fullmatch(path.name)
        if match is None:
            continue
        for number in range(1, int(match["total"]) + 1):
            name = f"{match['stem']}-{number:05}-of-{match['total']}.safetensors"
            if name not in names:
                raise WeightsError(f"{folder / name} is missing (shard {path.name} is there): {AGAIN}")
    return files


def _no_files(folder: Path, names: Collection[str]) -> str:
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        return (
            f"{folder} has only {pickles[0]}: .bin and .pt files can run code when opened and are not read. "
            "Load it once with transformers and call save_pretrained(folder), which writes safetensors; of an EAGLE "
            "head, safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')."
        )
    return (
        f"{folder} has no .safetensors file: give a folder with the weights; --load-format dummy runs a model with "
        "random ones."
    )
