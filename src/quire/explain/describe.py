"""The plan of an engine that is not built, for this machine or for a described GPU. No torch, no weights.

All values come from the functions that `assemble` calls, except a value that only a GPU can tell: the memory of
activations and CUDA graphs is estimated here.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.args.checkpoint import ModelArgs, read_raw_config
from quire.assemble.obtain import read_args, settled_quantization
from quire.config.engine import EngineConfig
from quire.config.speculators import resolve_speculators
from quire.contracts.errors import ConfigError, ModelError, ModelNotFound, UserError, WeightsError
from quire.contracts.parallel import Parallel, Rank
from quire.kernels.experts_plan import DISPATCHERS
from quire.kernels.select import probe_of
from quire.plan.cuda_memory import DeviceMemory
from quire.plan.drafts import draft_config, draft_division, head_method, with_draft_model
from quire.plan.dtype import resolve_dtype
from quire.plan.engine import EnginePlan, Machine, ModelFacts, of_rank, resolve_engine
from quire.plan.kinds.blocks import widest
from quire.plan.meetings import check, inputs_of, met
from quire.plan.memory import GIB, MemoryPlan, check_cpu_weights
from quire.plan.placement import held_of, parallel_sizes, ranks_here
from quire.plan.sizing import resolve_sizing
from quire.platforms.cpu import CpuFacts, read_cpu_facts
from quire.platforms.detect import check_gpus, probe_driver, resolve_device
from quire.quantization.read import find_quantization
from quire.reports.adapters import adapter_bytes
from quire.reports.engine import PlanReport
from quire.reports.gpu_rates import HOST_GPUS
from quire.reports.holdings import Holdings
from quire.weights.folder import HEADERS, absent_weights, resolve_folders
from quire.weights.match import load_error, match_tensors

EMPTY = 600 << 20  # bytes on a GPU: an empty process


class Gpu(NamedTuple):
    """A GPU as far as plans depend on it; `memory` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), int(139.8 * GIB)),
    "h100": Gpu("NVIDIA H100 80GB", (9, 0), int(79.2 * GIB)),
    "a100": Gpu("NVIDIA A100 80GB", (8, 0), int(79.2 * GIB)),
}


def plan_engine(
    config: EngineConfig,
    described: str = "",
    head: str = "",
    parallel: Parallel | None = None,
    facts: CpuFacts | None = None,
) -> PlanReport:
    """Plan an engine for `config`, on the device named `described` (a key of GPUS) or on this machine.

    head       method of the EAGLE head that is planned; "": a model
    parallel   division of a draft model or EAGLE head over the ranks; None: by the options
    facts      of this machine's CPU; None: as they are now. Plans that are compared need the same free memory
    Raises the errors that `assemble` would raise.
    """
    if not head:
        config = resolve_speculators(config, resolve_folders(config, only=HEADERS)[0])
    gpu, words = _device(config, described)
    parallel = parallel or parallel_sizes(config.parallel)
    facts, folder = facts or read_cpu_facts(), resolve_folders(config, only=HEADERS)[0]
    device, memory = ("cuda", gpu.memory) if gpu else ("cpu", facts.total_memory)
    machine = Machine(device=device, words=words, total_memory=memory)
    args = read_args(config, folder, head)
    dtype = resolve_dtype(config.model.dtype, args.dtype, bool(facts.bf16_units), device)
    other = draft_config(config, dtype.dtype)
    model = ModelFacts(
        folder=folder,
        args=args,
        dtype=dtype,
        quantization=_quantization(config, folder, args),
        draft=None if other is None else _draft_args(other, head_method(config)),
    )
    plan = resolve_engine(config, model, machine, probe_of(gpu.capability if gpu else None), parallel=parallel)
    if gpu is not None and not described:
        check_gpus(parallel, here=ranks_here(config.hosts, parallel))
    draft = None
    if other is not None:
        divided = (other, parallel) if model.draft is None else draft_division(config, other, model.draft, parallel)
        try:
            draft = plan_engine(divided[0], described, head_method(config), divided[1])
            plan = with_draft_model(plan, draft.plan)
        except UserError:  # what the engine cannot do yet is told, and the rest of the plan
            if not plan.missing:
                raise
    holdings, error = _holdings(plan, folder)
    if draft is not None:
        error = error or draft.load_error
    memory, fullest = _tightest(holdings, gpu, facts.free_memory)
    if isinstance(memory, str) and gpu is not None:
        memory += _larger(plan, gpu)
    return PlanReport(holdings=holdings, memory=memory, fullest=fullest, load_error=error)


