"""The only composition root: configuration -> facts -> plans -> engine."""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from quire.assemble.cpu import assemble_without_triton
from quire.assemble.parts import Loading, Parts
from quire.config.checkpoint import ModelArgs
from quire.config.engine import EngineConfig
from quire.config.pooling import PoolingPlan
from quire.config.resolve import DTypePlan, MemoryPlan
from quire.config.resolve_cuda import gpu_only_options
from quire.contracts.errors import ConfigError
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.sampling import SamplingParams
from quire.engine.core import EngineCore
from quire.kernels.select import Kernels, here
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import namespace_digest
from quire.kv.pool import BlockPool
from quire.models.obtain import obtain_weights, read_model
from quire.models.plan import EnginePlan, Machine, resolve_engine
from quire.models.report import PlanReport
from quire.observe.progress import Progress
from quire.platforms.cpu import read_cpu_facts
from quire.platforms.cuda import CudaFacts, read_cuda_facts
from quire.platforms.detect import DevicePlan, resolve_device
from quire.text.chat import ChatTemplate
from quire.text.grammar import GrammarCompiler
from quire.text.grammar_trial import GrammarTrial
from quire.text.load import load_text
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_folders
from quire.weights.tied import unread_head
from quire.worker.runner import StepRunner

LOG = logging.getLogger("quire")


@dataclass(kw_only=True)
class Engine:
    """An assembled engine and every choice that was made for it.

    weight_bytes   bytes of the parameters, before they are packed
    phases   seconds by start-up phase, in order;  notes   lines the user should see
    """

    config: EngineConfig
    folder: Path
    args: ModelArgs
    device: DevicePlan
    dtype: DTypePlan
    memory: MemoryPlan
    kernels: Kernels
    core: EngineCore
    worker: StepRunner
    tokenizer: Tokenizer | None
    tokenizer_folder: Path
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    default_params: SamplingParams
    pooling: PoolingPlan
    weight_bytes: int
    phases: dict[str, float]
    notes: tuple[str, ...] = ()

    def close(self) -> None:
        """Stop the worker and free its memory; a GPU's memory goes back to the driver."""
        self.core.shutdown()
        del self.worker, self.core
        gc.collect()  # modules that PyTorch imports late keep the frames of whoever was at work then
        if self.device.device == "cuda":
            torch.cuda.empty_cache()


