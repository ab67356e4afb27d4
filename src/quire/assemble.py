"""The only composition root: configuration -> facts -> plans -> engine."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config.checkpoint import ModelArgs, read_checkpoint_config
from quire.config.engine import EngineConfig
from quire.config.resolve import DTypePlan, MemoryPlan, check_context, resolve_dtype, resolve_geometry, resolve_memory
from quire.contracts.errors import ConfigError
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.sampling import SamplingParams
from quire.engine.core import EngineCore
from quire.kernels.attention import KVView
from quire.kernels.select import Kernels
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import namespace_digest
from quire.kv.pool import BlockPool
from quire.kvstore.arena import KVArena
from quire.layers.stack import Model
from quire.models.registry import build_model, kv_components
from quire.observe.progress import Progress
from quire.platforms.cpu import CpuFacts, read_cpu_facts
from quire.procs.in_process import InProcessExecutor
from quire.text.chat import ChatTemplate
from quire.text.load import load_text
from quire.text.protocol import TextTokenizer
from quire.weights.dummy import load_dummy
from quire.weights.folder import resolve_folders
from quire.weights.load import load_weights
from quire.worker.sampler import Sampler
from quire.worker.sampling_table import SamplingTable
from quire.worker.slots import SlotTables
from quire.worker.worker import Worker

Loading = Callable[[int, int], None]
LOG = logging.getLogger("quire")


@dataclass(kw_only=True)
class Engine:
    """An assembled engine and every choice that was made for it.

    weight_bytes   of the parameters, before they are packed
    phases   seconds by start-up phase, in order;  notes   lines the user should see
    """

    config: EngineConfig
    folder: Path
    args: ModelArgs
    dtype: DTypePlan
    memory: MemoryPlan
    kernels: Kernels
    core: EngineCore
    worker: Worker
    tokenizer: TextTokenizer | None
    tokenizer_folder: Path
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    default_params: SamplingParams
    weight_bytes: int
    phases: dict[str, float]
    notes: tuple[str, ...] = ()

    def close(self) -> None:
        """Stop the worker and drop the tensors."""
        self.core.shutdown()
        del self.worker, self.core


class _Phases:
    """Seconds since the last phase ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def assemble(config: EngineConfig, on_loading: Loading | None = None) -> Engine:
    """Build an engine; raises a `UserError` that names the fix when model or options cannot be served.

    on_loading   told (bytes done, bytes in all) while the weights are read, instead of a progress bar
    """
    if config.device.device == "mock":
        raise ConfigError("device=mock has no model and is for `quire serve`: choose another device here.")
    phases = _Phases()
    facts = read_cpu_facts()
    torch.set_num_threads(config.device.num_threads or facts.cores)
    folder, tokenizer_folder = resolve_folders(config)
    args = read_checkpoint_config(folder)
    check_context(config.model, args.max_position_embeddings)
    dtype = resolve_dtype(config.model.dtype, args.dtype, bool(facts.bf16_units))
    phases.end("config")
    text = load_text(config, folder, tokenizer_folder=tokenizer_folder)
    phases.end("tokenizer")
    model, weight_bytes = _load_model(config, folder, args, dtype, facts, on_loading=on_loading)
    phases.end("weights")
    geometry = resolve_geometry(kv_components(args, dtype.dtype), args.num_layers, config.cache.block_size)
    memory = resolve_memory(
        geometry,
        config.model,
        config.cache,
        context=args.max_position_embeddings,
        max_num_seqs=config.scheduler.max_num_seqs,
        free_bytes=read_cpu_facts().free_memory,
    )
    worker, core = _build_engine(config, args, model, memory, dtype)
    phases.end("engine")
    notes = _notes(args, dtype, memory, config)
    for note in notes:
        LOG.warning("%s", note)
    return Engine(
        config=config,
        folder=folder,
        args=args,
        dtype=dtype,
        memory=memory,
        kernels=model.kernels,
        core=core,
        worker=worker,
        tokenizer=text.tokenizer,
        tokenizer_folder=text.tokenizer_folder,
        chat_template=text.chat_template,
        eos_ids=text.eos_ids,
        default_params=text.default_params,
        weight_bytes=weight_bytes,
        phases=phases.seconds,
        notes=notes,
    )


def _load_model(
    config: EngineConfig, folder: Path, args: ModelArgs, dtype: DTypePlan, facts: CpuFacts, *,
    on_loading: Loading | None,
) -> tuple[Model, int]:
    model = build_model(args, dtype=dtype.dtype, device="cpu", platform=facts)
    num_bytes = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    if config.load.load_format == "dummy":
        load_dummy(model, config.model.seed)
    elif on_loading is not None:
        load_weights(model, folder, on_loading)
    else:
        with Progress("Loading weights", 0, enabled=config.load.use_tqdm_on_load, unit="B") as progress:
            load_weights(model, folder, progress.update)
    model.pack()
    return model, num_bytes


def _build_engine(
    config: EngineConfig, args: ModelArgs, model: Model, memory: MemoryPlan, dtype: DTypePlan
) -> tuple[Worker, EngineCore]:
    geometry, scheduler, cpu = memory.geometry, config.scheduler, torch.device("cpu")
    arena = KVArena(geometry, memory.num_blocks + 1, cpu)
    views = [KVView(*arena.views(layer)) for layer in range(args.num_layers)]
    sampling = SamplingTable(scheduler.max_num_seqs, args.vocab_size, memory.max_model_len)
    tables = SlotTables(sampling, scheduler.max_num_seqs, geometry.num_blocks(memory.max_model_len), cpu)
    worker = Worker(model, views, tables, Sampler(sampling), block_size=geometry.block_size)
    depth = config.device.async_depth or 1
    facts = ExecutorFacts(
        depth=depth,
        decode_lag=depth,
        num_slots=scheduler.max_num_seqs,
        num_blocks=memory.num_blocks,
        block_size=geometry.block_size,
        max_model_len=memory.max_model_len,
        vocab_size=args.vocab_size,
        plans={"dtype": dtype, "memory": memory, "kernels": model.kernels.choices},
    )
    allocator = KVAllocator(BlockPool(memory.num_blocks), geometry, num_slots=scheduler.max_num_seqs)
    root = namespace_digest(
        model=config.model.model or "quire-tiny",
        revision=config.model.revision or "",
        dtype=dtype.dtype,
        block_size=geometry.block_size,
        geometry=geometry,
    )
    core = EngineCore(
        InProcessExecutor(worker.run, facts),
        scheduler,
        allocator,
        root_key=root,
        prefix_caching=config.cache.enable_prefix_caching,
    )
    return worker, core


def _notes(args: ModelArgs, dtype: DTypePlan, memory: MemoryPlan, config: EngineConfig) -> tuple[str, ...]:
    notes = [*args.notes, *memory.notes]
    if dtype.dtype != args.dtype:
        notes.append(f"computing in {dtype.dtype}: {dtype.reason}.")
    if config.model.trust_remote_code:
        notes.append("trust_remote_code changes nothing: Quire never runs code from a checkpoint.")
    return tuple(notes)