def _draft_args(config: EngineConfig, head: str) -> ModelArgs | None:
    """Return the arguments of a draft model or EAGLE head; None if it cannot be read, which its own plan tells."""
    try:
        return read_args(config, resolve_folders(config, only=HEADERS)[0], head)
    except ModelError:
        return None


def one_layer(plan: dict[str, Any], layer: str) -> dict[str, Any]:
    """Return a described plan cut to a layer: "embed", a number or "head". Raises ConfigError for an unknown layer."""
    if found := [one for one in plan["layers"] if one["layer"] == layer]:
        return plan | {"layers": found}
    raise ConfigError(f"--layer {layer} does not exist: give embed, 0 to {len(plan['layers']) - 3}, or head.")


def _quantization(config: EngineConfig, folder: Path, args: ModelArgs) -> dict[str, Any]:
    """Return the quantization of the model; by its config alone where its weights cannot be read (`load_error`)."""
    try:
        return settled_quantization(config, folder, args).config
    except (ModelNotFound, WeightsError):
        raw = read_raw_config(folder, config.load.hf_overrides)
        return find_quantization(folder, raw, config.load.quantization).config


def _holdings(plan: EnginePlan, folder: Path) -> tuple[Holdings, str]:
    """Return the holdings of the ranks, and the error that the loader would raise for the weights; "": none.

    The weights are in `folder`, or on the hub: then their headers are read.
    """
    holdings, config = Holdings(plan=plan), plan.config
    if config.load.load_format == "dummy":
        return holdings, ""
    repository = absent_weights(config, folder)
    if repository is None:
        return holdings, load_error(folder, holdings.layout, plan.args)
    try:
        headers = repository.read_headers(folder)
        holdings = Holdings(plan=plan, checkpoint=headers)
        with repository.named(folder):
            match_tensors(headers, holdings.layout, plan.args)
    except (ModelNotFound, WeightsError) as error:
        return holdings, str(error)
    return holdings, ""


def _device(config: EngineConfig, described: str) -> tuple[Gpu | None, str]:
    """Return the GPU, or None for a CPU, and the device in words."""
    if gpu := GPUS.get(described):
        return gpu, "cuda (described: {}, sm_{}{}, {:.1f} GiB)".format(gpu.name, *gpu.capability, gpu.memory / GIB)
    try:
        found = resolve_device(config.device.device)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}. --device {', '.join(GPUS)} plans for a GPU that is not here."
        ) from None
    if found.device == "cpu":
        return None, str(found)
    driver = probe_driver()
    return Gpu("this GPU", driver.capability, driver.memory), str(found)


def _tightest(holdings: Holdings, gpu: Gpu | None, free: int) -> tuple[MemoryPlan | str, int]:
    """Return the memory of the rank with the least room, or the reason why nothing fits there, and its number."""
    kinds = {held_of(holdings.plan.args, rank): rank for rank, _ in reversed(holdings.held)}
    memory = list[tuple[MemoryPlan, int]]()
    for rank in sorted(kinds.values(), key=lambda rank: (-holdings.held[rank.number][1], rank.number)):
        try:
            memory.append((_memory(holdings, gpu, free, rank), rank.number))
        except ConfigError as error:
            return str(error), rank.number
    return min(memory, key=lambda one: one[0].num_blocks)


