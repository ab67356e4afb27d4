"""Options of several devices in other words than Quire's: the dispatchers for vLLM's names, and notes for people.

Pure functions of the options and the model. No torch.
"""

from collections.abc import Iterator, Mapping, Sequence

from quire.args.checkpoint import ModelArgs
from quire.config.engine import ParallelConfig
from quire.contracts.errors import ConfigError
from quire.contracts.params import Param
from quire.kernels.experts_plan import MoEPlan
from quire.plan.placement import parallel_sizes, ranks
from quire.quantization.scheme_words import scheme_words
from quire.quantization.slices import is_cut, mixes_groups

# --all2all-backend -> phase -> dispatcher in its place; Quire chooses in other phases. "pull" takes a row once to each
# rank with an expert of it, as DeepEP's normal form does.
BACKENDS: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "allgather_reducescatter": {"prefill": "all-gather", "decode": "all-gather"},
    "deepep_high_throughput": {"prefill": "pull"},
    "deepep_low_latency": {"decode": "pull"},
}
MOST_RANKS = 4  # whose experts a note tells


def check_backend(backend: str, plan: MoEPlan) -> None:
    """Raise ConfigError for a value of --all2all-backend that has no dispatcher, with the candidates of `plan`."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"--all2all-backend {backend}: Quire has no such exchange of tokens: use "
            f"{' or '.join(name for name in BACKENDS if name != 'auto')}, or leave it out. Without it:\n"
            f"{plan}"
        )


def parallel_notes(args: ModelArgs, config: ParallelConfig, params: Sequence[Param] = ()) -> tuple[str, ...]:
    """Return the notes about the placement of experts, the exchange of tokens between replicas, and scales of slices.

    params   of a rank
    """
    return (*_placement(args, config), *_exchange(args, config), *_scales(params, config))


def slice_notes(params: Sequence[Param], dtype: str) -> tuple[str, ...]:
    """Return notes about quantized matrices whose slices have no whole groups of columns.

    dtype   of the computation
    """
    return (*_groups(params), *_widths(params), *_orders(params, dtype))


def _groups(params: Sequence[Param]) -> Iterator[str]:
    """Yield a note for each size of groups that slices cut, and which are read as equal parts."""
    cut = dict[tuple[int, int], dict[str, None]]()
    for one in params:
        if one.stored is None or one.scheme is None or not any(map(is_cut, one.parts)):
            continue
        if one.scheme.block[1] != one.stored.block[1]:
            wide, name = one.stored.block[1], one.parts[0].stored.removesuffix(".weight").rpartition(".")[2]
            cut.setdefault((wide, one.scheme.block[1]), {})[name] = None
    for (wide, own), names in cut.items():
        yield (
            f"{' and '.join(names)}: ranks of -tp cut groups of {wide} columns, which are read as groups of {own}: "
            "each has the scale of the stored group, so numbers are equal."
        )


def _widths(params: Sequence[Param]) -> Iterator[str]:
    """Yield a note about experts that are widened, because others of their layer have more bits or smaller groups."""
    mixed = [one for one in params if one.each and any(each != one.stored for each in one.each)]
    if mixed:
        common = " and ".join(dict.fromkeys(scheme_words(one.stored) for one in mixed if one.stored))
        layers = len({one.module for one in mixed})
        yield (
            f"experts of {layers} layer{'s' * (layers > 1)} are stored in several forms: all of a layer are kept in "
            f"one that holds their numbers ({common}), which takes more memory."
        )


def _orders(params: Sequence[Param], dtype: str) -> Iterator[str]:
    """Yield a note about matrices that are kept in `dtype`, because a slice of them mixes groups."""
    mixed = [one for one in params if one.stored is not None and mixes_groups(one.parts, one.stored)]
    if not mixed:
        return
    names = " and ".join(dict.fromkeys(one.parts[0].stored.rpartition(".")[0].rpartition(".")[2] for one in mixed))
    whole = ", with all matrices of these experts" if any(one.shard == "experts" for one in mixed) else ""
    yield (
        f"{names}: kept in {dtype}{whole}, because their columns are in activation order and a slice of these, which a "
        "rank of -tp holds, has no whole groups. A checkpoint without that order (desc_act=false) stays quantized."
    )


def _placement(args: ModelArgs, config: ParallelConfig) -> Iterator[str]:
    parallel, moe = parallel_sizes(config), args.moe
    if not parallel.round_robin or moe is None or parallel.expert_ranks == 1:
        return
    asked = "--expert-placement-strategy round_robin"
    stage = [rank for rank in ranks(args, parallel) if rank.stage == 0]
    held = "; ".join(f"rank {rank.number}: {listed(rank.expert_ids)}" for rank in stage[:MOST_RANKS])
    more = "; ..." * (len(stage) > MOST_RANKS)
    vllm = "" if moe.routing.num_groups > 1 else ", where vLLM is linear, because the router chooses among no groups"
    yield f"{asked}: experts go to {len(stage)} ranks in turn{vllm}: {held}{more}."


def _exchange(args: ModelArgs, config: ParallelConfig) -> Iterator[str]:
    backend, parallel = config.all2all_backend, parallel_sizes(config)
    asked = f"--all2all-backend {backend}"
    if args.moe is not None and parallel.lockstep and backend.startswith("deepep") and backend in BACKENDS:
        ((phase, name),) = BACKENDS[backend].items()
        yield (
            f"{asked} is taken as Quire's dispatcher {name} in {phase}, where it can join these ranks (up to 8 GPUs of "
            f"one host), else Quire chooses; DeepEP itself is not used. For "
            f"{'decode' if phase == 'prefill' else 'prefill'} Quire chooses."
        )


def _scales(params: Sequence[Param], config: ParallelConfig) -> Iterator[str]:
    """Yield the note that numbers depend on the cut: a rank has the inputs of some columns, and scales them alone."""
    names = dict.fromkeys(
        part.stored.removesuffix(".weight").rpartition(".")[2]
        for param in params
        if param.scheme is not None and param.scheme.inputs == "token"
        for part in param.parts
        if part.axis == 1 and not part.whole
    )
    if names:
        yield (
            f"-tp {config.tensor_parallel_size}: activations have one scale per token, and each rank takes it from its "
            f"slice of the inputs of {' and '.join(names)}: numbers, and now and then a greedy token, are not those of "
            "one device."
        )


def listed(numbers: Sequence[int]) -> str:
    """Return numbers in words, of more than four the first two and the last: "0, 4, ..., 252"."""
    shown = list(map(str, numbers))
    return ", ".join(shown if len(shown) < 5 else [*shown[:2], "...", shown[-1]])
