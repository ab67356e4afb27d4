"""The only composition root: configuration -> facts -> plans -> engine."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from quire.answers.grammar import GrammarCompiler
from quire.answers.grammar_trial import GrammarTrial
from quire.args.checkpoint import ModelArgs
from quire.args.pooling import PoolingPlan
from quire.assemble.adapter_slots import adapter_slots
from quire.assemble.early_checks import check_early
from quire.assemble.feature_lines import feature_lines, turned_on
from quire.assemble.loaded import Loading, Outside, Parts
from quire.assemble.obtain import obtain_weights, read_model
from quire.assemble.offload import make_store, namespace, root_key
from quire.assemble.rank import load_rank
from quire.assemble.states import make_checkpoints
from quire.config.balancing import read_eplb_config
from quire.config.engine import EngineConfig, SchedulerConfig
from quire.config.env import ranks_share_gpu
from quire.config.events import events_notes
from quire.config.speculators import resolve_speculators
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.contracts.params import Param
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.sampling import SamplingParams
from quire.distributed.mesh import ALONE
from quire.engine.balancer import Balancer
from quire.engine.core import EngineCore
from quire.engine.eplb import even_nodes, initial_map
from quire.engine.replicas import Core, Replicas, flush
from quire.kernels.select import Kernels, here
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool
from quire.kvnet.event_publisher import publish_events
from quire.observe.progress import Progress
from quire.plan.cache_dtype import cache_notes
from quire.plan.drafts import draft_config, draft_division, draft_notes, head_method, with_draft_model
from quire.plan.dtype import DTypePlan
from quire.plan.engine import EnginePlan, Machine, ModelFacts, resolve_engine
from quire.plan.meetings import check, idle_notes, inputs_of, met
from quire.plan.memory import MemoryPlan
from quire.plan.parallel_notes import parallel_notes, slice_notes
from quire.plan.placement import parallel_sizes, ranks_here
from quire.plan.sizing import resolve_sizing
from quire.platforms.cpu import CpuFacts, read_cpu_facts
from quire.platforms.cuda import read_cuda_facts
from quire.platforms.detect import DevicePlan, check_gpus, probe_driver, resolve_device
from quire.quantization.read import Quantization
from quire.ranks.headless import check_first_host
from quire.reports.engine import PlanReport
from quire.reports.holdings import Holdings
from quire.reports.packed_bytes import kept_weights
from quire.reports.ranks import rank_lines
from quire.reports.states import state_notes
from quire.text.chat import ChatTemplate
from quire.text.load import load_text
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_folders
from quire.weights.tied import unread_head
from quire.worker.runner import StepRunner

LOG = logging.getLogger("quire")


@dataclass(kw_only=True)
class Engine:
    """An assembled engine and every choice that was made for it.

    weight_bytes   bytes of the weights as they are kept, as far as plans know the kernels' layout (`kept_weights`)
    runner         model runner of an engine on one device; None: each of several ranks has its own, in its process
    phases         name of each start-up phase -> its seconds, in order
    notes          lines that the user should see
    """

    config: EngineConfig
    folder: Path
    args: ModelArgs
    device: DevicePlan
    dtype: DTypePlan
    memory: MemoryPlan
    kernels: Kernels
    core: Core
    runner: StepRunner | None
    tokenizer: Tokenizer | None
    tokenizer_folder: Path
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    default_params: SamplingParams
    pooling: PoolingPlan
    weight_bytes: int
    phases: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def worker(self) -> StepRunner:
        """The model runner of an engine on one device. Raises ConfigError for an engine of several ranks."""
        if self.runner is None:
            raise ConfigError(
                "this engine has several ranks, each in a process of its own, so no model runner is in "
                "this process: use one device (leave out -tp, -pp and -dp)."
            )
        return self.runner

    def close(self) -> None:
        """Stop the worker and free its memory; a GPU's memory goes back to the driver."""
        flush(self.core)
        self.core.shutdown()
        del self.runner, self.core
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


class Found(NamedTuple):
    """The model that a configuration names, as its files describe it, and this machine; input of `plan_ranks`.

    config  options; of a speculators repository those of the model that it drafts for
    dtype   dtype in which the model computes, as the checkpoint and this CPU or GPU allow it
    draft   the draft model or EAGLE head; None: there is none
    """

    config: EngineConfig
    folder: Path
    tokenizer_folder: Path
    args: ModelArgs
    dtype: DTypePlan
    quantization: Quantization
    device: DevicePlan
    cpu: CpuFacts
    draft: "Found | None" = None

    @property
    def facts(self) -> ModelFacts:
        """The model and its drafter as plans need them."""
        return ModelFacts(
            folder=self.folder,
            args=self.args,
            dtype=self.dtype,
            quantization=self.quantization.config,
            draft=self.draft.args if self.draft is not None else None,
        )


