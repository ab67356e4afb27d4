"""`quire explain --cost`: what a step costs, kernel by kernel, with a forecast of its time. No torch, no weights."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.args.latent import LatentArgs
from quire.config.engine import EngineConfig
from quire.contracts.errors import ConfigError, UserError
from quire.contracts.parallel import Parallel
from quire.explain.describe import plan_engine
from quire.plan.kv_geometry import kv_components
from quire.plan.placement import parallel_sizes
from quire.plan.weight_bytes import ITEM_BYTES
from quire.reports.engine import PlanReport
from quire.reports.gpu_rates import RATES, GpuRates, rates_of
from quire.reports.step_costs import StepWork
from quire.reports.step_kernels import StepForecast, StepKernel, active_parameters, forecast, launches
from quire.reports.step_time import USUAL, RankSteps

Works = tuple[tuple[StepWork, bool], ...]  # with True for prompts
Counts = tuple[int, ...]
BATCHES = (1, 4, 16, 64, 256)  # whose experts are counted
LAYOUTS = tuple(Parallel(tp=size) for size in (2, 4, 8))
WITH_EXPERTS = (*LAYOUTS, *(Parallel(dp=size, experts=True) for size in (2, 4, 8)))


def describe_cost(
    config: EngineConfig, described: str, requests: int = 1, context: int | None = None, *, layouts: bool = False
) -> dict[str, Any]:
    """Return the costs of a step of decodes, and of one of prompts, as plain values.

    requests, context   of a replica in the step of decodes, and tokens of each after it (None: 4096, or the longest)
    rates         of the GPU; None: a CPU, or none are known: then all seconds, and what bounds a kernel, are None
    balance       operations of a product for each byte from which on it is bound by operations
    parameters    "all" and "active": those that a token is multiplied with
    experts       [tokens, experts that they hit] in a layer if the router chooses at random; []: none
    latent        bytes of a token in a layer, "absorbed" and "naive" (keys and values of all heads); None: no latents
    replicas      of the engine: a step is that of one of them
    steps         of `StepForecast`, of the slowest rank's first stage
    layouts       what other divisions of the model send in these steps, if `layouts`
    """
    report = plan_engine(config, described)
    args, rates = report.plan.args, rates_of(report.plan.machine.words)
    longest = args.max_position_embeddings
    context = context or min(USUAL, longest)
    if context > longest:
        raise ConfigError(f"--context {context:,} is longer than the model's {longest:,} tokens: give fewer.")
    moe = args.moe
    top, every = (moe.routing.top_k, moe.routing.num_experts) if moe else (0, 1)
    counted = active_parameters(report.holdings.layout, top / every)
    found: dict[str, Any] = {
        "rates": rates and asdict(rates),
        "balance": rates and rates.products / rates.memory,
        "parameters": dict(zip(("all", "active"), counted, strict=True)),
        "experts": [[n, every * (1 - (1 - top / every) ** n)] for n in sorted({*BATCHES, requests})] if moe else [],
        "latent": _latent(report),
        "replicas": config.parallel.data_parallel_size,
        "steps": [],
        "layouts": [],
    }
    if layouts and rates is None:
        raise ConfigError("--layouts compares seconds, and the rates of this device are not known: add --device h200.")
    chunk = min(report.plan.config.scheduler.token_budget(), longest)
    works = ((StepWork(requests, 1, context), False), (StepWork(1, chunk, chunk), True))
    layers, own = list(report.layers()), report.holdings.held[0][0].layers
    counts = tuple(launches(layers, own, prompts) for _, prompts in works)
    found["steps"] = [_step(one, rates) for one in _forecasts(report, rates or RATES[0], works, counts)]
    if layouts and rates is not None:
        found["layouts"] = list(_layouts(config, described, args, rates, works, counts))
    return found


def _forecasts(report: PlanReport, rates: GpuRates, works: Works, counts: Counts) -> Iterator[StepForecast]:
    """Yield the steps of rank 0. counts: kernels of each"""
    rank = report.holdings.held[0][0]
    made = RankSteps(holdings=report.holdings, rank=rank, rates=rates, exchanges=[*report.exchanges(rank)])
    for (work, prompts), count in zip(works, counts, strict=True):
        own = work._replace(rows=work.rows + (0 if prompts else made.drafts(work.requests)))
        yield forecast(made, count, own, prompts=prompts)


def _step(made: StepForecast, rates: GpuRates | None) -> dict[str, Any]:
    kernels = [_kernel(one, rates) for one in made.kernels]
    counted = {"kind": made.kind, **made.work._asdict(), "kernels": kernels, "launches": made.launches}
    seconds = ("gaps", "exchanges", "copies", "floor", "seconds")
    return counted | {name: None if rates is None else getattr(made, name) for name in seconds}


def _kernel(one: StepKernel, rates: GpuRates | None) -> dict[str, Any]:
    if rates is None:
        return one._asdict() | {"floor": None, "seconds": None, "intensity": one.intensity, "bound": None}
    by_bytes = one.num_bytes / rates.memory >= one.floor * (1 - 1e-9)
    return one._asdict() | {"intensity": one.intensity, "bound": "memory" if by_bytes else "operations"}


def _latent(report: PlanReport) -> dict[str, int] | None:
    """Return bytes of a token in a layer of latents: as they are kept, and as keys and values of all heads."""
    plan = report.plan
    args = next((one for one in plan.args.mixers if isinstance(one, LatentArgs)), None)
    if args is None:
        return None
    kept = kv_components(args, plan.cache.dtype, report.holdings.held[0][0])
    absorbed = sum(one.num_heads * one.head_dim * one.item_bytes for one in kept if not one.name.startswith("index"))
    each = args.nope_dim + args.rope_dim + args.v_dim
    return {"absorbed": absorbed, "naive": args.num_heads * each * ITEM_BYTES[plan.dtype.dtype]}


def _layouts(
    config: EngineConfig, described: str, args: ModelArgs, rates: GpuRates, works: Works, counts: Counts
) -> Iterator[dict[str, Any]]:
    """Yield what divisions of the model send in the steps of a rank; those that do not divide it say why.

    Requests are those of the plan: replicas share them.
    """
    asked = parallel_sizes(config.parallel)
    candidates = dict.fromkeys((asked, *(WITH_EXPERTS if args.moe else LAYOUTS)))
    for parallel in candidates:
        if parallel.size == 1:
            continue
        known: dict[str, Any] = {"layout": str(parallel), "asked": parallel == asked}
        own = tuple((work._replace(requests=-(-work.requests // parallel.dp)), prompts) for work, prompts in works)
        try:
            report = plan_engine(_divided(config, parallel), described)
            made = list(_forecasts(report, rates, own, counts))
        except UserError as error:
            yield known | {"refused": str(error)}
            continue
        yield known | {"refused": "", "steps": [[one.exchanges, one.seconds] for one in made]}


def _divided(config: EngineConfig, parallel: Parallel) -> EngineConfig:
    sizes = replace(
        config.parallel,
        tensor_parallel_size=parallel.tp,
        pipeline_parallel_size=parallel.pp,
        data_parallel_size=parallel.dp,
        enable_expert_parallel=parallel.experts,
    )
    return replace(config, parallel=sizes)
