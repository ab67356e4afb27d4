"""The layers, heads and experts that each rank of a parallel engine holds, and the groups of ranks.

Pure arithmetic over a model's arguments. Layers are divided as in Megatron-LM (Shoeybi et al., 2019). Whole experts are
divided among ranks across the replicas of attention, as in DeepSeek-V3 (2024, section 3.4). No torch.
"""

from collections.abc import Iterator, Sequence

from quire.args.checkpoint import ModelArgs
from quire.config.balancing import read_eplb_config
from quire.config.engine import HostsConfig, ParallelConfig
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import MOST_RANKS, Parallel, Rank, share, tp_members
from quire.plan.kinds import mixer


def parallel_sizes(config: ParallelConfig) -> Parallel:
    """Return the sizes of parallelism that the options of `config` ask for."""
    balancing = read_eplb_config(config.eplb_config)
    return Parallel(
        tp=config.tensor_parallel_size,
        pp=config.pipeline_parallel_size,
        dp=config.data_parallel_size,
        experts=config.enable_expert_parallel,
        layers=config.pipeline_layer_partition,
        round_robin=config.expert_placement_strategy == "round_robin",
        redundant=balancing.num_redundant_experts if config.enable_eplb else None,
    )


def check_one_device(config: ParallelConfig, command: str) -> None:
    """Raise `ConfigError` if there are several ranks: `command` needs the whole model in its own process."""
    if (parallel := parallel_sizes(config)).size > 1:
        raise ConfigError(
            f"{parallel}: `{command}` cannot run with several ranks, because it looks into the model of "
            "its own process. Leave these options out, or use `quire trace`, which follows a request "
            "into every rank."
        )


def check_parallel(args: ModelArgs, parallel: Parallel) -> None:
    """Raise `ConfigError` for sizes of parallelism by which this model cannot be divided."""
    tp, kv = parallel.tp, args.num_kv_heads
    if min(tp, parallel.pp, parallel.dp) < 1:
        raise ConfigError(f"{parallel}: a size must be at least 1.")
    if parallel.size > MOST_RANKS:
        raise ConfigError(
            f"{parallel}: {parallel.size:,} ranks are more than the {MOST_RANKS:,} that can be planned: lower a size."
        )
    if args.num_heads % tp:
        raise ConfigError(f"-tp {tp}: {args.num_heads} attention heads cannot be divided by {tp}: {_sizes(args)}.")
    if not mixer(args).divides(tp):
        raise ConfigError(
            f"-tp {tp}: {kv} KV heads can be neither divided nor copied evenly among {tp} ranks: {_sizes(args)}."
        )
    if parallel.pp > args.num_layers:
        raise ConfigError(
            f"-pp {parallel.pp}: the model has only {args.num_layers} layers, and every stage needs a "
            f"layer: use -pp {args.num_layers} at most."
        )
    given = parallel.layers
    if given and (len(given) != parallel.pp or sum(given) != args.num_layers):
        words, layers = ",".join(map(str, given)), args.num_layers
        raise ConfigError(
            f"pipeline_layer_partition={words}: {len(given)} stages with {sum(given)} layers do not fit "
            f"-pp {parallel.pp} and the model's {layers} layers: give {parallel.pp} numbers that add up "
            f"to {layers}."
        )
    if parallel.experts and args.moe is None:
        raise ConfigError("--enable-expert-parallel: this model has no experts: leave it out.")
    if args.moe and parallel.expert_ranks > args.moe.routing.num_experts:
        raise ConfigError(
            f"{parallel}: {args.moe.routing.num_experts} experts are fewer than the "
            f"{parallel.expert_ranks} ranks (tp x dp) that share them: lower -tp or -dp."
        )
    if parallel.redundant is not None:
        _check_balancing(args, parallel, parallel.redundant)