def assemble(config: EngineConfig, on_loading: Loading | None = None, *, served: bool = True) -> Engine:
    """Build an engine; raises a `UserError` that names the fix when model or options cannot be served.

    on_loading   called with (bytes done, bytes in all) while weights are read; replaces the progress bar
    served       True: a server, which streams tokens; False: offline, where steps of an MoE model may be larger
    """
    if config.device.device == "mock":
        raise ConfigError("device=mock has no model and is for `quire serve`: choose another device here.")
    phases = _Phases()
    found = read_files(config)
    config = found.config
    phases.end("config")
    text = load_text(config, found.folder, tokenizer_folder=found.tokenizer_folder)
    phases.end("tokenizer")
    plans = plan_ranks(config, found, served=served)
    plan, cpu = plans[0], found.cpu
    check_early(plans, cpu.free_memory)
    if found.draft is not None and plan.draft is not None:
        obtain_weights(
            plan.draft.config,
            found.draft.folder,
            found.draft.args,
            plan.draft.dtype,
            None,
            quantization=plan.draft.quantization,
        )
    obtain_weights(
        config,
        found.folder,
        found.args,
        plan.dtype,
        None if found.device.device == "cuda" else cpu.free_memory,
        quantization=plan.quantization,
    )
    unread = () if config.load.load_format == "dummy" else unread_head(found.folder, config.load.hf_overrides)
    with Progress(
        "Loading weights", 0, unit="B", enabled=config.load.use_tqdm_on_load and on_loading is None
    ) as progress:
        arrived = threading.Event()
        replicas = _assemble_replicas(plans, arrived, on_loading or progress.update, phases.end)
    parts, tokenizer = replicas[0], text.tokenizer  # not of a core that serves another process, until it needs one
    cores = _assemble_cores(
        replicas,
        lambda: GrammarCompiler(
            lambda: tokenizer or Tokenizer.load(found.tokenizer_folder),
            found.args.vocab_size,
            GrammarTrial(),
            cpu.cores,
        ),
    )
    core = join_replicas(plan, cores, arrived, parts.hosts)
    phases.end("engine")
    lines = () if served else feature_lines(core.facts.plans)  # a server has a banner
    notes = (
        *draft_notes(plan),
        *found.quantization.notes,
        *_notes(plan, _params_of(plans), parts.memory),
        *unread,
        *parts.notes,
        *idle_notes(plan.meetings),
        *lines,
    )
    for note in notes:
        LOG.warning("%s", note)
    return Engine(
        config=plan.config,
        folder=found.folder,
        args=found.args,
        device=found.device,
        dtype=plan.dtype,
        memory=parts.memory,
        kernels=parts.model.kernels if parts.model else Kernels(choices=plan.kernels),
        core=core,
        runner=parts.worker,
        tokenizer=text.tokenizer,
        tokenizer_folder=text.tokenizer_folder,
        chat_template=text.chat_template,
        eos_ids=text.eos_ids,
        default_params=text.default_params,
        pooling=text.pooling,
        weight_bytes=kept_weights(plan),
        phases=phases.seconds,
        notes=notes,
    )


def read_files(config: EngineConfig, head: str = "") -> Found:
    """Find the model and read its config.json; its weights may be missing. Raises a `UserError` that names the fix.

    head   method of the EAGLE head that is read; "": a model
    """
    device = resolve_device(config.device.device)
    if not head:
        config = resolve_speculators(config, resolve_folders(config)[0])
    folder, tokenizer_folder = resolve_folders(config)
    cpu = read_cpu_facts()
    args, dtype, quantization = read_model(config, folder, device.device, cpu, head)
    other = draft_config(config, dtype.dtype)
    draft = None if other is None else read_files(other, head_method(config))
    return Found(config, folder, tokenizer_folder, args, dtype, quantization, device, cpu, draft)