class _Phases:
    """Clock of the start-up phases: seconds of each, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def assemble(config: EngineConfig, on_loading: Loading | None = None, *, served: bool = True) -> Engine:
    """Build an engine; raises a `UserError` that names the fix when model or options cannot be served.

    on_loading   called with (bytes done, bytes in all) while weights are read; replaces the progress bar
    served       clients read answers token by token
    """
    if config.device.device == "mock":
        raise ConfigError("device=mock has no model and is for `quire serve`: choose another device here.")
    phases = _Phases()
    device = resolve_device(config.device.device)
    folder, tokenizer_folder = resolve_folders(config)
    cpu = read_cpu_facts()
    args, dtype, quantization = read_model(config, folder, device.device, cpu)
    torch.set_num_threads(config.device.num_threads or cpu.cores)
    phases.end("config")
    text = load_text(config, folder, tokenizer_folder=tokenizer_folder)
    phases.end("tokenizer")
    gpu = read_cuda_facts() if device.device == "cuda" else None
    plan = resolve_engine(config, folder, args, _machine(device, gpu), dtype, here,
                          quantization=quantization.config, served=served)  # fmt: skip
    plan.check_runnable()
    dtype = plan.dtype
    obtain_weights(config, folder, args, dtype, None if gpu else cpu.free_memory, quantization=plan.quantization)
    unread = () if config.load.load_format == "dummy" else unread_head(folder)
    with Progress("Loading weights", 0, unit="B",
                  enabled=config.load.use_tqdm_on_load and on_loading is None) as progress:  # fmt: skip
        parts = _build(plan, gpu, on_loading or progress.update, phases.end)
    tokenizer = text.tokenizer  # not of a core that serves another process, until it needs one
    compiler = GrammarCompiler(lambda: tokenizer or Tokenizer.load(tokenizer_folder), args.vocab_size, GrammarTrial(),
                               cpu.cores)  # fmt: skip
    core = _build_core(parts, compiler)
    phases.end("engine")
    unused = gpu_only_options(config) if device.device == "cpu" else ()
    notes = (*quantization.notes, *plan.cache.notes, *_notes(args, dtype, parts.memory, config), *unread,
             *parts.notes, *unused)  # fmt: skip
    for note in notes:
        LOG.warning("%s", note)
    return Engine(
        config=plan.config,
        folder=folder,
        args=args,
        device=device,
        dtype=dtype,
        memory=parts.memory,
        kernels=parts.model.kernels,
        core=core,
        worker=parts.worker,
        tokenizer=text.tokenizer,
        tokenizer_folder=text.tokenizer_folder,
        chat_template=text.chat_template,
        eos_ids=text.eos_ids,
        default_params=text.default_params,
        pooling=text.pooling,
        weight_bytes=plan.weight_bytes,
        phases=phases.seconds,
        notes=notes,
    )


def _machine(device: DevicePlan, gpu: CudaFacts | None) -> Machine:
    if gpu is not None:
        return Machine(device="cuda", words=f"{device}, {gpu}", total_memory=gpu.total_memory)
    return Machine(device="cpu", words=str(device), total_memory=read_cpu_facts().total_memory)


def _build(plan: EnginePlan, gpu: CudaFacts | None, on_loading: Loading, end_phase: Callable[[str], None]) -> Parts:
    """Build the engine of a plan on this machine."""
    if gpu is not None:
        from quire.assemble.cuda import assemble_cuda

        return assemble_cuda(plan, gpu, on_loading=on_loading, end_phase=end_phase)
    return assemble_without_triton(plan, on_loading=on_loading, end_phase=end_phase,
                                   free_bytes=lambda: read_cpu_facts().free_memory)  # fmt: skip


def _build_core(parts: Parts, compiler: GrammarCompiler) -> EngineCore:
    plan, memory, config = parts.plan, parts.memory, parts.plan.config
    scheduler = config.scheduler
    report = PlanReport(plan=plan, memory=memory)
    facts = ExecutorFacts(
        depth=parts.depth,
        decode_lag=parts.depth,
        num_slots=scheduler.sequences(),
        num_blocks=memory.num_blocks,
        block_size=memory.geometry.block_size,
        max_model_len=memory.max_model_len,
        vocab_size=plan.args.vocab_size,
        prompt_chunk=parts.prompt_chunk,
        plans={"device": plan.machine.words, "dtype": plan.dtype, "memory": memory, "kernels": plan.kernels,
               "experts": plan.experts and f"{plan.experts.experts} (dispatcher {plan.experts.dispatcher})",
               "engine": msgspec.json.encode(report.describe()).decode()} | parts.plans,
    )
    root = namespace_digest(
        model=config.model.model or "quire-tiny",
        revision=config.model.revision or "",
        dtype=plan.dtype.dtype,
        block_size=memory.geometry.block_size,
        geometry=memory.geometry,
    )
    return EngineCore(
        parts.executor(facts),
        scheduler,
        KVAllocator(BlockPool(memory.num_blocks), memory.geometry, num_slots=scheduler.sequences()),
        root_key=root,
        prefix_caching=config.cache.enable_prefix_caching,
        compiler=compiler,
    )


def _notes(args: ModelArgs, dtype: DTypePlan, memory: MemoryPlan, config: EngineConfig) -> tuple[str, ...]:
    notes = [*args.notes, *memory.notes]
    if dtype.dtype != args.dtype:
        notes.append(f"computing in {dtype.dtype}: {dtype.reason}.")
    if config.model.trust_remote_code:
        notes.append("trust_remote_code changes nothing: Quire never runs code from a checkpoint.")
    return tuple(notes)
