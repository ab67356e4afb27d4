"""Quantization of a checkpoint to another one: which tensors, by which rule, with which config.json.

The layout of the model's family says which matrices are quantized. Layers that Quire does not read (multi-token
prediction) follow the modules of the same names in other layers.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config, read_raw_config
from quire.args.families import has_family
from quire.assemble.obtain import foreign_model
from quire.contracts.errors import ConfigError, UnsupportedModel
from quire.contracts.params import FLOATS, Param, num_experts
from quire.models.names import EACH
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout
from quire.quantization.assigned import is_quantizable, is_worthwhile, settled, with_formats
from quire.quantization.kfirst import AWQ
from quire.quantization.read import KEY, find_quantization
from quire.quantization.rules import HEAD, Rule
from quire.quantization.written_schemes import (
    Stored,
    has_groups,
    method_of,
    quantization_config,
    scheme_rule,
    stored_of,
)
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint
from quire.weights.match import match_tensors
from quire.weights.tied import EMBEDDING
from quire.weights.tied import HEAD as HEAD_WEIGHT
from quire.weights.write import WriteItem, Written, copy_files, write_checkpoint

GROUPS = (128, 64, 32, 16, 8)
SPARE_BYTES = 64 << 20  # on the disk, for files beside the weights and headers


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of `quire quantize`.

    scheme, head   names of `SCHEMES`, for the layers and for the LM head; head "": the head stays unquantized
    group_size     number of columns that share a scale; 0: 128, -1: all columns of a row
    ignore         modules that stay unquantized: full names, whole words of names ("mlp", "self_attn.q_proj") or
                   "re:PATTERN"
    """

    scheme: str
    head: str = ""
    group_size: int = 0
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizePlan:
    """Tensors that `quire quantize` reads and writes, in the order of the files, and the config.json of the result."""

    source: Checkpoint
    items: tuple[WriteItem, ...]
    config: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(item.num_bytes for item in self.items)


