"""The way of one stored tensor into the memory of a kernel: `quire trace --from load --tensor NAME`."""

import difflib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from quire.contracts.errors import ConfigError
from quire.contracts.params import Param, fused
from quire.entry.cli.table import format_bytes
from quire.entry.llm import LLM
from quire.explain.describe import plan_engine
from quire.observe.calls import PACKAGE
from quire.quantization.formats import tensor_names
from quire.weights.files import read_checkpoint


def load_lines(llm: LLM, tensor: str | None) -> Iterator[str]:
    """Yield the way of a stored tensor in an engine of one process, as lines.

    tensor   its name, or that of its module; None: the first projection of queries
    Raises ConfigError for a name that no parameter reads, with the nearest ones.
    """
    engine = llm.engine
    report = plan_engine(engine.config)
    headers = read_checkpoint(engine.folder).tensors
    named = {name: param for param in report.holdings.layout for name in tensor_names(param)}
    name = tensor or next((one for one in named if "q_proj" in one), next(iter(named)))
    found = [one for one in named if one == name or one.rpartition(".")[0] == name.removesuffix(".weight")]
    if not found:
        near = difflib.get_close_matches(name, named, 3, 0.5)
        raise ConfigError(f"no parameter reads {name!r}." + f" Near: {', '.join(near)}." * bool(near))
    param = named[found[0]]
    for one in found:
        if (header := headers.get(one)) is not None:
            shape = "x".join(map(str, header.shape)) or "scalar"
            end = header.offset + header.num_bytes
            yield f"{one}  {shape} {header.dtype}, bytes {header.offset:,} to {end:,} of {header.file.name}"
    yield from _slices(param, found[0])
    layer = param.name.split(".")[1] if param.name.startswith("layers.") else ""
    described = next(
        weight
        for one in report.layers()
        for weight in one["weights"]
        if weight["name"] == param.name and (not layer or one["layer"] == layer)
    )
    if described["format"] != "unquantized":
        stored = described["stored_as"] or "stored unquantized"
        yield f"  format {described['format']}: {stored}; decided by {described['decided_by']}"
    for stage in ("load", "convert", "pack", "run"):
        if described[stage]:
            yield f"  {stage}  {_function(described[stage])}"
    yield f"  as the kernel has it: {described['dtype']}, {format_bytes(described['bytes'])}"
    if engine.runner is None:
        yield "  in the processes of the ranks: their memory is not shown"
        return
    for words in _memory(engine.runner.model, param.name):
        yield f"  {words}"


def _slices(param: Param, name: str) -> Iterator[str]:
    """Yield the place of a tensor's rows in its parameter."""
    module, first, count = name.rpartition(".")[0], 0, fused(param)[0] if param.shard == "experts" else 1
    each = len(param.parts) // count
    for number, part in enumerate(param.parts):
        rows = part.rows
        if part.stored.rpartition(".")[0] == module:
            where = f"expert {number // each} of {param.name}" if count > 1 else param.name
            begin = first if len(param.parts) > 1 else 0
            yield f"  rows {begin:,} to {begin + rows:,} of {where}, {'x'.join(map(str, param.shape))} on this rank"
            return
        first = 0 if count > 1 and (number + 1) % each == 0 else first + rows


def _function(name: str) -> str:
    """Return a function's full name with its file and line."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    code = inspect.unwrap(function).__code__
    return f"{name}  {code.co_filename.removeprefix(f'{PACKAGE}/')}:{code.co_firstlineno}"


def _memory(model: Any, name: str) -> Iterator[str]:
    """Yield the tensors of a loaded parameter: address, device, shape and bytes."""
    *path, last = name.split(".")
    owner = model
    for part in path:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part, None)
        if owner is None:
            return
    values = getattr(owner, "packed", None)
    if values is None:
        values = getattr(owner, last, None)
    for one in _tensors(values):
        shape, kind = "x".join(map(str, one.shape)), str(one.dtype).removeprefix("torch.")
        size = format_bytes(one.untyped_storage().nbytes())
        yield f"memory  0x{one.data_ptr():x} on {one.device}: {shape} {kind}, in {size} of storage"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