def _check_balancing(args: ModelArgs, parallel: Parallel, redundant: int) -> None:
    """Raise `ConfigError` if experts cannot be balanced, or if the ranks cannot hold equally many slots."""
    ranks, experts = parallel.expert_ranks, args.moe.routing.num_experts if args.moe else 0
    if not experts:
        raise ConfigError("--enable-eplb: this model has no experts: leave it out.")
    if ranks == 1:
        more = "-tp or -dp" if parallel.experts else "--enable-expert-parallel and -tp or -dp"
        raise ConfigError(
            f"--enable-eplb: {parallel} has nothing to balance, because no two ranks divide whole "
            f"experts: add {more}, or leave it out."
        )
    if parallel.pp > 1 or parallel.round_robin:
        other = "-pp" if parallel.pp > 1 else "--expert-placement-strategy"
        raise ConfigError(f"--enable-eplb cannot be used with {other}: leave one of them out.")
    if (experts + redundant) % ranks:
        fitting = -experts % ranks
        raise ConfigError(
            f"eplb_config: num_redundant_experts={redundant}: {experts + redundant} slots for {experts} "
            f"experts do not divide among {ranks} ranks: use {fitting}, {fitting + ranks} or "
            f"{fitting + 2 * ranks}."
        )
    if redundant > experts * (ranks - 1):
        raise ConfigError(
            f"eplb_config: num_redundant_experts={redundant}: a rank would have more slots than "
            f"there are experts ({experts}): use at most {experts * (ranks - 1)}."
        )


def check_hosts(config: HostsConfig, parallel: Parallel) -> None:
    """Raise `ConfigError` for a number of hosts by which the ranks cannot be divided, and on a host without a core."""
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank}: only host 0 has an engine core. Start this host with `quire "
            "serve MODEL --headless` and the same flags."
        )
    if config.distributed_executor_backend == "ray" and parallel.size == 1:
        raise ConfigError(
            "distributed_executor_backend=ray: one rank runs on this host, without Ray: leave it out, or "
            "ask for several ranks (-tp, -pp, -dp)."
        )
    local, hosts = config.data_parallel_size_local, config.nnodes
    if local is not None and local * hosts != parallel.dp and not local == 1 > parallel.dp // hosts:
        fitting = max(1, parallel.dp // local) if local else hosts
        raise ConfigError(
            f"data_parallel_size_local={local}: all hosts, host 0 too, have equally many of the "
            f"{parallel.dp} replicas (-dp): leave it out, and start each host with --nnodes {fitting}, "
            "--node-rank and --master-addr."
        )
    if parallel.size % config.nnodes:
        raise ConfigError(
            f"{parallel}: {parallel.size} ranks cannot be divided equally among {config.nnodes} hosts: "
            "change nnodes, or a size."
        )


def hosts_note(parallel: Parallel, hosts: Sequence[int]) -> str:
    """Return a note about slices of layers that lie on several hosts; "" when there are none.

    hosts   index of the host of each rank
    """
    if any(len({hosts[rank] for rank in ranks}) > 1 for ranks in tp_members(parallel)):
        return (
            f"-tp {parallel.tp}: slices of a layer are on several hosts, so two sums per layer cross the network: "
            "a -tp that fits one host, and -pp or -dp across hosts, exchange less."
        )
    return ""


def _sizes(args: ModelArgs) -> str:
    """Return the sizes of tensor parallelism that fit the model, in words."""
    heads = args.num_heads
    fitting = [str(tp) for tp in range(1, heads + 1) if heads % tp == 0 and mixer(args).divides(tp)]
    return f"use -tp {' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))}"


def stages(num_layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """Return the layer range of each stage. All stages get equally many layers.

    The remaining layers go to the stages just before the last one, because the last one also has the LM head.
    """
    each, left = divmod(num_layers, pp)
    return _ranges([each + (pp - 1 - left <= stage < pp - 1) for stage in range(pp)])


def _ranges(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(len(sizes)))


def ranks(args: ModelArgs, parallel: Parallel) -> Iterator[Rank]:
    """Yield every rank, in the order of their numbers."""
    num_experts = args.moe.routing.num_experts if args.moe else 0
    held = _ranges(parallel.layers) if parallel.layers else stages(args.num_layers, parallel.pp)
    for number in range(parallel.size):
        replica, rest = divmod(number, parallel.pp * parallel.tp)
        stage, place = divmod(rest, parallel.tp)
        among = replica * parallel.tp + place if parallel.experts else 0
        yield Rank(
            number=number,
            replica=replica,
            stage=stage,
            place=place,
            layers=held[stage],
            heads=share(args.num_heads, parallel.tp, place),
            kv_heads=mixer(args).kv_heads(parallel.tp, place),
            experts=(among, num_experts, parallel.expert_ranks)
            if parallel.round_robin
            else (*share(num_experts + (parallel.redundant or 0), parallel.expert_ranks, among), 1),
            first=stage == 0,
            last=stage == parallel.pp - 1,
            tp=parallel.tp,
            whole_experts=parallel.experts,
            num_experts=num_experts,
        )
