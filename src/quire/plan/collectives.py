"""The exchanges between the ranks of an engine in each step, their algorithms, and the memory of their buffers.

Pure arithmetic over a model's arguments; `layers/`, `worker/stage.py` and `worker/sliced_sampling.py` make the
exchanges, and `plan/draft_exchanges.py` lists those of drafters. A test compares the list with those of a real step.
No torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.args.checkpoint import ModelArgs
from quire.contracts.parallel import Parallel, Rank, dcp_members, ep_members, pp_members, tp_members, vocabulary_share
from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.plan.kinds.blocks import layer_exchanges
from quire.plan.kinds.interfaces import CHOICE_BYTES, TOKEN, ExchangedRows, RankExchange
from quire.plan.placement import ranks

LOGIT_BYTES = 4  # float32
KEY_BYTES = 8  # of a rank's best id of a row and its value, as one integer
SUM_BUFFERS = 3  # of sums through symmetric memory: `quire.kernels.comm`
# Bytes of the largest sum through symmetric memory, by number of ranks. Every rank reads the parts of all others, that
# is (N - 1) times the message; NCCL's rings move 2 (N - 1) / N times. Known of two ranks only.
MOST_ROOM = {2: 64 << 20, 4: 512 << 10, 8: 256 << 10}
BOUNDS = (64, 256, 4096)  # tokens of a replica in an exchange between replicas
TOKEN_BYTES = 4  # int32
SAMPLED, SCORED = "sampled row", "scored row"
PLAIN, EDITED = (f"{rows} filters, penalties, bias or a mask" for rows in ("no row of the step has", "a row has"))
LOGGED = "log-probabilities of tokens, or of the prompt"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An exchange between the ranks of a group, made `times` in a step.

    message_bytes   size of a rank's buffer for each token or row (see `per`). The bytes on the wire differ, because
                    they depend on the algorithm
    when            condition of the exchange, in words; "": in every step
    algorithm, why  the way in which the ranks exchange, and the reason for it
    drafts          pass of a drafter that makes it; "": the model's layers, embedding and head do
    """

    kind: str
    where: str
    group: str
    message_bytes: int
    times: int = 1
    per: str = TOKEN
    when: str = ""
    algorithm: str = ""
    why: str = ""
    drafts: str = ""


def algorithm(kind: str, device: str) -> tuple[str, str]:
    """Return the algorithm of an exchange ("all-reduce", "send", ...) on a device ("cpu" or "cuda"), and the reason."""
    if device == "cpu":
        way = "point to point" if kind in ("send", "receive", "all-to-all") else "ring"
        return f"gloo {way}", "the ranks are processes on CPUs of one host, and their tensors go over loopback"
    if kind == "all-reduce":
        return "symmetric memory, else NCCL", (
            "each GPU reads the others' parts; NCCL sums what exceeds the buffers (--disable-custom-all-reduce: all)"
        )
    if kind == "pull":
        return "symmetric memory", "each GPU reads the rows that it needs from the memory of the others"
    return "NCCL", "the tensors are in the memory of GPUs"


def sum_room(ranks: int, message_bytes: int) -> int:
    """Return the bytes of the largest message that `ranks` GPUs sum through symmetric memory. NCCL sums larger ones.

    message_bytes   size of the message in the largest step
    """
    known = next((one for one in MOST_ROOM if one >= ranks), max(MOST_ROOM))
    return min(message_bytes, MOST_ROOM[known]) // 16 * 16


def collectives(
    args: ModelArgs,
    parallel: Parallel,
    *,
    item_bytes: int,
    device: str,
    spread: Mapping[str, str] | None = None,
    wire: Wire = AS_THEY_ARE,
    rank: Rank | None = None,
    drafts: Sequence[int] | None = None,
) -> Iterator[Collective]:
    """Yield the exchanges of a step, in their order.

    item_bytes   bytes of one value of an activation: 2 for bfloat16
    spread       phase -> name of the dispatcher that brings tokens to the experts of other replicas; None: none does
    wire         form of rows on the way to experts
    drafts       layers whose inputs an EAGLE-3 head reads; (): another drafter. Plans tell the stages of a pipeline the
                 tokens. None: no drafts
    rank         yield the exchanges of this rank. None: those that a token passes in all stages, without the receives
    """
    for one, times in _exchanges(args, parallel, item_bytes, spread or {}, wire, rank, reads=drafts or ()):
        if times and (drafts is None or one.group != "tokens"):
            name, why = algorithm(one.kind, device)
            yield Collective(**one._asdict(), times=times, algorithm=name, why=why)


