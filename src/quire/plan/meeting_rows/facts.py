"""Numbers and names that stand in the texts of rows: a name in braces -> a function of the inputs."""

from collections.abc import Callable, Mapping
from string import Formatter

from quire.args.check_layer import check_layer
from quire.contracts.parallel import MOST_RANKS
from quire.plan.kinds import mixers
from quire.plan.meeting_rows import features
from quire.plan.meeting_rows.records import Inputs


def filled(text: str, inputs: Inputs) -> str:
    """Return the text with the facts that it names."""
    names = {name for _, name, _, _ in Formatter().parse(text) if name}
    return text.format_map({name: FACTS[name](inputs) for name in names})


def listed_or(words: list[str]) -> str:
    """Return words as "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _fitting_tp(i: Inputs) -> str:
    kinds, most = mixers(i.model), min(kind.num_heads for kind in mixers(i.model))
    fits = [not any(kind.uneven(tp) for kind in kinds) for tp in range(1, most + 1)]
    return listed_or([str(tp) for tp, good in enumerate(fits, 1) if good])


def _uneven_parts(i: Inputs) -> str:
    """Return the parts of layers that -tp ranks cannot share; heads that cannot be divided come alone."""
    kinds, tp = mixers(i.model), i.parallel.tp
    heads = [kind for kind in kinds if kind.num_heads % tp]
    return " and ".join(dict.fromkeys(filter(None, (kind.uneven(tp) for kind in heads or kinds))))


def _fitting_slots(i: Inputs) -> str:
    return listed_or([str(-i.num_experts % i.parallel.expert_ranks + n * i.parallel.expert_ranks) for n in range(3)])


FACTS: Mapping[str, Callable[[Inputs], object]] = {
    "parallel": lambda i: i.parallel,
    "tp": lambda i: i.parallel.tp,
    "pp": lambda i: i.parallel.pp,
    "dp": lambda i: i.parallel.dp,
    "dcp": lambda i: i.parallel.dcp,
    "ranks": lambda i: f"{i.parallel.size:,}",
    "most_ranks": lambda i: f"{MOST_RANKS:,}",
    "hosts": lambda i: i.config.hosts.nnodes,
    "local": lambda i: i.config.hosts.data_parallel_size_local,
    "uneven_parts": _uneven_parts,
    "fitting_tp": _fitting_tp,
    "layers": lambda i: i.model.num_layers,
    "last_layer": lambda i: i.model.num_layers - 1,
    "partition": lambda i: ",".join(map(str, i.parallel.layers)),
    "partition_stages": lambda i: len(i.parallel.layers),
    "partition_layers": lambda i: sum(i.parallel.layers),
    "in_one_piece": lambda i: i.model.foreign and i.model.foreign.divides,
    "experts": lambda i: i.num_experts,
    "expert_ranks": lambda i: i.parallel.expert_ranks,
    "redundant": lambda i: i.parallel.redundant,
    "slots": lambda i: i.num_experts + (i.parallel.redundant or 0),
    "fitting_slots": _fitting_slots,
    "most_redundant": lambda i: i.num_experts * (i.parallel.expert_ranks - 1),
    "more_ranks": lambda i: "--enable-expert-parallel and " * (not i.parallel.experts) + "-tp or -dp",
    "exchange": lambda i: i.config.parallel.all2all_backend,
    "idle_placement": features.idle_placement,
    "routing": lambda i: i.config.load.routing,
    "method": lambda i: i.method,
    "mtp_layers": features.mtp_layers,
    "draft": lambda i: i.speculation and i.speculation.model,
    "draft_vocabulary": lambda i: i.draft and features.draft_vocabulary(i.draft),
    "vocabulary": lambda i: i.model.vocab_size,
    "draft_width": lambda i: i.draft and i.draft.hidden_size,
    "draft_context": lambda i: i.draft and i.draft.max_position_embeddings,
    "width": lambda i: i.model.hidden_size,
    "length": lambda i: i.length,
    "odd_layer": lambda i: features.odd_layers(i)[0],
    "uneven_draft": features.uneven_drafter,
    "draft_length": lambda i: i.speculation and i.speculation.max_model_len,
    "draft_ranks": lambda i: i.speculation and i.speculation.draft_tensor_parallel_size,
    "cpu_offload": lambda i: f"{i.config.load.cpu_offload_gb:g}",
    "offload": lambda i: f"{i.tiers.kv_offload_gb:g}",
    "folder": lambda i: repr(i.tiers.kv_offload_dir),
    "folder_size": lambda i: f"{i.tiers.kv_offload_dir_gb:g}",
    "policy": lambda i: i.tiers.kv_offload_policy,
    "role": lambda i: i.role,
    "check_layers": lambda i: check_layer(i.model) + 1,
    "chunks": lambda i: '"kv_chunk": true in messages' if i.request.chunks == "messages" else i.request.chunks,
}
