"""The way of one stored tensor into the memory of a kernel, on each rank: `quire trace --from load --tensor NAME`."""

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError
from quire.contracts.params import Param, num_experts, of_expert
from quire.entry.cli.table import format_bytes
from quire.entry.llm import LLM
from quire.explain.describe import plan_engine
from quire.explain.near_names import hint
from quire.explain.render_ranks import cut_words
from quire.observe.calls import PACKAGE
from quire.plan.parallel_notes import listed
from quire.quantization.formats import tensor_names
from quire.reports.engine import PlanReport
from quire.reports.ranks import rank_name, slices_of
from quire.weights.files import read_checkpoint


def load_lines(llm: LLM, tensor: str | None) -> Iterator[str]:
    """Yield the way of a stored tensor to each rank that reads it, as lines.

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
    yield from (f"  {one}" for one in rank_slices(report, found))
    yield from (f"  {one}" for one in ways_to_kernels(report, found))
    if engine.runner is None:
        yield "  in the processes of the ranks: their memory is not shown"
        return
    place, *others = _places(param, found[0])
    alone = param.shard == "experts" and not others
    for words in _memory(engine.runner.model, param, place if alone else -1):
        yield f"  {words}"


def ways_to_kernels(report: PlanReport, names: Sequence[str]) -> Iterator[str]:
    """Yield the ways of a module's stored tensors to each parameter that reads them on any rank, as lines.

    Two parameters read a tied embedding where the first and the last stage are different ranks.
    """
    held = (param for rank, _ in report.holdings.held for param in report.holdings.params_of(rank))
    readers = {one.name: one for one in held if any(name in names for name in tensor_names(one))}
    for name, param in readers.items():
        yield from (f"{name}: {words}" if len(readers) > 1 else words for words in _way(report, param))


def _way(report: PlanReport, param: Param) -> Iterator[str]:
    """Yield a parameter's format, the functions on its way to the kernel, and what the kernel has, as lines."""
    layer = param.name.split(".")[1] if param.name.startswith("layers.") else ""
    described = next(
        weight
        for one in report.layers()
        for weight in one["weights"]
        if weight["name"] == param.name and (not layer or one["layer"] == layer)
    )
    if described["format"] != "unquantized":
        stored = described["stored_as"] or "stored unquantized"
        yield f"format {described['format']}: {stored}; decided by {described['decided_by']}"
    for stage in ("load", "convert", "pack", "run"):
        if described[stage]:
            yield f"{stage}  {_function(described[stage])}"
    whole = f", {format_bytes(described['bytes'])}" * (report.plan.mesh.parallel.size == 1)
    yield f"as the kernel has it: {described['dtype']}{whole}"


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
        raise ConfigError(f"no parameter reads {name!r}.{hint(name, named, report.holdings.layout)}")
    return found


def rank_slices(report: PlanReport, names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each rank that reads a module's stored tensors: its slices, and their rows in a parameter.

    The slices are those of `quire explain --rank N`. One device reads whole tensors, and its line tells the rows alone.
    """
    parallel, holdings = report.plan.mesh.parallel, report.holdings
    for rank, _ in holdings.held:
        for param in holdings.params_of(rank):
            cuts = [one for one in slices_of(report, param) if one["tensor"] in names]
            if not cuts:
                continue
            where = f"{_rows(param, names[0])}, {'x'.join(map(str, param.shape))} on this rank"
            if parallel.size == 1:
                yield where
                continue
            one = next(one for one in holdings.with_one_expert(rank) if one.name == param.name)
            size = format_bytes(holdings.num_bytes(one, len(rank.expert_ids) if param.shard == "experts" else 1))
            yield f"{rank_name(rank, parallel)} reads {_cuts(cuts, len(names) > 1)}: {where}, {size} for the kernel"


def _cuts(slices: Sequence[Mapping[str, Any]], named: bool) -> str:
    """Return slices of stored tensors in words: "rows 0-127 of 256". named: each with the tensor's last name"""
    by_tensor = dict[str, list[str]]()
    for one in slices:
        by_tensor.setdefault(one["tensor"], []).append(cut_words(one))
    words = {name: " and ".join(dict.fromkeys(cuts)) for name, cuts in by_tensor.items()}
    if not named:
        (cut,) = words.values()
        return "it whole" if cut == "whole" else cut
    return ", ".join(f"{name.rpartition('.')[2]} {cut}" for name, cut in words.items())


def _places(param: Param, name: str) -> dict[int, tuple[int, int]]:
    """Return expert's place in the stack (0 without experts) -> first and end row of a stored tensor's rows there."""
    module, count, found = name.rpartition(".")[0], num_experts(param), dict[int, tuple[int, int]]()
    for place in range(count):
        first = 0
        for part in of_expert(param, place, count).parts:
            if part.stored.rpartition(".")[0] == module:
                found[place] = found.get(place, (first, 0))[0], first + part.rows
            first += part.rows
    return found


def _rows(param: Param, name: str) -> str:
    """Return the rows that a stored tensor fills in a parameter, in words."""
    places = _places(param, name)
    begin, end = next(iter(places.values()))
    rows = f"rows {begin:,} to {end:,} of"
    if param.shard != "experts":
        return f"{rows} {param.name}"
    each = len(param.parts) // num_experts(param)
    ids = [int(param.parts[place * each].name.partition(".")[0]) for place in places]
    experts = f"expert {ids[0]}" if len(ids) == 1 else f"each of the {len(ids)} experts {listed(ids)}"
    return f"{rows} {experts} of {param.name}"


def _function(name: str) -> str:
    """Return a function's full name with its file and line."""
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    code = inspect.unwrap(function).__code__
    return f"{name}  {code.co_filename.removeprefix(f'{PACKAGE}/')}:{code.co_firstlineno}"


def _memory(model: Any, param: Param, place: int) -> Iterator[str]:
    """Yield the tensors of a loaded parameter: address, device, shape and bytes. place: of an expert; -1: of all"""
    *path, last = param.name.split(".")
    owner = model
    for part in path:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part, None)
        if owner is None:
            return
    values = getattr(owner, "packed", None)
    if values is None:
        values = getattr(owner, last, None)
    stacked = num_experts(param) if place >= 0 else 0
    tensors = _tensors(values, last, place, stacked) if param.shard == "experts" else _tensors(values)
    for one in {one.data_ptr(): one for one in tensors}.values():
        shape, kind = "x".join(map(str, one.shape)), str(one.dtype).removeprefix("torch.")
        storage = one.untyped_storage().nbytes()
        shared = f", in a storage of {format_bytes(storage)}" * (storage > one.nbytes)
        yield f"memory  0x{one.data_ptr():x} on {one.device}: {shape} {kind}, {format_bytes(one.nbytes)}{shared}"


def _tensors(value: Any, last: str = "", place: int = -1, stacked: int = 0) -> Iterator[Tensor]:
    """Yield the tensors of packed weights.

    last      parameter of experts: only this one of their matrices; "": all
    place     of the expert in its stack
    stacked   number of experts that lists and tensors stack here; 0: they are of one expert, or all are wanted
    """
    if last and hasattr(value, last):
        yield from _tensors(getattr(value, last), "", place, stacked)
    elif isinstance(value, torch.Tensor):
        yield value[place] if stacked and value.ndim and len(value) == stacked else value
    elif isinstance(value, list) and stacked and len(value) == stacked:
        yield from _tensors(value[place], last)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one, last, place, stacked)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), last, place, stacked)