def _exchanges(
    args: ModelArgs,
    parallel: Parallel,
    item_bytes: int,
    spread: Mapping[str, str],
    wire: Wire,
    rank: Rank | None,
    *,
    reads: Sequence[int],
) -> Iterator[tuple[RankExchange, int]]:
    """Yield each exchange, and the number of times that a step makes it."""
    row, slices = args.hidden_size * item_bytes, parallel.tp > 1
    first, last = (True, True) if rank is None else (rank.first, rank.last)
    layers = args.layers[: args.num_layers] if rank is None else args.layers[slice(*rank.layers)]
    if rank is not None and not first:
        came = row * (1 + num_passed(reads, rank.layers[0]))
        yield RankExchange("receive", "hidden states of the stage before", "pp", came), 1
    if slices:
        yield RankExchange("all-reduce", "embedding", "tp", row), int(first)
    rows = ExchangedRows(args.hidden_size, item_bytes, parallel, spread, wire)
    yield from Counter(one for layer in layers for one in layer_exchanges(layer, rows)).items()
    stages = ranks(args, Parallel(pp=parallel.pp, layers=parallel.layers)) if rank is None else (rank,)
    sent = Counter(row * (1 + num_passed(reads, one.layers[1])) for one in stages if not one.last)
    for size, sends in sent.items():
        yield RankExchange("send", "hidden states to the next stage", "pp", size), sends
    if slices and last:
        logits = widest_slice(args, parallel) * LOGIT_BYTES
        yield RankExchange("all-gather", "each rank's best ids", "tp", KEY_BYTES, SAMPLED, PLAIN), 1
        yield RankExchange("all-gather", "logits", "tp", logits, SAMPLED, EDITED), 1
        yield RankExchange("all-gather", "logits", "tp", logits, SCORED, LOGGED), 1
    if parallel.pp > 1 and last:
        yield RankExchange("send", "tokens to the first stage", "tokens", TOKEN_BYTES, SAMPLED), 1
    if parallel.pp > 1 and rank is not None and first:
        when = "before the request's next step"
        yield RankExchange("receive", "tokens of the last stage", "tokens", TOKEN_BYTES, SAMPLED, when), 1


def num_passed(reads: Sequence[int], layer: int) -> int:
    """Return the number of states for an EAGLE-3 head that come along with the input of a stage that begins at `layer`.

    reads   layers whose inputs the head reads
    """
    return sum(read < layer for read in reads)


def head_reads(args: ModelArgs, drafter: ModelArgs | None) -> tuple[int, ...]:
    """Return the layers of a model whose inputs its drafter reads, an EAGLE-3 head; () for another one, or none."""
    return () if drafter is None or drafter.eagle is None else drafter.eagle.reads(args.num_layers)


def passed_bytes(reads: Sequence[int], rank: Rank, stages: int, state_bytes: int) -> int:
    """Return the bytes of states for an EAGLE-3 head that a rank gets and sends. state_bytes: of one of them"""
    received, sent = (num_passed(reads, layer) for layer in rank.layers)
    return state_bytes * (received + sent * stages * int(not rank.last))  # a copy for each step in flight


