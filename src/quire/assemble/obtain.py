"""Steps before a model is built, cheapest first: checks of config.json, checks of the weights' headers, the download.

No torch.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.args.checkpoint import ModelArgs, read_checkpoint_config, read_raw_config
from quire.args.families import has_family
from quire.args.length import with_length
from quire.config.engine import EngineConfig
from quire.config.speculators import resolve_speculators
from quire.contracts.errors import ConfigError, ModelNotFound, UnsupportedModel, UserError, WeightsError
from quire.contracts.speculation import read_speculative_config
from quire.plan.as_stored import as_stored
from quire.plan.cache_dtype import choose_cache
from quire.plan.drafts import draft_config, head_method, with_draft_layers, with_spelling
from quire.plan.dtype import DTypePlan, resolve_dtype
from quire.plan.kinds.interfaces import StateTypes
from quire.plan.kv_geometry import rank_geometry
from quire.plan.layout import alone, layout
from quire.plan.meeting_rows.records import REFUSED
from quire.plan.meetings import check, inputs_of, met
from quire.plan.memory import check_cpu_weights, resolve_memory
from quire.plan.state_memory import state_dtype, state_use
from quire.plan.weight_bytes import unpacked_bytes
from quire.platforms.cpu import CpuFacts
from quire.platforms.detect import resolve_device
from quire.quantization.assigned import differs_by_module, settled, with_formats
from quire.quantization.read import Quantization, find_quantization
from quire.weights.files import INDEX, Checkpoint, read_checkpoint, stored_in
from quire.weights.folder import HEADERS, absent_weights, fetch_weights, resolve_folders
from quire.weights.match import match_tensors


def check_options(config: EngineConfig) -> None:
    """Raise a `UserError` for options that exclude each other, before a server starts anything.

    Rows about the model are told with them, if its config.json can be read. No file is read where options go together.
    """
    found = met(inputs_of(config))
    if not any(one.status == REFUSED for one in found):
        return
    if config.device.device != "mock":
        with suppress(UserError):  # of the model: told when the options are right
            config = resolve_speculators(config, resolve_folders(config, only=HEADERS)[0])
            args = read_args(config, resolve_folders(config, only=HEADERS)[0])
            other = draft_config(config, config.model.dtype)
            draft = other and read_args(other, resolve_folders(other, only=HEADERS)[0], head_method(config))
            found = met(inputs_of(config, args, resolve_device(config.device.device).device, draft=draft))
    check(found)


def read_args(config: EngineConfig, folder: Path, head: str = "") -> ModelArgs:
    """Return the arguments of the model in `folder`, with the layers that draft.

    head   method of the EAGLE head that the folder must hold; "": a model
    Names of tensors decide the spelling of a head, the place inside another model, the presence of layers that draft,
    and the form of stored experts.
    """
    impl = config.model.model_impl
    if impl == "transformers" and not head:
        return read_foreign(config, folder)
    try:
        args = with_length(read_checkpoint_config(folder, head, config.load.hf_overrides), config.model.max_model_len)
    except UnsupportedModel as error:
        if impl != "auto" or head or has_family(read_raw_config(folder)):
            raise
        return read_foreign(config, folder, str(error))
    told_by_names = args.eagle or args.wrapper or args.moe or args.prediction.root
    try:
        stored = _stored_names(config, folder) if told_by_names else ()
    except (ModelNotFound, WeightsError):  # the loader tells
        stored = ()
    if args.eagle is not None:
        return with_spelling(args, stored)
    args = as_stored(args, stored, lambda name: _shape(config, folder, name))
    return with_draft_layers(args, config.scheduler.speculative_config)


def read_foreign(config: EngineConfig, folder: Path, lacks: str = "") -> ModelArgs:
    """Return the arguments of a model whose layers run by transformers' code.

    lacks   the error of a model that Quire has no file for; "": transformers' code was asked for
    Raises `UnsupportedModel` with what was found, before `lacks`.
    """
    try:
        stored = _stored_names(config, folder)
    except (ModelNotFound, WeightsError):  # the loader tells
        stored = ()
    return foreign_model(folder, stored, lambda name: _shape(config, folder, name), lacks)


def foreign_model(
    folder: Path, stored: Collection[str], shape: Callable[[str], tuple[int, ...]], lacks: str
) -> ModelArgs:
    """Return the arguments of a model whose layers run by transformers' code. See `read_foreign`.

    stored   names of the stored tensors; shape: name -> shape
    """
    from quire.foreign.find import foreign_args

    try:
        return as_stored(foreign_args(folder, stored, lacks=lacks), stored, shape)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error} {lacks}".strip()) from None


def read_model(
    config: EngineConfig, folder: Path, device: str, cpu: CpuFacts, head: str = ""
) -> tuple[ModelArgs, DTypePlan, Quantization]:
    """Return the model arguments, the dtype of the computation and the quantization of the model in `folder`.

    If the weights are not in the folder, the headers of quantized weights are read from the Hub.

    Raises a `UserError` for a model that is not implemented, and for options that the model cannot meet.
    """
    args = read_args(config, folder, head)
    dtype = resolve_dtype(config.model.dtype, args.dtype, bool(cpu.bf16_units), device)
    return args, dtype, settled_quantization(config, folder, args)


def settled_quantization(config: EngineConfig, folder: Path, args: ModelArgs) -> Quantization:
    """Return the quantization of the model in `folder`, with the modules whose stored tensors differ from its config.

    The files, the option `quantization` and the names of the stored tensors decide it.
    """
    raw = read_raw_config(folder, config.load.hf_overrides)
    found = find_quantization(folder, raw, config.load.quantization)
    _check_draft_layer(config, folder, found)
    if not found.config:
        return found
    stored = _stored_types(config, folder)
    if not stored and not differs_by_module(found.config):  # a layout of all experts takes a while
        return found
    return found._replace(config=settled(found.config, layout(args), stored))


def _check_draft_layer(config: EngineConfig, folder: Path, found: Quantization) -> None:
    """Raise ConfigError if a quantization that is named for the layer of method mtp is not that of the checkpoint."""
    drafts = read_speculative_config(config.scheduler.speculative_config)
    if drafts is None or drafts.method != "mtp" or drafts.quantization is None:
        return
    why = ""
    try:
        raw = read_raw_config(folder, config.load.hf_overrides)
        other = find_quantization(folder, raw, drafts.quantization).config
    except ConfigError as error:
        why, other = f" ({error})", {}
    if why or other != found.config:
        raise ConfigError(
            f'speculative_config: "quantization": {drafts.quantization!r}: the layer that drafts is a part of the '
            f"checkpoint, and is quantized as the model{why}: leave it out."
        )


def _stored_types(config: EngineConfig, folder: Path) -> dict[str, str]:
    """Return the names of the stored tensors and their types, "" where only an index names them; {} without weights."""
    repository = absent_weights(config, folder)
    if config.load.load_format == "dummy":
        return {}
    if repository is None and not any(folder.glob("*.safetensors")):
        return dict.fromkeys(stored_in(folder), "")
    checkpoint = read_checkpoint(folder) if repository is None else repository.read_headers(folder)
    return {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}


def _stored_names(config: EngineConfig, folder: Path) -> Collection[str]:
    """Return the names of the stored tensors, from the index if there is one; () without weights."""
    if config.load.load_format == "dummy":
        return ()
    repository = absent_weights(config, folder)
    found = {} if repository is not None and not (folder / INDEX).is_file() else stored_in(folder)
    return found or _stored_types(config, folder)


def _shape(config: EngineConfig, folder: Path, name: str) -> tuple[int, ...]:
    """Return the shape of a stored tensor, from the header of its file."""
    repository = absent_weights(config, folder)
    if repository is not None:
        return repository.read_headers(folder).tensors[name].shape
    return read_checkpoint(folder).tensors[name].shape


def obtain_weights(
    config: EngineConfig,
    folder: Path,
    args: ModelArgs,
    dtype: DTypePlan,
    free_bytes: int | None,
    *,
    quantization: Mapping[str, Any],
) -> None:
    """Download the weights that `folder` lacks. First check by their headers that the model can be loaded.

    free_bytes   memory that must hold the parameters and the KV cache; None: not checked
    Raises a `UserError` that names the fix.
    """

    def check(checkpoint: Checkpoint) -> None:
        params = with_formats(layout(args), quantization)
        match_tensors(checkpoint, params, args)
        if free_bytes is not None:
            stored = dtype.weights or dtype.dtype
            weights = unpacked_bytes(params, stored)
            check_cpu_weights(weights, free_bytes, "" if quantization else stored)
            cache = choose_cache(config.cache.kv_cache_dtype, dtype.dtype, quantization)
            geometry = rank_geometry(
                args,
                alone(args),
                dtype=cache.dtype,
                states=StateTypes(dtype.dtype, state_dtype(config)),
                device="cpu",
                block_size=config.cache.block_size,
            )
            resolve_memory(
                geometry,
                config.model,
                config.cache,
                context=args.max_position_embeddings,
                chunk=config.scheduler.token_budget(),
                max_num_seqs=config.scheduler.sequences(),
                free_bytes=free_bytes - weights,
                states=state_use(config),
            )

    fetch_weights(config, folder, check)
