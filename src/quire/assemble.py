"""The only composition root: configuration -> facts -> plans -> engine."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.config.bundled import bundled_model
from quire.config.checkpoint import ModelArgs, read_checkpoint_config
from quire.config.engine import EngineConfig
from quire.config.resolve import DTypePlan, MemoryPlan, resolve_dtype, resolve_geometry, resolve_memory
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
from quire.text.defaults import load_eos_ids, load_generation_defaults
from quire.text.protocol import TextTokenizer
from quire.text.tokenizer import Tokenizer
from quire.weights.dummy import load_dummy
from quire.weights.folder import resolve_model_folder
from quire.weights.load import load_weights
from quire.worker.sampler import Sampler
from quire.worker.sampling_table import SamplingTable
from quire.worker.slots import SlotTables
from quire.worker.worker import Worker

LOG = logging.getLogger("quire")


@dataclass(kw_only=True)
class Engine:
    """An assembled engine and every choice that was made for it.

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


def assemble(config: EngineConfig) -> Engine:
    """Build an engine; raises a `UserError` that names the fix when model or options cannot be served."""
    phases = _Phases()
    facts = read_cpu_facts()
    torch.set_num_threads(config.device.num_threads or facts.cores)
    folder = _folder(config, config.model.model) if config.model.model else bundled_model()
    args = read_checkpoint_config(folder)
    dtype = resolve_dtype(config.model.dtype, args.dtype, bool(facts.bf16_units))
    phases.end("config")
    tokenizer_folder = _folder(config, config.model.tokenizer) if config.model.tokenizer else folder
    tokenizer = None if config.model.skip_tokenizer_init else Tokenizer.load(tokenizer_folder)
    template = None if tokenizer is None else ChatTemplate.load(tokenizer_folder, config.model.chat_template)
    eos_ids, default_params = load_eos_ids(folder, tokenizer), _default_params(config, folder)
    phases.end("tokenizer")
    model = _load_model(config, folder, args, dtype, facts)
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
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        chat_template=template,
        eos_ids=eos_ids,
        default_params=default_params,
        phases=phases.seconds,
        notes=notes,
    )


def _folder(config: EngineConfig, model: str) -> Path:
    return resolve_model_folder(
        model,
        revision=config.model.revision,
        offline=config.load.offline,
        download_dir=config.load.download_dir,
        token=config.load.hf_token,
    )


def _load_model(config: EngineConfig, folder: Path, args: ModelArgs, dtype: DTypePlan, facts: CpuFacts) -> Model:
    model = build_model(args, dtype=dtype.dtype, device="cpu", platform=facts)
    if config.load.load_format == "dummy":
        load_dummy(model, config.model.seed)
    else:
        with Progress("Loading weights", 0, enabled=config.load.use_tqdm_on_load, unit="B") as progress:
            load_weights(model, folder, progress.update)
    model.pack()
    return model


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


def _default_params(config: EngineConfig, folder: Path) -> SamplingParams:
    if config.model.generation_config not in ("auto", "none", "vllm"):
        raise ConfigError(f"generation_config={config.model.generation_config!r}: must be auto or none.")
    read = config.model.generation_config == "auto"
    override = config.model.override_generation_config
    return SamplingParams(**load_generation_defaults(folder, read=read, override=override))


def _notes(args: ModelArgs, dtype: DTypePlan, memory: MemoryPlan, config: EngineConfig) -> tuple[str, ...]:
    notes = [*args.notes, *memory.notes]
    if dtype.dtype != args.dtype:
        notes.append(f"computing in {dtype.dtype}: {dtype.reason}.")
    if config.model.trust_remote_code:
        notes.append("trust_remote_code changes nothing: Quire never runs code from a checkpoint.")
    return tuple(notes)