def plan_ranks(config: EngineConfig, found: Found, *, served: bool = True) -> list[EnginePlan]:
    """Return the `EnginePlan` of every rank, in the order of rank numbers. `served`: see `assemble`."""
    parallel, words = parallel_sizes(config.parallel), str(found.device)
    check_first_host(config.hosts)
    facts = found.facts
    check(met(inputs_of(config, facts.args, found.device.device, draft=facts.draft)), planned=True)
    total, shared = found.cpu.total_memory, False
    if found.device.device == "cuda" and parallel.size > 1:  # this process computes nothing: no context on a GPU
        if shared := ranks_share_gpu():
            config = _on_one_gpu(config, parallel)
        elif config.hosts.distributed_executor_backend != "ray":  # which knows the GPUs of its nodes
            check_gpus(parallel, here=ranks_here(config.hosts, parallel))
        total = probe_driver().memory
    elif found.device.device == "cuda":
        gpu = read_cuda_facts()
        words, total = f"{words}, {gpu}", gpu.total_memory
    machine = Machine(device=found.device.device, words=words, total_memory=total, shared=shared)

    def plans(config: EngineConfig, parallel: Parallel = parallel, found: Found = found) -> list[EnginePlan]:
        each = partial(resolve_engine, config, found.facts, machine, here, parallel=parallel, served=served)
        made = [each(number=number) for number in range(parallel.size)]
        other = draft_config(config, found.dtype.dtype)
        if found.draft is None or other is None or made[0].missing:
            return made
        drafts = plans(*draft_division(config, other, found.draft.args, parallel), found.draft)
        return [with_draft_model(*both) for both in zip(made, drafts, strict=True)]

    made = plans(config)
    smallest = min((plan.config.scheduler for plan in made), key=SchedulerConfig.token_budget)
    if any(plan.config.scheduler != smallest for plan in made):  # stages of unequal weight have room for other steps
        made = plans(replace(config, scheduler=smallest))
    assert all(plan.config == made[0].config and plan.graphs == made[0].graphs for plan in made), "ranks differ"
    return made


def _on_one_gpu(config: EngineConfig, parallel: Parallel) -> EngineConfig:
    """Return the configuration of ranks that share a GPU, for tests: each has an equal part of its memory.

    Raises `ConfigError` for exchanges that cannot go through host memory.
    """
    pulls = parallel.lockstep and config.parallel.all2all_backend != "allgather_reducescatter"
    apart = config.hosts.several
    if pulls or apart or not config.device.enforce_eager:
        raise ConfigError(
            "QUIRE_TEST_RANKS_SHARE_GPU: ranks that share a GPU exchange tensors through host memory: "
            "add --enforce-eager, and with -dp and --enable-expert-parallel --all2all-backend "
            "allgather_reducescatter; leave out --nnodes and Ray."
        )
    part = config.cache.gpu_memory_utilization / parallel.size
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=part))


def assemble_rank(plans: Sequence[EnginePlan], *, on_loading: Loading, end_phase: Callable[[str], None]) -> Parts:
    """Load the model of the only plan in `plans` on this process's device and size its KV cache; see `load_rank`."""
    (plan,) = plans
    torch.set_num_threads(plan.config.device.num_threads or read_cpu_facts().cores)
    gpu = read_cuda_facts() if plan.machine.device == "cuda" else None
    loaded = load_rank(plan, ALONE, gpu, on_loading=on_loading, end_phase=end_phase)
    return loaded.finish(resolve_sizing(plan, loaded.measure()), Outside(namespace([plan], [loaded.sums])))


def _assemble_cores(replicas: Sequence[Parts], compiler: Callable[[], GrammarCompiler]) -> list[EngineCore]:
    """Return the core of each replica. When one cannot be made, those before it end."""
    cores = list[EngineCore]()
    with ExitStack() as made:
        for replica, parts in enumerate(replicas):
            cores.append(assemble_core(parts, compiler(), replica))
            made.callback(cores[-1].shutdown, wait=False)
        made.pop_all()
    return cores


def _assemble_replicas(
    plans: Sequence[EnginePlan], arrived: threading.Event, on_loading: Loading, end_phase: Callable[[str], None]
) -> list[Parts]:
    """Build the engine of each replica: on this process's device, or in processes of their own."""
    if len(plans) == 1:
        return [assemble_rank(plans, on_loading=on_loading, end_phase=end_phase)]
    from quire.assemble.ranks import assemble_ranks

    return assemble_ranks(plans, on_loading=on_loading, end_phase=end_phase, arrived=arrived)