def groups(parallel: Parallel) -> list[dict[str, Any]]:
    """Return the groups of ranks as plain values: name, purpose, and the global numbers of the members of each."""
    found = (
        ("tp", "share every layer of a stage" + "; each has whole experts" * parallel.experts, tp_members(parallel)),
        ("dcp", "divide the tokens of contexts: queries and partial results are exchanged", dcp_members(parallel)),
        ("pp", "stages in order: hidden states go forward", pp_members(parallel)),
        ("tokens", "the same ranks: sampled tokens go from the last stage to the first", pp_members(parallel)),
        ("ep", "divide the experts of a stage across replicas: tokens go to experts and back", ep_members(parallel)),
    )
    named = [{"name": name, "purpose": purpose, "members": list(members)} for name, purpose, members in found]
    return [one for one in named if one["members"] and len(one["members"][0]) > 1]


def buffer_bytes(
    args: ModelArgs,
    rank: Rank,
    parallel: Parallel,
    *,
    item_bytes: int,
    tokens: int,
    rows: int,
    device: str = "cpu",
    spread: Mapping[str, str] | None = None,
    wire: Wire = AS_THEY_ARE,
) -> int:
    """Return the bytes of buffers that a rank's exchanges need at most, beside the tensors of the layers.

    tokens, rows   most tokens and most sampled rows of a step of a replica
    spread, wire   as in `collectives`
    All-reduces on a CPU need no buffer: they run in place. GPUs keep buffers in symmetric memory for them.
    """
    hidden = tokens * args.hidden_size * item_bytes
    received, sent = int(not rank.first), parallel.pp * int(not rank.last)  # a copy for each step in flight
    logits = 0
    if parallel.tp > 1 and rank.last:  # the slices of all ranks, and these joined
        logits = rows * (widest_slice(args, parallel) * parallel.tp + args.vocab_size) * LOGIT_BYTES
    shared = SUM_BUFFERS * sum_room(parallel.tp, hidden) if parallel.tp > 1 and device == "cuda" else 0
    exchanged = 0
    if args.moe and parallel.lockstep and any(layer in args.expert_layers for layer in range(*rank.layers)):
        choices = CHOICE_BYTES * args.moe.routing.top_k * tokens
        row = wire.row_bytes(args.hidden_size, item_bytes)
        # All-gather: the rows of all replicas as they come, and taken apart. Pull: memory that others read, and rows
        # that were read from it.
        read = parallel.dp * exchange_bounds(tokens)[-1] * row
        rooms = {
            "all-gather": 2 * parallel.dp * (tokens * row + choices),
            "pull": exchange_bytes(args, parallel, item_bytes=item_bytes, tokens=tokens, wire=wire) + read,
        }
        exchanged = max((rooms[name] for name in (spread or {}).values()), default=0)
    return (received + sent) * hidden + logits + shared + exchanged


def widest_slice(args: ModelArgs, parallel: Parallel) -> int:
    """Ids of the largest slice of the vocabulary; the others are padded to it when they are gathered."""
    slices = (vocabulary_share(args.vocab_size, parallel.tp, place) for place in range(parallel.tp))
    return max(end - first for first, end in slices)


def exchange_bounds(tokens: int) -> tuple[int, ...]:
    """Return the numbers of a replica's tokens for which exchanges between replicas are captured, ascending.

    tokens   most tokens of a step. More than the last bound travel in several exchanges
    """
    return (*(bound for bound in BOUNDS if bound < min(tokens, BOUNDS[-1])), min(tokens, BOUNDS[-1]))


def exchange_bytes(args: ModelArgs, parallel: Parallel, *, item_bytes: int, tokens: int, wire: Wire) -> int:
    """Return the bytes of a GPU's memory for exchanges by dispatcher "pull": rows, ids, weights and results.

    See `quire.kernels.comm.exchange.Layout`.
    """
    assert args.moe is not None
    row, rows = args.hidden_size * item_bytes, exchange_rows(parallel, tokens)
    choices = CHOICE_BYTES * args.moe.routing.top_k
    return rows * (wire.row_bytes(args.hidden_size, item_bytes) + row * parallel.expert_ranks + choices)


def exchange_rows(parallel: Parallel, tokens: int) -> int:
    """Return the most rows that a rank brings to an exchange; the ranks of a replica share its tokens."""
    return -(-exchange_bounds(tokens)[-1] // parallel.tp)