def _larger(plan: EnginePlan, gpu: Gpu) -> str:
    """Return a sentence with the smallest number of such GPUs that holds the model and its parallel sizes, or "".

    Doubles tensor parallelism inside a machine, then pipeline stages; replicas stay as they are asked for. Of replicas
    that share experts it also names as many more of them, if these fit on as many GPUs.
    """
    asked, layers = plan.mesh.parallel, plan.args.num_layers
    doubled = [
        replace(asked, tp=asked.tp << i, pp=asked.pp << j)
        for j in range(layers.bit_length())
        for i in range(4)
        if i == 0 or asked.tp << i <= HOST_GPUS
    ]
    fitting = next((sizes for sizes in sorted(doubled, key=lambda sizes: sizes.size) if _fits(plan, gpu, sizes)), None)
    if fitting is None:
        return ""
    more = replace(asked, dp=asked.dp * fitting.size // asked.size)
    found = [fitting, *[more] * (asked.lockstep and more != fitting and _fits(plan, gpu, more))]
    wide = asked.lockstep and not plan.config.device.enforce_eager and fitting.expert_ranks > DISPATCHERS["pull"].ranks
    eager = f", with --enforce-eager: more than {DISPATCHERS['pull'].ranks} ranks share experts" * wide
    return f" It fits with {' or '.join(map(str, found))} ({fitting.size} GPUs like this one{eager})."


def _fits(plan: EnginePlan, gpu: Gpu, sizes: Parallel) -> bool:
    """Return True if a model with these parallel sizes fits on such GPUs."""
    other = msgspec.structs.replace(plan, mesh=msgspec.structs.replace(plan.mesh, parallel=sizes))
    try:
        check(met(inputs_of(plan.config, plan.args, "cuda", parallel=sizes)), planned=True)
        memory, _ = _tightest(Holdings(plan=other), gpu, 0)
    except ConfigError:  # a size does not divide the model, or a slice would cut a group of a quantized matrix
        return False
    return not isinstance(memory, str)


def _memory(holdings: Holdings, gpu: Gpu | None, free: int, rank: Rank) -> MemoryPlan:
    """Size the memory of a rank; `free`: bytes of a CPU's memory, which all ranks share, before weights are loaded."""
    weights = holdings.held[rank.number][1] - holdings.host_layers(rank).saved
    plan = msgspec.structs.replace(of_rank(holdings.plan, rank), geometry=holdings.page(rank))
    if gpu is None:
        every = sum(held for _, held in holdings.held)
        check_cpu_weights(every, free, "" if plan.quantization else plan.dtype.dtype)
        free -= adapter_bytes(plan) * len(holdings.held)
        return resolve_sizing(plan, (free - every) // len(holdings.held))
    ours = EMPTY + plan.graphs.num_bytes + _activations(plan)
    ours += plan.buffer_bytes + plan.scratch_bytes + adapter_bytes(plan)
    ours += (plan.config.scheduler.sequences() + 1) * plan.geometry.state_bytes
    if plan.graphs.bounds:  # graphs have memory of their own, for the experts' part of the largest exchange, too
        ours += plan.mesh.parallel.dp * plan.graphs.bounds[-1] * _expert_bytes(plan)
    left = gpu.memory - weights - ours
    return resolve_sizing(
        plan, DeviceMemory(total=gpu.memory, at_start=gpu.memory, free=left, weights=weights, others=0)
    )


def _activations(plan: EnginePlan) -> int:
    """Estimate the bytes of the largest step.

    Every token has hidden states and the results of the widest layer, 2 bytes per number. Experts that replicas share
    have room for the tokens of all replicas in one exchange; more travel in several. Every sampled row has float32
    logits and the copies that sampling makes.
    """
    args, parallel, tokens = plan.args, plan.mesh.parallel, plan.step_tokens
    inner = tokens * 2 * 3 * widest(args) // parallel.tp
    parts = () if plan.graphs.even else plan.graphs.bounds[-1:]  # `even` counts decodes, and prompts travel at once
    rows = parallel.dp * min((tokens, *parts)) if parallel.lockstep else tokens
    inner = max(inner, rows * _expert_bytes(plan))
    return tokens * 2 * 4 * args.hidden_size + inner + 3 * 4 * args.vocab_size * plan.step_rows


def _expert_bytes(plan: EnginePlan) -> int:
    """Return the bytes that the results of a token's experts take in their layers; 0 for a model without experts."""
    moe, parallel = plan.args.moe, plan.mesh.parallel
    if moe is None:
        return 0
    return (
        2
        * moe.routing.top_k
        * (3 * moe.expert_size // (1 if parallel.experts else parallel.tp) + plan.args.hidden_size)
    )
