"""The exchanges between ranks in the passes of a drafter with layers. No torch.

    first pass          in every step with decodes: their accepted tokens, at most 1 + k rows of each; gives a draft
    later passes        k - 1 of them, with a row of each decode, or of recurrent layers with its drafts so far, too
    pass over prompts   in every step with prompts: all tokens of the step

`quire.spec.layers` makes the passes, before the model's layers or, in a pipeline, at the end of a step of the last
stage. A test compares the list with the exchanges of real steps.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from quire.args.layers import LayerArgs
from quire.contracts.parallel import Parallel, Rank
from quire.plan.collectives import KEY_BYTES, LOGIT_BYTES, Collective, algorithm, widest_slice
from quire.plan.engine import EnginePlan
from quire.plan.kinds.blocks import layer_exchanges
from quire.plan.kinds.interfaces import ExchangedRows, RankExchange
from quire.plan.weight_bytes import ITEM_BYTES

FIRST, LATER, PROMPTS = "first pass", "later passes", "pass over prompts"
DECODE = "decode"  # a unit of messages: a row for each decode of the step


class DraftLayers(NamedTuple):
    """The layers that draft, and the ranks that divide them.

    embeds   ranks that divide the embedding which gives the layers their input
    logits   bytes of the logits that a rank gathers for each row, as the head of some EAGLE-3 heads does; 0: none
    """

    layers: tuple[LayerArgs, ...]
    hidden: int
    parallel: Parallel
    embeds: int
    logits: int
    plan: EnginePlan


def draft_layers(plan: EnginePlan) -> DraftLayers | None:
    """Return the layers that an engine drafts with; None: no drafter has layers, or its model could not be planned."""
    speculation, own = plan.speculation, plan.mesh.parallel
    if speculation is None or not speculation.layered:
        return None
    if speculation.method == "mtp":
        args = plan.args
        layers = args.layers[args.num_layers : args.num_layers + args.draft_layers]
        return DraftLayers(layers, args.hidden_size, own, own.tp, 0, plan)
    if plan.draft is None:
        return None
    args, parallel = plan.draft.args, plan.draft.mesh.parallel
    fewer = args.eagle is not None and args.vocab_size != args.eagle.vocab_size  # ids than the model has
    return DraftLayers(
        layers=args.layers[: args.num_layers],
        hidden=args.hidden_size,
        parallel=parallel,
        embeds=own.tp if speculation.head else parallel.tp,
        logits=widest_slice(args, parallel) * LOGIT_BYTES if fewer and parallel.tp > 1 else 0,
        plan=plan.draft,
    )


def draft_exchanges(plan: EnginePlan, rank: Rank | None = None) -> Iterator[Collective]:
    """Yield the exchanges of the passes that draft in a step, in order. rank: as of `collectives`"""
    drafter = draft_layers(plan)
    if drafter is None or rank is not None and not rank.last:
        return
    assert plan.speculation is not None
    most = plan.speculation.num_drafts
    for name, phase, passes, drafts in (
        (FIRST, "decode", 1, min(1, most)),
        (LATER, "decode", max(0, most - 1), 1),
        (PROMPTS, "prefill", 1, 0),
    ):
        for one, times in _pass(plan, drafter, phase, drafts=bool(drafts)):
            way, why = algorithm(one.kind, plan.machine.device)
            if times * passes:
                yield Collective(**one._asdict(), times=times * passes, algorithm=way, why=why, drafts=name)


def _pass(plan: EnginePlan, drafter: DraftLayers, phase: str, *, drafts: bool) -> Iterator[tuple[RankExchange, int]]:
    """Yield each exchange of a pass, and the number of times that the pass makes it. drafts: it gives a draft"""
    item = ITEM_BYTES[drafter.plan.dtype.dtype]
    spread: Mapping[str, str] = {at: name for at, name in drafter.plan.spread.items() if at == phase}
    rows = ExchangedRows(drafter.hidden, item, drafter.parallel, spread, drafter.plan.wire)
    if drafter.embeds > 1:
        yield RankExchange("all-reduce", "embedding", "tp", rows.num_bytes), 1
    made = Counter(one._replace(when="") for layer in drafter.layers for one in layer_exchanges(layer, rows))
    yield from made.items()
    if drafts and drafter.logits:
        yield RankExchange("all-gather", "logits of the EAGLE head", "tp", drafter.logits, DECODE), 1
    if drafts and plan.mesh.parallel.tp > 1:
        yield RankExchange("all-gather", "each rank's best ids", "tp", KEY_BYTES, DECODE), 1
