"""The layers, heads and experts that each rank of a parallel engine holds, and the groups of ranks.

Pure arithmetic over a model's arguments. Layers are divided as in Megatron-LM (Shoeybi et al., 2019). Whole experts are
divided among ranks across the replicas of attention, as in DeepSeek-V3 (2024, section 3.4). No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.config.balancing import read_eplb_config
from quire.config.engine import ParallelConfig
from quire.config.hosts import HostsConfig, counts_replicas
from quire.contracts.parallel import Parallel, Rank, share, tp_members
from quire.plan.kinds import attending, mixers
from quire.plan.kinds.stored_experts import expert_share


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
        dcp=config.decode_context_parallel_size,
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
    num_slots = num_experts + (parallel.redundant or 0)
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
            experts=(among, num_slots, parallel.expert_ranks)
            if parallel.round_robin
            else (*share(num_slots, parallel.expert_ranks, among), 1),
            first=stage == 0,
            last=stage == parallel.pp - 1,
            tp=parallel.tp,
            whole_experts=parallel.experts,
            num_experts=num_experts,
            dcp=parallel.dcp,
        )


def ranks_here(hosts: HostsConfig, parallel: Parallel) -> int:
    """Return the number of ranks of this host."""
    if counts_replicas(hosts, parallel.dp):
        return (hosts.data_parallel_size_local or 0) * parallel.replica
    return parallel.size // hosts.nnodes


def query_heads(args: ModelArgs, rank: Rank) -> tuple[tuple[int, int], ...]:
    """Return the ranges of query heads that a rank holds, each range once."""
    return tuple(dict.fromkeys(share(kind.num_heads, rank.tp, rank.place) for kind in attending(args)))


def kv_heads(args: ModelArgs, rank: Rank) -> tuple[tuple[int, int], ...]:
    """Return the ranges of KV heads that a rank holds, each range once."""
    return tuple(dict.fromkeys(kind.kv_heads(rank.tp, rank.place) for kind in attending(args)))


def rank_facts(args: ModelArgs, rank: Rank) -> dict[str, Any]:
    """Return plain values about the part of the model that a rank holds, for `explain`.

    If kinds of layers differ in heads, these are those of the first one.
    """
    heads, own = query_heads(args, rank)[0], kv_heads(args, rank)[0]
    return asdict(rank) | {"heads": heads, "kv_heads": own}


def held_of(args: ModelArgs, rank: Rank) -> tuple[object, ...]:
    """Return a key that is equal for ranks with the same layers, and equal parts of their heads and experts."""
    own = dict.fromkeys(kind.kv_heads(rank.tp, rank.place) for kind in mixers(args))
    heads = tuple(end - first for first, end in own)
    widths = expert_share(args.moe, rank)[1] if args.moe else 0
    return rank.layers, heads, len(rank.expert_ids), widths
