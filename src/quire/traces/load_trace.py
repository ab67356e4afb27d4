"""The way of one stored tensor into the memory of a kernel, on each rank: `quire trace --from load --tensor NAME`."""

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.params import Param, fused
from quire.entry.cli.table import format_bytes
from quire.entry.llm import LLM
from quire.explain.describe import plan_engine
from quire.observe.calls import PACKAGE
from quire.quantization.formats import raw_tensors, tensor_names
from quire.reports.engine import PlanReport
from quire.reports.ranks import rank_name
from quire.weights.files import read_checkpoint

MOST_NAMES = 3  # names that an error tells


def load_lines(llm: LLM, tensor: str | None) -> Iterator[str]:
    """Yield the way of a stored tensor in an engine, as lines.

    tensor   its name, or that of its module; None: the first projection of queries
    Raises ConfigError for a name that no parameter reads, with the nearest ones.
    """
    engine = llm.engine
    report = plan_engine(engine.config)
    headers = read_checkpoint(engine.folder).tensors
    named = _named(report)
    found = _found(report, named, tensor)
    param = named[found[0]]
    for one in found:
        if (header := headers.get(one)) is not None:
            shape = "x".join(map(str, header.shape)) or "scalar"
            end = header.offset + header.num_bytes
            yield f"{one}  {shape} {header.dtype}, bytes {header.offset:,} to {end:,} of {header.file.name}"
    many = len(report.holdings.held) > 1
    yield from _ranks(report, found[0]) if many else _slices(param, found[0])
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
    size = f", {format_bytes(described['bytes'])}" * (not many)
    yield f"  as the kernel has it: {described['dtype']}{size}"
    if engine.runner is None:
        yield "  in the processes of the ranks: their memory is not shown"
        return
    expert = _expert(param, found[0]) if param.shard == "experts" else None
    for words in _memory(engine.runner.model, param.name, expert):
        yield f"  {words}"


def check_tensor(config: EngineConfig, tensor: str) -> None:
    """Raise ConfigError for the name of a tensor that no parameter of a model reads, before it is loaded."""
    report = plan_engine(config)
    _found(report, _named(report), tensor)


def _named(report: PlanReport) -> dict[str, Param]:
    return {name: param for param in report.holdings.layout for name in tensor_names(param)}


def _found(report: PlanReport, named: Mapping[str, Param], tensor: str | None) -> list[str]:
    """Return the stored tensors of a name, which may be that of their module. Raises ConfigError if there are none."""
    name = tensor or next((one for one in named if "q_proj" in one), next(iter(named)))
    found = [one for one in named if one == name or one.rpartition(".")[0] == name.removesuffix(".weight")]
    if not found:
        raise ConfigError(_unread(name, named, report.plan.args.tie_word_embeddings))
    return found


def _unread(name: str, named: Mapping[str, Param], tied: bool) -> str:
    """Return an error for a name that no parameter reads."""
    made = [stored for stored, param in named.items() if name in (param.name, param.module)]
    if made:
        return (
            f"{name} is made of {', '.join(made[:MOST_NAMES])}{', ...' * (len(made) > MOST_NAMES)}: name one of them."
        )
    if tied and name.partition(".")[0] == "lm_head":
        return f"{name} is not stored: the head is tied to the embedding, whose weight it reads."
    ends = [one for one in named if one.removesuffix(".weight").endswith(f".{name.removesuffix('.weight')}")]
    near = ends[:MOST_NAMES] or difflib.get_close_matches(name, named, MOST_NAMES, 0.5)
    return f"no parameter reads {name!r}." + (f" Near: {', '.join(near)}." if near else " `quire weights` lists all.")


def _ranks(report: PlanReport, name: str) -> Iterator[str]:
    """Yield what each rank reads of a stored tensor, and where its slice lies in the rank's parameter."""
    parallel = report.plan.mesh.parallel
    for rank, _ in report.holdings.held:
        for param in report.holdings.params_of(rank):
            for raw in raw_tensors(param):
                for part in raw.parts:
                    if part.stored != name:
                        continue
                    bounds = f"{part.start:,} to {part.start + part.count:,} of {part.matrix[part.axis]:,}"
                    whole = part.count == part.matrix[part.axis]
                    read = "all of it" if whole else f"{('rows', 'columns')[part.axis]} {bounds}"
                    shape = "x".join(map(str, param.shape))
                    yield f"  {rank_name(rank, parallel)} reads {read}, for {param.name}, {shape} on this rank"


def _slices(param: Param, name: str) -> Iterator[str]:
    """Yield the place of a tensor's rows in its parameter."""
    expert = _expert(param, name) if param.shard == "experts" else None
    module, first = name.rpartition(".")[0], 0
    each = len(param.parts) // (1 if expert is None else fused(param)[0])
    for number, part in enumerate(param.parts):
        rows = part.rows
        if part.stored.rpartition(".")[0] == module:
            where = param.name if expert is None else f"expert {expert} of {param.name}"
            begin = first if len(param.parts) > 1 else 0
            yield f"  rows {begin:,} to {begin + rows:,} of {where}, {'x'.join(map(str, param.shape))}"
            return
        first = 0 if expert is not None and (number + 1) % each == 0 else first + rows


def _expert(param: Param, name: str) -> int | None:
    """Return the place of a tensor's expert in a parameter of several; None: of none."""
    count, module = fused(param)[0], name.rpartition(".")[0]
    each = len(param.parts) // count
    places = [number // each for number, part in enumerate(param.parts) if part.stored.rpartition(".")[0] == module]
    return places[0] if count > 1 and places else None


def _function(name: str) -> str:
    """Return a function's full name with its file and line."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    code = inspect.unwrap(function).__code__
    return f"{name}  {code.co_filename.removeprefix(f'{PACKAGE}/')}:{code.co_firstlineno}"


def _memory(model: Any, name: str, expert: int | None) -> Iterator[str]:
    """Yield the tensors of a loaded parameter: address, device, shape and bytes.

    expert   only of this one, where experts lie apart; None: all
    """
    *path, last = name.split(".")
    owner = model
    for part in path:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part, None)
        if owner is None:
            return
    key, values = "packed", getattr(owner, "packed", None)
    if values is None:
        key, values = last, getattr(owner, last, None)
    if expert is not None and isinstance(values, list | tuple) and len(values) > expert and _alike(values):
        key, values = f"{key}[{expert}]", values[expert]
    for label, one in _tensors(key, values):
        shape, kind = "x".join(map(str, one.shape)), str(one.dtype).removeprefix("torch.")
        size, storage = format_bytes(one.nbytes), format_bytes(one.untyped_storage().nbytes())
        held = f", {size}" if size == storage else f", {size} of {storage} of storage"
        yield f"memory  {label} at 0x{one.data_ptr():x} on {one.device}: {shape} {kind}{held}"


def _alike(values: Sequence[Any]) -> bool:
    """Return True if all values have tensors by the same names: there is one for each expert."""
    return len({tuple(label for label, _ in _tensors("", value)) for value in values}) == 1


def _tensors(label: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors(f"{label}[{number}]", one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(f"{label}.{field.name}", getattr(value, field.name))