def assemble_core(parts: Parts, compiler: GrammarCompiler | None, replica: int = 0) -> EngineCore:
    """Make the engine core: scheduler, KV block allocator, executor. `compiler`: of structured output."""
    plan, memory, config = parts.plan, parts.memory, parts.plan.config
    scheduler, num_slots = config.scheduler, memory.num_slots or config.scheduler.sequences()
    report = PlanReport(holdings=Holdings(plan=plan), memory=memory, fullest=plan.mesh.rank.number)
    pool, states = BlockPool(memory.num_blocks), make_checkpoints(memory, plan)
    store = make_store(plan, memory, pool, states, parts.tiers, parts.namespace)
    facts = ExecutorFacts(
        depth=parts.depth,
        decode_lag=parts.depth if parts.num_stages == 1 else 1,
        num_stages=parts.num_stages,
        num_slots=num_slots,
        num_blocks=memory.num_blocks,
        num_host_blocks=memory.host_blocks,
        block_size=memory.geometry.block_size,
        max_model_len=memory.max_model_len,
        vocab_size=plan.args.vocab_size,
        prompt_chunk=parts.prompt_chunk,
        num_drafts=plan.drafting.num_drafts,
        drafts_cached=plan.speculation is not None and plan.speculation.layered,
        blends=config.cache.enable_cache_blend,
        drafts_by_batch=plan.speculation.by_batch if plan.speculation else (),
        auto_drafts=plan.speculation.auto if plan.speculation else (),
        draft_lookup=plan.speculation.lookup if plan.speculation else (0, 0),
        plans={
            "device": plan.machine.words,
            "dtype": plan.dtype,
            "memory": memory,
            "kernels": plan.kernels,
            "experts": plan.experts and f"{plan.experts.kernels} (dispatcher {plan.experts.dispatcher})",
            "engine": msgspec.json.encode(report.describe()).decode(),
        }
        | parts.plans
        | rank_lines(report)
        | turned_on(plan, store, memory),
    )
    core = EngineCore(
        parts.executor(facts),
        scheduler,
        KVAllocator(pool, memory.geometry, num_slots=num_slots, states=states),
        root_key=root_key(plan),
        prefix_caching=config.cache.enable_prefix_caching,
        compiler=compiler,
        store=store,
    )
    core.scheduler.roster.adapters = adapter_slots(plan)
    try:
        return publish_events(core, config, replica)
    except ConfigError:
        core.shutdown(wait=False)
        raise


def join_replicas(
    plan: EnginePlan, cores: Sequence[EngineCore], arrived: threading.Event, hosts: tuple[int, ...] = ()
) -> Core:
    """Return the core of all replicas, which also balances experts; the only core if there is nothing to join.

    hosts   index of the host of each rank
    """
    for store in filter(None, (core.scheduler.roster.store for core in cores)):
        for start in store.on_start:
            start()
    parallel, moe, layers = plan.mesh.parallel, plan.args.moe, len(plan.args.expert_layers)
    if parallel.redundant is None or moe is None:
        return cores[0] if len(cores) == 1 else Replicas(cores, lockstep=parallel.lockstep, arrived=arrived)
    experts = initial_map(
        layers, moe.routing.num_experts, parallel.redundant, parallel.expert_ranks, in_turn=parallel.round_robin
    )
    settings = read_eplb_config(plan.config.parallel.eplb_config)
    return Replicas(
        cores,
        lockstep=True,
        arrived=arrived,
        balance=partial(Balancer, settings, experts, groups=max(1, moe.routing.num_groups), nodes=even_nodes(hosts)),
    )


def _params_of(plans: Sequence[EnginePlan]) -> list[Param]:
    """Return the parameters of a rank of each stage."""
    return [param for one in {one.mesh.rank.layers: one for one in plans}.values() for param in one.params]


def _notes(plan: EnginePlan, params: Sequence[Param], memory: MemoryPlan) -> tuple[str, ...]:
    """Return notes about the model, its ranks and memory. params: of a rank of each stage."""
    args, dtype, config = plan.args, plan.dtype, plan.config
    shown = (*parallel_notes(args, config.parallel, params), *events_notes(config))
    cache = (*cache_notes(plan.cache, plan.machine.device, dtype.dtype), *plan.offload.notes)
    notes = [*cache, *slice_notes(params, dtype.dtype), *args.notes, *memory.notes, *state_notes(plan, memory), *shown]
    if dtype.dtype not in (args.dtype, config.model.dtype):  # a type that was asked for needs no note
        notes.append(f"computing in {dtype.dtype}: {dtype.reason}.")
    if config.model.trust_remote_code:
        notes.append("trust_remote_code changes nothing: Quire never runs code from a checkpoint.")
    return tuple(notes)