def quantize_checkpoint(
    folder: Path, out: Path, recipe: Recipe, progress: Callable[[int, int], None] = lambda done, total: None
) -> Written:
    """Write the quantized checkpoint of the model in `folder` to the new folder `out`.

    progress   called with (bytes read, bytes in all)
    Raises a `UserError` that names the fix, before anything is written if the headers of the weights show the error.
    After an error nothing of the new checkpoint is left.
    """
    check_out(out)
    plan = plan_quantization(folder, recipe)
    _check_room(out, plan.num_bytes)
    made = not out.is_dir()
    try:
        out.mkdir(parents=True, exist_ok=True)
        copy_files(folder, out)
        limit = max(
            sum(tensor.num_bytes for tensor in plan.source.tensors.values() if tensor.file == file)
            for file in plan.source.files
        )
        written = write_checkpoint(plan.items, out, limit, progress)
        (out / "config.json").write_text(json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except BaseException as error:
        for path in out.iterdir() if out.is_dir() else ():
            path.unlink()
        if made and out.is_dir():
            out.rmdir()
        if isinstance(error, OSError):
            raise ConfigError(
                f"-o {out}: {error.strerror or error}; unfinished files were deleted: use another folder."
            ) from None
        raise
    return written


def plan_quantization(folder: Path, recipe: Recipe) -> QuantizePlan:
    """Return the plan for the model in `folder`, made from its config.json and the headers of its weights.

    Raises a `UserError` for a model that is quantized already, an unknown scheme, a group size that does not divide the
    columns, a name in `ignore` that no module has, and a fused matrix of which only some parts would be quantized.
    """
    body, head = _rules(recipe)
    raw = read_raw_config(folder)
    if found := find_quantization(folder, raw).config:
        raise ConfigError(f"{folder} is quantized already ({found['quant_method']}): give the unquantized checkpoint.")
    source = read_checkpoint(folder)
    args = _model_args(folder, raw, source)
    if args.moe is not None and args.moe.stored != EACH:
        raise ConfigError(
            f"{folder} stores all experts of a layer in one tensor, and only matrices are quantized: load the model "
            "with transformers and call save_pretrained(folder), if that writes a tensor for each expert."
        )
    match_tensors(source, layout(args), args)
    matrices = {_in_any_layer(part.stored) for param in layout(args) if is_worthwhile(param) for part in param.parts}
    own_head = HEAD_WEIGHT if args.foreign is None else f"{args.foreign.head}.weight"
    if head is not None and own_head != HEAD_WEIGHT:
        raise ConfigError(
            f"--lm-head: this head is named {own_head}, and only {HEAD_WEIGHT} is quantized: leave it out."
        )
    matrices.discard(own_head)
    names = [
        name.removesuffix(".weight")
        for name, tensor in source.tensors.items()
        if _in_any_layer(name) in matrices and len(tensor.shape) == 2 and tensor.dtype in FLOATS
    ]
    ignored = frozenset(_ignored(names, recipe.ignore))
    rules: dict[str, Rule] = {f"{name}.weight": body for name in names if name not in ignored}
    for name, rule in rules.items():
        _check_shape(source.tensors[name], rule)
    _check_fused(layout(args), rules)
    untied = head is not None and args.tie_word_embeddings
    items = tuple(_items(source, rules, head, args.tie_word_embeddings, _fused(layout(args))))
    kept = [*_kept(source, rules), *([HEAD] if head is None and HEAD_WEIGHT not in source.tensors else ())]
    if head is not None:
        kept = [name for name in kept if name != HEAD]
    config = raw | {KEY: quantization_config(body, head, kept)} | ({"tie_word_embeddings": False} if untied else {})
    tied = args.tie_word_embeddings and not untied
    made = parse_checkpoint_config(config) if args.foreign is None else replace(args, tie_word_embeddings=tied)
    _check_readable(made, config[KEY], items)
    return QuantizePlan(source, items, config)


def _model_args(folder: Path, raw: Mapping[str, Any], source: Checkpoint) -> ModelArgs:
    """Return the arguments of the model: of a family of Quire, or of a decoder of transformers."""

    def shape(name: str) -> tuple[int, ...]:
        return source.tensors[name].shape

    try:
        args = parse_checkpoint_config(raw, str(folder / "config.json"))
    except UnsupportedModel as error:
        if has_family(raw):
            raise
        return foreign_model(folder, source.tensors, shape, str(error))
    return as_stored(args, source.tensors, shape)


def _rules(recipe: Recipe) -> tuple[Rule, Rule | None]:
    """Return the rules of the body and of the head."""
    body = scheme_rule(recipe.scheme, recipe.group_size)
    head = scheme_rule(recipe.head, recipe.group_size) if recipe.head else None
    if recipe.group_size and not any(has_groups(name) for name in (recipe.scheme, recipe.head) if name):
        raise ConfigError(
            f"--group-size {recipe.group_size}: scheme {recipe.scheme} has no group size: leave --group-size out."
        )
    if head is not None and method_of(head) != method_of(body):
        raise ConfigError(
            f"--lm-head {recipe.head} is stored as {method_of(head)}, --scheme {recipe.scheme} as "
            f"{method_of(body)}; a checkpoint has only one: use --lm-head {recipe.scheme}."
        )
    return body, head


def _in_any_layer(name: str) -> str:
    return re.sub(r"\.layers\.\d+\.", ".layers.N.", name)


def _ignored(modules: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the modules that these names mean. Raises ConfigError for a name that means none."""
    for name in names:
        try:
            pattern = re.compile(name.removeprefix("re:")) if name.startswith("re:") else None
        except re.error as error:
            raise ConfigError(f"--ignore {name} is no regular expression ({error}): correct it.") from None
        found = [module for module in modules if (pattern.match(module) if pattern else f".{name}." in f".{module}.")]
        if not found:
            raise ConfigError(
                f"--ignore {name} matches no matrix that would be quantized: `quire weights MODEL` lists "
                f"the names, for example {modules[0] if modules else 'none'}."
            )
        yield from found


def _check_shape(tensor: StoredTensor, rule: Rule) -> None:
    rows, columns = tensor.shape
    if rule.scheme.values in ("w4", "w8", "e2m1") and columns % (rule.scheme.block[1] or 8):
        sizes = GROUPS if rule.scheme.values != "e2m1" else ()
        fits = next((f"--group-size {size} or " for size in sizes if columns % size == 0), "")
        raise ConfigError(
            f"{tensor.name} has {columns} columns, not a multiple of {rule.scheme.block[1] or 8}: "
            f"use {fits}--ignore {tensor.name.removesuffix('.weight')}."
        )
    if rule.format == AWQ.name and rows % 8:
        raise ConfigError(
            f"{tensor.name} has {rows} rows, not a multiple of 8: use --ignore "
            f"{tensor.name.removesuffix('.weight')}, or --scheme w4a16."
        )


def _check_fused(params: Sequence[Param], rules: Collection[str]) -> None:
    """Refuse parts of a matrix, or of an expert, of which only some are quantized."""
    together: dict[str, list[str]] = {}  # all experts of a layer run in one kernel
    for param in params:
        if is_quantizable(param) and param.name != "head.weight":
            together.setdefault(param.module, []).extend(part.stored for part in param.parts)
    for stored in together.values():
        plain = [name for name in stored if name not in rules]
        if plain and len(plain) < len(stored):
            other = next(name for name in stored if name in rules)
            raise ConfigError(
                f"--ignore leaves {plain[0]} alone and not {other}: they run as one matrix or one set of "
                "experts, so ignore all of them or none."
            )


def _fused(params: Sequence[Param]) -> Mapping[str, tuple[str, ...]]:
    """Return the tensors that form a matrix together, in any layer, by each of their names. See `_in_any_layer`."""
    found: dict[str, tuple[str, ...]] = {}
    for param in params:
        if is_quantizable(param):
            each = len(param.parts) // num_experts(param)
            for first in range(0, len(param.parts), each):
                names = tuple(_in_any_layer(part.stored) for part in param.parts[first : first + each])
                found |= dict.fromkeys(names, names)
    return found


def _beside(source: Checkpoint, name: str, fused: Mapping[str, tuple[str, ...]]) -> tuple[StoredTensor, ...]:
    """Return the other tensors of the matrix to which a tensor belongs."""
    layer = re.search(r"\.layers\.\d+\.", name)
    names = [other.replace(".layers.N.", layer[0] if layer else "") for other in fused.get(_in_any_layer(name), ())]
    return tuple(source.tensors[other] for other in names if other != name and other in source.tensors)


def _items(
    source: Checkpoint,
    rules: Mapping[str, Rule],
    head: Rule | None,
    tied: bool,
    fused: Mapping[str, tuple[str, ...]],
) -> Iterator[WriteItem]:
    """Yield the tensors that are written, in the order in which they are read. A head that was tied comes last."""
    for name, tensor in source.tensors.items():
        if head is not None and name == HEAD_WEIGHT:
            if not tied:
                yield _item(tensor, name, head)
        else:
            yield _item(tensor, name, rules.get(name))._replace(beside=_beside(source, name, fused))
    if head is not None and tied:
        yield _item(source.tensors[EMBEDDING], HEAD_WEIGHT, head)


def _item(tensor: StoredTensor, name: str, rule: Rule | None) -> WriteItem:
    if rule is None:
        return WriteItem(tensor, None, (Stored(name, "", tensor.dtype, tensor.shape, tensor.num_bytes),))
    if name == HEAD_WEIGHT:
        _check_shape(tensor, rule)
    rows, columns = tensor.shape
    return WriteItem(tensor, rule, stored_of(name, (rows, columns), rule, tensor.dtype))


def _kept(source: Checkpoint, rules: Collection[str]) -> Iterator[str]:
    """Yield the linear layers that stay as they are: matrices that are no embeddings."""
    for name, tensor in source.tensors.items():
        if name.endswith(".weight") and len(tensor.shape) == 2 and name not in rules and "embed" not in name:
            yield name.removesuffix(".weight")


def _check_readable(args: ModelArgs, config: Mapping[str, Any], items: Sequence[WriteItem]) -> None:
    """Raise a `UserError` for a checkpoint that Quire would refuse."""
    types = {stored.name: stored.dtype for item in items for stored in item.stored}
    checked = find_quantization(Path(), {KEY: config}).config
    with_formats(layout(args), settled(checked, layout(args), types))


def check_out(out: Path) -> None:
    """Raise `ConfigError` when `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"-o {out} exists and is not an empty folder: choose a new one.")


def _check_room(out: Path, num_bytes: int) -> None:
    """Refuse a folder on a disk with too little room."""
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if free < num_bytes + SPARE_BYTES:
        raise ConfigError(
            f"-o {out}: the checkpoint needs {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free "
            f"in {parent}: choose another folder."
        )
