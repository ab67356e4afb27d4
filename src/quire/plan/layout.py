"""The parameters of one rank and the checkpoint slices from which they are read, computed from the config alone.

The loader fills these parameters, layers take their sizes from them, `quire explain` prints them. No torch.
"""

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from quire.args.checkpoint import ModelArgs
from quire.args.foreign import ForeignEnds
from quire.args.wrappers import placed
from quire.contracts.errors import UnsupportedModel
from quire.contracts.parallel import ALONE, Rank, vocabulary_share
from quire.contracts.params import Param
from quire.models.names import NameMap
from quire.plan.kinds.blocks import block_params, head_params, input_params, prediction_params
from quire.plan.kinds.foreign import first_params, last_params
from quire.plan.kinds.interfaces import ParamWriter, StoredRows
from quire.plan.placement import ranks
from quire.quantization.formats import spare_names, tensor_names


def layout(args: ModelArgs, rank: Rank | None = None, experts: Sequence[int] | None = None) -> tuple[Param, ...]:
    """Return every parameter that `rank` holds, in the order of the layers.

    rank      None: the only rank of an engine on one device
    experts   numbers of the rank's experts, in the order in which they are stacked; None: `rank.expert_ids`
    """
    rank = rank or alone(args)
    names = layer_names(args)
    if args.eagle is not None:
        at, fc = args.eagle.at, args.eagle.fc
        names = {key: one.replace("{at}", at).replace("{fc}", fc) for key, one in names.items()}
    stacked = rank.expert_ids if experts is None else experts
    write = ParamWriter(names, rank, stacked, args.hidden_size, args.model_type)
    return tuple(_params(args, write))


def layer_names(args: ModelArgs, layer: int = 0) -> Mapping[tuple[str, str], str]:
    """Return (parameter, part) -> checkpoint name of the tensors of a layer, and of those that belong to none.

    Layers that predict several tokens may have names of their own.
    """
    if args.foreign is not None:  # its other parameters have their names by themselves
        return {(parameter, part): stored for stored, parameter, part in args.foreign.experts}
    names: Mapping[tuple[str, str], str] = checkpoint_names(args.model_type)
    if layer >= args.num_layers:
        names = {key: args.prediction.named(one) for key, one in names.items()}
    return placed(names, args.wrapper)


def alone(args: ModelArgs) -> Rank:
    """Return the only rank of an engine on one device."""
    return next(ranks(args, ALONE))


def stored_names(params: Iterable[Param]) -> Iterator[str]:
    """Yield the checkpoint names of these parameters' tensors.

    Also yields tensors that checkpoints store beside quantized parameters, and that need not be read.
    """
    for param in params:
        yield from tensor_names(param)
        yield from spare_names(param)


def checkpoint_names(model_type: str) -> dict[tuple[str, str], str]:
    """Return (parameter, part) -> checkpoint name. Raises UnsupportedModel if models/<model_type>.py does not exist."""
    module = f"quire.models.{model_type}"
    try:
        rows: NameMap = importlib.import_module(module).NAME_MAP
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UnsupportedModel(
            f"model_type {model_type!r} has a row in FAMILIES of args/families.py and no names "
            f"of tensors: write models/{model_type}.py, like models/qwen3.py."
        ) from None
    found = {(parameter, part): stored for stored, parameter, part in rows}
    twice = [name for name, times in Counter(row[1:] for row in rows).items() if times > 1]
    assert not twice, f"models/{model_type}.py names the tensor of {twice[0]} twice: leave one row out"
    return found


def parameters_per_token(args: ModelArgs) -> int:
    """Return the number of weights that multiply each token: all of a dense model, of experts only the chosen ones."""
    chosen = args.moe.routing.top_k if args.moe else 1
    with_one = layout(args, experts=range(1))
    return sum(prod(param.shape) * (chosen if param.shard == "experts" else 1) for param in with_one)


def _params(args: ModelArgs, write: ParamWriter) -> Iterator[Param]:
    """Yield the parameters of embedding, layers, norm and head, as far as the rank has these."""
    rank, hidden = write.rank, args.hidden_size
    first, end = vocabulary_share(args.vocab_size, rank.tp, rank.place)
    vocab = StoredRows(args.vocab_size, first, end - first)
    if args.eagle is not None:
        yield from head_params(args, args.eagle, write, vocab)
        return
    if args.foreign is not None:
        yield from _foreign(args, args.foreign, write, vocab)
        return
    embeds = rank.first or (rank.last and args.prediction.embeds)
    if embeds:
        yield write.param("embed.weight", {"": vocab}, hidden, shard="rows")
    if args.inputs:
        yield from input_params(args, write, vocab)
    for layer in range(*rank.layers):
        yield from block_params(args, write, layer)
    if not rank.last:
        return
    for layer in range(args.num_layers, args.num_layers + args.draft_layers):
        yield from prediction_params(args, write.naming(layer_names(args, layer)), layer)
    yield write.norm("norm.weight")
    if not args.tie_word_embeddings:
        yield write.param("head.weight", {"": vocab}, hidden, shard="rows")
    elif not embeds:  # the embedding lies on another stage: its rows are read here once more
        (part,) = write.param("embed.weight", {"": vocab}, hidden).parts
        yield Param("head.weight", part.local_shape, (part,), shard="rows")


def _foreign(args: ModelArgs, ends: ForeignEnds, write: ParamWriter, vocab: StoredRows) -> Iterator[Param]:
    """Yield the parameters of a decoder of transformers, as far as the rank has these."""
    if write.rank.first:
        yield from first_params(ends, write, vocab, args.hidden_size)
    for layer in range(*write.rank.layers):
        yield from block_params(args, write, layer)
    if write.rank.last:
        yield from last_params(ends, write, vocab, args.hidden_size, args.tie_word_embeddings)
